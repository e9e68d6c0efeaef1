"""Replay: how many steps real greedy decoding takes with a tree, from the trace alone, exactly.

Greedy output does not depend on the tree, so decoding visits states t <- t + 1 + a(t), where a(t) is
the number of guesses accepted at t (Hydra, section 4, simulates the same with the model).

P states · S sequences · D deepest node · n tree sizes asked for at once
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.trace import RankTrace
from treeopt.tree import Choice, IntArray, Tree


@dataclass(frozen=True, eq=False)
class Replay:
    """Steps of every sequence; a sequence of N tokens emits N - 1 in steps, the first is prefilled.

    steps  : (S,)  decoding steps
    tokens : (S,)  tokens emitted by them
    """

    steps: IntArray
    tokens: IntArray

    @property
    def tokens_per_step(self) -> float:
        """Pooled over the sequences; 1.0 where no step was taken."""
        return tokens_per_step(self.tokens.sum(), self.steps.sum())


def tokens_per_step(tokens: float, steps: float) -> float:
    return float(tokens / steps) if steps else 1.0


def replay(trace: RankTrace, tree: Tree) -> Replay:
    """Decode every sequence of the trace with ``tree``, without the model.

    >>> trace = RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))
    >>> replay(trace, Tree.chain(1)).steps.tolist()
    [2]
    """
    steps = replay_sizes(trace, tree.paths, np.array([len(tree)]))
    return Replay(steps[0], trace.lengths - 1)


def accepted_counts(trace: RankTrace, tree: Tree) -> IntArray:
    """(D+1,) how many steps of the replay emit 0, 1, ... D accepted guesses.

    >>> trace = RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))
    >>> accepted_counts(trace, Tree.chain(1)).tolist()
    [0, 2]
    """
    accepted = (growth_index(trace, tree.paths) < len(tree)).sum(1)
    counts = np.zeros(tree.depth + 1, dtype=np.int64)
    t, last = trace.starts[:-1].copy(), trace.starts[1:] - 1
    while (t < last).any():
        t, last = t[t < last], last[t < last]
        counts += np.bincount(accepted[t], minlength=len(counts))
        t = t + 1 + accepted[t]
    return counts


def replay_sizes(trace: RankTrace, paths: tuple[Choice, ...], sizes: IntArray) -> IntArray:
    """(n, S) steps of every sequence with each of the nested trees paths[:size].

    One vectorised walk for all sizes: every state keeps, for each prefix of its rank path, the index
    of that node in ``paths``; size n accepts those below n. Time is proportional to the steps taken,
    memory to P x D.
    """
    order = growth_index(trace, paths)
    steps = np.zeros((len(sizes), trace.num_sequences), dtype=np.int64)
    last = np.tile(trace.starts[1:] - 1, len(sizes))  # a step starts before the last state
    t = np.tile(trace.starts[:-1], len(sizes))
    bound = np.repeat(sizes, trace.num_sequences).astype(order.dtype)
    walker = np.flatnonzero(t < last)
    counts = steps.reshape(-1)
    while len(walker):
        counts[walker] += 1
        here = t[walker]
        here += 1 + (order[here] < bound[walker, None]).sum(1)
        t[walker] = here
        walker = walker[here < last[walker]]
    return steps


def growth_index(trace: RankTrace, paths: tuple[Choice, ...]) -> NDArray[np.int32]:
    """(P, D) index in ``paths`` of each prefix of a state's rank path; len(paths) where it is no node."""
    child = child_table(paths)
    none, top = len(paths), child.shape[1] - 1
    depth = max(map(len, paths))
    order = np.full((len(trace.ranks), max(depth, 1)), none, dtype=np.int32)
    node = np.zeros(len(trace.ranks), dtype=np.int32)
    for d in range(min(depth, trace.num_heads)):
        rank = trace.ranks[:, d]
        node = child[node, np.where((rank < 0) | (rank > top), top, rank)]
        order[:, d] = node
    return order


def child_table(paths: tuple[Choice, ...]) -> NDArray[np.int32]:
    """(N+1, R+1) index of each node's child at each rank; N where there is none.

    The last row and the last column stand for "no such node" and "no such rank".
    """
    none = len(paths)
    top = 1 + max((path[-1] for path in paths[1:]), default=-1)
    child = np.full((none + 1, top + 1), none, dtype=np.int32)
    index = {path: i for i, path in enumerate(paths)}
    for path, i in index.items():
        if path:
            child[index[path[:-1]], path[-1]] = i
    return child
