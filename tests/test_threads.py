"""Threads of a processor: what is kept and said."""

import os
import subprocess
import sys

import pytest

from treeopt.latency.rounds import processor_share, time_steps
from treeopt.runtime import stepper
from treeopt.runtime.decode import Decoder
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import StepVisits
from treeopt.runtime.stop import StopRule
from treeopt.trees.tree import Tree


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


@pytest.mark.long
def test_threads_are_those_of_the_environment_and_are_recorded():
    """A session computes with OMP_NUM_THREADS threads, and its provenance says so."""
    code = (
        "from treeopt.runtime.waiting import import_torch; import_torch()\n"
        "from treeopt.runtime.session import open_session; print(open_session().provenance().threads)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("MKL_NUM_THREADS", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_a_busy_machine_is_told_by_the_processor_time_of_rounds(target, heads, monkeypatch):
    """A clock of the process that goes half as fast as the wall's."""
    monkeypatch.setattr(stepper.time, "process_time", lambda: stepper.time.perf_counter() / 2)
    setup = Setup(target, heads, StopRule(frozenset(), 20, at_loops=False))
    found = time_steps(StepVisits(Decoder(setup), [[1, 2, 3]], [Tree.chain(1)], 1), time_limit_s=0.0)
    assert processor_share([(v.seconds, v.processor_s) for v in found.visits]) == pytest.approx(0.5, abs=0.01)
    assert processor_share([(1.0, None)]) is None  # somebody else's
