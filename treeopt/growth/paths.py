"""The distinct rank paths of a trace's states. Every tree accepts the same guesses at states with the same path.

path   the ranks of heads 1, 2, ... up to the first rank of `top` or more; that rank and all behind it are `top`

Paths are numbered in lexicographic order, so those that begin alike are neighbours.

P states · N distinct paths · D heads · R = top ranks
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeopt.trees.tree import Choice, IntArray

MARKED = 2**24  # numbers that are marked rather than sorted, at least


@dataclass(frozen=True, eq=False)
class Paths:
    """The distinct paths of the states of a trace.

    of    : (P,) int32    number of every state's path
    ranks : (D, N) int16  the paths, a column each

    >>> paths = Paths.of_ranks(np.array([[0, 1], [1, -1], [-1, 0], [0, 1]], np.int16), 2)
    >>> paths.of.tolist(), paths.ranks.T.tolist()
    ([0, 1, 2, 0], [[0, 1], [1, 2], [2, 2]])
    """

    of: NDArray[np.int32]
    ranks: NDArray[np.int16]
    top: int
    _children: dict[Choice, IntArray] = field(default_factory=dict)

    @classmethod
    def of_ranks(cls, ranks: NDArray[np.int16], top: int) -> Paths:
        """The paths of (P, D) ranks. Time O(P x D)."""
        paths, of = np.zeros((0, 1), dtype=np.int16), np.zeros(len(ranks), dtype=np.int32)
        ended = np.zeros(1, dtype=bool)
        for column in ranks.T:
            digits = np.where((column < 0) | (column >= top) | ended[of], top, column)
            codes, of = _numbered(of * np.int64(top + 1) + digits, len(ended) * (top + 1))
            before, digit = np.divmod(codes, top + 1)
            paths, ended = np.vstack([paths[:, before], digit.astype(np.int16)]), digit == top
        return cls(of, paths, top)

    def children(self, path: Choice) -> IntArray:
        """(R+1,) number of the first path that continues a path by rank 0, 1, ...; at the end the number behind the last."""
        if path not in self._children:
            low, high = self.children(path[:-1])[path[-1] : path[-1] + 2] if path else (0, len(self.ranks.T))
            column = self.ranks[len(path), low:high]
            self._children[path] = low + np.searchsorted(column, np.arange(self.top + 1))
        return self._children[path]


def _numbered(codes: IntArray, most: int) -> tuple[IntArray, NDArray[np.int32]]:
    """The distinct codes below ``most`` in rising order, and the place of each code among them."""
    if most > max(4 * len(codes), MARKED):
        distinct, places = np.unique(codes, return_inverse=True)
        return distinct, places.astype(np.int32)
    is_there = np.zeros(most, dtype=bool)
    is_there[codes] = True
    number = (is_there.cumsum(dtype=np.int32) - 1).astype(np.int32)
    return np.flatnonzero(is_there), number[codes]
