"""Drafting by level: costs against the truth behind them, trees under prices against all trees there are."""

import importlib
import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from treeopt.errors import InvalidInput
from treeopt.growth.heldout import crossfit, from_calibration
from treeopt.growth.knapsack import best_trees
from treeopt.growth.objectives import Worth, grow, grow_joint, products, worth_of
from treeopt.growth.replay import replay
from treeopt.latency.drafting import DraftTiming, draft_timings, expanding_nodes, fit_draft_costs
from treeopt.pipeline.profile.placement import tree_families
from treeopt.planning import planner
from treeopt.planning.candidates import Grown, candidates_of, common
from treeopt.planning.planner import plan_trees
from treeopt.planning.throughput import best_prices
from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import FOLDS, fold_numbers
from treeopt.trees.shapes import SHAPES
from treeopt.trees.tree import Tree, TreeFamily

from .conftest import random_trace, trees
from .test_shapes import DEPTH, MOST, RANKS, every_tree

stages = importlib.import_module("treeopt.pipeline.profile.timed")  # the package has a function of this name
PRICED = ["sibling-closed", "low-rank-expands"]


# Costs of a level


@given(st.integers(0, 10**6))
def test_a_level_has_the_least_squares_with_neither_part_below_zero(seed):
    rng = np.random.default_rng(seed)
    nodes = np.sort(rng.choice(12, rng.integers(2, 6), replace=False)) + 1
    ms, samples = rng.uniform(0, 4, len(nodes)), rng.integers(1, 9, len(nodes))
    medians = {(1, int(n)): (float(y), int(k)) for n, y, k in zip(nodes, ms, samples, strict=True)}
    costs = fit_draft_costs({(0, 1): (1.0, 3), **medians})
    weight = np.sqrt(samples)
    wanted, _ = nnls(np.column_stack([weight, weight * nodes]), weight * ms)
    assert [costs.fixed_ms[1], costs.node_ms[1]] == pytest.approx(wanted, abs=1e-9)


def test_levels_between_are_between_and_levels_beyond_are_unknown():
    line = {
        (level, n): (fixed + n * slope, 3) for level, fixed, slope in ((1, 1.0, 0.5), (3, 3.0, 0.1)) for n in (1, 4)
    }
    costs = fit_draft_costs({(0, 1): (2.0, 3), **line})
    assert costs.fixed_ms == pytest.approx([2.0, 1.0, 2.0, 3.0])
    assert costs.node_ms == pytest.approx([0.0, 0.5, 0.3, 0.1])
    assert costs.ms((1, 2, 3, 1)) == pytest.approx(2.0 + 2.0 + 2.9 + 3.1)
    assert costs.ms((1, 2, 3, 1, 1)) is None
    assert fit_draft_costs(line).ms((1,)) is None  # the first level was not timed


def test_a_level_timed_with_one_number_of_nodes_has_the_slope_of_those_about_it():
    costs = fit_draft_costs({(0, 1): (2.0, 3), (1, 2): (2.0, 3), (1, 4): (3.0, 3), (2, 3): (4.0, 3), (3, 9): (1.8, 3)})
    assert costs.fixed_ms == pytest.approx([2.0, 1.0, 2.5, 0.0])
    assert costs.node_ms == pytest.approx([0.0, 0.5, 0.5, 0.2])  # nor may nine nodes cost more than they took


@given(trees(depth=3, ranks=3))
def test_expanding_nodes_are_those_with_children(tree):
    children = np.bincount(tree.parents[1:], minlength=len(tree))
    assert list(expanding_nodes(tree.paths)) == [
        int(((tree.depths == depth) & (children > 0)).sum()) for depth in range(tree.depth)
    ]


# From timings of steps to costs


def cost_ms(expanding, fixed=(1.0, 0.8, 0.6), node=(0.0, 0.7, 0.9)):
    return sum(c + s * e for c, s, e in zip(fixed, node, expanding, strict=False))


def rest_ms(batch_size, size):
    return 6.0 + 0.05 * batch_size * size


