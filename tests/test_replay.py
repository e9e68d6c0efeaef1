"""Replay against a walk written as the definition reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.growth.grow import grow_products
from treeopt.growth.replay import replay, replay_trees
from treeopt.trees.shapes import Limits

from .conftest import random_trace, traces, trees


def slow_steps(trace, paths) -> list[int]:
    nodes, result = set(paths), []
    for s in range(trace.num_sequences):
        ranks = trace.ranks[trace.starts[s] : trace.starts[s + 1]].tolist()
        t, steps = 0, 0
        while t <= len(ranks) - 2:
            accepted = 0
            while accepted < trace.num_heads and tuple(ranks[t][: accepted + 1]) in nodes:
                accepted += 1
            t, steps = t + 1 + accepted, steps + 1
        result.append(steps)
    return result


@given(traces(), trees(depth=3, ranks=4))
def test_replay_is_the_walk(trace, tree):
    assert replay(trace, tree).steps.tolist() == slow_steps(trace, tree.paths)


@given(traces(), trees(depth=3, ranks=4, most_nodes=12))
def test_all_sizes_at_once_are_one_by_one(trace, tree):
    steps = replay_trees(trace, tree.paths, np.arange(1, len(tree) + 1))
    for size in range(1, len(tree) + 1):
        assert steps[size - 1].tolist() == slow_steps(trace, tree.paths[:size])


def test_long_sequences_and_many_sizes():
    """Sums of more than 255 steps, and sizes beyond 64, which need a second word."""
    rng = np.random.default_rng(0)
    trace = random_trace(rng, np.array([1000, 3, 700]), heads=3, ranks=6)
    family = grow_products(np.full((3, 6), 0.1), Limits(150))
    steps = replay_trees(trace, family.paths, family.sizes)
    for size in (1, 2, 63, 64, 65, 128, len(family)):
        assert steps[size - 1].tolist() == slow_steps(trace, family.paths[:size])


@given(traces(sequences=5), st.integers(1, 300))
def test_portions_change_nothing(trace, at_once):
    family = grow_products(np.full((trace.num_heads, 4), 0.1), Limits(8))
    whole = replay_trees(trace, family.paths, family.sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treeopt.growth.lanes.AT_ONCE", at_once)
        assert (replay_trees(trace, family.paths, family.sizes) == whole).all()
