"""Tensor parallelism: processes that share a target decode what one does, and end together."""

import json
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from treeopt.errors import InvalidInput, Unsupported
from treeopt.records.rundir import RunDirectory
from treeopt.runtime import ranks
from treeopt.runtime.target import load_target

from .conftest import invoke, treeopt
from .test_resume import finish, start

CALIBRATE = ("calibrate", "--num-prompts", "4", "--max-new-tokens", "8", "--topk", "2", "--dtype", "float64")
TWO = ("--tensor-parallel", "2")


def test_two_processes_measure_the_trace_of_one(tmp_path):
    said = finish(tmp_path, *CALIBRATE, *TWO, "--run", "two")
    assert said.count("Calibrat") <= 1  # one of them speaks
    treeopt(*CALIBRATE, "--run", tmp_path / "one")
    one, two = (RunDirectory(tmp_path / name).read_trace() for name in ("one", "two"))
    for name in ("ranks", "starts", "tokens", "end", "pool_places"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    np.testing.assert_allclose(one.pool_scores, two.pool_scores, atol=1e-3)
    assert two.meta["provenance"].pop("device") == "2 x cpu"
    del one.meta["provenance"]["device"]
    assert one.meta["provenance"] == two.meta["provenance"]
    assert {path.name for path in (tmp_path / "two").iterdir()} == {".lock", "calibration.json", "trace.npz"}


@pytest.mark.long
def test_two_processes_time_and_decode_as_one(tmp_path):
    options = ("--run", "run")
    finish(tmp_path, *CALIBRATE, *TWO, *options)
    finish(tmp_path, "profile", *TWO, "--sizes", "1,4", "--time-limit", "2", *options)
    finish(tmp_path, "search", "--budget", "4", *options)
    finish(tmp_path, "bench", *TWO, "--num-prompts", "4", "--json", *options)
    profile = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert profile["provenance"]["device"] == "2 x cpu"
    result = json.loads((tmp_path / "run" / "bench.json").read_text())
    assert all(c["identical"] == c["compared"] > 0 for c in result["contenders"])
    assert all(c["steps"] == c["replayed_steps"] for c in result["contenders"])


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_all_with_words_and_the_command_continues(tmp_path, victim):
    options = (*CALIBRATE[:2], "24", *CALIBRATE[3:], "--batch-size", "1", *TWO, "--run", "run")
    process = start(tmp_path, *options)
    partial = tmp_path / "run" / "calibrate.partial"
    while process.poll() is None and not list(partial.glob("0*.sha256")):
        time.sleep(0.05)
    ranks_of(process.pid)[victim].send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"process {victim + 1} of 2 was ended by signal 9" in said
    assert "Traceback" not in said
    assert "Continuing after" in finish(tmp_path, *options)


def ranks_of(pid):
    import psutil

    found = psutil.Process(pid).children()
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


def config(**changes):
    known = {"base_model_tp_plan": {"layers.*.mlp": "colwise"}, "model_type": "llama", "num_attention_heads": 8}
    return SimpleNamespace(**{**known, "num_key_value_heads": 4, **changes})


def test_what_cannot_be_divided_is_refused_with_words(monkeypatch):
    monkeypatch.setattr(ranks, "count", lambda: 4)
    ranks.check_divisible(config(), "M")
    with pytest.raises(Unsupported, match=r"transformers has none for M \(gpt\): use --device-map auto"):
        ranks.check_divisible(config(base_model_tp_plan=None, model_type="gpt"), "M")
    with pytest.raises(InvalidInput, match="M has 8 and 2, and got 4"):
        ranks.check_divisible(config(num_key_value_heads=2), "M")
    with pytest.raises(InvalidInput, match="do not go with --tensor-parallel"):
        load_target("M", device="cpu")


def test_the_option_says_as_many_processes_as_there_are(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    said = treeopt(*CALIBRATE, *TWO, "--run", tmp_path / "run", code=1)
    assert "--tensor-parallel 2 needs as many processes, but 3 were started" in said.replace("\n", " ")
    assert "pass --tensor-parallel with their number" in invoke(*CALIBRATE, code=2).stderr
    assert "--engine does not go with --tensor-parallel" in invoke("bench", *TWO, "--engine", "openvino", code=2).stderr


def test_without_ranks_there_is_one():
    assert (ranks.count(), ranks.greatest(0.5)) == (1, 0.5)
    assert ranks.is_of_ranks(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not ranks.is_of_ranks(RuntimeError("out of memory"))
