"""What a plan says of the fastest dynamic and adaptive tree, computed again by plain loops over the same record."""

from dataclasses import replace

import numpy as np
import pytest

from treeopt.growth.adaptive import fit_rule
from treeopt.latency.dynamic import DynamicCosts
from treeopt.latency.estimate import StepCosts
from treeopt.planning import dynamic
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import RankTrace, fold_numbers
from treeopt.trees.dynamic import MOST_ROWS, DynamicTree, pool_size
from treeopt.trees.shapes import Limits

from .conftest import random_trace
from .test_dynamic_replay import slow_lengths, slow_replay, slow_taken, with_pools
from .test_figures import some_profile

LEVELS, TOPKS, BATCH_SIZES, BUDGET = 3, (1, 2, 4), (1, 4), 16


@pytest.fixture(scope="module")
def trace() -> RankTrace:
    rng = np.random.default_rng(2)
    lengths = rng.integers(20, 50, 16)
    pools = with_pools(rng, lengths.tolist(), LEVELS, TOPKS, turns=2)
    ranks = random_trace(rng, lengths, 3, 6)
    return replace(pools, ranks=ranks.ranks, end=ranks.end, meta={**pools.meta, **ranks.meta})


@pytest.fixture(scope="module")
def profile() -> LatencyProfile:
    fixed = some_profile(BATCH_SIZES, largest=16)
    extra = {(2, 2): 0.1, (2, 3): 0.3, (4, 2): 0.2, (4, 3): 0.5}
    plain = {p.batch_size: p for p in fixed.autoregressive}
    points = [
        StepTiming(b, 512, 8, levels, tuple(ms + 0.6 + 0.02 * b + more for ms in plain[b].step_ms), topk=topk)
        for b in BATCH_SIZES
        for (topk, levels), more in extra.items()
    ]
    return LatencyProfile((*fixed.points, *points), fixed.autoregressive)


@pytest.fixture(scope="module")
def plan(trace, profile) -> Plan:
    return plan_trees(trace, profile, PlanRequest(Limits(BUDGET), batch_sizes=BATCH_SIZES))


def costs(profile, batch_size) -> DynamicCosts:
    return DynamicCosts.of(StepCosts(profile, batch_size, 512), profile)


def tokens_per_step(trace, tree) -> float:
    steps = slow_replay(trace, slow_lengths(trace, tree.levels, tree.topk, tree.rows))
    return (trace.lengths - 1).sum() / sum(map(len, steps))


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_the_dynamic_tree_of_a_plan_is_among_the_fastest_of_all_settings(trace, profile, plan, batch_size):
    found, of = plan[batch_size].dynamic, costs(profile, batch_size)
    trees = [
        DynamicTree(levels, topk, rows)
        for topk in TOPKS[1:]
        for levels in range(1, LEVELS + 1)
        for rows in range(max(levels + 1, 2), min(pool_size(levels, topk) + 1, MOST_ROWS, BUDGET) + 1)
    ]
    rates, ms = np.array([tokens_per_step(trace, tree) for tree in trees]), of.ms(trees)
    i = trees.index(found.tree)
    assert found.tokens_per_step == pytest.approx(rates[i])
    assert found.step_ms == pytest.approx(ms[i])
    throughput = 1e3 * batch_size * rates / ms
    assert found.tokens_per_s == pytest.approx(throughput[i])
    best = np.nanargmax(throughput)
    assert found.tree == trees[best] or (len(found.tree) < trees[best].rows and throughput[i] > 0.95 * throughput[best])


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_the_adaptive_tree_of_a_plan_is_judged_on_answers_that_its_rule_was_not_fitted_to(
    trace, profile, plan, batch_size
):
    found, of = plan[batch_size].adaptive, costs(profile, batch_size)
    rows, levels, topk = found.rows, found.depth, found.topk
    assert rows == [n for n in (2, 4, 8, 16) if levels < n <= pool_size(levels, topk) + 1]
    ms = of.ms([DynamicTree(levels, topk, n) for n in rows])
    assert found.cost_ms == pytest.approx(ms.tolist())
    taken = np.zeros(4)
    fold = fold_numbers(trace)
    for f in range(5):
        rule = fit_rule(trace.select(np.flatnonzero(fold != f)), rows, levels, topk, ms, batch_size=batch_size)
        judged = trace.select(np.flatnonzero(fold == f))
        taken += slow_taken(rule, judged, *rule.expected(judged), batch_size).sum(1)
    tokens, steps, spent, verified = taken
    assert tokens == (trace.lengths - 1).sum()
    assert found.tokens_per_step == pytest.approx(tokens / steps)
    assert found.tokens_per_s == pytest.approx(1e3 * tokens / spent)
    assert found.mean_rows == pytest.approx(verified / steps)
    whole = fit_rule(trace, rows, levels, topk, ms, batch_size=batch_size)
    assert (found.intercepts, found.slopes) == (list(whole.promise.intercepts), list(whole.promise.slopes))
    assert found.tokens_per_ms == whole.rate


def test_both_are_compared_with_the_fixed_tree_and_with_plain_decoding(tmp_path, profile, plan):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    for entry in plan:
        for kind in (entry.dynamic, entry.adaptive):
            plain = 1e3 * entry.batch_size / StepCosts(profile, entry.batch_size, 512).plain.ms
            assert kind.speedup == pytest.approx(kind.tokens_per_s / plain)
            assert kind.over_fixed == pytest.approx(kind.tokens_per_s / entry.tokens_per_s)
            assert kind.over_fixed95[0] < kind.over_fixed < kind.over_fixed95[1]
            assert kind.size <= BUDGET


def test_a_plan_without_pools_or_without_timings_of_dynamic_trees_has_none(trace, profile):
    bare = RankTrace(trace.ranks, trace.starts, end=trace.end)
    for record, timed in ((bare, profile), (trace, LatencyProfile(tuple(profile.fixed), profile.autoregressive))):
        entry = plan_trees(record, timed, PlanRequest(Limits(4), batch_sizes=(1,)))[1]
        assert (entry.dynamic, entry.adaptive) == (None, None)


def test_of_many_answers_the_first_conversations_judge_adaptive_trees(monkeypatch, trace, profile):
    few = trace.select(np.flatnonzero(trace.clusters < 5))
    monkeypatch.setattr(dynamic, "MOST_ADAPTED", int(few.lengths.sum()) + 1)
    entry = plan_trees(trace, profile, PlanRequest(Limits(BUDGET), batch_sizes=(1,)))[1].adaptive
    ms = costs(profile, 1).ms([DynamicTree(entry.depth, entry.topk, n) for n in entry.rows])
    rule = fit_rule(few, entry.rows, entry.depth, entry.topk, ms, batch_size=1)
    assert (entry.intercepts, entry.tokens_per_ms) == (list(rule.promise.intercepts), rule.rate)
    assert entry.speedup == pytest.approx(entry.tokens_per_s * StepCosts(profile, 1, 512).plain.ms / 1e3)
