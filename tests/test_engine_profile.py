"""Latencies of another engine: whole steps with all rows live are timed, and costs of its dynamic trees come from those timed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import treeopt as api
from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.journal import Journal
from treeopt.latency.dynamic import DynamicCosts
from treeopt.latency.estimate import StepCosts
from treeopt.latency.rounds import PLAIN_VISITS, timed_trees, timings
from treeopt.pipeline import profile_in
from treeopt.pipeline.profile import engine as timing
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.engines import Pass
from treeopt.trees.dynamic import DynamicTree
from treeopt.trees.tree import Tree

from .conftest import treeopt

PROMPTS = [[1] * n for n in (5, 9, 7)]
TREES = [Tree.chain(1), Tree.chain(3), DynamicTree(3, 4, 9)]


class Fake:
    """An engine whose steps take 2 ms, 1 ms more for each row of the tree and 10 for a prompt, and accept all guesses."""

    name, version, most_rows, is_stepwise, takes_trees = "fake", "1", 4, True, True
    own_length, without_own, about = None, "", ""

    def __init__(self, tokens: int = 20) -> None:
        self.tokens, self.open = tokens, 0

    def answer(self, prompts, tree, rows=1):
        waiting, live = list(enumerate(prompts)), {}
        self.open += 1
        try:
            while waiting or live:
                new = [waiting.pop(0) for _ in range(min(rows - len(live), len(waiting)))]
                live |= {place: 0 for place, _ in new}
                yield Pass(
                    {place: [8] * (1 + tree.depth) for place in live},
                    2e-3 + 1e-3 * len(tree) + 0.01 * len(new),
                    bool(new),
                )
                live = {place: n + 1 for place, n in live.items() if n + 1 < self.tokens}
        finally:
            self.open -= 1


@pytest.mark.parametrize("batch_size", [1, 2])
def test_whole_steps_with_all_rows_live_are_timed(tmp_path, batch_size):
    engine = Fake()
    timed = timing.Timing(engine, PROMPTS, TREES, batch_size)
    rounds = timed.rounds(1e9, 0.02, Journal(tmp_path / "journal", {}))
    assert engine.open == 0  # every answer that was not heard to its end was closed
    assert timed_trees(rounds, TREES) == TREES
    points, plain = timings(rounds, TREES, batch_size)
    for point, tree in zip((*points, plain), (*TREES, Tree.chain(0)), strict=True):
        assert set(point.step_ms) == {2.0 + len(tree)}
        assert (point.size, point.depth, point.accepted_mean) == (len(tree), tree.depth, tree.depth)
    assert len(plain.step_ms) == PLAIN_VISITS * len(points[0].step_ms)
    assert [point.topk for point in points] == [None, None, 4]
    lengths = [length for round_ in rounds for length in round_["lengths"]]
    assert min(map(len, PROMPTS)) < min(lengths)
    assert max(lengths) <= max(map(len, PROMPTS)) + 20 * 4


def test_answers_too_short_to_be_timed_are_said(tmp_path):
    timed = timing.Timing(Fake(2), PROMPTS, TREES, 1)
    with pytest.raises(InvalidInput, match="Timing needs answers of some length, but 4 prompts gave no 6 steps"):
        timed.rounds(1e9, 0.02, Journal(tmp_path / "journal", {}))


def test_what_the_time_has_no_room_for_is_said(tmp_path, capsys):
    timed = timing.Timing(Fake(), PROMPTS, [Tree.chain(n) for n in range(1, 9)], 1)
    rounds = timed.rounds(0.0, 0.02, Journal(tmp_path / "journal", {}))
    assert len(timed_trees(rounds, timed.trees)) == 2
    assert "Timing all 8 settings at batch size 1 would take about 0 s" in capsys.readouterr().err


def step(size: int, depth: int, ms: float, topk: int | None = None) -> StepTiming:
    return StepTiming(1, 100, size, depth, (ms,), topk=topk)


def test_costs_of_dynamic_trees_lie_between_those_that_were_timed():
    """Rows 4 and 16 of three levels are timed: what lies between them is between them, and nothing is known beyond."""
    points = [step(n + 1, n, 10.0 + n) for n in (1, 2, 3, 8)]
    points += [step(rows, levels, 10.0 + rows + 2 * levels, 4) for rows in (6, 16) for levels in (2, 4)]
    profile = LatencyProfile(tuple(points), (step(1, 0, 10.0),))
    costs = DynamicCosts.of(StepCosts(profile, 1), profile)
    trees = [DynamicTree(4, 4, rows) for rows in (6, 8, 12, 16)]
    ms = costs.ms(trees)
    assert ms[0] == 24.0
    assert ms[-1] == 34.0
    assert all(a < b for a, b in pairwise(ms.tolist()))
    known = [DynamicTree(2, 4, 6), DynamicTree(3, 4, 6), DynamicTree(3, 1, 4)]
    assert costs.ms(known).tolist() == [20.0, 24.0, 13.0]  # as much as the next deeper one; a chain is a chain
    assert np.isnan(costs.ms([DynamicTree(4, 4, 17), DynamicTree(5, 4, 8), DynamicTree(2, 2, 4)])).all()
    draws = costs.draws_ms([*trees, *known], 400, np.random.default_rng(0))
    assert np.median(draws, axis=1) == pytest.approx(costs.ms([*trees, *known]), rel=0.03)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("engine") / "run"
    treeopt("calibrate", "--drafter", "eagle3", "--num-prompts", 8, "--max-new-tokens", 16, "--run", folder)
    return RunDirectory(folder)


def test_an_engines_profile_is_planned_on(run, monkeypatch):
    monkeypatch.setattr("treeopt.runtime.engines.open_engine", lambda *parts: Fake())
    session = api.open(run=run)
    found = profile_in(run, session, "fake", batch_sizes=(1, 2), budget=12, time_limit_s=1e6)
    assert found.runtime == {"name": "fake", "version": "1"}
    assert found.batch_sizes == [1, 2]
    assert {p.topk for p in found.points if p.batch_size == 1} == {None, 2, 4, 8}
    assert {p.topk for p in found.points if p.batch_size == 2} == {None}  # trees are for one request
    plan = api.search(run=run, engine="openvino", budget=12, batch_sizes=[1])
    assert plan[1].dynamic is not None
    assert plan[1].dynamic.step_ms == pytest.approx(2.0 + plan[1].dynamic.size, rel=0.35)
    assert plan[1].adaptive is None


def test_what_an_engine_cannot_time_is_refused(run, monkeypatch):
    monkeypatch.setattr("treeopt.runtime.engines.open_engine", lambda *parts: Fake())
    session = api.open(run=run)
    with pytest.raises(Unsupported, match="fake decodes 4 sequences at a time, but got --batch-size 8"):
        api.profile(session, run=run, engine="fake", batch_sizes=(8,))
    for option, value in {"context": (64,), "sizes": (4,), "compile": True, "bandwidth": 9.0}.items():
        name = {"context": "contexts", "compile": "compiled", "bandwidth": "gb_per_s"}.get(option, option)
        with pytest.raises(InvalidInput, match=f"--engine fake does not go with --{option}"):
            api.profile(session, run=run, engine="fake", **{name: value})
