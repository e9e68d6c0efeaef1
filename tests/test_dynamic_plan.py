"""What plans and benchmarks say of dynamic and adaptive trees: kept by their files, and refused where it contradicts itself."""

import copy
import json

import numpy as np
import pytest

from treeopt.errors import InvalidInput
from treeopt.latency.dynamic import DynamicCosts
from treeopt.latency.estimate import StepCosts
from treeopt.records.benchmark import Benchmark
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.trees.dynamic import DynamicTree

from .test_records import BENCH, FULL_CONTENDER, FULL_ENTRY, PLAN

DYNAMIC = {
    "size": 8,
    "depth": 3,
    "tokens_per_step": 2.2,
    "tokens_per_s": 1600.0,
    "topk": 4,
    "tokens_per_step_stderr": 0.02,
    "step_ms": 5.5,
    "speedup": 1.6,
    "speedup_stderr": 0.03,
    "over_fixed": 1.05,
    "over_fixed95": [1.02, 1.09],
}
ADAPTIVE = DYNAMIC | {
    "rows": [4, 6, 8],
    "mean_rows": 5.3,
    "intercepts": [0.1, 0.0, -0.2],
    "slopes": [0.9, 1.0, 1.1],
    "cost_ms": [5.0, 5.4, 6.0],
    "tokens_per_ms": 1.6,
}
KINDS = {"dynamic": DYNAMIC, "adaptive": ADAPTIVE}


def planned(**kinds):
    return PLAN | {"entries": [FULL_ENTRY | kinds]}


def loaded(kind, tmp_path, document):
    file = tmp_path / "file.json"
    file.write_text(json.dumps(document))
    return kind.load(file)


@pytest.mark.parametrize("kinds", [{}, {"dynamic": DYNAMIC}, {"adaptive": ADAPTIVE}, KINDS], ids=str)
def test_a_plan_says_just_what_was_loaded(tmp_path, kinds):
    plan = loaded(Plan, tmp_path, planned(**kinds))
    plan.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == planned(**kinds)
    assert Plan.load(tmp_path / "again.json") == plan
    entry = plan[4]
    assert (entry.dynamic is None, entry.adaptive is None) == ("dynamic" not in kinds, "adaptive" not in kinds)
    if entry.dynamic:
        assert entry.dynamic.tree == DynamicTree(3, 4, 8)
    if entry.adaptive:
        tree = entry.adaptive.adaptive
        assert (tree.most, tree.choices, tree.depth, len(tree)) == (DynamicTree(3, 4, 8), (4, 6, 8), 3, 8)
        assert (tree.intercepts, tree.slopes) == ((0.1, 0.0, -0.2), (0.9, 1.0, 1.1))
        assert (tree.cost_ms, tree.tokens_per_ms) == ((5.0, 5.4, 6.0), 1.6)


def test_figures_without_a_latency_need_only_the_tree_and_its_rate(tmp_path):
    few = {key: DYNAMIC[key] for key in ("size", "depth", "tokens_per_step", "topk")}
    assert loaded(Plan, tmp_path, planned(dynamic=few))[4].dynamic.rate == 2.2


