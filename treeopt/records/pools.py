"""What a trace records of trees that are built anew at every step: the place of the true path among their nodes.

Nodes are ordered from the best on. A step with some rows has the best rows - 1 nodes, and accepts those of the true path among
them, so one record is enough for every number of rows. The pool of fewer levels is the beginning of a dynamic tree's pool,
and nodes of a tree over marginals keep their order within any depth and width.

P states · L levels at most · n numbers of expanded nodes ("topk"), or of ranks that are tried ("width")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from treeopt.errors import InvalidInput, quoted
from treeopt.trees.draft import MOST_BLOCK, MOST_LEVELS, MOST_TOPK, MOST_WIDTH

NO_PLACE = 255  # the true path is not in the pool, or too far back for any tree


def columns_of(levels: int) -> slice:
    """The columns of the places in pools of so many levels, by depth from 1.

    >>> columns_of(1), columns_of(3)
    (slice(0, 1, None), slice(3, 6, None))
    """
    return slice(levels * (levels - 1) // 2, levels * (levels + 1) // 2)


@dataclass(frozen=True)
class Counts:
    """What is recorded at every state.

    top_k         : ranks 0...top_k-1 are told apart
    levels, topks : settings of dynamic trees; none by default
    depth, widths : settings of trees over marginals; none by default
    """

    top_k: int = 32
    levels: int = 0
    topks: tuple[int, ...] = ()
    depth: int = 0
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, numbers, most in ("topks", self.topks, MOST_TOPK), ("widths", self.widths, MOST_WIDTH):
            if not all(1 <= number <= most for number in numbers):
                raise InvalidInput(f"`{name}` must be numbers from 1 to {most}, but got {quoted(list(numbers))}.")

    @property
    def record(self) -> dict[str, object]:
        """The keys of a trace's meta.

        >>> Counts(32, 3, (1, 4)).record
        {'top_k': 32, 'pools': {'levels': 3, 'topks': [1, 4]}}
        """
        record: dict[str, object] = {"top_k": self.top_k}
        if self.levels and self.topks:
            record["pools"] = {"levels": self.levels, "topks": list(self.topks)}
        if self.depth and self.widths:
            record["marginals"] = {"levels": self.depth, "widths": list(self.widths)}
        return record

    def fitting(self, drafter: Any) -> Counts:
        """Those of the counts that a drafter has."""
        tokens, guesses = drafter.draft_vocab_size, drafter.num_heads
        topks = tuple(topk for topk in self.topks if topk <= tokens and drafter.has_probabilities)
        widths = tuple(width for width in self.widths if width <= tokens and drafter.has_marginals)
        levels, depth = min(self.levels, guesses) if topks else 0, min(self.depth, guesses) if widths else 0
        return Counts(min(self.top_k, tokens), levels, topks, depth, widths)


RANKS_ALONE = Counts()
USUAL = Counts(levels=MOST_LEVELS, topks=(2, 4, 8), depth=MOST_BLOCK, widths=(MOST_WIDTH,))
USUAL_OF_BLOCKS = Counts(depth=MOST_BLOCK, widths=(MOST_WIDTH,))


@dataclass(frozen=True, eq=False)
class Pools:
    """The pools of every state, for each topk.

    places : (P, n, L (L + 1) / 2) uint8  column d - 1 of `columns_of` s has the true path's node of depth d: its place from 0
             among the nodes of the first s levels, or NO_PLACE where it is not among them

    Raises InvalidInput for arrays that do not fit together.
    """

    levels: int
    topks: tuple[int, ...]
    places: NDArray[np.uint8]
    name, key, most = "pools", "topks", (MOST_LEVELS, MOST_TOPK)

    def __post_init__(self) -> None:
        rising = [topk for topk in range(1, self.most[1] + 1) if topk in self.topks]
        if not 1 <= self.levels <= self.most[0] or not rising or list(self.topks) != rising:
            raise InvalidInput(
                f"{self.name} must have 1 to {self.most[0]} levels and a rising list of {self.key[:-1]} from 1 to "
                f"{self.most[1]}, but have {self.levels} and {quoted(list(self.topks))}."
            )
        shape = (len(self.places), len(self.topks), columns_of(self.levels).stop)
        if self.places.shape != shape:
            raise InvalidInput(f"places of the {self.name} must be {shape}, but are {self.places.shape}.")

    @classmethod
    def of(cls, about: object, places: NDArray[np.uint8]) -> Self:
        """The pools of places, by the object in a trace's meta."""
        levels, topks = (about.get("levels"), about.get(cls.key)) if isinstance(about, dict) else (None, None)
        if type(levels) is not int or type(topks) is not list or not all(type(topk) is int for topk in topks):
            raise InvalidInput(
                f"meta '{cls.name}' must have a number of levels and a list of {cls.key}, but is {quoted(about)}."
            )
        return cls(levels, tuple(topks), places)

    def places_in(self, levels: int, topk: int) -> NDArray[np.uint8]:
        """(P, levels) place of the true path's node of each depth in the pool of so many levels."""
        return self.places[:, self.topks.index(topk), columns_of(levels)]


class Marginals(Pools):
    """The trees over marginals of every state, for each width: `Pools` whose levels are depths."""

    name, key, most = "marginals", "widths", (MOST_BLOCK, MOST_WIDTH)
