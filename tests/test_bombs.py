"""Small files that would take hours or gigabytes, in every format: each is refused at once, in a sentence.

Here every bomb is given to its reader. On demand (``pytest -m slow tests/test_bombs.py``) each is given to the command that
reads it, with larger ones: exit 1 within 20 seconds of work and 2 GB.
"""

import gzip
import json
import os
import shutil
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from treeopt import demo
from treeopt.engines.imports import read_measurement
from treeopt.engines.reading import tree_in
from treeopt.errors import InvalidInput
from treeopt.files import npz
from treeopt.files.bounds import MOST_ROWS, limit_rows, loads, parse_yaml
from treeopt.files.storage import load_json, to_json
from treeopt.pipeline.trees import read_tree
from treeopt.records.inputs import load_result
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.prompts.sets import load_prompts
from treeopt.runtime.random_weights import random_target
from treeopt.runtime.target import eos_ids, load_target
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MOST_DEPTH, MOST_NODES, Tree

from .conftest import some_long
from .helpers.forked import MEGABYTES, OUTPUT, SECONDS, end, start
from .helpers.prompt_files import PLAIN

MEGABYTE, DEEP = 2**20, 100_000
HEADER = np.lib.format.magic(1, 0)


def member(shape: str, kind: str = "<i8", zeros: int = 0) -> bytes:
    """An array's header, which may say more than there is, and so many bytes of it."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return HEADER + len(text).to_bytes(2, "little") + text.encode() + bytes(zeros)


def archive(path, members: dict[str, bytes]):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


SMALL = {
    "ranks.npy": member("(2, 1)", zeros=8) + (-2).to_bytes(8, "little", signed=True),
    "starts.npy": member("(2,)", zeros=8) + (2).to_bytes(8, "little"),
}
NPZ = {
    "zeros that unpack to a gigabyte": {**SMALL, "ranks.npy": member(f"({2**27}, 1)", zeros=2**20)},
    "a header that says a petabyte": {**SMALL, "ranks.npy": member(f"({2**47}, 1)")},
    "a long text": {**SMALL, "meta.npy": member("()", f"<U{2**28}")},
    "a negative length": {**SMALL, "ranks.npy": member(f"(-1, {2**40})"), "tokens.npy": member(f"({2**40},)")},
    "a header that is long itself": {**SMALL, "ranks.npy": np.lib.format.magic(2, 0) + b"\xff\xff\xff\x7f"},
    "a header that is nested": {**SMALL, "ranks.npy": member("(" * 3000 + ")" * 3000)},
    "members that are no arrays": {"ranks.npy": b"hello", "starts.npy": b""},
    "no member's name": {"ranks": b"hello", "starts": b""},
    "meta that is nested": {**SMALL, "meta.npy": member("()", "<U8000", 0) + ("[" * 8000).encode("utf-32-le")},
    "meta that is bytes": {**SMALL, "meta.npy": member("()", "|S2") + b"{}"},
    "meta that is no character": {**SMALL, "meta.npy": member("()", "<U1") + b"\xff\xff\xff\xff"},
}
JSON = {
    "nested lists": ("[" * DEEP + "]" * DEEP, "recursion limit exceeded"),
    "nested objects": ('{"a":' * DEEP + "1" + "}" * DEEP, "recursion limit exceeded"),
    "nested, and cut off": ("[" * DEEP, "recursion limit exceeded"),
    "just too deep": ("[" * 202 + "]" * 202, "recursion limit exceeded"),
    "more digits than Python reads": (f"[{'1' * 5000}]", "64 bits"),
    "a number beyond 64 bits": (f"[{2**63}]", "64 bits"),
    "infinity by its exponent": ("[1e999]", "finite"),
    "infinity by its name": ("[-Infinity]", "finite"),
    "half a character": ('["\\ud800"]', "hex escape"),
    "millions of values": ("[" + "0," * 2**23 + "0]", "values and lines"),
}


def trace_with(meta):
    return lambda path: np.savez(path, ranks=[[0]], starts=[0, 1], meta=np.array(meta[: 2**20]))


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {"laughs": LAUGHS, "deep YAML": "[" * 5000 + "]" * 5000, "long YAML": "- [0]\n" * 30_000}
TREES = {
    **YAML,
    "a choice of 20,000 ranks": f"[[{'0, ' * 20_000}0]]",
    "999 guesses in a row": '{"num_speculative_tokens": 999}',
    "999 guesses in a row, as a flag": "--speculative-num-steps 999",
    "30,000 choices": json.dumps([[i] for i in range(30_000)]),
    "30,000 nodes of Neuron": json.dumps({str(i): [str(i + 1)] for i in range(30_000)}),
    "a number of 5,000 digits": f"[[{'1' * 5000}]]",
    "5,000 digits in YAML": f"- [{'1' * 5000}]",
    "a long file": "[" + " " * 2**21 + "]",
    "words": "w" * 200_000,
    "words and colons": "a:," * 60_000,
    "open arguments": "--medusa-choices=" * 12_000,
    "nested calls": "f(" * 50_000,
    "signs": "-" * 50_000 + "1",
}
LOGS = {
    "vllm-metrics": "SpecDecoding metrics: Mean acceptance length: 1, Accepted: " * 20_000,
    "llama-cpp": "statistics a: #gen drafts = 1, #acc drafts = " * 20_000,
    "csv": "head," + "x" * 200_000 + "\n0,1\n",
    "rates": "{'test/0_acc': " * 20_000,
    "vllm-requests": json.dumps([[]] * (MOST_ROWS + 1)),
}


def packed_tensors(path):
    """Zeros that torch never packs, packed."""
    stored = path.with_name("stored.pt")
    torch.save({"0.0.linear.weight": torch.zeros(MEGABYTE)}, stored)
    with zipfile.ZipFile(stored) as file:
        archive(path, {name: file.read(name) for name in file.namelist()})


def model_with(file, change):
    def write(path):
        shutil.copytree(demo.MODEL, path)
        known = json.loads((path / "config.json").read_text())
        text = json.dumps({**known, **change}) if isinstance(change, dict) else change
        (path / file).write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


SERIES = 'vllm:spec_decode_num_drafts_total{{engine="{}"}} 1.0\n'
SMALL_BATCH = ("--num-prompts", "2", "--max-new-tokens", "4")
MODEL = ("calibrate", "--model", "x", "--drafter", "ngram", "--prompts", "p.jsonl", *SMALL_BATCH)
PROMPTS = ("calibrate", "--model", "demo", *SMALL_BATCH, "--prompts")
# Name: the command that reads the file x, the file's ending, what is in it or who writes it
BOMBS = {
    **{f"trace: {name}": (("search", "--calibration"), ".npz", content) for name, content in NPZ.items()},
    **{f"JSON: {name}": (("search", "--calibration"), ".json", text) for name, (text, _) in JSON.items()},
    **{f"meta: {name}": (("search", "--calibration"), ".npz", trace_with(text)) for name, (text, _) in JSON.items()},
    **{f"tree: {name}": (("import",), ".txt", text) for name, text in TREES.items()},
    **{f"import: {kind}": (("import", "--from", kind), ".txt", text) for kind, text in LOGS.items()},
    "import: many series": (("import",), ".txt", "".join(map(SERIES.format, range(20_000)))),
    "drafter: packed tensors": (("calibrate", *SMALL_BATCH, "--drafter"), ".pt", packed_tensors),
    "model: a billion layers": (MODEL, "", model_with("config.json", {"num_hidden_layers": 10**9})),
    "model: a trillion tokens": (MODEL, "", model_with("config.json", {"vocab_size": 10**12})),
    "model: a header of an exabyte": (MODEL, "", model_with("model.safetensors", (2**60).to_bytes(8, "little"))),
    "model: nested config": (MODEL, "", model_with("tokenizer_config.json", "[" * 10**6)),
    "model: a template that writes a book": (MODEL, "", model_with("chat_template.jinja", "{{ 'a' * 10000000 }}")),
}


def put(content, path):
    if callable(content):
        content(path)
    elif isinstance(content, dict):
        archive(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def use_model(path, rows):
    found = load_target(str(path))
    load_prompts(found, str(rows))


def readers(command, path, rows):
    """What reads the file for a command."""
    if command[0] == "search":
        return [load_result, load_json, read_tree, read_measurement][: 1 if path.suffix == ".npz" else 4]
    if command[0] == "import":
        kind = command[2] if len(command) > 1 else None
        return [lambda path: read_measurement(path, kind), read_measurement]
    if command[0] == "import":
        return [read_tree]
    if command[-1] == "--drafter":
        return [lambda path: open_drafter(str(path), load_target(str(demo.MODEL)))]
    return [lambda path: use_model(path, rows)]


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_its_readers(name, tmp_path):
    command, ending, content = BOMBS[name]
    rows, path = tmp_path / "p.jsonl", tmp_path / f"x{ending}"
    rows.write_text('{"prompt": "a"}\n')
    put(content, path)
    for read in readers(command, path, rows):
        with pytest.raises(InvalidInput) as refused:
            read(path)
        assert JSON.get(name.removeprefix("JSON: "), "  ")[1] in str(refused.value)
        assert len(str(refused.value)) < 1000
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", YAML)
def test_yaml_is_read_within_bounds(name):
    with pytest.raises(ValueError, match="YAML may"):
        parse_yaml(YAML[name])


@pytest.mark.parametrize("name", ["x.json", "x.npz", "x.jsonl", "x.txt"])
def test_what_is_no_file_is_not_waited_for(name, tmp_path):
    """A pipe that nobody writes to, under every name that a reader takes."""
    os.mkfifo(tmp_path / name)
    for read in (load_result, read_measurement, read_tree, lambda path: load_prompts(PLAIN, str(path))):
        with pytest.raises(InvalidInput):
            read(tmp_path / name)


def parquet_of(rows, value):
    def write(path):
        import pyarrow as pa
        from pyarrow import parquet

        column = pa.nulls(rows, pa.string())
        if value is not None:
            column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))
        parquet.write_table(pa.table({"prompt": column}), path, compression="zstd")

    return write


def long_trace(path):
    """A real trace of zeros, as long as an archive may be: the commands that read it must get by."""
    ranks = np.zeros((2**21 - 2**12, 1), np.int16)
    ranks[2**12 - 1 :: 2**12] = -2
    np.savez_compressed(path, ranks=ranks, starts=np.arange(0, len(ranks) + 1, 2**12))


TIMED, ROWS, PROMPT = ("profile", "--from-csv"), "batch_size,size,step_ms\n", b'{"prompt": "a"}\n'
# Files of hundreds of megabytes, or that unpack to them; made when they are needed.
LARGE = {
    "trace: as long as may be": (("search", "--calibration"), ".npz", long_trace),
    "import: a hundred MB in a line": (("import",), ".txt", lambda path: path.write_text("a" * (2**27 - 1))),
    "import: more than is read": (("import",), ".txt", lambda path: path.write_text("a" * (2**27 + 1))),
    "import: lists": (("import",), ".txt", lambda path: path.write_text("[" + "[]," * 2**22 + "[]]")),
    "import: lines": (("import",), ".txt", lambda path: path.write_text("[]\n" * 2**21)),
    "latencies: a million rows": (TIMED, ".csv", lambda path: path.write_text(ROWS + "1,1,2.0\n" * 10**6)),
    "prompts: blank lines": (PROMPTS, ".jsonl.gz", lambda path: path.write_bytes(gzip.compress(b"\n" * 2**28))),
    "prompts: ten million rows": (PROMPTS, ".jsonl.gz", lambda path: path.write_bytes(gzip.compress(PROMPT * 10**7))),
    "prompts: one line": (PROMPTS, ".txt", lambda path: path.write_text("a" * 2**28)),
    "prompts: one text": (PROMPTS, ".json", lambda path: path.write_text('["' + "a" * 2**27 + '"]')),
    "prompts: one cell": (PROMPTS, ".csv", lambda path: path.write_text('prompt\n"' + "a" * 2**27)),
    "prompts: a value in every row": (PROMPTS, ".parquet", parquet_of(20_000, "x" * 2**20)),
    "prompts: nulls": (PROMPTS, ".parquet", parquet_of(10**7, None)),
}
HARMLESS = ("trace: as long as may be",)  # may be read, within the bounds


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BOMBS, *LARGE])
def test_a_bomb_is_defused_at_the_command_line(name, tmp_path):
    command, ending, content = {**BOMBS, **LARGE}[name]
    put(content, tmp_path / f"x{ending}")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    words = [*command, *([f"x{ending}"] if ending else []), *(["--run", "run"] * (command[0] != "import"))]
    ended = end(start(tmp_path, words, is_bounded=True))
    text = (tmp_path / OUTPUT).read_text(errors="replace")
    assert ended.code == 1 or name in HARMLESS, text[-2000:]
    assert text.count("\n") <= 3 or name in HARMLESS, text[-2000:]
    assert ended.megabytes < MEGABYTES
    assert ended.seconds < SECONDS


# At the bounds, and just beyond


def test_json_at_the_bounds_is_read():
    assert loads("[" * 200 + "]" * 200)
    assert loads(f"[{2**63 - 1}, -1e308, null]") == [2**63 - 1, -1e308, None]
    assert loads("null") is None
    assert loads('["\\ud83d\\ude00"]') == ["\U0001f600"]  # two halves are a character


def test_arrays_that_nobody_asked_for_are_not_read(tmp_path):
    path = archive(tmp_path / "t.npz", {**SMALL, "other.npy": member(f"({2**40},)"), "note.txt": b"hello"})
    assert load_result(path).num_heads == 1
    assert npz.names(path) == {"ranks", "starts", "other", "note.txt"}


@pytest.mark.parametrize("text", ["--option 1\n", *some_long("--option 1 ", "--option '")])
def test_many_flags_are_read_in_one_pass(text):
    """Each flag counted the lines before it: 130,000 took two minutes."""
    began = time.monotonic()
    with pytest.raises(InvalidInput, match="must hold a tree"):
        tree_in(text * 95_000)
    assert time.monotonic() - began < 30


def test_the_largest_tree_is_read():
    comb = [[rank] + [0] * depth for rank in range(256) for depth in range(16)]
    tree = tree_in(json.dumps(comb, separators=(",", ":")))
    assert (len(tree), tree.depth) == (MOST_NODES + 1, 16)
    for larger in (lambda: Tree.from_choices([*comb, [256]]), lambda: Tree.dense([10**9])):
        with pytest.raises(InvalidInput, match="nodes"):
            larger()
    with pytest.raises(InvalidInput, match="256 deep"):
        Tree.chain(MOST_DEPTH + 1)


@pytest.mark.parametrize(
    ("limit", "least", "most"), [("budget", 1, MOST_NODES), ("max_depth", 1, 256), ("max_rank", 0, 32767)]
)
def test_limits_are_those_of_trees(limit, least, most):
    Limits(**{limit: least}), Limits(**{limit: most})
    for value, said in ((least - 1, "at least"), (most + 1, "at most")):
        with pytest.raises(InvalidInput, match=f"must be {said}"):
            Limits(**{limit: value})


def test_texts_in_lists_stay_as_they_are():
    document = {"a [ b ]": ["[  1,  2 ]", [1, 2.5, None], []], "n": np.array([[1, 2]]), 3: {}, "t": [True]}
    read = json.loads(to_json(document))
    assert read == {"a [ b ]": ["[  1,  2 ]", [1, 2.5, None], []], "n": [[1, 2]], "3": {}, "t": [True]}
    assert "\n    [1, 2.5, null],\n" in to_json(document)


def test_rows_are_counted_as_they_are_read():
    assert len(list(limit_rows(range(MOST_ROWS), "x"))) == MOST_ROWS
    with pytest.raises(InvalidInput, match="131,072 rows"):
        list(limit_rows(range(MOST_ROWS + 1), "x"))


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers of a model may be at most 1,000"),
        ({"max_position_embeddings": 2**31}, "may be at most 16,777,216"),
        ({"vocab_size": 10**12}, "more than these files can hold"),
        ({"num_hidden_layers": 40}, "lacks .* of them"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 10**9}}, "may be at most 1, but"),
        ({"rope_parameters": ROPE | {"attention_factor": []}}, "must be a loadable .*TypeError"),
        ({"eos_token_id": [[1]]}, "eos_token_id"),
    ],
)
def test_a_config_of_another_model_is_refused_at_once(tmp_path, changes, said):
    model_with("config.json", changes)(tmp_path / "copy")
    with pytest.raises(InvalidInput, match=said):
        load_target(str(tmp_path / "copy"))
    if "1,000" in said:
        with pytest.raises(InvalidInput, match=said):
            random_target(str(tmp_path / "copy"), dtype=None, device="cpu", seed=0)


def test_numbers_of_configs_may_be_long(tmp_path):
    model_with("config.json", {"model_max_length": 10**30})(tmp_path / "copy")
    assert load_target(str(tmp_path / "copy")).num_layers


@pytest.mark.parametrize(("said", "ids"), [([2, -1], {2}), (-1, set())])
def test_an_end_token_of_minus_one_is_none(said, ids):
    assert eos_ids(SimpleNamespace(config=SimpleNamespace(eos_token_id=said)), None) == ids
