"""How often the paths of a trace came, counted once for every part of its answers.

Whatever is asked of states by their ranks is asked of these counts: what trees are grown on, how strongly rare paths
are shrunk, and what trees reach on average. Without one part they are the sum of all less that part's.

S sequences · P states · N distinct paths · n_d nodes of depth d · K heads · R ranks told apart · F parts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.paths import AT_ONCE, Paths
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.tree import Choice, IntArray

SEQUENCES = 2**13  # that are looked at together, at most


@dataclass(frozen=True, eq=False)
class Tally:
    """Counts over the states at which a step can be taken, by part.

    counts : (F, N) of each path
    heads  : (F, K, R' + 1)  of each head and rank, whatever came before, and last how many trials there were; the ranks
             are all that were recorded

    >>> ranks = np.array([[0, 1], [1, -1], [-1, 0], [0, 1]], np.int16)
    >>> tally = Tally.of_ranks(ranks, np.array([0, 0, 1, 1]), 2)
    >>> tally.counts.tolist(), tally.nodes[1].tolist(), tally.heads[1].tolist()
    ([[1, 1, 0], [1, 0, 1]], [[1, 1], [1, 0]], [[1, 0, 2], [1, 1, 2]])
    """

    paths: Paths
    counts: IntArray
    heads: IntArray

    @classmethod
    def of_ranks(cls, ranks: NDArray[np.int16], part: IntArray, top: int) -> Tally:
        """Of (P, K) ranks, all of which count, by the (P,) part of each."""
        starts = np.append(np.arange(len(ranks)), len(ranks))
        return tallies(ranks, starts, np.ones(len(ranks), dtype=bool), Paths.of_ranks(ranks, top), part[None])[0]

    def of_part(self, part: int) -> Tally:
        return Tally(self.paths, self.counts[part : part + 1], self.heads[part : part + 1])

    def without(self, part: int) -> Tally:
        """All parts but one, as one."""
        whole, own = self.whole, self.of_part(part)
        return Tally(self.paths, whole.counts - own.counts, whole.heads - own.heads)

    @property
    def whole(self) -> Tally:
        """All parts together, as one."""
        return Tally(self.paths, self.counts.sum(0, keepdims=True), self.heads.sum(0, keepdims=True))

    @cached_property
    def states(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _sums(self) -> IntArray:
        return np.concatenate([np.zeros((len(self.counts), 1), np.int64), self.counts.cumsum(1)], axis=1)

    @cached_property
    def nodes(self) -> list[IntArray]:
        """Of each depth (F, n_d): how many states begin with each node's path."""
        return [self._sums[:, nodes.end] - self._sums[:, nodes.first] for nodes in self.paths.trie]

    @cached_property
    def trials(self) -> list[IntArray]:
        """The same of those that have something to guess behind it; for all nodes that have a head behind them."""
        if not self.states:
            return self.nodes[:-1]
        found = []
        for d, nodes in enumerate(self.paths.trie[:-1]):
            last = nodes.end - 1  # where nothing is to guess, a path comes last
            without = np.where(self.paths.ranks[last, d] == self.paths.top + 1, self.counts[:, last], 0)
            found.append(self.nodes[d] - without)
        return found

    def of_head(self, head: int) -> IntArray:
        """(F, R + 1) how often each rank came at a head, and last how many trials there were."""
        top = self.paths.top
        hits = np.zeros((len(self.heads), top + 1), dtype=np.int64)
        known = min(top, self.heads.shape[2] - 1)
        hits[:, :known], hits[:, top] = self.heads[:, head, :known], self.heads[:, head, -1]
        return hits

    def after(self, depth: int) -> IntArray:
        """(F, R, R + 1) the same behind so many ranks, at least one, by the last of them."""
        top, here, below = self.paths.top, self.paths.trie[depth], self.paths.trie[depth + 1]
        cell = here.rank[below.parent] * (top + 1) + below.rank
        table = [
            np.bincount(cell, hits, top * (top + 1)) + np.bincount(here.rank * (top + 1) + top, trials, top * (top + 1))
            for hits, trials in zip(self.nodes[depth + 1], self.trials[depth], strict=True)
        ]
        return np.array(table).astype(np.int64).reshape(-1, top, top + 1)

    def frequencies(self, paths: Sequence[Choice]) -> IntArray:
        """(n,) how many states of all parts begin with each node's path."""
        sums = self._sums.sum(0)
        ranges = [self.paths.beginning_with(path) for path in paths]
        return np.array([sums[each.stop] - sums[each.start] for each in ranges], dtype=np.int64)


def tallies(
    ranks: NDArray[np.int16], starts: IntArray, counted: NDArray[np.bool_], paths: Paths, parts: IntArray
) -> list[Tally]:
    """The tally of each of several divisions of the sequences into parts, in one reading of their states.

    counted : (P,)   which states count
    parts   : (m, S) number of the part of each sequence, -1 for none
    """
    n, found, width = len(paths.ranks), int(parts.max(initial=0)) + 1, max(int(ranks.max(initial=0)) + 1, 1)
    counts = np.zeros((len(parts), found * n), dtype=np.int64)
    heads = np.zeros((len(parts) * found, ranks.shape[1] * (width + 2)), dtype=np.int64)
    cuts = np.searchsorted(starts, np.arange(0, len(ranks), AT_ONCE), side="left")
    for first, end in pairwise(np.union1d(cuts, [*range(0, len(starts) - 1, SEQUENCES), len(starts) - 1]).tolist()):
        here = slice(starts[first], starts[end])
        lengths, use = np.diff(starts[first : end + 1]), counted[here]
        of = paths.of[here][use]
        sequence = np.repeat(np.arange(end - first, dtype=np.int32), lengths)[use]
        by_sequence = _head_counts(ranks[here], sequence, use, end - first, width)
        for m, part in enumerate(parts[:, first:end]):
            of_state = part[sequence]
            keys = of_state * n + of
            counts[m] += np.bincount(keys[of_state >= 0] if part.min() < 0 else keys, minlength=found * n)
            members = (part == np.arange(found)[:, None]).astype(np.float64)
            heads[m * found : (m + 1) * found] += (members @ by_sequence).astype(np.int64)
    by_rank = heads.reshape(len(parts), found, -1, width + 2)
    hits = by_rank[..., 2:]  # before them stand those without a trial, and the misses
    trials = by_rank[..., 1:].sum(-1, keepdims=True)
    by_path = counts.reshape(len(parts), found, n)
    return [Tally(paths, *each) for each in zip(by_path, np.concatenate([hits, trials], axis=-1), strict=True)]


def _head_counts(
    ranks: NDArray[np.int16], sequence: NDArray[np.int32], use: NDArray[np.bool_], sequences: int, width: int
) -> NDArray[np.float64]:
    """(sequences, K x (width + 2)) how often each number from -2 on came at each head."""
    cells = width + 2
    begin = sequence * np.int32(cells) - np.int32(NO_TRIAL)
    found = [np.bincount(begin + column[use], minlength=sequences * cells) for column in ranks.T]
    return np.concatenate([each.reshape(sequences, cells) for each in found], axis=1).astype(np.float64)


def of_trace(trace: RankTrace, paths: Paths, parts: IntArray) -> list[Tally]:
    """The tallies of a trace's steps, by (m, S) parts of its sequences."""
    return tallies(trace.ranks, trace.starts, trace.has_step, paths, parts)