def timed(
    trees_of, *, batch_sizes=(1,), context=100, rng=None, rounds=5, slow_from=None, told=True, cost=cost_ms, stretch=1.0
):
    """A profile of these trees by the truth above; with ``rng`` noise, and from a round on half as fast.

    stretch : how much longer the parts of a step take, timed one by one
    """

    def noisy(ms):
        ms = np.full(rounds, ms)
        if rng is not None:
            ms = ms * rng.lognormal(0, 0.03, rounds) * np.where(rng.random(rounds) < 0.05, 4.0, 1.0)
        return tuple((ms * np.where(np.arange(rounds) >= (slow_from or rounds), 2.0, 1.0)).tolist())

    number, points = tuple(range(rounds)), []
    for b in batch_sizes:
        for tree in trees_of:
            e = expanding_nodes(tree.paths)
            parts = {
                f"draft {level}": noisy(stretch * (cost((0,) * level + (nodes,)) - cost((0,) * level)))
                for level, nodes in enumerate(e)
            }
            points.append(
                StepTiming(
                    b,
                    context,
                    len(tree),
                    tree.depth,
                    noisy(rest_ms(b, len(tree)) + cost(e)),
                    round=number,
                    parts_ms={**parts, "target": noisy(stretch * rest_ms(b, len(tree)))},
                    expanding=e if told else None,
                )
            )
    plain = tuple(StepTiming(b, context, 1, 0, noisy(rest_ms(b, 1)), round=number) for b in batch_sizes)
    return LatencyProfile(tuple(points), plain)


BUSHES = [Tree.dense(widths) for widths in ([2, 1, 1], [2, 2, 1], [3, 2, 2], [4, 3, 1], [5, 2, 1], [1, 1, 1])]


def test_costs_are_recovered_through_noise_interruptions_and_drift():
    """20 profiles of 30 rounds; the second half of each ran at half the speed."""
    found = []
    for seed in range(20):
        profile = timed(BUSHES, rng=np.random.default_rng(seed), rounds=30, slow_from=15)
        speed = np.median(profile.autoregressive[0].step_ms) / rest_ms(1, 1)
        costs = profile.draft_costs(1, 100)
        found.append(np.concatenate([costs.fixed_ms, costs.node_ms]) / speed)
    assert np.mean(found, axis=0) == pytest.approx([1.0, 0.8, 0.6, 0.0, 0.7, 0.9], abs=0.05)
    assert np.std(found, axis=0).max() < 0.1


def test_parts_that_take_longer_than_their_step_are_scaled_to_it():
    """A synchronisation after each part made drafting look 1.5 times as dear as it is in the step."""
    costs = timed(BUSHES, stretch=1.5).draft_costs(1, 100)
    assert [*costs.fixed_ms, *costs.node_ms] == pytest.approx([1.0, 0.8, 0.6, 0.0, 0.7, 0.9])
    short = timed(BUSHES, stretch=0.5).draft_costs(1, 100)  # parts may leave something of the step out
    assert [*short.fixed_ms, *short.node_ms] == pytest.approx([0.5, 0.4, 0.3, 0.0, 0.35, 0.45])


@pytest.mark.parametrize("rounds", [(30, 10), (10, 30), (30, 30)])
def test_trees_alike_in_size_and_depth_may_expand_otherwise(rounds):
    """Two of 7 rows, in rounds of their own: a median of both was once taken less a mean of their drafting."""
    draft = tuple(DraftTiming(1, level, nodes, (ms,)) for level, nodes, ms in ((0, 1, 1.0), (1, 1, 2.5), (1, 3, 6.5)))
    points = tuple(
        StepTiming(1, 100, 7, 2, (ms,) * n, round=tuple(range(first, first + n)), expanding=expanding)
        for ms, n, first, expanding in ((11.0, rounds[0], 0, (1, 3)), (7.0, rounds[1], rounds[0], (1, 1)))
    )
    plain = StepTiming(1, 100, 1, 0, (2.0,) * sum(rounds), round=tuple(range(sum(rounds))))
    profile = LatencyProfile(points, (plain,), draft=draft)
    assert profile.step(1, 100, 7, 2, expanding=(1, 3)).ms == pytest.approx(11.0)
    assert profile.step(1, 100, 7, 2, expanding=(1, 1)).ms == pytest.approx(7.0)
    mean = (11.0 * rounds[0] + 7.0 * rounds[1]) / sum(rounds)
    assert profile.step(1, 100, 7, 2).ms == pytest.approx(mean)
    assert profile.step(1, 100, 7, 2).stderr_ms == 0.0  # that they differ is no noise
    assert profile.draws([(1, 100, 7, 2)], 50, np.random.default_rng(0)) == pytest.approx(mean)


