"""Dynamic trees among the candidates of a plan: as files have them, what they cost, and which is chosen."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from treeopt.engines.registry import method_of
from treeopt.errors import InvalidInput
from treeopt.growth.replay import replay
from treeopt.growth.source import source_of
from treeopt.latency.costs import StepCosts
from treeopt.latency.rounds import time_steps
from treeopt.pipeline.profile.placement import anew_trees, placed_sizes, timing_trees, tree_families
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.estimate import NEGLIGIBLE
from treeopt.records.exchange import ExportOptions
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import MISS, RankTrace
from treeopt.trees.draft import (
    MOST_ROWS,
    OVER_MARGINALS,
    DDTree,
    Draft,
    DynamicLimits,
    DynamicTree,
    TreeSize,
    draft_of,
    pool_size,
    product_size,
    topk_family,
)
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import FIXED, Cost, Tree

from .conftest import random_trace
from .helpers.engine_rows import export_plan
from .helpers.runs import some_profile
from .test_ddtree import recorded
from .test_dynamic import slow_lengths, slow_replay, with_pools
from .test_profile import Slow

LONG = partial(pytest.param, marks=pytest.mark.long)

# Drafts, as files have them.

DRAFTS = (Tree.chain(0), Tree.chain(3), Tree.dense([2, 2]), DynamicTree(3, 4, 8), TreeSize(16, 3), DDTree(3, 4, 8))


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.name)
def test_a_draft_of_any_kind_keeps_the_protocol_and_comes_back_from_its_record(draft):
    assert isinstance(draft, Draft)
    assert draft_of(draft.record) == draft_of(draft) == draft
    assert draft.rows == len(draft)
    assert draft.rows > draft.depth
    assert draft.kind in ("plain", "chain", "tree", "dynamic", "ddtree")
    assert (draft.topk is not None) == (draft.kind == "dynamic")
    assert draft.cost == Cost(
        {"dynamic": topk_family(draft.topk or 1), "ddtree": OVER_MARGINALS}.get(draft.kind, FIXED),
        draft.rows,
        draft.depth,
    )
    assert len({one.name for one in DRAFTS}) == len(DRAFTS)


DYNAMIC = {"levels": 3, "topk": 4, "rows": 8}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (DYNAMIC | {"rows": 38}, "must be 2 to 37, but got 38"),
        (DYNAMIC | {"rows": 65, "topk": 10}, "must be 2 to 64, but got 65"),
        (DYNAMIC | {"rows": 1}, "must be 2 to 37, but got 1"),
        (DYNAMIC | {"levels": 9}, "levels of a dynamic tree must be 1 to 8, but got 9"),
        (DYNAMIC | {"topk": 0}, "topk of a dynamic tree must be 1 to 10, but got 0"),
        (DYNAMIC | {"topk": 4.0}, "topk of a draft must be a whole number"),
        (DYNAMIC | {"topk": True}, "topk of a draft must be a whole number"),
        (DYNAMIC | {"rows": "$(x)"}, "rows of a draft must be a whole number"),
        ({"rows": 4, "depth": 4}, "1 <= depth < rows"),
        ({"rows": 0, "depth": 0}, "1 <= depth < rows"),
        ({"medusa_choices": [[0, 0]]}, "lacks"),
        ({"medusa_choices": "[[0]]"}, "medusa_choices of a draft must be a list"),
        ({"levels": 3}, "A draft must have medusa_choices"),
        ([[0]], "A draft must have medusa_choices"),
        (None, "A draft must have medusa_choices"),
    ],
)
def test_a_record_of_no_draft_is_refused(record, message):
    with pytest.raises(InvalidInput, match=message):
        draft_of(record)


# Plans.

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


def tokens_per_step(trace, tree) -> float:
    steps = slow_replay(trace, slow_lengths(trace, tree.levels, tree.topk, tree.rows))
    return (trace.lengths - 1).sum() / sum(map(len, steps))


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_the_dynamic_tree_of_a_plan_is_among_the_fastest_of_all_settings(trace, profile, plan, batch_size):
    found, of = plan[batch_size].best("dynamic"), StepCosts(profile, batch_size, 512)
    trees = [
        DynamicTree(levels, topk, rows)
        for topk in TOPKS[1:]
        for levels in range(1, LEVELS + 1)
        for rows in range(max(levels + 1, 2), min(pool_size(levels, topk) + 1, MOST_ROWS, BUDGET) + 1)
    ]
    rates, ms = np.array([tokens_per_step(trace, tree) for tree in trees]), of.ms([tree.cost for tree in trees])
    i = trees.index(found.draft)
    throughput = 1e3 * batch_size * rates / ms
    assert (found.tokens_per_step, found.step_ms) == pytest.approx((rates[i], ms[i]))
    assert found.tokens_per_s == pytest.approx(1e3 * batch_size * found.tokens_per_step / found.step_ms)
    best = np.nanargmax(throughput)
    assert i == best or (found.size < trees[best].rows and throughput[i] > 0.95 * throughput[best])


def test_it_is_compared_with_the_fixed_tree_and_with_plain_decoding(tmp_path, profile, plan):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").entries == plan.entries
    for entry in plan:
        found, chosen = entry.best("dynamic"), entry.chosen
        assert found.plain_ms == pytest.approx(StepCosts(profile, entry.batch_size, 512).plain.ms)
        assert found.over(chosen) == pytest.approx(found.tokens_per_s / chosen.tokens_per_s)
        if found.draft != chosen.draft:
            low, high = found.over(chosen).ends
            assert low < found.tokens_per_s / chosen.tokens_per_s < high
        assert found.size <= BUDGET


def test_a_plan_without_pools_or_without_timings_of_dynamic_trees_has_none(trace, profile):
    bare = RankTrace(trace.ranks, trace.starts, end=trace.end)
    for record, timed in ((bare, profile), (trace, LatencyProfile(tuple(profile.fixed), profile.autoregressive))):
        assert plan_trees(record, timed, PlanRequest(Limits(4), batch_sizes=(1,)))[1].best("dynamic") is None


def dearer(profile: LatencyProfile, *, fixed: float = 0.0, dynamic: float = 0.0) -> LatencyProfile:
    """The profile with steps of fixed and of dynamic trees that take so many milliseconds more."""
    points = [
        replace(p, step_ms=tuple(ms + (fixed if p.cost.family == FIXED else dynamic) for ms in p.step_ms))
        for p in profile.points
        if p.size > 1
    ]
    return LatencyProfile(tuple(points), profile.autoregressive)


@pytest.mark.parametrize(
    ("fixed", "dynamic"), [(0.0, 0.0), (900.0, 0.0), (900.0, 900.0), LONG(2.0, 0.0), LONG(0.0, 2.0)]
)
def test_the_chosen_draft_is_the_best_of_all_kinds_and_never_slower_than_plain(trace, profile, fixed, dynamic):
    """One table: within what is negligible nothing beside the chosen draft is faster, unless it is tied with it."""
    request = PlanRequest(Limits(BUDGET), batch_sizes=BATCH_SIZES)
    plan = plan_trees(trace, dearer(profile, fixed=fixed, dynamic=dynamic), request)
    for entry in plan:
        kinds = {"tree", "chain", "dynamic"} - {entry.chosen.draft.kind}
        assert entry.others.keys() <= kinds
        assert entry.best("dynamic") is not None
        assert entry.best("chain").draft.kind == "chain"
        fastest = max([entry.chosen, entry.plain, *entry.others.values()], key=lambda figure: figure.rate)
        assert entry.chosen.rate >= (1 - NEGLIGIBLE) * fastest.rate
        for takes in (lambda draft: draft.kind == "dynamic", lambda draft: draft.kind == "chain"):
            serving = entry.serving(takes)
            assert serving.speedup >= min(1.0, entry.chosen.speedup)
            assert serving.draft.kind == "plain" or takes(serving.draft)
    assert plan.speculates is any(entry.chosen.size > 1 for entry in plan)
    if fixed == dynamic == 900.0:
        assert not plan.speculates
        for entry in plan:
            assert (entry.chosen.draft.kind, len(entry.tree)) == ("plain", 1)
    elif fixed == 900.0:
        assert {entry.chosen.draft.kind for entry in plan} <= {"dynamic", "plain"}


def test_an_engine_of_chains_gets_the_best_chain_or_plain_decoding(plan):
    for entry in plan:
        chain, found = entry.best("chain"), entry.serving(lambda draft: draft.kind == "chain")
        assert found == (chain if chain.speedup > 1 else entry.plain)
        slow = replace(entry.served(entry.best("tree")), others={"chain": replace(chain, step_ms=1e3 * chain.step_ms)})
        if entry.chosen.draft.kind == "tree":
            assert slow.serving(lambda draft: draft.kind == "chain").draft.kind == "plain"
            with pytest.raises(InvalidInput, match="no draft of that kind"):
                replace(slow, others={}).serving(lambda draft: draft.kind == "chain")


def with_marginals(is_best) -> tuple[RankTrace, LatencyProfile]:
    """A record of trees over marginals, which are the fastest of all settings or not."""
    record, _ = recorded(5, lengths := [30] * 10, (4,), depth=3)
    ranks = random_trace(np.random.default_rng(5), np.array(lengths), 3, 6)
    few = np.where(ranks.ranks > 0, MISS, ranks.ranks)
    record = replace(record, ranks=few if is_best else ranks.ranks, end=ranks.end, meta={**record.meta, **ranks.meta})
    fixed = some_profile((1,), largest=16)
    (plain,) = fixed.autoregressive
    timed = [
        StepTiming(1, 512, n, 3, tuple(ms + 0.5 + 0.01 * n for ms in plain.step_ms), over_marginals=True)
        for n in (8, 16)
    ]
    profile = dearer(LatencyProfile((*fixed.points, *timed), fixed.autoregressive), dynamic=0.0 if is_best else 5.0)
    return record, profile


@pytest.mark.parametrize("is_best", [True, False])
def test_a_tree_over_marginals_stands_in_the_same_table(is_best):
    """It is the fastest of all settings, by brute force, and it is chosen where fixed trees are no better than chains."""
    record, profile = with_marginals(is_best)
    entry = plan_trees(record, profile, PlanRequest(Limits(16), batch_sizes=(1,)))[1]
    trees = [
        DDTree(depth, 4, n) for depth in (1, 2, 3) for n in range(depth + 1, min(product_size(depth, 4) + 1, 16) + 1)
    ]
    ms = StepCosts(profile, 1, 512).ms([tree.cost for tree in trees])
    throughput = [replay(record, tree).tokens_per_step for tree in trees] / ms
    found, best = entry.best("ddtree"), int(np.argmax(throughput))
    i = trees.index(found.draft)
    assert i == best or throughput[i] > 0.95 * throughput[best]
    assert entry.chosen.rate >= (1 - NEGLIGIBLE) * max(one.rate for one in (entry.plain, *entry.others.values()))
    assert (entry.draft == found.draft) == is_best


def test_edge_llm_builds_trees_over_the_marginals_of_whole_blocks(tmp_path):
    record, profile = with_marginals(True)
    record = replace(record, meta={**record.meta, "drafter": {"kind": "dflash", "num_heads": 3, "widest": 3}})
    limits = method_of("edge-llm", "dflash").limits.anew
    assert limits == DynamicLimits(levels=0, marginals=True, width=8)
    request = PlanRequest(Limits(16, shape="chain"), batch_sizes=(1,), dynamic=limits, lengths=(3,))
    plan_trees(record, profile, request).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    tree = plan[1].draft
    assert (tree.kind, tree.depth) == ("ddtree", 3)
    for size in (None, 1):
        written = export_plan(plan, "edge-llm", ExportOptions(batch_size=size))
        told = f"--specDraftTopK {tree.ranks} --specDraftStep 1 --specVerifySize {tree.rows} --dflashBlockSize 4"
        assert told in written.command
        assert f"--maxVerifyTreeSize {tree.rows} or more" in " ".join(written.notes)
        assert "not a prefix" not in " ".join(written.notes)
    chain = plan[1].best("chain")
    for other in (DDTree(2, 4, 8), DDTree(3, 9, 16)):  # of another width, or of more ranks than it tries
        chosen = replace(plan[1].chosen, draft=other)
        without = replace(plan, entries=(replace(plan[1].served(chosen), others={"chain": chain}),), schedule=[])
        written = export_plan(without, "edge-llm")
        assert "takes chains only" in " ".join(written.notes)
        assert "--specDraftTopK 1 " in written.command or "--specDecode" not in written.command
    narrow = replace(limits, width=3)
    few = plan_trees(record, profile, replace(request, dynamic=narrow))[1].best("ddtree")
    assert few is None or few.draft.ranks <= 3


@pytest.mark.parametrize("limit_s", [0.0, 20.0])
@pytest.mark.parametrize("budget", [2, 4, 8])
def test_a_plan_follows_from_the_few_trees_of_a_short_time(trace, budget, limit_s):
    """In the shortest time one chain and one dynamic tree are timed, whose steps were checked as those of a fixed one."""
    families = tree_families(source_of(trace), 3, budget)
    trees = [*timing_trees(families, placed_sizes(1, budget)), *anew_trees(trace, budget)]
    (points, plain), *_ = time_steps(Slow(trees, 1), time_limit_s=limit_s).timings(512)
    timed = LatencyProfile(tuple(points), (plain,))
    assert plan_trees(trace, timed, PlanRequest(Limits(budget), batch_sizes=(1,)))[1].chosen.speedup >= 1
