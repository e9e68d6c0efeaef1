"""The distinct rank paths of a trace: a state's ranks are read once, and counted by their path from then on.

path   the ranks of heads 1, 2, ... up to the first that no tree has; there stands `top` for a miss, `top` + 1 where
       nothing was to guess, and 0 behind it. A tree accepts the same at all states of one path
trie   of their prefixes that are ranks alone, which are the nodes that a tree can have

Paths are numbered in lexicographic order, so those that begin alike are neighbours.

P states · N distinct paths · D heads · R = top ranks told apart · n_d nodes of depth d
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.records.trace import MISS, NO_TRIAL
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
        """Those of (P, D) ranks, level by level. Time O(P x D), memory O(P) beside the ranks."""
        digits = np.full(
            max(int(ranks.max(initial=0)) + 1, top) + 2, top, dtype=np.int16
        )  # by rank; -1 and -2 are last
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
        found: NDArray[np.uint16] = np.logical_and.accumulate(self.ranks[:, :-1] < self.top, axis=1).sum(
            1, dtype=np.uint16
        )
        return found

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
    """The same numbers, all below ``most``, in the smallest type that holds them."""
    return numbers.astype(np.uint16 if most <= 2**16 else np.uint32)