def test_two_trees_of_a_size_differ_by_as_much_noise_as_the_draws_say():
    """Whole steps cancel, so what is left is that of the levels: 60 profiles, and 2000 draws of each."""
    table = Calibration(np.array([[50, 20, 10, 5], [40, 20, 15, 9], [35, 25, 15, 10]]), np.full(3, 100))
    limits = {"budget": 22, "max_rank": 3, "max_depth": 3, "shape": "sibling-closed"}
    families = [
        Grown(from_calibration(table, **limits, **more), 3, more.get("prices", ()))
        for more in ({}, {"prices": (0.0, 0.1, 0.1)})
    ]
    lone = Grown(from_calibration(table, **{**limits, "max_depth": 1}), 1)
    estimates, errors, alone = [], [], []
    for seed in range(60):
        profile = timed(BUSHES, rng=np.random.default_rng(seed), rounds=30)
        c = candidates_of([lone, *families], profile, 1, 100, False)
        i, j = np.flatnonzero((c.sizes == 22) & (c.depths == 3))
        estimates.append(c.ms[i] - c.ms[j])
        errors.append((c.ms_draws[i] - c.ms_draws[j]).std())
        expanding = [expanding_nodes(c.held_out[k].family.nodes(22)) for k in (i, j)]
        assert sum(expanding[0]) > sum(expanding[1])
        whole = profile.step(1, 100, 22, 3)
        alone.append(profile.step(1, 100, 22, 3, expanding=expanding[1]).stderr_ms / whole.stderr_ms)
    assert np.mean(errors) == pytest.approx(np.std(estimates), rel=0.35)
    assert min(alone) > 1.001


def test_records_pool_levels_alike_and_leave_out_what_does_not_tell():
    one = StepTiming(
        1,
        9,
        4,
        2,
        (20.0,) * 4,
        round=(0, 0, 1, 1),
        parts_ms={"draft 0": (1.0, 2.0), "draft 1": (3.0, 4.0), "target": (9.0, 9.0)},
        expanding=(1, 1),
    )
    two = StepTiming(1, 9, 5, 2, (20.0,) * 2, parts_ms={"draft 0": (5.0,), "draft 1": (6.0,)}, expanding=(1, 2))
    mute = StepTiming(1, 9, 5, 2, (1.0,), parts_ms={"draft 0": (7.0,)})
    heads = StepTiming(1, 9, 5, 2, (1.0,), parts_ms={"draft": (7.0,)}, expanding=(1, 2))
    assert draft_timings([one, two, mute, heads]) == (
        DraftTiming(1, 0, 1, (1.0, 2.0, 5.0), 9, None),
        DraftTiming(1, 1, 1, (3.0, 4.0), 9, (0, 1)),
        DraftTiming(1, 1, 2, (6.0,), 9, None),
    )


@pytest.mark.parametrize("context", [100, 250, 400])
def test_a_step_is_that_of_the_timed_trees_with_its_own_drafting(context):
    """Two contexts; where both parts of a step are straight lines the estimate is the truth."""
    near, far = timed(BUSHES), timed(BUSHES, context=400, cost=lambda e: 2 * cost_ms(e))
    profile = LatencyProfile(near.points + far.points, near.autoregressive + far.autoregressive)
    share = (context - 100) / 300
    for tree in BUSHES:
        for expanding in ((1, 1, 1), (1, 2, 3), expanding_nodes(tree.paths)):
            wanted = rest_ms(1, len(tree)) + (1 + share) * cost_ms(expanding)
            found = profile.step(1, context, len(tree), 3, expanding=expanding)
            assert found.ms == pytest.approx(wanted)
    assert profile.step(1, context, 16, 1, expanding=(1,)).ms == pytest.approx(
        profile.step(1, context, 16, 3, expanding=(1, 1, 1)).ms - (1 + share) * (0.8 + 0.7 + 0.6 + 0.9)
    )


def test_a_profile_with_draft_costs_survives_its_file(tmp_path):
    profile = timed(BUSHES, batch_sizes=(1, 4))
    assert len({(d.batch_size, d.level, d.expanding_nodes) for d in profile.draft}) == len(profile.draft) > 10
    profile.save(tmp_path / "profile.json")
    loaded = LatencyProfile.load(tmp_path / "profile.json")
    assert (loaded.points, loaded.draft, loaded.info) == (profile.points, profile.draft, {})
    assert loaded.draft_costs(4, 100).ms((1, 2, 3)) == profile.draft_costs(4, 100).ms((1, 2, 3))


