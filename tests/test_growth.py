"""Growth against every tree there is, closed forms and published trees; shapes against their definitions."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.growth.grow import DIGITS, ROUNDS, SMALL, TraceGrowth, grow, grow_products, product_values
from treeopt.growth.replay import growth_index, replay
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import count_hits
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
    check_best(grow_products(accept, Limits(MOST)), wanted)


def best_by_recursion(accept, size: int) -> float:
    """Most expected tokens of a tree of exactly ``size`` rows without gaps among siblings (Sequoia, algorithm 4)."""

    @cache
    def subtree(depth: int, rows: int, children: int) -> float:
        """Of a root at a depth; the last child takes some of the rows, the root and the others the rest."""
        if not children:
            return 1.0 if rows == 1 else -np.inf
        share = accept[depth, children - 1]
        ways = [subtree(depth, left, children - 1) + share * best(depth + 1, rows - left) for left in range(1, rows)]
        return max(ways, default=-np.inf)

    @cache
    def best(depth: int, rows: int) -> float:
        most = accept.shape[1] if depth < len(accept) else 0
        return max(subtree(depth, rows, children) for children in range(most + 1))

    return best(0, size)


@given(seed=st.integers(0, 2**32), size=st.integers(1, 20))
@examples(20)
def test_products_are_sequoias_dynamic_programme(seed, size):
    """Where accuracies fall with rank."""
    accept = -np.sort(-np.random.default_rng(seed).dirichlet(np.ones(5), 3)[:, :4], axis=1)
    family = grow_products(accept, Limits(size))
    assert family.tokens_per_step(len(family)) == pytest.approx(best_by_recursion(accept, size))


def test_a_chain_is_the_first_rank_of_every_depth():
    accept = np.array([[0.2, 0.5], [0.3, 0.4], [0.1, 0.6]])
    assert grow_products(accept, Limits(MOST, shape="chain")).tree(4) == Tree.chain(3)


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


@pytest.mark.parametrize("shape", GROWN)
def test_a_plan_from_a_trace_adds_up_in_every_shape(shape):
    trace = random_trace(np.random.default_rng(8), np.array([40, 25, 30, 35, 28, 50]), heads=3, ranks=4)
    plan = plan_trees(trace, request=PlanRequest(Limits(16, max_rank=3, shape=shape)))
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
    request = PlanRequest(Limits(4))
    assert plan_trees(trace, request=request).entries[0].tree.choices == [[0], [1], [1, 0]]
    taken = plan_trees(trace, request=replace(request, takes="low-rank-expands"))
    assert taken.entries[0].tree.choices == [[0], [1]]


@pytest.mark.parametrize("seeds", [8, pytest.param(40, marks=pytest.mark.long)])
def test_growth_is_close_to_brute_force_at_every_size(seeds):
    losses = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        trace = random_trace(rng, rng.integers(20, 40, 5), heads=2, ranks=3)
        grown = grow(trace, Limits(5))
        small = [tree for tree in every_tree() if tree.depth <= 2 and len(tree) <= 5 and SHAPES["sibling-closed"](tree)]
        for size in range(2, 6):
            best = max(replay(trace, tree).tokens_per_step for tree in small if len(tree) == size)
            losses.append(1 - replay(trace, grown.tree(size)).tokens_per_step / best)
    # Nested families cannot all be optimal. In 40 such traces the mean is 0.34 % and nine in ten are below 1.4 %, in the
    # first 8 of them 0.47 % and 2.1 %.
    assert np.mean(losses) < 0.006
    assert np.quantile(losses, 0.9) < 0.025
    assert max(losses) < 0.07


def next_nodes(nodes: list, product: dict) -> list:
    return [p for p in product if p not in nodes and p[:-1] in nodes and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in nodes)]


def walked(trace, nodes: list) -> list[int]:
    """The states at which decoding with a tree takes its steps, one after the other."""
    visited, tree = [], Tree.from_choices(nodes[1:])
    accepted = (growth_index(trace.ranks, tree.paths) < len(tree)).sum(1).tolist()
    for t, end in itertools.pairwise(trace.starts.tolist()):
        while t < end - 1:
            visited.append(t)
            t += 1 + accepted[t]
    return visited


def grown_by_definition(trace, budget: int) -> list[list]:
    """Both families, states walked through and counted one by one."""
    ranks, top = trace.ranks.tolist(), trace.top_k
    hits, trials = count_hits(trace.ranks[trace.has_step], top)
    product = dict.fromkeys([()], 1.0)
    for path in [p for d in range(1, trace.num_heads + 1) for p in itertools.product(range(top), repeat=d)]:
        share = hits[len(path) - 1, path[-1]] / max(trials[len(path) - 1], 1)
        product[path] = round(product[path[:-1]] * share, DIGITS)

    def frequent(states: list[int]) -> list:
        often, nodes = Counter(tuple(ranks[t][:d]) for t in states for d in range(trace.num_heads + 1)), [()]
        while len(nodes) < min(budget, len(product)):
            nodes.append(min(next_nodes(nodes, product), key=lambda p: (-often[p], -product[p], len(p), p)))
        return nodes

    first = frequent(np.flatnonzero(trace.has_step).tolist())
    families = [first]
    for _ in range(ROUNDS):
        families.append(frequent(walked(trace, families[-1])))
    small = [()]
    while len(small) < min(SMALL, budget):
        following = sorted(set(first).intersection(next_nodes(small, product)), key=first.index)
        small.append(min(following, key=lambda p: len(walked(trace, [*small, p]))))
    small += [p for p in frequent(walked(trace, small)) if p not in small]
    return [small[:budget], min(families, key=lambda nodes: len(walked(trace, nodes)))]


@given(traces(sequences=6, longest=20))
@examples(10)
def test_families_are_those_of_growing_state_by_state(trace):
    """And every size has the tree that takes fewer steps."""
    if not trace.has_step.any():
        return
    wanted, grown = grown_by_definition(trace, 12), grow(trace, Limits(12))
    for size in grown.sizes.tolist():
        steps = [len(walked(trace, nodes[:size])) for nodes in wanted]
        assert grown.family(size).paths == tuple(wanted[int(np.argmin(steps))])


@given(traces())
def test_gains_are_those_of_replayed_trees(trace):
    if not trace.has_step.any():
        return
    grown = grow(trace, Limits(12))
    for size in grown.sizes.tolist():
        assert grown.tokens_per_step(size) == pytest.approx(replay(trace, grown.tree(size)).tokens_per_step)


def test_blocks_change_nothing(monkeypatch):
    """Sequences are decoded in blocks, and paths numbered by sorting where there may be too many."""
    rng = np.random.default_rng(3)
    trace = random_trace(rng, rng.choice([1, 2, 3, 40, 120], 30), 4, 12)
    sets = rng.random((3, 30)) < 0.7
    whole = list(TraceGrowth(trace, 10, sets).grow(Limits(20)))
    monkeypatch.setattr("treeopt.growth.lanes.AT_ONCE", 50)
    monkeypatch.setattr("treeopt.growth.paths.MARKED", 0)
    for (grown, steps), (other, other_steps) in zip(whole, TraceGrowth(trace, 10, sets).grow(Limits(20)), strict=True):
        assert [family.paths for family in grown.families] == [family.paths for family in other.families]
        assert (steps == other_steps).all()


def test_answers_in_another_order_have_the_same_trees():
    trace = random_trace(np.random.default_rng(4), np.arange(3, 43, 2), 3, 6)
    mixed = trace.select(np.random.default_rng(0).permutation(trace.num_sequences))
    before, after = ([family.paths for family in grow(one, Limits(24)).families] for one in (trace, mixed))
    assert before == after


def test_bad_limits_are_refused():
    with pytest.raises(InvalidInput, match="shape must be one of sibling-closed, chain, but got 'any'"):
        Limits(2, shape="any")
