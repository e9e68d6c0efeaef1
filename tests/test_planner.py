"""Selection and held-out figures; the files of plans and profiles are in test_records.py."""

import numpy as np
import pytest

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.grow import grow
from treeopt.growth.replay import replay
from treeopt.growth.source import TraceSource, source_of
from treeopt.latency.costs import StepCosts
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.contender import Block, Contender
from treeopt.records.estimate import NEGLIGIBLE
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import FOLDS, fold_numbers
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import FIXED, Cost, Tree

from .conftest import random_trace


@pytest.fixture(scope="module")
def trace():
    return random_trace(np.random.default_rng(5), [40] * 30, 3, 8)


def staircase(ms_of_rows, *, batch_sizes=(1,), sizes=range(2, 65), depths=(1, 2, 3), context=100):
    """A profile without noise from a cost per rows = batch x size."""

    def timing(b, n, d):
        return StepTiming(b, context, n, d, (ms_of_rows(b * n),) * 3)

    points = [timing(b, n, d) for b in batch_sizes for n in sizes for d in depths if d < n]
    return LatencyProfile(tuple(points), tuple(timing(b, 1, 0) for b in batch_sizes))


def test_figures_are_held_out(trace):
    """The cross-fitted steps are those of trees that never saw the sequence."""
    limits = Limits(12, max_depth=3, max_rank=7)
    held_out = source_of(trace).crossfit(limits)
    fold = fold_numbers(trace)
    for f in range(FOLDS):
        tree = grow(trace.select(np.flatnonzero(fold != f)), limits).tree(12)
        test = np.flatnonzero(fold == f)
        assert held_out.every[11].steps[test].tolist() == replay(trace, tree).steps[test].tolist()
    assert held_out.grown.tree(12) == grow(trace, limits).tree(12)


def test_one_sequence_has_nothing_to_hold_out(trace):
    with pytest.raises(OutOfRange, match="at least 2 sequences"):
        plan_trees(trace.select(np.array([0])))


def test_a_free_step_takes_the_whole_budget_and_a_dear_one_nothing(trace):
    request = PlanRequest(Limits(20))
    free, dear = (plan_trees(trace, staircase(cost), request).entries[0] for cost in (lambda rows: 1.0, float))
    best = max(free.curve, key=lambda point: point.tokens_per_step)
    assert free.chosen.tokens_per_step == pytest.approx(best.tokens_per_step)
    assert (dear.chosen.size, dear.chosen.speedup, dear.tree.medusa_choices) == (1, 1.0, [])


def test_the_choice_is_the_best_of_all_sizes_and_depths(trace):
    def cost(rows):
        return 2.0 + np.ceil(rows / 8)

    plan = plan_trees(trace, staircase(cost, batch_sizes=(1, 4)), PlanRequest(Limits(40), batch_sizes=(1, 4)))
    for entry in plan.entries:
        best = 0.0
        for depth in (1, 2, 3):
            held_out = source_of(trace).crossfit(Limits(40, max_depth=depth))
            for size, rate in enumerate(held_out.tokens_per_step, 1):
                best = max(best, 1e3 * entry.batch_size * rate / cost(entry.batch_size * size))
        assert entry.chosen.tokens_per_s == pytest.approx(best, rel=0.005)  # less what it owes to luck
        assert entry.chosen.size * entry.batch_size % 8 == 0  # the end of a stair: one node more is not free
    assert [part.entry for part in plan.schedule] == [0, 1]
    assert 1 < plan.schedule[1].first <= 4


def test_ties_inside_the_noise_go_to_the_smaller_tree(trace):
    """Latencies that rise as tokens per step do, so that all sizes are nearly as fast."""
    rates = source_of(trace).crossfit(Limits(20)).tokens_per_step

    def noisy(b, n, d, ms):
        return StepTiming(b, 100, n, d, (ms * 0.8, ms, ms, ms * 1.2))

    points = tuple(noisy(1, n, d, rates[n - 1] * (1 - 0.0004 * n)) for n in range(2, 21) for d in (1, 2, 3) if d < n)
    plan = plan_trees(trace, LatencyProfile(points, (noisy(1, 1, 0, 2.0),)), PlanRequest(Limits(20)))
    entry = plan.entries[0]
    fastest = max(point.tokens_per_s for point in entry.curve)
    good = [p.size for p in entry.curve if p.tokens_per_s >= (1 - NEGLIGIBLE) * fastest]
    assert entry.chosen.size == min(set(good) & set(entry.tied_sizes)) < max(entry.tied_sizes)
    assert len(entry.tied_sizes) > len(good) > 1