def test_a_draft_record_by_hand_needs_four_keys_and_bad_ones_are_refused(tmp_path):
    path = tmp_path / "profile.json"
    points = [
        {"batch_size": 1, "context_tokens": c, "size": 4, "depth": 2, "step_ms": [9.0], "expanding": [1, 1]}
        for c in (5, 50)
    ]
    plain = [{"batch_size": 1, "context_tokens": c, "step_ms": [2.0]} for c in (5, 50)]
    draft = [
        {"batch_size": 1, "level": 0, "expanding_nodes": 1, "ms": [1.0]},
        {"batch_size": 1, "level": 1, "expanding_nodes": 1, "ms": [2.0]},
        {"batch_size": 1, "level": 1, "expanding_nodes": 3, "ms": [4.0]},
    ]
    document = {"schema": "treeopt.profile/1", "points": points, "autoregressive": plain, "draft": draft}
    path.write_text(json.dumps(document))
    profile = LatencyProfile.load(path)
    assert profile.step(1, 20, 4, 2, expanding=(1, 2)).ms == pytest.approx(10.0)
    assert profile.step(1, 20, 4, 2).ms == pytest.approx(9.0)
    for change, message in (
        ({"ms": []}, "samples"),
        ({"ms": [-1.0]}, "samples"),
        ({"level": -1}, "level >= 0"),
        ({"expanding_nodes": 0}, "expanding_nodes >= 1"),
        ({"expanding_nodes": 2}, "alone"),
    ):
        path.write_text(json.dumps({**document, "draft": [{**draft[0], **change}]}))
        with pytest.raises(InvalidInput, match=message):
            LatencyProfile.load(path)
    for bad in ([1], [1, 3], [2, 1], [1, 0], [1, 1, 1]):
        path.write_text(json.dumps({**document, "points": [{**points[0], "expanding": bad}]}))
        with pytest.raises(InvalidInput, match="expanding must have 2 numbers"):
            LatencyProfile.load(path)


# Trees under prices


@cache
def all_of(shape: str) -> tuple[list[tuple], np.ndarray, np.ndarray, np.ndarray]:
    """Every path; of all small trees of a shape which of them each has, its size, its expanding nodes."""
    found = [tree for tree in every_tree() if SHAPES[shape](tree)]
    paths = sorted({path for tree in found for path in tree.paths})
    index = {path: i for i, path in enumerate(paths)}
    members = np.zeros((len(found), len(paths)))
    expanding = np.zeros((len(found), DEPTH))
    for row, tree in enumerate(found):
        members[row, [index[path] for path in tree.paths]] = 1.0
        e = expanding_nodes(tree.paths)
        expanding[row, : len(e)] = e
    return paths, members, members.sum(1).astype(int), expanding


def any_worth(rng) -> Worth:
    """Tables in any order of ranks, zeros among them; or frequencies of a trace."""
    if rng.random() < 0.3:
        trace = random_trace(rng, np.array([9, 14]), heads=DEPTH, ranks=RANKS)
        return worth_of(trace, objective="replay", max_depth=DEPTH, max_rank=RANKS - 1, shape="sibling-closed")
    accept = rng.dirichlet(np.full(RANKS + 1, rng.choice([0.3, 1.0, 3.0])), DEPTH)[:, :RANKS]
    return products(accept * (rng.random(accept.shape) < rng.choice([0.7, 1.0])))


def brute(worth: Worth, shape: str):
    """Of every small tree: tokens, size, expanding nodes."""
    paths, members, sizes, expanding = all_of(shape)
    return members @ np.array([worth.tokens([path]) for path in paths]), sizes, expanding


def of_family(family: TreeFamily):
    sizes = family.sizes.tolist()
    expanding = np.zeros((len(sizes), DEPTH))
    for row, size in enumerate(sizes):
        e = expanding_nodes(family.nodes(size))
        expanding[row, : len(e)] = e
    return np.array([family.tokens_per_step(size) for size in sizes]), family.sizes, expanding


@pytest.mark.parametrize("shape", PRICED)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_trees_less_their_prices_are_the_best_within_every_size(shape, seed):
    rng = np.random.default_rng(seed)
    worth, prices = any_worth(rng), rng.exponential(rng.choice([0.003, 0.03, 0.3]), DEPTH)
    tokens, sizes, expanding = brute(worth, shape)
    family = worth.best(MOST, shape, tuple(prices))
    assert all(SHAPES[shape](family.tree(size)) for size in family.sizes.tolist())
    found, found_sizes, found_expanding = of_family(family)
    for size in range(1, MOST + 1):
        best = (tokens - expanding @ prices)[sizes <= size].max()
        assert (found - found_expanding @ prices)[found_sizes <= size].max() == pytest.approx(best, abs=1e-6)


