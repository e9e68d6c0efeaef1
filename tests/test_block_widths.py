"""Drafters of blocks: another width is another drafter, so each width has a run of its own, and runs are compared."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.steps import request_of
from treeopt import compare
from treeopt.errors import InvalidInput
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.options import Source
from treeopt.records.pools import USUAL
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.runtime.drafters.dflash import DFlashHeads
from treeopt.runtime.measure.ranks import PoolRecorder, read_answers
from treeopt.runtime.session import open_session
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import invoke, random_trace
from .helpers.engine_rows import export, export_plan

WIDTHS = (3, 5)  # guesses of the demo model's drafter, which was trained for 5
SHORT = ("--num-prompts", 8, "--max-new-tokens", 16, "--dtype", "float64")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, RunDirectory]:
    """A calibration of each width, and a plan without latencies."""
    folder, found = tmp_path_factory.mktemp("widths"), {}
    for width in WIDTHS:
        found[width] = RunDirectory(folder / str(width))
        invoke("calibrate", "--run", folder / str(width), "--drafter", "dflash", "--draft-depth", width, *SHORT)
        invoke("search", "--run", folder / str(width), "--budget", 8)
    return found


@pytest.mark.long
def test_a_narrower_block_has_other_guesses_at_every_depth(runs):
    narrow, wide = (runs[width].read_trace() for width in WIDTHS)
    assert (narrow.tokens == wide.tokens).all()
    assert (narrow.ranks != wide.ranks[:, : WIDTHS[0]]).any(0).all()


@pytest.mark.long
def test_bench_decodes_with_the_block_that_was_calibrated(runs):
    """Texts are plain decoding's, and steps are replay's."""
    invoke("bench", "--run", runs[3].path, "--num-prompts", 4)
    result = json.loads(runs[3].bench.read_text())
    assert result["provenance"]["drafter"]["num_heads"] == 3
    for contender in result["contenders"]:
        assert contender["identical"] == contender["compared"] == 4
        assert contender["steps"] == contender["replayed_steps"]


def timed(width, plain_ms=2.0, draft_ms=1.0) -> LatencyProfile:
    """Steps that cost by their rows, and a pass of the drafter."""
    points = [
        StepTiming(1, 64, rows, depth, (plain_ms + draft_ms + 0.05 * rows,) * 3)
        for rows in (2, 3, 5, 8, 9, 16)
        for depth in range(1, min(width, rows - 1) + 1)
    ]
    return LatencyProfile(tuple(points), (StepTiming(1, 64, 1, 0, (plain_ms,) * 3),), {"name": "treeopt"})


def traced(width, **drafter) -> RankTrace:
    trace = random_trace(np.random.default_rng(width), (30,) * 8, width, 4)
    about = {"kind": "dflash", "sha256": "one", "num_heads": width, "widest": 9, **drafter}
    return replace(trace, meta={"top_k": 4, "drafter": about})


def test_runs_of_several_widths_are_compared_as_drafters_are(tmp_path):
    """The weights are the same, the guesses are not."""
    found, speedups = [], {}
    for width in (2, 4, 7):
        run, trace, latencies = RunDirectory(tmp_path / str(width)), traced(width), timed(width)
        plan = plan_trees(trace, latencies, PlanRequest(Limits(16), (1,)))
        trace.save(run.trace)
        latencies.save(run.profile)
        plan.save(run.plan)
        found.append(run)
        speedups[str(width)] = plan.entries[0].chosen.speedup
    compared = compare(*found)
    assert {one.drafter: one.speedup.value for one in compared.settings} == pytest.approx(speedups)
    (winner,) = compared.winners
    assert winner.drafter == max(speedups, key=speedups.__getitem__)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama-cpp", "lmdeploy"])
def test_whole_blocks_alone_are_planned_where_the_length_is_the_width(engine):
    trace, latencies = traced(7), timed(7, draft_ms=0.0)
    request, said = request_of(trace, latencies, engine=engine, batch_sizes=(1,))
    assert "takes the length as the width of the block" in said[0]
    (entry,) = plan_trees(trace, latencies, request).entries
    assert entry.best("chain").draft == Tree.chain(7)
    assert {point.depth for point in entry.curve} <= {0, 7}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama-cpp", "lmdeploy"])
def test_an_export_says_that_the_length_is_the_width(engine):
    """Without latencies the longest chain is planned."""
    trace = traced(4)
    request, _ = request_of(trace, None, engine=engine, batch_sizes=(1,))
    notes = export_plan(plan_trees(trace, None, request), engine).notes
    assert any("blocks of 4 guesses or more: engines cut a wider block" in note for note in notes)
    assert any("all 4 guesses are verified, not a prefix" in note for note in notes)


def test_a_length_wider_than_the_block_is_refused_with_the_reason():
    with pytest.raises(InvalidInput, match="with 7 guesses all would be others than those of the 5 that this drafter"):
        export("vllm", Tree.chain(7), num_heads=5, drafter="dflash")
    assert "7" in export("vllm", Tree.chain(7), num_heads=7, drafter="dflash").command


def test_a_block_is_passed_once_for_all_that_is_recorded_of_a_state(monkeypatch):
    session = open_session(Source(drafter="dflash", dtype="float64"))
    passes, block = [], DFlashHeads.block
    monkeypatch.setattr(DFlashHeads, "block", lambda *given: passes.append(1) or block(*given))
    text, n = session.prompts.conversations[0].first, 8
    setup = session.setup(n)
    (row,) = read_answers(setup, [text[:n]], [text[n : 2 * n]], batch_size=1)
    recorder = PoolRecorder(session.drafter, USUAL.fitting(session.drafter))
    found = recorder.record(row.text())
    assert sorted(found) == ["marginal_places", "pool_places"]
    assert len(passes) == 1