OF_BOTH = {
    "more rows than the pool": ({"size": 38, "topk": 4}, "must be 2 to 37, but got 38"),
    "more rows than any tree": ({"size": 65, "topk": 10}, "must be 2 to 64, but got 65"),
    "endless rows": ({"size": 10**18}, "rows of a dynamic tree"),
    "one row": ({"size": 1}, "depth must be"),
    "no rows": ({"size": -3}, "size must be at least 1"),
    "more levels than rows": ({"depth": 8}, "depth must be from 1 to 7"),
    "more levels than any tree": ({"depth": 9, "size": 20}, "levels of a dynamic tree must be 1 to 8, but got 9"),
    "no topk": ({"topk": 0}, "topk of a dynamic tree must be 1 to 10, but got 0"),
    "more topk than any tree": ({"topk": 11}, "topk of a dynamic tree must be 1 to 10, but got 11"),
    "a topk with a point": ({"topk": 4.0}, "topk"),
    "a topk of text": ({"topk": "$(x)"}, "topk"),
    "more tokens than levels": ({"tokens_per_step": 4.1, "tokens_per_s": None, "step_ms": None}, "from 1 to 4"),
    "less than a token": ({"tokens_per_step": 0.9, "tokens_per_s": None}, "tokens_per_step must be from 1"),
    "another speed": ({"tokens_per_s": 1700.0}, "tokens_per_s must be 1600"),
    "another latency": ({"step_ms": 6.5}, "tokens_per_s must be"),
    "no time": ({"step_ms": 0.0}, "step_ms must be above 0"),
    "an error below 0": ({"tokens_per_step_stderr": -0.1}, "tokens_per_step_stderr must be at least 0"),
    "another error below 0": ({"speedup_stderr": -0.1}, "speedup_stderr must be at least 0"),
    "a speedup below 0": ({"speedup": -1.6}, "speedup must be at least 0"),
    "a ratio below 0": ({"over_fixed": -1.05}, "over_fixed must be at least 0"),
    "an interval that falls": ({"over_fixed95": [1.09, 1.02]}, "the lower one first"),
    "an interval from 0": ({"over_fixed95": [0.0, 1.02]}, "two ends above 0"),
    "an interval of one end": ({"over_fixed95": [1.02]}, "two ends above 0"),
    "an interval of three": ({"over_fixed95": [1.0, 1.1, 1.2]}, "two ends above 0"),
    "an empty interval": ({"over_fixed95": []}, "two ends above 0"),
}
OF_ADAPTIVE = {
    "no rows to choose from": ({"rows": []}, "rows must rise from 2 or more to the size, 8"),
    "falling rows": ({"rows": [6, 4, 8]}, "rows must rise"),
    "the same rows twice": ({"rows": [4, 4, 8]}, "rows must rise"),
    "a lone root": ({"rows": [1, 4, 8]}, "rows must rise from 2"),
    "rows below none": ({"rows": [-4, 6, 8]}, "rows must rise from 2"),
    "rows up to another size": ({"rows": [4, 6, 7]}, "to the size, 8"),
    "rows of another length": ({"rows": [4, 8]}, "cost_ms must be above 0 and one for each"),
    "costs of another length": ({"cost_ms": [5.0, 5.4]}, "cost_ms must be above 0 and one for each"),
    "no costs": ({"cost_ms": []}, "cost_ms must be above 0 and one for each"),
    "a cost of nothing": ({"cost_ms": [0.0, 5.4, 6.0]}, "cost_ms must be above 0"),
    "a cost below nothing": ({"cost_ms": [5.0, -5.4, 6.0]}, "cost_ms must be above 0"),
    "an intercept too few": ({"intercepts": [0.1, 0.2]}, "one for each level"),
    "a slope too many": ({"slopes": [1.0] * 4}, "one for each level"),
    "fewer levels": ({"depth": 2, "tokens_per_step": 2.2}, "one for each level"),
    "a rate of nothing": ({"tokens_per_ms": 0.0}, "tokens_per_ms above 0"),
    "fewer rows than the least": ({"mean_rows": 3.9}, "mean_rows must be from 4 to 8"),
    "more rows than the most": ({"mean_rows": 8.1}, "mean_rows must be from 4 to 8"),
    "a missing rule": ({"slopes": None}, "slopes"),
}
WRONG = [(kind, name, change) for kind in KINDS for name, change in OF_BOTH.items()]
WRONG += [("adaptive", name, change) for name, change in OF_ADAPTIVE.items()]


@pytest.mark.parametrize(("kind", "name", "change"), WRONG, ids=lambda part: part if isinstance(part, str) else "")
def test_figures_that_contradict_one_another_are_refused(tmp_path, kind, name, change):
    fields, message = change
    with pytest.raises(InvalidInput, match=message) as refused:
        loaded(Plan, tmp_path, planned(**{kind: KINDS[kind] | fields}))
    assert f"entries.0.{kind}" in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_that_must_be_is_missed_by_its_name(tmp_path, kind):
    needed = {"size", "depth", "tokens_per_step", "topk"}
    needed |= set(ADAPTIVE) - set(DYNAMIC) if kind == "adaptive" else set()
    for name in needed:
        figures = {key: value for key, value in KINDS[kind].items() if key != name}
        with pytest.raises(InvalidInput, match=f"entries.0.{kind}.{name}: Field required"):
            loaded(Plan, tmp_path, planned(**{kind: figures}))


def benched(size=8, choices=(), **dynamic):
    contender = copy.deepcopy(FULL_CONTENDER) | {"size": size, "medusa_choices": list(choices)}
    return BENCH | {"contenders": [contender | {"dynamic": {"levels": 3, "topk": 4, "rows": []} | dynamic}]}


@pytest.mark.parametrize("rows", [[], [4, 6, 8]], ids=["dynamic", "adaptive"])
def test_a_benchmark_says_just_what_was_loaded(tmp_path, rows):
    bench = loaded(Benchmark, tmp_path, benched(rows=rows))
    bench.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == benched(rows=rows)
    assert bench.contenders[0].depth == 3
    assert bench.contenders[0].dynamic.rows == rows
    bench = loaded(Benchmark, tmp_path, BENCH)
    assert bench.contenders[0].dynamic is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (benched(levels=9), "levels of a dynamic tree must be 1 to 8"),
        (benched(levels=0), "levels of a dynamic tree must be 1 to 8"),
        (benched(topk=11), "topk of a dynamic tree must be 1 to 10"),
        (benched(topk="$(x)"), "topk"),
        (benched(size=38), "must be 2 to 37, but got 38"),
        (benched(size=1), "must be 2 to 37, but got 1"),
        (benched(rows=[4, 6]), "to the size, 8"),
        (benched(rows=[6, 4, 8]), "rows must rise"),
        (benched(rows=[0, 8]), "rows must rise from 2"),
        (benched(choices=[[0]]), "medusa_choices must be empty"),
    ],
)
def test_a_contender_that_no_tree_fits_is_refused(tmp_path, document, message):
    with pytest.raises(InvalidInput, match=rf"contenders.0.*{message}"):
        loaded(Benchmark, tmp_path, document)