def slow_best(worth: Worth, prices, budget: int, *, low_rank_expands: bool) -> np.ndarray:
    """(budget+1,) most tokens less prices of trees of 0, 1, ... rows: row by row from rank 0 on, over all nodes."""

    def joined(a, b):
        found = np.full(budget + 1, -np.inf)
        for n in range(budget + 1):
            found[n:] = np.maximum(found[n:], a[n] + b[: budget + 1 - n])
        return found

    def subtrees(path):
        """Of a node alone, and of it with children."""
        alone, expands = np.full((2, budget + 1), -np.inf)
        alone[1] = worth.tokens([path])
        ranks = len(worth.row(path))
        if not ranks:
            return alone, expands
        all_expand, last_is_leaf = np.full((2, budget + 1), -np.inf)
        all_expand[0] = -prices[len(path)]
        for rank in range(ranks):
            leaf, bush = subtrees((*path, rank))
            before = np.maximum(all_expand, last_is_leaf)
            last_is_leaf = joined(before, leaf)
            if not low_rank_expands:
                last_is_leaf = np.maximum(last_is_leaf, joined(before, bush))
            all_expand = joined(all_expand, bush)
            expands = np.maximum(expands, joined(alone, np.maximum(all_expand, last_is_leaf)))
        return alone, expands

    return np.maximum(*subtrees(()))


@pytest.mark.parametrize("shape", PRICED[:2])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=30)
def test_the_nodes_looked_at_are_enough(shape, seed):
    """Trees of up to 24 rows of 85 nodes, against a knapsack over all nodes; ranks in any order."""
    rng = np.random.default_rng(seed)
    accept = rng.dirichlet(np.full(5, rng.choice([0.3, 1.0])), 3)[:, :4]
    worth, prices = products(accept), rng.exponential(rng.choice([0.0, 0.001, 0.01, 0.1]), 3)
    family = worth.best(24, shape, tuple(prices))
    wanted = slow_best(worth, prices, 24, low_rank_expands=shape == "low-rank-expands")
    tokens, sizes, expanding = of_family(family)
    found = tokens - expanding @ prices
    best = np.maximum.accumulate(wanted[1:])
    assert np.maximum.accumulate(found) == pytest.approx(best[sizes - 1], abs=1e-6)
    exact = wanted[sizes] >= best[sizes - 1] - 1e-9  # no smaller tree is worth more
    assert found[exact] == pytest.approx(wanted[sizes][exact], abs=1e-6)


def test_a_dear_level_is_paid_for_by_those_below_it():
    """After two likely guesses a third is worth both prices, though the second alone is not worth its own."""
    worth = products(np.array([[0.9, 0.05, 0.04]] * 3))
    assert worth.best(4, "sibling-closed", (0.0, 0.9, 0.0)).tree(4) == Tree.chain(3)
    assert worth.best(4, "sibling-closed", (0.0, 0.9)).tree(4) == Tree.chain(3)  # levels not named are free
    assert worth.best(4, "sibling-closed", (0.0, 0.9, 0.7)).tree(4) == Tree.from_choices([[0], [1], [2]])


@pytest.mark.parametrize("shape", PRICED)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=60)
def test_the_best_ratio_is_that_of_the_best_of_all_trees(shape, seed):
    """And trees of other sizes are no further from theirs than the header says, where no smaller one is worth more."""
    best, ratios, short, allowed, most = other_sizes(shape, seed)
    assert ratios.max() == pytest.approx(best, rel=1e-6)
    assert (short <= allowed + 1e-6)[most].all()


def test_where_a_smaller_tree_is_worth_more_a_size_may_be_further_from_its_best():
    _, _, short, allowed, most = other_sizes("sibling-closed", 6)
    assert not most[5]
    assert short[5] > allowed[5] + 0.001


def other_sizes(shape, seed):
    """The best ratio; of the trees of every size at its theta their ratios, how far from the size's best, how far
    they may be by theorem 10's last formula, and whether no smaller one is worth more."""
    rng = np.random.default_rng(seed)
    worth, node_ms = any_worth(rng), rng.exponential(rng.choice([0.01, 0.1, 1.0]), DEPTH)
    rest = np.append(np.nan, rng.uniform(0.5, 2) + np.cumsum(rng.exponential(0.1, MOST)))
    tokens, sizes, expanding = brute(worth, shape)
    ms = rest[sizes] + expanding @ node_ms
    prices = best_prices(worth, rest, node_ms, budget=MOST, shape=shape)
    best = (tokens / ms).max()
    assert prices.bound == pytest.approx(best, rel=1e-6)
    found, found_sizes, found_expanding = of_family(worth.best(MOST, shape, prices.per_node))
    found_ms = rest[found_sizes] + found_expanding @ node_ms
    ratios = found / found_ms
    worths = found - found_expanding @ prices.per_node
    most = np.array([worth >= worths[:i].max(initial=-np.inf) - 1e-9 for i, worth in enumerate(worths)])
    theirs = [max(np.flatnonzero(sizes == size), key=lambda i: tokens[i] / ms[i]) for size in found_sizes]
    short = (tokens / ms)[theirs] - ratios
    return best, ratios, short, (best - ratios) * (1 - found_ms / ms[theirs]), most


