"""Growth against brute force, closed forms and published trees."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.growth.objectives import OBJECTIVES, grow, grow_independent, grow_joint, grow_replay
from treeopt.growth.replay import replay
from treeopt.growth.worth import product_values
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import examples, random_trace, traces


def all_trees(size: int, depth: int, ranks: int):
    """Every tree of a size, by brute force."""
    seen, layer = set(), {frozenset()}
    for _ in range(size - 1):
        bigger = set()
        for tree in layer:
            for parent in [(), *tree]:
                if len(parent) < depth:
                    bigger |= {tree | {(*parent, r)} for r in range(ranks)} - {tree}
        layer = bigger
    seen |= layer
    return [Tree.from_choices(list(tree)) for tree in seen if len(tree) == size - 1]


def expected_over_states(trace, tree) -> float:
    """Tokens of a step averaged over all states, by walking each of them."""
    nodes, total = set(tree.paths), 0
    ranks = trace.ranks[trace.has_step].tolist()
    for row in ranks:
        d = 0
        while d < len(row) and tuple(row[: d + 1]) in nodes:
            d += 1
        total += 1 + d
    return total / len(ranks)


@given(st.integers(0, 2**32))
def test_independent_takes_the_largest_products(seed):
    accept = np.random.default_rng(seed).dirichlet(np.ones(5), 3)[:, :4]  # ranks in any order
    family = grow_independent(accept, Limits(25, shape="any"))
    paths = [p for d in (1, 2, 3) for p in itertools.product(range(4), repeat=d)]
    best = np.sort(product_values(accept, tuple(paths)))[::-1][:24]
    np.testing.assert_allclose(family.gains[1:], best)


@examples(12)
@given(traces(heads=2, ranks=3, sequences=3, longest=8))
def test_joint_is_the_best_tree_of_every_size(trace):
    if not trace.has_step.any() or (trace.ranks[trace.has_step] == -2).all(0).any():
        return  # nothing to grow from; calibration refuses such a trace
    family = grow_joint(trace, Limits(5, shape="any"))
    for size in range(1, len(family) + 1):
        best = max(expected_over_states(trace, tree) for tree in all_trees(size, 2, 3))
        assert family.tokens_per_step(size) == pytest.approx(best)
        assert expected_over_states(trace, family.tree(size)) == pytest.approx(best)


@pytest.mark.parametrize("seeds", [8, pytest.param(40, marks=pytest.mark.long)])
def test_replay_growth_is_close_to_brute_force_at_every_size(seeds):
    losses = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        trace = random_trace(rng, rng.integers(20, 40, 5), heads=2, ranks=3)
        family = grow_replay(trace, Limits(5, shape="any"))
        for size in range(2, 6):
            best = max(replay(trace, tree).tokens_per_step for tree in all_trees(size, 2, 3))
            losses.append(1 - replay(trace, family.tree(size)).tokens_per_step / best)
    # Nested families cannot all be optimal, and savings are means over a parent; the loss is small.
    assert np.mean(losses) < 0.006
    assert np.quantile(losses, 0.9) < 0.02
    assert max(losses) < 0.07


@given(traces())
def test_replay_gains_are_those_of_replayed_trees(trace):
    if not trace.has_step.any() or (trace.ranks[trace.has_step] == -2).all(0).any():
        return
    family = grow_replay(trace, Limits(12, shape="any"))
    for size in range(1, len(family) + 1):
        assert family.tokens_per_step(size) == pytest.approx(replay(trace, family.tree(size)).tokens_per_step)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_families_are_nested_closed_and_within_their_limits(objective):
    rng = np.random.default_rng(1)
    trace = random_trace(rng, rng.integers(10, 30, 20), heads=4, ranks=8)
    family = grow(trace, Limits(64, max_depth=3, max_rank=5, shape="any"), objective=objective)
    assert len(family) == 64
    assert len(set(family.paths)) == 64
    assert all(p[:-1] in family.paths[: family.paths.index(p)] for p in family.paths[1:])
    assert max(map(len, family.paths)) <= 3
    assert max(max(p) for p in family.paths[1:]) <= 5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_counts_do_not_depend_on_how_often_the_data_is_repeated(objective):
    rng = np.random.default_rng(2)
    trace = random_trace(rng, rng.integers(10, 30, 12), heads=3, ranks=6)
    trace = replace(trace, cluster=np.arange(12))
    twice = trace.select(np.tile(np.arange(12), 2))
    limits = Limits(30, max_depth=3, max_rank=5, shape="any")
    assert grow(trace, limits, objective=objective).paths == grow(twice, limits, objective=objective).paths


def test_a_family_ends_where_the_table_does():
    assert len(grow_independent(np.array([[0.5, 0.2]]), Limits(64, shape="any"))) == 3


def test_bad_limits_are_refused():
    with pytest.raises(InvalidInput, match="at least 1"):
        grow_independent(np.array([[0.5]]), Limits(0, shape="any"))
    with pytest.raises(InvalidInput, match="independent, joint, replay"):
        grow(None, Limits(2, max_depth=1, max_rank=1, shape="any"), objective="magic")
