"""Trees within a shape: predicates against their definitions, growth against every tree there is."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.growth.objectives import grow_independent, grow_joint, grow_replay
from treeopt.growth.replay import growth_index, replay, replay_trees
from treeopt.growth.worth import product_values
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.trees.published import PUBLISHED_TREES, published_tree
from treeopt.trees.shapes import SHAPES, Limits
from treeopt.trees.tree import Tree

from .conftest import examples, random_trace, traces, trees

DEPTH, RANKS, MOST = 3, 3, 7
SHAPED = [name for name in SHAPES if name != "any"]


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


def best_values(value, shape: str) -> dict[int, float]:
    """The largest value of a tree of each size, by looking at all."""
    best: dict[int, float] = {}
    for tree in every_tree():
        if SHAPES[shape](tree):
            best[len(tree)] = max(best.get(len(tree), 0.0), value(tree))
    return best


@pytest.mark.parametrize("shape", SHAPED)
@given(seed=st.integers(0, 10**6), zeros=st.booleans())
@examples(6)
def test_products_are_best_for_every_size(shape, seed, zeros):
    rng = np.random.default_rng(seed)
    accept = rng.dirichlet(np.full(RANKS + 1, 0.5), DEPTH)[:, :RANKS]
    if zeros:
        accept[rng.random(accept.shape) < 0.3] = 0.0
    family = grow_independent(accept, Limits(MOST, shape=shape))
    wanted = best_values(lambda tree: product_values(accept, tree.paths).sum(), shape)
    compare(family, wanted, shape)


@pytest.mark.parametrize("shape", SHAPED)
@given(seed=st.integers(0, 10**6))
@examples(4)
def test_frequencies_are_best_for_every_size(shape, seed):
    trace = random_trace(np.random.default_rng(seed), np.array([9, 14]), heads=DEPTH, ranks=RANKS)
    states = trace.has_step
    family = grow_joint(trace, Limits(MOST, max_rank=RANKS - 1, shape=shape))

    def value(tree: Tree) -> float:
        return 1 + (growth_index(trace, tree.paths)[states] < len(tree)).sum() / states.sum()

    compare(family, best_values(value, shape), shape)


def compare(family, wanted: dict[int, float], shape: str) -> None:
    for size in family.sizes.tolist():
        tree = family.tree(size)
        assert SHAPES[shape](tree)
        assert len(tree) == size
        assert family.tokens_per_step(size) == pytest.approx(wanted[size], abs=1e-6)
    best = {size: max(v for s, v in wanted.items() if s <= size) for size in wanted}
    for size, value in best.items():
        assert family.tokens_per_step(size) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("shape", SHAPED)
@given(trace=traces(sequences=4))
def test_replay_grows_within_the_shape(shape, trace):
    family = grow_replay(trace, Limits(9, shape=shape))
    for size in family.sizes.tolist():
        assert SHAPES[shape](family.tree(size))


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


def test_a_family_that_is_not_nested_replays_tree_by_tree():
    trace = random_trace(np.random.default_rng(5), np.array([30, 40, 20]), heads=3, ranks=4)
    family = grow_joint(trace, Limits(30, shape="sibling-closed"))
    assert not family.nested
    steps = replay_trees(trace, family.paths, family.members_of(family.sizes))
    for size, found in zip(family.sizes.tolist(), steps, strict=True):
        assert (found == replay(trace, family.tree(size)).steps).all()


def test_an_unknown_shape_is_refused():
    with pytest.raises(InvalidInput, match="--shape must be one of any, sibling-closed"):
        grow_independent(np.array([[0.5]]), Limits(2, shape="bush"))


@pytest.mark.parametrize("objective", ["joint", "replay", "independent"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_from_a_trace_adds_up_in_every_shape(shape, objective):
    trace = random_trace(np.random.default_rng(8), np.array([40, 25, 30, 35, 28, 50]), heads=3, ranks=4)
    plan = plan_trees(trace, request=PlanRequest(Limits(16, max_rank=3, shape=shape), objective=objective))
    (entry,) = plan.entries
    assert SHAPES[shape](entry.tree)
    steps = entry.predicted.steps
    assert steps * entry.tokens_per_step == pytest.approx((trace.lengths - 1).sum())
    assert len(entry.growth_order) >= entry.size - 1
    assert {tuple(path) for path, _ in entry.growth_order[: entry.size - 1]} == set(entry.tree.paths[1:])