@given(seed=st.integers(0, 10**6))
@settings(max_examples=150)
def test_no_tree_exceeds_the_bound_whatever_its_size_was_timed_with(seed):
    """Latencies that fall with size, and sizes that are not known."""
    rng = np.random.default_rng(seed)
    worth, node_ms = any_worth(rng), rng.exponential(rng.choice([0.1, 0.5]), DEPTH)
    rest = np.append(np.nan, np.exp(rng.uniform(-3, 1, MOST)))
    rest[1 + np.flatnonzero(rng.random(MOST) < 0.3)] = np.nan
    tokens, sizes, expanding = brute(worth, "sibling-closed")
    prices = best_prices(worth, rest, node_ms, budget=MOST, shape="sibling-closed")
    if np.isnan(rest).all():
        assert prices is None
    else:
        assert np.nanmax(tokens / (rest[sizes] + expanding @ node_ms)) <= prices.bound * (1 + 1e-6)


@pytest.mark.parametrize("shape", PRICED[:2])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_prices_of_nothing_change_nothing(shape, seed):
    """The knapsack itself, given prices of zero, and the families that use it."""
    rng = np.random.default_rng(seed)
    worth = any_worth(rng)
    family = worth.best(12, shape)
    free = worth.best(12, shape, (0.0,) * DEPTH)
    assert (free.paths, free.nested) == (family.paths, family.nested)
    assert (free.members_of(free.sizes) == family.members_of(family.sizes)).all()

    def values(path):
        return [first for first, _ in worth.row(path)]

    greedy = TreeFamily(family.paths, np.array([worth.value(path)[0] for path in family.paths]))
    if family.nested:
        low = shape == "low-rank-expands"
        known = [best_trees(values, greedy, low_rank_expands=low, prices=prices) for prices in ((), (0.0,) * DEPTH)]
        sums = [[found.tokens_per_step(size) for size in found.sizes.tolist()] for found in known]
        assert sums[0] == pytest.approx(sums[1])
        assert sums[0] == pytest.approx([greedy.tokens_per_step(size) for size in greedy.sizes.tolist()])


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40)
def test_the_dearer_an_expanding_node_the_less_is_paid_for(seed):
    """Of one size; with all prices k times as high, what is bought at the old prices costs no more."""
    rng = np.random.default_rng(seed)
    worth, prices = any_worth(rng), rng.exponential(0.03, DEPTH)
    bought = []
    for k in (0.0, 1.0, 3.0):
        tokens, sizes, expanding = of_family(worth.best(20, "sibling-closed", tuple(k * prices)))
        net = tokens - k * expanding @ prices
        best = np.array([net[i] >= net[:i].max(initial=-np.inf) - 1e-9 for i in range(len(net))])
        bought.append({int(n): paid for n, paid in zip(sizes[best], (expanding @ prices)[best], strict=True)})
    for less, more in zip(bought[1:], bought, strict=False):
        for size in less.keys() & more.keys():
            assert less[size] <= more[size] + 1e-6


# Plans


@pytest.fixture(scope="module")
def trace():
    return random_trace(np.random.default_rng(5), [40] * 30, 3, 8)


def timing_trees(source, budget=24):
    """Trees as a profile times them: of every depth limit, as if drafting were free."""
    families = [grow_joint(source, budget=budget, max_depth=depth, shape="sibling-closed") for depth in (1, 2, 3)]
    return [
        family.tree(size)
        for depth, family in enumerate(families, 1)
        for size in family.sizes.tolist()
        if size > depth and family.tree(size).depth == depth
    ]


def steep(expanding):
    return cost_ms(expanding, fixed=(0.3, 0.3, 0.3), node=(0.0, 0.5, 0.5))


@pytest.mark.parametrize("objective", ["joint", "replay", "independent"])
def test_a_plan_that_pays_for_drafting_expands_few_nodes_and_is_faster(trace, objective):
    profile = timed(timing_trees(trace), cost=steep)
    entry = plan_trees(trace, profile, budget=24, objective=objective).entries[0]
    blind = timed(timing_trees(trace), cost=steep, told=False)
    other = plan_trees(trace, blind, budget=24, objective=objective).entries[0]
    expanding = expanding_nodes(entry.tree.paths)
    assert entry.draft_cost["expanding"] == list(expanding)
    assert entry.draft_cost["ms"] == pytest.approx(steep(expanding))
    assert entry.step_ms == pytest.approx(rest_ms(1, entry.size) + steep(expanding))
    assert sum(expanding) < sum(expanding_nodes(other.tree.paths))
    assert entry.tokens_per_s > 1.02 * other.tokens_per_s
    assert 0 <= entry.draft_cost["gap"] < 0.05
    assert other.draft_cost is None


