"""Replay against a walk written as the definition reads."""

import numpy as np
from hypothesis import given

from treeopt.replay import replay, replay_sizes
from treeopt.tree import Tree

from .conftest import traces, trees


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
    sizes = np.arange(1, len(tree) + 1)
    steps = replay_sizes(trace, tree.paths, sizes)
    for size in sizes:
        assert steps[size - 1].tolist() == slow_steps(trace, tree.paths[:size])


@given(traces())
def test_a_lone_root_gives_one_token_per_step(trace):
    assert replay(trace, Tree.chain(0)).tokens_per_step == 1.0


@given(traces())
def test_a_dense_tree_of_all_ranks_accepts_every_hit(trace):
    everything = replay(trace, Tree.dense([4, 4, 4]))
    assert (everything.steps <= replay(trace, Tree.dense([4])).steps).all()
    assert (everything.tokens == trace.lengths - 1).all()
