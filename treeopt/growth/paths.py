"""The distinct rank paths of a trace, and how often they came: a state's ranks are read once, counted by path from then on.

path   the ranks of heads 1, 2, ... up to the first that no tree has; there stands `top` for a miss, `top` + 1 where
       nothing was to guess, and 0 behind it. A tree accepts the same at all states of one path
trie   of their prefixes that are ranks alone, which are the nodes that a tree can have
tally  counts of paths for every part of the answers. Whatever is asked of states by their ranks is asked of these: what
       trees are grown on, how strongly rare paths are shrunk, and what trees reach on average. Without one part they are
       the sum of all less that part's

Paths are numbered in lexicographic order, so those that begin alike are neighbours.

P states · S sequences · N distinct paths · D = K heads · R = top ranks told apart · n_d nodes of depth d · F parts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.records.trace import MISS, NO_TRIAL, RankTrace
from treeopt.trees.tree import Choice, IntArray

AT_ONCE = 2**20  # states that are looked at together
TICKED = 2**24  # numbers of paths that are ticked off, at least


@dataclass(frozen=True, eq=False)
class Nodes:
    """All nodes of one depth, in lexicographic order.

    first, end : (n,) the paths that begin with each are first ... end - 1
    parent     : (n,) number of its parent among those of the depth before; rank : (n,) its own rank
    """

    first: IntArray
    end: IntArray
    parent: IntArray
    rank: IntArray


@dataclass(frozen=True, eq=False)
class Paths:
    """The distinct paths of the states of a trace.

    of    : (P,) int32  number of every state's path
    ranks : (N, D + 1)  the paths, one by one; the last column is `top` + 1

    >>> paths = Paths.of_ranks(np.array([[0, 1], [1, -1], [-1, 0], [0, 1]], np.int16), 2)
    >>> paths.of.tolist(), paths.ranks.tolist(), paths.hits.tolist()
    ([0, 1, 2, 0], [[0, 1, 3], [1, 2, 3], [2, 0, 3]], [2, 1, 0])
    """

    of: NDArray[np.int32]
    ranks: NDArray[np.int16]
    top: int

    @classmethod
    def of_ranks(cls, ranks: NDArray[np.int16], top: int) -> Paths:
        """The paths of (P, D) ranks, found level by level. Time O(P x D), memory O(P) beside the ranks."""
        # by rank; -1 and -2 are last
        digits = np.full(max(int(ranks.max(initial=0)) + 1, top) + 2, top, dtype=np.int16)
        digits[:top], digits[NO_TRIAL], digits[MISS] = np.arange(top), top + 1, top
        found = np.zeros((1, 0), dtype=np.int16)
        of, ended = np.zeros(len(ranks), dtype=np.int32), np.zeros(1, dtype=bool)
        for column in range(ranks.shape[1]):
            codes = _renumber(of, ranks[:, column], digits, ended)
            before, digit = np.divmod(codes, top + 2)
            ended = ended[before] | (digit >= top)
            found = np.column_stack([found[before], digit.astype(np.int16)])
        return cls(of, np.column_stack([found, np.full(len(found), top + 1, dtype=np.int16)]), top)

    @property
    def depth(self) -> int:
        return int(self.ranks.shape[1]) - 1

    @cached_property
    def hits(self) -> NDArray[np.uint16]:
        """(N,) how many ranks each path has."""
        inside = np.logical_and.accumulate(self.ranks[:, :-1] < self.top, axis=1)
        return np.asarray(inside.sum(1, dtype=np.uint16))

    def cut(self, depth: int) -> tuple[Paths, NDArray[np.int32]]:
        """The paths of the first heads alone, without their states, and (N,) which of them each becomes."""
        cut = self.ranks[:, :depth]
        new = np.append(True, (cut[1:] != cut[:-1]).any(1)) if len(cut) else np.zeros(0, dtype=bool)
        ranks = np.column_stack([cut[new], np.full(int(new.sum()), self.top + 1, dtype=np.int16)])
        return Paths(self.of[:0], ranks, self.top), (new.cumsum() - 1).astype(np.int32)

    @cached_property
    def trie(self) -> tuple[Nodes, ...]:
        """The nodes of depth 0, 1, ... D."""
        only = np.zeros(1, dtype=np.int64)
        found = [Nodes(only, only + len(self.ranks), only, only)]
        for d in range(1, self.depth + 1):
            prefix, inside = self.ranks[:, :d], self.hits >= d
            new = inside & np.append(True, (prefix[1:] != prefix[:-1]).any(1))
            first = np.flatnonzero(new)
            # Those that go on behind a node are neighbours; a path that is none of its own ends it.
            ends = np.flatnonzero(np.append(new | ~inside, True))
            end = ends[np.searchsorted(ends, first, side="right")]
            parent = np.searchsorted(found[-1].first, first, side="right") - 1
            found.append(Nodes(first, end, parent, self.ranks[first, d - 1].astype(np.int64)))
        return tuple(found)

    def beginning_with(self, path: Choice) -> slice:
        """Which paths begin with a node's."""
        low, high = 0, len(self.ranks)
        for d, rank in enumerate(path):
            column = self.ranks[low:high, d]
            low, high = (low + int(np.searchsorted(column, rank, side)) for side in ("left", "right"))
        return slice(low, high)


