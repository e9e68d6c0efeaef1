"""Greedy decoding of a whole trace with a growing tree, kept up to date node by node.

A new node changes only the states whose accepted path ended at its parent, so only sequences with one
of them are decoded again.

P states of all sequences · R ranks told apart
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treeopt.records.trace import MISS, NO_TRIAL, RankTrace
from treeopt.trees.tree import IntArray


class Walk:
    """Greedy decoding of every sequence of a trace with a tree that begins as a lone root.

    node    : (P,) deepest accepted node at each state
    depth   : (P,) its depth, the guesses accepted there
    wanted  : (P,) rank of the guess that would be accepted next; ``top`` for none of ours, ``top`` + 1
              where there is nothing to guess
    visited : (P,) whether a step is taken at the state
    to_go   : (P,) steps from the state to the end of its sequence, 0 at its last state
    """

    def __init__(self, trace: RankTrace, max_depth: int, top: int) -> None:
        ranks = trace.ranks[:, :max_depth].astype(np.int16)
        ranks[(ranks == MISS) | (ranks >= top)] = top
        ranks[ranks == NO_TRIAL] = top + 1
        none = np.full((len(ranks), 1), top + 1, dtype=np.int16)
        self.ranks = np.hstack([ranks, none])  # (P, D+1)
        self.top, self.starts = top, trace.starts
        self.sequence = np.repeat(np.arange(trace.num_sequences), trace.lengths)
        self.last = (trace.starts[1:] - 1)[self.sequence]  # (P,) last state of the state's sequence
        self.node = np.zeros(len(ranks), dtype=np.int64)  # deepest accepted node
        self.depth = np.zeros(len(ranks), dtype=np.int64)  # its depth: accepted guesses
        self.wanted = self.ranks[:, 0].copy()  # rank of the guess that would be accepted next
        self.visited = trace.has_step.copy()
        self.to_go = self.last - np.arange(len(ranks))

    def steps(self) -> int:
        return int(self.to_go[self.starts[:-1]].sum())

    def ends(self, nodes: int, strength: float) -> tuple[IntArray, NDArray[np.float64]]:
        """(nodes, R+2) how many visited states end at each node by the rank they wanted, and
        (nodes,) what one more accepted guess saves at them on average [steps].

        One more guess at state t, where a were accepted, saves to_go[t+1+a] - to_go[t+2+a]. ``strength``
        states of the mean over all nodes are mixed into that of each.
        """
        t, width = np.flatnonzero(self.visited), self.top + 2
        node, wanted = self.node[t], self.wanted[t]
        counts = np.bincount(node * width + wanted, minlength=nodes * width).reshape(nodes, width)
        following, last = t + 1 + self.depth[t], self.last[t]
        saved = self.to_go[np.minimum(following, last)] - self.to_go[np.minimum(following + 1, last)]
        saved[wanted == self.top + 1] = 0
        tried = counts[:, : self.top + 1].sum(1)
        mean = saved.sum() / max(tried.sum(), 1)
        total = np.bincount(node, weights=saved, minlength=nodes)
        return counts, (total + strength * mean) / np.maximum(tried + strength, 1e-9)

    def add(self, parent: int, rank: int, node: int) -> None:
        """Add child ``rank`` of ``parent`` as ``node`` and decode the sequences it changes again."""
        changed = np.flatnonzero((self.node == parent) & (self.wanted == rank))
        self.node[changed] = node
        self.depth[changed] += 1
        self.wanted[changed] = self.ranks[changed, self.depth[changed]]
        sequences = np.unique(self.sequence[changed])
        begins, ends = self.starts[sequences], self.starts[sequences + 1] - 1
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            self.visited[begin:end] = False
        order = np.argsort(begins - ends, kind="stable")  # longest first, all backwards at once
        t, lengths = ends[order], (ends - begins)[order]
        for back in range(1, int(lengths.max(initial=0)) + 1):
            t = t[: np.searchsorted(-lengths, -back, side="right")] - 1
            self.to_go[t] = 1 + self.to_go[np.minimum(t + 1 + self.depth[t], self.last[t])]
        t = self.starts[sequences]
        while len(t := t[t < self.last[t]]):
            self.visited[t] = True
            t = np.minimum(t + 1 + self.depth[t], self.last[t])
