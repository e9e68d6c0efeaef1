"""Growth against every tree there is, closed forms and published trees; shapes against their definitions."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.growth.objectives import grow, grow_independent, grow_joint, grow_replay
from treeopt.growth.replay import growth_index, replay
from treeopt.growth.worth import product_values
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.trace import RankTrace
from treeopt.trees.published import PUBLISHED_TREES, published_tree
from treeopt.trees.shapes import GROWN, SHAPES, Limits
from treeopt.trees.tree import Tree

from .conftest import examples, random_trace, traces, trees

DEPTH, RANKS, MOST = 3, 3, 7


@cache
def every_tree() -> list[Tree]:
    """All trees of up to MOST nodes, DEPTH deep and RANKS wide."""
    layer, found = {((),)}, {((),)}
    for _ in range(MOST - 1):
        layer = {
            tuple(sorted({*nodes, (*path, rank)}))
            for nodes in layer
            for path in nodes
            for rank in range(RANKS)
            if len(path) < DEPTH and (*path, rank) not in nodes
        }
        found |= layer
    return [Tree.from_choices([path for path in nodes if path]) for nodes in sorted(found)]


def best_values(value, *, depth: int = DEPTH) -> dict[int, float]:
    """The largest value of a tree of each size, by looking at all."""
    best: dict[int, float] = {}
    for tree in every_tree():
        if tree.depth <= depth:
            best[len(tree)] = max(best.get(len(tree), 0.0), value(tree))
    return best


def check_best(family, wanted: dict[int, float]) -> None:
    for size in family.sizes.tolist():
        tree = family.tree(size)
        assert SHAPES["sibling-closed"](tree)
        assert len(tree) == size
        assert family.tokens_per_step(size) == pytest.approx(wanted[size], abs=1e-6)


@given(seed=st.integers(0, 10**6), zeros=st.booleans())
@examples(6)
def test_products_are_best_for_every_size(seed, zeros):
    """Where accuracies fall with rank no tree is better, with gaps or without."""
    rng = np.random.default_rng(seed)
    accept = rng.dirichlet(np.full(RANKS + 1, 0.5), DEPTH)[:, :RANKS]
    if zeros:
        accept[rng.random(accept.shape) < 0.3] = 0.0
    accept = -np.sort(-accept, axis=1)
    wanted = best_values(lambda tree: product_values(accept, tree.paths).sum())
    check_best(grow_independent(accept, Limits(MOST)), wanted)


@given(seed=st.integers(0, 10**6))
@examples(4)
def test_frequencies_are_best_for_every_size(seed):
    """Where counts fall with rank behind every path no tree is better, with gaps or without."""
    trace = random_trace(np.random.default_rng(seed), np.array([9, 14]), heads=DEPTH, ranks=RANKS)
    states, ranks = trace.has_step, trace.ranks.copy()
    ranks[states] = commonest_first(ranks[states])
    family = grow_joint(replace(trace, ranks=ranks), Limits(MOST, max_rank=RANKS - 1))

    def value(tree: Tree) -> float:
        return 1 + (growth_index(ranks[states], tree.paths) < len(tree)).sum() / states.sum()

    check_best(family, best_values(value))


def commonest_first(ranks):
    """The ranks, numbered anew behind every path so that the commonest comes first."""
    found = ranks.copy()
    for depth in range(DEPTH):
        for path in itertools.product(range(RANKS), repeat=depth):
            here = (found[:, :depth] == path).all(1) & (found[:, depth] >= 0)
            counts = np.bincount(found[here, depth], minlength=RANKS)
            found[here, depth] = np.argsort(np.argsort(-counts, kind="stable"))[found[here, depth]]
    return found


def test_a_chain_is_the_first_rank_of_every_depth():
    accept = np.array([[0.2, 0.5], [0.3, 0.4], [0.1, 0.6]])
    assert grow_independent(accept, Limits(MOST, shape="chain")).tree(4) == Tree.chain(3)


def test_shapes_contain_each_other():
    names = list(SHAPES)
    for tree in every_tree():
        kept = [SHAPES[name](tree) for name in names]
        assert kept == sorted(kept, reverse=True)


def test_published_trees_have_their_known_shapes():
    """Of all eleven: siblings without gaps, likelier siblings expand first, none a chain."""
    for name in PUBLISHED_TREES:
        tree = published_tree(name)
        assert [SHAPES[shape](tree) for shape in SHAPES] == [True, True, True, False]


@given(trees(depth=3, ranks=3))
def test_low_rank_expands_is_counted_per_parent(tree):
    """The engine keeps how many children of a node expand, and expands that many from rank 0 on."""
    nodes = set(tree.paths)
    expands = {p for p in nodes if any(q[:-1] == p for q in nodes if q)}
    closed = all(set(range(p[-1])) <= {q[-1] for q in nodes if q and q[:-1] == p[:-1]} for p in nodes if p)
    lowest = all(
        {q[-1] for q in expands if q and q[:-1] == p} == set(range(sum(1 for q in expands if q and q[:-1] == p)))
        for p in nodes
    )
    assert SHAPES["low-rank-expands"](tree) == (closed and lowest)


@pytest.mark.parametrize("objective", ["joint", "replay", "independent"])
@pytest.mark.parametrize("shape", GROWN)
def test_a_plan_from_a_trace_adds_up_in_every_shape(shape, objective):
    trace = random_trace(np.random.default_rng(8), np.array([40, 25, 30, 35, 28, 50]), heads=3, ranks=4)
    plan = plan_trees(trace, request=PlanRequest(Limits(16, max_rank=3, shape=shape), objective=objective))
    (entry,) = plan.entries
    assert SHAPES[shape](entry.tree)
    steps = entry.basis.steps
    assert steps * entry.chosen.tokens_per_step == pytest.approx((trace.lengths - 1).sum())
    assert len(entry.growth_order) >= entry.tree.rows - 1
    assert {tuple(path) for path, _ in entry.growth_order[: entry.tree.rows - 1]} == set(entry.tree.paths[1:])


def test_an_engine_gets_a_grown_tree_that_it_takes():
    """The second head is right behind the first one's second guess alone."""
    ranks = np.tile([[0, -1], [1, 0], [0, -1]], (5, 1))
    ranks[-2:, 1], ranks[-1] = -2, -2
    trace = RankTrace(np.tile(ranks, (10, 1)), np.arange(0, 151, 15))
    request = PlanRequest(Limits(4), objective="joint")
    assert plan_trees(trace, request=request).entries[0].tree.choices == [[0], [1], [1, 0]]
    taken = plan_trees(trace, request=replace(request, takes="low-rank-expands"))
    assert taken.entries[0].tree.choices == [[0], [1]]


