"""Bombs at the command line: exit 1 in one sentence, within 10 seconds of work and 2 GB, whatever the file says it is.

Each command is a process of its own, whose time and memory the system counts (``pytest -m slow tests/test_bombs.py``).
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from treeopt import demo

from .test_bounds import JSON, LAUGHS, LOGS, NPZ, TREES, archive

pytestmark = pytest.mark.slow
SECONDS, MEGABYTES = 10, 2000
SIZES = {"rows": 10**7, "kilobytes": 1000}


def tree_of(name):
    return lambda folder: (folder / "x.txt").write_text(TREES[name])


def npz_of(name):
    return lambda folder: archive(folder / "x.npz", NPZ[name])


def json_of(name):
    return lambda folder: (folder / "x.json").write_text(JSON[name][0])


def log_of(kind):
    return lambda folder: (folder / "x.txt").write_text(LOGS[kind])


def long_trace(folder):
    """A real trace of zeros, as long as an archive may be: the commands that read it must get by."""
    ranks = np.zeros((2**21 - 2**12, 1), np.int16)
    ranks[2**12 - 1 :: 2**12] = -2
    np.savez_compressed(folder / "x.npz", ranks=ranks, starts=np.arange(0, len(ranks) + 1, 2**12))


def parquet_of(rows, value):
    def write(folder):
        import pyarrow as pa
        from pyarrow import parquet

        column = pa.nulls(rows, pa.string())
        if value is not None:
            column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))
        parquet.write_table(pa.table({"prompt": column}), folder / "x.parquet", compression="zstd")

    return write


def packed_tensors(folder):
    torch.save({"0.0.linear.weight": torch.zeros(2**26)}, folder / "stored.pt")
    with zipfile.ZipFile(folder / "stored.pt") as stored:
        members = {name: stored.read(name) for name in stored.namelist()}
    archive(folder / "x.pt", members)
    (folder / "stored.pt").unlink()


def model_with(file, text):
    def write(folder):
        shutil.copytree(demo.MODEL, folder / "model")
        if file == "config.json":
            text_of = json.dumps({**json.loads((folder / "model/config.json").read_text()), **text})
            (folder / "model/config.json").write_text(text_of)
        elif isinstance(text, bytes):
            (folder / "model" / file).write_bytes(text)
        else:
            (folder / "model" / file).write_text(text)

    return write


SEARCH = ("search", "--calibration", "x.npz")
TREE, SCORE = ("import-tree", "x.txt"), ("score", "x.txt", "--calibration", "vicuna-7b-medusa1")
DEMO = ("calibrate", "--model", "demo", "--num-prompts", "2", "--max-new-tokens", "4", "--prompts")
MODEL = ("calibrate", "--model", "model", "--drafter", "ngram", "--num-prompts", "2", "--max-new-tokens", "4")
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ROW = '{"prompt": "a"}\n'
BOMBS = {
    **{f"trace: {name}": (SEARCH, npz_of(name)) for name in NPZ},
    "trace: as long as may be": (SEARCH, long_trace),
    **{f"calibration: {name}": (("search", "--calibration", "x.json"), json_of(name)) for name in JSON},
    **{f"tree: {name}": (TREE, tree_of(name)) for name in TREES},
    "tree: laughs": (SCORE, lambda folder: (folder / "x.txt").write_text(LAUGHS)),
    **{f"import: {kind}": (("import", "x.txt", "--from", kind), log_of(kind)) for kind in LOGS},
    "import: a hundred MB in a line": (
        ("import", "x.txt"),
        lambda folder: (folder / "x.txt").write_text("a" * (2**27 - 1)),
    ),
    "import: more than is read": (("import", "x.txt"), lambda folder: (folder / "x.txt").write_text("a" * (2**27 + 1))),
    "import: lists": (("import", "x.txt"), lambda folder: (folder / "x.txt").write_text("[" + "[]," * 2**22 + "[]]")),
    "import: lines": (("import", "x.txt"), lambda folder: (folder / "x.txt").write_text("[]\n" * 2**21)),
    "import: a million series": (
        ("import", "x.txt"),
        lambda folder: (folder / "x.txt").write_text('vllm:spec_decode_num_drafts_total{e="1"} 1.0\n' * 10**6),
    ),
    "import: packed tensors": (("import", "x.pt"), packed_tensors),
    "latencies: a million rows": (
        ("profile", "--from-csv", "x.csv"),
        lambda folder: (folder / "x.csv").write_text("batch_size,size,step_ms\n" + "1,1,2.0\n" * 10**6),
    ),
    "prompts: blank lines": (
        (*DEMO, "x.jsonl.gz"),
        lambda folder: (folder / "x.jsonl.gz").write_bytes(gzip.compress(b"\n" * 2**28)),
    ),
    "prompts: ten million rows": (
        (*DEMO, "x.jsonl.gz"),
        lambda folder: (folder / "x.jsonl.gz").write_bytes(gzip.compress(ROW.encode() * SIZES["rows"])),
    ),
    "prompts: one line": ((*DEMO, "x.txt"), lambda folder: (folder / "x.txt").write_text("a" * 2**28)),
    "prompts: one text": ((*DEMO, "x.json"), lambda folder: (folder / "x.json").write_text('["' + "a" * 2**27 + '"]')),
    "prompts: one cell": ((*DEMO, "x.csv"), lambda folder: (folder / "x.csv").write_text('prompt\n"' + "a" * 2**27)),
    "prompts: a value in every row": ((*DEMO, "x.parquet"), parquet_of(20_000, "x" * 2**20)),
    "prompts: nulls": ((*DEMO, "x.parquet"), parquet_of(10**7, None)),
    "drafter: packed tensors": ((*DEMO[:-1], "--drafter", "x.pt"), packed_tensors),
    "model: a billion layers": (MODEL, model_with("config.json", {"num_hidden_layers": 10**9})),
    "model: a trillion tokens": (MODEL, model_with("config.json", {"vocab_size": 10**12})),
    "model: a header of an exabyte": (MODEL, model_with("model.safetensors", (2**60).to_bytes(8, "little"))),
    "model: nested config": (MODEL, model_with("tokenizer_config.json", "[" * 10**6)),
    "model: a template without an end": ((*MODEL, "--prompts", "p.jsonl"), model_with("chat_template.jinja", ENDLESS)),
    "model: a template that writes a book": (
        (*MODEL, "--prompts", "p.jsonl"),
        model_with("chat_template.jinja", "{{ 'a' * 10000000 }}"),
    ),
}
HARMLESS = ("trace: as long as may be",)  # may be read, within the bounds


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_defused(name, tmp_path):
    command, write = BOMBS[name]
    write(tmp_path)
    (tmp_path / "p.jsonl").write_text(ROW)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "said").open("wb") as said:
        words = [sys.executable, "-m", "treeopt.cli", *command, *(["--run", "run"] * (command[0] != "import-tree"))]
        process = subprocess.Popen(words, cwd=tmp_path, stdout=said, stderr=said, env=environment)
        _, status, used = os.wait4(process.pid, 0)
    text = (tmp_path / "said").read_text(errors="replace")
    assert "Traceback" not in text, text[-2000:]
    assert os.waitstatus_to_exitcode(status) == 1 or name in HARMLESS, text[-500:]
    assert text.count("\n") <= 3 or name in HARMLESS, text[-2000:]
    assert used.ru_maxrss / 1024 < MEGABYTES
    assert used.ru_utime + used.ru_stime < SECONDS + 8, "eight of them for starting torch on a busy machine"