def _renumber(
    of: NDArray[np.int32], column: NDArray[np.int16], digits: NDArray[np.int16], ended: NDArray[np.bool_]
) -> IntArray:
    """Number paths that are one rank longer, in place of ``of``; (N,) number before x (top + 2) + digit of each."""
    base = int(digits.max()) + 1
    most = len(ended) * base
    if most > max(4 * len(of), TICKED):  # more ranks than could be ticked off
        sparse = digits[column].astype(np.int64)
        sparse[ended[of]] = 0
        codes: IntArray
        codes, of[:] = np.unique(of * np.int64(base) + sparse, return_inverse=True)
        return codes
    seen = np.zeros(most, dtype=bool)
    for here in portions(len(of)):
        before = of[here]
        digit = digits[column[here]]
        digit[ended[before]] = 0
        of[here] = before * np.int32(base) + digit
        seen[of[here]] = True
    number = (seen.cumsum() - 1).astype(np.int32)
    for here in portions(len(of)):
        of[here] = number[of[here]]
    return np.flatnonzero(seen)


def portions(states: int) -> Iterator[slice]:
    """All states, some at once."""
    for begin in range(0, states, AT_ONCE):
        yield slice(begin, min(begin + AT_ONCE, states))


def narrow(numbers: NDArray[Any], most: int) -> NDArray[Any]:
    """Numbers below ``most`` in the smallest type that holds them."""
    return numbers.astype(np.uint16 if most <= 2**16 else np.uint32)


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
        """The tally of (P, K) ranks, all of which count, by the (P,) part of each."""
        starts = np.append(np.arange(len(ranks)), len(ranks))
        return tallies(ranks, starts, np.ones(len(ranks), dtype=bool), Paths.of_ranks(ranks, top), part[None])[0]

    def without(self, part: int) -> Tally:
        whole = self.whole
        return Tally(self.paths, whole.counts - self.counts[part], whole.heads - self.heads[part])

    @property
    def whole(self) -> Tally:
        return Tally(self.paths, self.counts.sum(0, keepdims=True), self.heads.sum(0, keepdims=True))

    @cached_property
    def states(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _sums(self) -> IntArray:
        return np.concatenate([np.zeros((len(self.counts), 1), np.int64), self.counts.cumsum(1)], axis=1)

    @cached_property
    def nodes(self) -> list[IntArray]:
        """(F, n_d) of each depth: how many states begin with each node's path."""
        return [self._sums[:, nodes.end] - self._sums[:, nodes.first] for nodes in self.paths.trie]

    @cached_property
    def trials(self) -> list[IntArray]:
        """(F, n_d) of each depth but the last: how many states that begin with each node's path have a further guess to judge."""
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
        """(F, R, R + 1) how often each rank came behind ``depth`` ranks, by the last of these; last how many trials there were."""
        top, here, below = self.paths.top, self.paths.trie[depth], self.paths.trie[depth + 1]
        cell = here.rank[below.parent] * (top + 1) + below.rank
        table = [
            np.bincount(cell, hits, top * (top + 1)) + np.bincount(here.rank * (top + 1) + top, trials, top * (top + 1))
            for hits, trials in zip(self.nodes[depth + 1], self.trials[depth], strict=True)
        ]
        return np.array(table).astype(np.int64).reshape(-1, top, top + 1)

    def behind(self, depth: int) -> IntArray:
        """(F, n_d, R + 1) how often each rank came behind each node of a depth, and last how many trials there were."""
        below = self.paths.trie[depth + 1]
        found = np.zeros((*self.trials[depth].shape, self.paths.top + 1), dtype=np.int64)
        found[:, below.parent, below.rank], found[..., -1] = self.nodes[depth + 1], self.trials[depth]
        return found


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