def test_a_contender_emits_no_more_than_its_levels_allow(tmp_path):
    document = benched(size=5, levels=1)
    document["contenders"][0] |= {"tokens": 21, "tokens_per_step": 2.1}
    with pytest.raises(InvalidInput, match="tokens must be from 10 to 20, but is 21"):
        loaded(Benchmark, tmp_path, document)


# Latencies


def profile(extra_ms, contexts=(100,)) -> LatencyProfile:
    """Steps of 2 ms + 0.1 a row, plain ones of 2; dynamic trees of 12 rows take so much more."""
    points, plain = [], []
    for context in contexts:
        plain.append(StepTiming(2, context, 1, 0, (2.0,) * 9))
        points += [StepTiming(2, context, n, d, (2 + 0.1 * n,) * 9) for n in (2, 12, 40) for d in (1, 2, 6) if d < n]
        points += [
            StepTiming(2, context, 12, levels, (3.2 + ms,) * 9, topk=topk) for (topk, levels), ms in extra_ms.items()
        ]
    return LatencyProfile(tuple(points), tuple(plain))


def test_dynamic_steps_cost_the_line_through_those_that_were_timed():
    timed = profile({(2, 2): 0.5, (2, 6): 1.3, (8, 4): 0.9})
    costs = DynamicCosts.of(StepCosts(timed, 2), timed)
    trees = [DynamicTree(*numbers) for numbers in ((2, 2, 7), (4, 2, 12), (5, 2, 7), (3, 8, 40), (5, 8, 12), (3, 4, 9))]
    line = [0.5, 0.9, 1.1, 0.9, 0.9, np.nan]
    fixed = costs.costs.ms([tree.rows for tree in trees], [tree.levels for tree in trees])
    np.testing.assert_allclose(costs.ms(trees), fixed + line)
    np.testing.assert_allclose(costs.ms([DynamicTree(4, 2, 12)]), [4.1])
    draws = costs.draws_ms(trees[:5], 50, np.random.default_rng(0))
    np.testing.assert_allclose(draws, np.repeat((fixed + line)[:5, None], 50, axis=1))
    assert np.isnan(costs.ms([DynamicTree(4, 2, 13), DynamicTree(2, 8, 41)])).tolist() == [False, True]


def test_a_drafter_that_reads_the_levels_above_again_pays_for_their_nodes():
    timed = profile({(2, 2): 0.5, (2, 6): 1.3, (8, 2): 0.9, (8, 6): 4.1})  # 0.2 and 0.8 ms a level: 0.1 ms a node
    once, again = (DynamicCosts.of(StepCosts(timed, 2), timed, redrafts=redrafts) for redrafts in (False, True))
    timed_with_chains = np.polyfit([1, 2, 8], [0.0, 0.2, 0.8], 1)[0]
    for levels in range(1, 7):
        for topk in (1, 2, 8):
            tree = DynamicTree(levels, topk, levels + 1)
            nodes = sum(topk * level for level in range(1, levels)) - topk * (levels - 1) if topk > 1 else 0
            assert again.extra_ms(tree) - once.extra_ms(tree) == pytest.approx(nodes * timed_with_chains, abs=1e-12)


def test_choosing_costs_what_it_was_timed_to_and_more_rows_never_cost_less():
    timed = profile({(2, 2): 0.5, (2, 6): 1.3})
    chose = [
        StepTiming(2, p.context_tokens, p.size, p.depth, (p.step_ms[0] + 0.25,) * 9, topk=2, adaptive=True)
        for p in timed.dynamic
        if p.depth == 6
    ]
    with_choice = LatencyProfile((*timed.points, *chose), timed.autoregressive)
    assert with_choice.dynamic == timed.dynamic
    costs = DynamicCosts.of(StepCosts(with_choice, 2), with_choice)
    trees = [DynamicTree(6, 2, rows) for rows in (12, 16, 20)]
    np.testing.assert_allclose(costs.adaptive_ms(trees), costs.ms(trees) + 0.25)
    backwards = costs.adaptive_ms(trees[::-1])  # as if fewer rows cost more
    np.testing.assert_allclose(backwards, np.full(3, costs.ms(trees).mean() + 0.25))
