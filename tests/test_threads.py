"""Threads of a processor and the number format that it computes in: what is chosen, kept and said."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.files.journal import Journal
from treeopt.latency.rounds import processor_share, time_rounds
from treeopt.pipeline import session as pipeline
from treeopt.records.origins import provenance
from treeopt.records.profile import LatencyProfile, ProfileSetting, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.runtime import stepper
from treeopt.runtime import target as target_module
from treeopt.runtime.decode import Decoder, Setup
from treeopt.runtime.measure import threads
from treeopt.runtime.stepper import StepVisits
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import dtype_note
from treeopt.trees.tree import Tree


@pytest.fixture
def torch_threads(monkeypatch):
    """A torch of 8 threads on 8 cores whose user said nothing; a list of the numbers that it was given, the last one kept."""
    given = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1])
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setattr(pipeline, "_chosen", None)
    for name in threads.SAID_BY:
        monkeypatch.delenv(name, raising=False)
    return given


def session_of(**source):
    target = SimpleNamespace(device=torch.device("cpu"))
    return SimpleNamespace(target=target, source=source, prompts=SimpleNamespace(conversations=()), setup=lambda n: n)


def profile_with(run, n):
    points = (StepTiming(1, 1, 2, 1, (2.0,)),)
    record = {**provenance(threads=n), "device": "cpu"}
    info = {"provenance": record, "settings": [ProfileSetting(batch_size=1, context_tokens=1)], "precision": 0.02}
    profile = LatencyProfile(points, (StepTiming(1, 1, 1, 0, (1.0,)),), info=info)
    profile.save(run.profile)
    return profile


def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise():
    """OpenMP prints what it read; commands that are started later do not inherit it."""
    code = (
        "import os, sys; from treeopt.runtime.waiting import import_torch\n"
        "os.environ['KMP_BLOCKTIME'] = '1'; import_torch(); assert 'torch' not in sys.modules\n"
        "del os.environ['KMP_BLOCKTIME']; import_torch(); import torch; print(os.environ.get('OMP_WAIT_POLICY'))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment["OMP_DISPLAY_ENV"] = "TRUE"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if "OMP_WAIT_POLICY" not in done.stderr:
        pytest.skip("this OpenMP does not say what it read")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
    assert done.stdout.strip() == "None"


@given(fast=st.floats(0.5, 1.0), noise=st.lists(st.floats(1.0, 100.0), min_size=2, max_size=2))
def test_more_threads_are_taken_where_they_are_clearly_faster_whatever_two_rounds_were(fast, noise):
    quiet = {1: [1.0] * 5, 2: [fast] * 5}
    disturbed = {1: [noise[0], noise[1], *quiet[1][2:]], 2: [fast * noise[1], fast * noise[0], *quiet[2][2:]]}
    assert threads.fastest(quiet) == threads.fastest(disturbed) == (2 if fast <= 1 / 1.1 else 1)


def test_plain_steps_are_timed_with_each_number_in_turn(torch_threads, target, monkeypatch):
    """A made clock: 4 threads take half the time of 1, and 8 wait for a busy core. torch's own number is left as it was."""
    torch_threads.append(8)
    taken = {1: 4.0, 2: 3.9, 4: 2.0, 8: 300.0}
    real, seen = Decoder._pass, []

    def timed(decoder, work, *, reads_prompt):
        one = real(decoder, work, reads_prompt=reads_prompt)
        if reads_prompt:
            return one
        seen.append(torch.get_num_threads())
        return replace(one, seconds=taken[seen[-1]])

    monkeypatch.setattr(Decoder, "_pass", timed)
    setup = Setup(target, None, StopRule(target.eos_ids, 5))
    assert threads.choose_threads(setup, [(1, 2, 3), (4, 5)]) == 4
    assert torch_threads[-1] == 8
    assert {n: seen.count(n) for n in taken} == dict.fromkeys(taken, (1 + threads.ROUNDS) * (1 + threads.STEPS))


def test_a_run_keeps_the_number_that_was_chosen_first(torch_threads, tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    monkeypatch.setattr(threads, "choose_threads", lambda setup, prompts: 2)
    pipeline.settle_threads(run, session_of())
    assert torch_threads[-1] == 2
    torch_threads.append(8)  # another process
    monkeypatch.setattr(pipeline, "_chosen", None)
    monkeypatch.setattr(threads, "choose_threads", lambda setup, prompts: pytest.fail("it was chosen before"))
    Journal(run.partial("calibrate"), {"provenance": provenance(threads=4)})  # killed
    pipeline.settle_threads(run, session_of())
    assert torch_threads[-1] == 4
    profile_with(run, 1)  # timings come first
    pipeline.settle_threads(run, session_of())
    assert torch_threads[-1] == 1


def test_the_users_number_stays_and_a_difference_is_said(torch_threads, tmp_path, monkeypatch, capsys):
    run = RunDirectory(tmp_path)
    monkeypatch.setattr(threads, "choose_threads", lambda setup, prompts: pytest.fail("the user chose"))
    profile_with(run, 4)
    for way in ("torch", "environment", "option"):
        torch_threads.append(3 if way == "torch" else 8)
        if way == "environment":
            monkeypatch.setenv("OMP_NUM_THREADS", "8")
        pipeline.settle_threads(run, session_of(**({"threads": 8} if way == "option" else {})))
        assert torch_threads[-1] == (3 if way == "torch" else 8)
        said = capsys.readouterr().err
        assert f"computes with {torch_threads[-1]} threads, but the run was measured with 4" in said
        assert "threads=4" in said


def test_another_machines_number_is_not_taken(torch_threads, tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    Journal(run.partial("calibrate"), {"provenance": {**provenance(threads=4), "machine": "another"}})
    monkeypatch.setattr(threads, "choose_threads", lambda setup, prompts: 2)
    pipeline.settle_threads(run, session_of())
    assert torch_threads[-1] == 2


def test_a_busy_machine_is_told_by_the_processor_time_of_rounds(target, heads, monkeypatch):
    """A clock of the process that goes half as fast as the wall's."""
    monkeypatch.setattr(stepper.time, "process_time", lambda: stepper.time.perf_counter() / 2)
    setup = Setup(target, heads, StopRule(frozenset(), 20, at_loops=False))
    found = time_rounds(StepVisits(Decoder(setup), [[1, 2, 3]], [Tree.chain(1)], 1), time_limit_s=0.0)
    assert processor_share([(v.seconds, v.processor_s) for v in found.visits]) == pytest.approx(0.5, abs=0.01)
    assert processor_share([(1.0, None)]) is None  # somebody else's


@pytest.mark.parametrize("computes", [True, False])
def test_bfloat16_is_warned_of_where_the_processor_does_not_compute_in_it(target, monkeypatch, computes):
    monkeypatch.setattr(target_module, "computes_in_bfloat16", lambda: computes)
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, stored_dtype=torch.bfloat16)
    said = dtype_note(model)
    assert (said is None) == computes
    assert computes or "does not compute in bfloat16" in said
    model.dtype = torch.float32
    assert ("does not compute in it" in dtype_note(model)) == (not computes)
    model.stored_dtype = torch.float32
    assert dtype_note(model) is None
    model.device, model.dtype = torch.device("cuda"), torch.bfloat16
    assert dtype_note(model) is None