def test_without_a_profile_the_largest_useful_tree_is_taken_and_said(trace):
    entry = plan_trees(trace, request=PlanRequest(Limits(10, max_depth=2, max_rank=1))).entries[0]
    assert entry.chosen.size <= 10
    assert entry.chosen.depth <= 2
    assert max(max(path) for path in entry.tree.medusa_choices) <= 1
    assert entry.chosen.step_ms is None
    assert "No profile" in entry.warnings[0]


def test_nothing_is_extrapolated(trace):
    profile = staircase(lambda rows: 1.0, sizes=range(2, 9), depths=(1, 2))
    entry = plan_trees(trace, profile, PlanRequest(Limits(20))).entries[0]
    assert entry.chosen.size <= 8
    assert entry.chosen.depth <= 2
    assert any("sizes up to 8" in warning for warning in entry.warnings)
    assert any("depths up to 2" in warning for warning in entry.warnings)
    assert np.isnan(StepCosts(profile, 1, 100).ms([Cost(FIXED, 9, 3)]))
    with pytest.raises(OutOfRange, match="covers batch sizes 1, but 2 was asked"):
        plan_trees(trace, profile, PlanRequest(Limits(20), batch_sizes=(2,)))


def test_a_budget_beyond_the_profile_costs_nothing(trace, monkeypatch):
    """Trees of 4,096 rows were grown and thrown away, although 12 rows were the most that was timed."""
    profile, grown = staircase(lambda rows: 1.0, sizes=range(2, 13)), []
    crossfit = TraceSource.crossfit
    monkeypatch.setattr(TraceSource, "crossfit", lambda s, limits, *a: grown.append(limits) or crossfit(s, limits, *a))
    wide, narrow = (plan_trees(trace, profile, PlanRequest(Limits(budget))) for budget in (4096, 13))
    assert max(limits.budget for limits in grown) == 13
    assert wide.entries[0].tree.medusa_choices == narrow.entries[0].tree.medusa_choices
    assert (wide.constraint.budget, narrow.constraint.budget) == (12, 12)
    (said,) = set(wide.entries[0].warnings) - set(narrow.entries[0].warnings)
    assert "covers sizes up to 12" in said
    assert "the budget is 4,096" in said
    grown.clear()
    with pytest.raises(InvalidInput, match="at most 1,024 without a profile, but got 4,096"):
        plan_trees(trace, None, PlanRequest(Limits(4096)))
    plan_trees(trace, None, PlanRequest(Limits(30)))
    assert [limits.max_depth for limits in grown] == [trace.num_heads]  # no depth but the one that is taken


def test_sequences_without_a_step_have_figures_too():
    trace = random_trace(np.random.default_rng(0), [10, 10, 1, 1, 1, 1, 1, 1], 2, 4)
    entry = plan_trees(trace, request=PlanRequest(Limits(4))).entries[0]
    assert entry.chosen.tokens_per_step.stderr >= 0
    assert plan_trees(trace, request=PlanRequest(Limits(1))).entries[0].chosen.tokens_per_step == 1.0


def test_growth_begins_with_the_chosen_tree(trace):
    plan = plan_trees(
        trace, staircase(lambda rows: 2.0 + rows / 8, batch_sizes=(1, 2)), PlanRequest(batch_sizes=(1, 2))
    )
    entry = plan.entries[0]
    chosen = [list(path) for path, _ in entry.growth_order[: entry.chosen.size - 1]]
    assert sorted(chosen, key=lambda p: (len(p), p)) == entry.tree.medusa_choices
    with pytest.raises(OutOfRange, match="batch_size"):
        plan.entry()


def test_speedups_are_paired_by_block():
    """A block that is slow for both contenders does not change their ratio."""

    def contender(name, tokens, scale, n_blocks=5):
        blocks = [
            Block(round=r, prompts=[i], tokens=tokens, steps=10, decode_s=slow * scale)
            for r in range(2)
            for i, slow in enumerate((1.0, 10.0, 3.0, 2.0, 7.0)[:n_blocks])
        ]
        return Contender(name=name, batch_size=1, draft=Tree.chain(0), sequences=[], blocks=blocks)

    bench = Benchmark(contenders=(contender("plain", 100, 1.0), contender("chosen", 100, 0.5)), dtype="x")
    ratio = bench.speedup("chosen")
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low == pytest.approx(2.0)
    assert bench.speedup("plain").high == pytest.approx(1.0)
    few = (contender("plain", 100, 1.0, 4), contender("chosen", 100, 0.5, 4))
    assert Benchmark(contenders=few, dtype="x").speedup("chosen").low is None  # no interval of so few
    with pytest.raises(InvalidInput, match="plain, chosen"):
        bench.speedup("other")