def test_the_plan_of_a_table_is_the_best_of_all_trees():
    """No noise and values that add up: nothing is left of the gap."""
    rng = np.random.default_rng(3)
    for _ in range(5):
        hits = (1000 * np.sort(rng.dirichlet(np.ones(RANKS + 1), DEPTH)[:, :RANKS])[:, ::-1]).astype(int)
        table = Calibration(hits, np.full(DEPTH, 1000))
        tokens, sizes, expanding = brute(products(table.accept), "sibling-closed")
        families = [products(table.accept, max_depth=d).best(MOST, "sibling-closed") for d in (1, 2, 3)]
        profile = timed(
            [f.tree(n) for d, f in enumerate(families, 1) for n in f.sizes.tolist() if f.tree(n).depth == d], cost=steep
        )
        entry = plan_trees(table, profile, budget=MOST).entries[0]
        drafting = np.array([steep(e[e > 0]) for e in expanding])
        assert entry.tokens_per_s == pytest.approx((1e3 * tokens / (rest_ms(1, sizes) + drafting)).max(), rel=0.006)
        reached = entry.tokens_per_s / (1e3 * tokens / (rest_ms(1, sizes) + drafting)).max()
        assert entry.draft_cost["gap"] == pytest.approx(1 - reached, abs=1e-6)


def test_families_of_all_batch_sizes_are_candidates_of_each(trace, monkeypatch):
    """Also of one tree for a mix, which is rated where it serves."""
    seen = []
    monkeypatch.setattr(planner, "common", lambda options: seen.extend(common(options)) or seen)

    def cost(expanding):
        return cost_ms(expanding, fixed=(0.1, 0.1, 0.1), node=(0.0, 0.2, 0.2))

    profile = timed(timing_trees(trace), batch_sizes=(1, 8), cost=cost)
    alone = plan_trees(trace, profile, batch_sizes=(1, 8), budget=24)
    mixed = plan_trees(trace, profile, batch_sizes={1: 0.5, 8: 0.5}, budget=24)
    sought = []
    for batch_size in (1, 8):
        limits = {"budget": 24, "max_rank": 9, "shape": "sibling-closed"}
        priced = planner.Priced(trace, "replay", limits, 3)
        priced.grow(profile, batch_size, 100, False)
        sought.append({grown.prices for grown in priced.families})
    assert sought[0].isdisjoint(sought[1])
    assert all(set(c.prices) == {(), *sought[0], *sought[1]} for c in seen)
    assert len(seen) == 2
    together = seen[0].throughput + seen[1].throughput
    free = max(total for total, prices in zip(together, seen[0].prices, strict=True) if not prices)
    assert sum(e.tokens_per_s for e in mixed.entries) > 1.02 * free
    first, second = mixed.entries
    assert first.tree == second.tree
    for one, best in zip(mixed.entries, alone.entries, strict=True):
        expanding = expanding_nodes(one.tree.paths)
        assert one.step_ms == pytest.approx(rest_ms(one.batch_size, one.size) + cost(expanding))
        assert one.tokens_per_s <= best.tokens_per_s * 1.006
    assert sum(e.tokens_per_s for e in mixed.entries) >= 0.9 * sum(e.tokens_per_s for e in alone.entries)


def test_folds_grow_under_the_same_prices(trace):
    limits = {"objective": "replay", "budget": 12, "max_depth": 3, "max_rank": 7, "shape": "sibling-closed"}
    prices = (0.0, 0.2, 0.1)
    held_out = crossfit(trace, prices=prices, **limits)
    fold = fold_numbers(trace)
    for f in range(FOLDS):
        grown = grow(trace.select(np.flatnonzero(fold != f)), prices=prices, **limits).tree(12)
        test = np.flatnonzero(fold == f)
        assert held_out.steps[-1, test].tolist() == replay(trace, grown).steps[test].tolist()
    free = crossfit(trace, **limits).family.tree(12)
    assert sum(expanding_nodes(held_out.family.nodes(12))) < sum(expanding_nodes(free.paths))


def test_a_curves_prices_grow_its_tree_again(trace):
    entry = plan_trees(trace, timed(timing_trees(trace), cost=steep), budget=24).entries[0]
    point = next(p for p in entry.curve if p["size"] == entry.size and p["depth"] == entry.depth)
    again = grow(
        trace,
        objective="replay",
        budget=24,
        max_rank=9,
        shape="sibling-closed",
        max_depth=entry.depth,
        prices=point["prices"],
    )
    assert again.tree(entry.size) == entry.tree