@pytest.mark.parametrize("seeds", [8, pytest.param(40, marks=pytest.mark.long)])
def test_replay_growth_is_close_to_brute_force_at_every_size(seeds):
    losses = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        trace = random_trace(rng, rng.integers(20, 40, 5), heads=2, ranks=3)
        family = grow_replay(trace, Limits(5))
        small = [tree for tree in every_tree() if tree.depth <= 2 and len(tree) <= 5 and SHAPES["sibling-closed"](tree)]
        for size in range(2, 6):
            best = max(replay(trace, tree).tokens_per_step for tree in small if len(tree) == size)
            losses.append(1 - replay(trace, family.tree(size)).tokens_per_step / best)
    # Nested families cannot all be optimal, and savings are means over a parent; the loss is small.
    assert np.mean(losses) < 0.006
    assert np.quantile(losses, 0.9) < 0.02
    assert max(losses) < 0.07


@given(traces())
def test_replay_gains_are_those_of_replayed_trees(trace):
    if not trace.has_step.any() or (trace.ranks[trace.has_step] == -2).all(0).any():
        return
    family = grow_replay(trace, Limits(12))
    for size in range(1, len(family) + 1):
        assert family.tokens_per_step(size) == pytest.approx(replay(trace, family.tree(size)).tokens_per_step)


def test_bad_limits_are_refused():
    with pytest.raises(InvalidInput, match="shape must be sibling-closed or chain, but got 'any'"):
        Limits(2, shape="any")
    with pytest.raises(InvalidInput, match="independent, joint, replay"):
        grow(None, Limits(2, max_depth=1, max_rank=1), objective="magic")
