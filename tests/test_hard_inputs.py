"""What a system and damaged files can hand in: each is refused in a sentence, or done, and none is a traceback or waits forever."""

import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

import treeopt as api
from treeopt import demo
from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal
from treeopt.files.storage import sha256_of, write_json
from treeopt.files.writing import write_text
from treeopt.pipeline.session import resolve
from treeopt.records.options import Source
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report import figures
from treeopt.runtime.checkpoints.files import find_tensors
from treeopt.runtime.folder import check_folder, dequantised
from treeopt.runtime.session import open_rule
from treeopt.runtime.target import check_device
from treeopt.trees.tree import Tree

from .conftest import invoke, some_long, treeopt
from .engines_live.gguf_model import write_gguf
from .test_merge import calibration, shard

SHIPPED = "vicuna-7b-medusa1"


@pytest.mark.parametrize(
    "command", [("import",), ("show",), ("score", "--calibration", SHIPPED), ("export", "--to", "vllm", "--tree")]
)
def test_a_chain_of_two_billion_is_refused_before_it_is_made(tmp_path, command):
    file = tmp_path / "big.json"
    write_text(file, json.dumps({"num_speculative_tokens": 2_000_000_000}))
    assert "this one is larger" in treeopt(*command, file, code=1)
    with pytest.raises(InvalidInput, match="this one is larger"):
        Tree.chain(10**9)


def test_a_gguf_file_of_too_many_layers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = write_gguf(demo.MODEL, tmp_path / "own.gguf")
    data, key = file.read_bytes(), b"llama.block_count"
    at = data.index(key) + len(key) + 4  # behind the key stand its type, and its number
    file.write_bytes(data[:at] + (2**24).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(InvalidInput, match="num_layers of a model may be at most 1,000"):
        dequantised(file)


def test_a_trace_with_an_impossible_temperature_is_refused(tmp_path):
    """An option that later commands take over from the trace is checked as a given one is."""
    run = RunDirectory(tmp_path)
    meta = {"source": {"model": demo.NAME, "rule": "sample:temperature=-1"}}
    RankTrace(np.array([[0], [-2]]), np.array([0, 2]), meta=meta).save(run.trace)
    with pytest.raises(InvalidInput, match="temperature must be above 0"):
        open_rule(resolve(run, Source()))
    assert open_rule(resolve(run, Source(rule="sample"))).record["temperature"] == 1.0


def test_a_merge_that_was_killed_is_done_by_the_same_command(tmp_path):
    """Killed between the two files, which are put in place one after the other."""
    blocks, hashes, _ = calibration(0, 3)
    parts = [tmp_path / f"part-{i}" for i in range(3)]
    for i, part in enumerate(parts):
        part.mkdir()
        shard(blocks, hashes, f"{i + 1}/3").save(part / "trace.npz")
    treeopt("import", *parts, "--run", tmp_path / "whole")
    written = tmp_path / "whole" / "calibration.json"
    before = json.loads(written.read_text())["hits"]
    written.unlink()
    treeopt("import", *parts, "--run", tmp_path / "whole")
    assert json.loads(written.read_text())["hits"] == before


def test_a_loop_of_links_is_no_run_directory(tmp_path):
    run = tmp_path / "a"
    run.symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for words in (("search", "--calibration", SHIPPED), ("show",), ("status",)):
        invoke(*words, "--run", run, code=0 if words == ("status",) else 1)


def test_a_device_without_numbers_is_refused():
    with pytest.raises(InvalidInput, match="device must be one that torch has here, but meta"):
        check_device("meta")


@pytest.mark.parametrize(
    "environment",
    [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, *some_long({"PYTHONIOENCODING": "ascii"})],
    ids=["C", "ascii"],
)
def test_a_terminal_that_is_not_utf8_gets_every_result(tmp_path, environment):
    command = [sys.executable, "-m", "treeopt", "compare", SHIPPED, SHIPPED]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert rb"0.0 \xb10.0" in done.stdout


def test_names_do_not_reach_the_terminal_through_warnings_of_pictures(recwarn):
    measured = api.load(SHIPPED)
    group = {"hits": measured.hits.tolist(), "trials": measured.trials.tolist()}
    measured.meta["groups"] = {"red \x1b[31m": group, "plain": group}
    with RunDirectory.holding(measured) as run:
        figures.draw(run)
    assert not [one for one in recwarn if "\x1b" in str(one.message)]


@pytest.fixture
def pipe(tmp_path):
    """A named pipe that nobody writes to: whoever opens it waits forever."""

    def make(path):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return path

    return make


def test_pipes_are_not_waited_for(tmp_path, pipe):
    with pytest.raises(OSError, match="no regular file"):
        sha256_of(pipe(tmp_path / "prompts.jsonl"))
    (tmp_path / "model").mkdir()
    pipe(tmp_path / "model" / "tokenizer.json")
    with pytest.raises(OSError, match="no regular file"):
        check_folder(tmp_path / "model")
    (tmp_path / "heads").mkdir()
    pipe(tmp_path / "heads" / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors"}}
    write_text(tmp_path / "heads" / "model.safetensors.index.json", json.dumps(index))
    with pytest.raises(InvalidInput, match="which is not there"):
        find_tensors(tmp_path / "heads")
    Journal(tmp_path / "steps.partial", {})
    pipe(tmp_path / "steps.partial" / "000000.json")
    assert Journal(tmp_path / "steps.partial", {}).finished() == 0


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "new.json", "tree", {})
        assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o640
        for mode in (0o600, 0o664):
            (tmp_path / "new.json").chmod(mode)
            write_json(tmp_path / "new.json", "tree", {"medusa_choices": []})
            assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == mode
    finally:
        os.umask(before)