def test_a_size_that_was_verified_is_taken_with_its_fastest_tree(trace):
    """Another size than the best, of which there are trees with prices and without."""
    profile = timed(timing_trees(trace), cost=steep)
    best = plan_trees(trace, profile, budget=24).entries[0]
    limits = {"objective": "replay", "budget": 24, "max_rank": 9, "shape": "sibling-closed"}
    tried = 0
    for point in best.curve:
        size, depth = point["size"], point["depth"]
        free = grow(trace, **limits, max_depth=max(depth, 1)).tree(size)
        if abs(size - best.size) < 3 or "prices" not in point or free.depth != depth:
            continue
        paid = grow(trace, **limits, max_depth=depth, prices=point["prices"]).tree(size)
        if paid == free or (tried := tried + 1) > 2:
            continue
        taken = plan_trees(trace, profile, budget=24, take={1: (size, depth)}).entries[0]
        assert taken.tree == paid
        assert taken.tokens_per_s == pytest.approx(point["tokens_per_s"])
        assert taken.tokens_per_s < best.tokens_per_s
    assert tried


def test_the_second_stage_of_a_profile_times_the_priced_trees_themselves(trace, monkeypatch):
    """Rivals with prices were once timed as the families' trees, and the chosen one beside the family's."""
    entry = plan_trees(trace, timed(timing_trees(trace), cost=steep), budget=24, objective="joint").entries[0]
    families = tree_families(trace, 3, 24, ranks=8)
    measured = stages.Measured(1, None, [families[2].tree(24)], rounds=[])
    monkeypatch.setattr(stages, "planned", lambda *arguments: {1: entry})
    monkeypatch.setattr(stages.Stages, "_rounds", lambda *arguments, **options: [])
    session = SimpleNamespace(drafter=SimpleNamespace(draft_vocab_size=8))
    stages.Stages(None, session, 0.02, 1.0, 16, None).second([measured], families, trace, 24)
    curve = {point["size"]: point for point in entry.curve}
    assert entry.tree in measured.refined
    assert len({len(tree) for tree in measured.refined}) == len(measured.refined) >= 3
    assert sum("prices" in curve[len(tree)] for tree in measured.refined) >= 3
    for tree in measured.refined:
        point = curve[len(tree)]
        assert tree == grow(
            trace,
            objective="joint",
            budget=24,
            max_rank=7,
            shape="sibling-closed",
            max_depth=point["depth"],
            prices=point.get("prices", ()),
        ).tree(len(tree))
    bare = replace(entry, curve=[{**point, "prices": [0.0]} for point in entry.curve])
    limits = {"budget": 24, "max_rank": 7, "shape": "sibling-closed"}
    assert entry.tree in stages.refined(bare, [], families, trace, limits)  # whatever the curve has of its size


def test_drafting_that_costs_next_to_nothing_leaves_the_plan_alone(trace):
    def cheap(expanding):
        return cost_ms(expanding, fixed=(0.5, 0.5, 0.5), node=(0.0, 1e-4, 1e-4))

    entry, blind = (
        plan_trees(trace, timed(timing_trees(trace), cost=cheap, told=told), budget=24).entries[0]
        for told in (True, False)
    )
    assert entry.tree == blind.tree
    assert entry.draft_cost["gap"] is None
    assert not any("prices" in point for point in entry.curve)


def test_trees_that_do_not_say_what_expands_are_planned_as_before_and_that_is_said(trace):
    mute = timed(timing_trees(trace), cost=steep, told=False)
    told = LatencyProfile(mute.points, mute.autoregressive, draft=timed(timing_trees(trace), cost=steep).draft)
    entry, before = (plan_trees(trace, profile, budget=24).entries[0] for profile in (told, mute))
    assert entry.tree == before.tree
    assert entry.draft_cost is None
    assert [warning for warning in entry.warnings if "which of its nodes expand" in warning]


def test_levels_that_were_not_timed_are_left_out_and_said(trace):
    profile = timed(timing_trees(trace), cost=steep)
    shallow = LatencyProfile(
        profile.points, profile.autoregressive, draft=tuple(d for d in profile.draft if d.level < 2)
    )
    entry = plan_trees(trace, shallow, budget=24).entries[0]
    assert max(point["depth"] for point in entry.curve) == 2
    assert any("depths up to 2" in warning for warning in entry.warnings)


def test_the_draft_cost_of_a_plan_survives_its_file(trace, tmp_path):
    plan = plan_trees(trace, timed(timing_trees(trace), cost=steep), budget=24)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").entries[0].draft_cost == plan.entries[0].draft_cost
