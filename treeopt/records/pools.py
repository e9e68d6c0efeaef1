"""What a trace records of trees that are built anew at every step: the place of the true path among their nodes.

Nodes are ordered from the best on. A step with some rows has the best rows - 1 nodes, and accepts those of the true path among
them, so one record is enough for every number of rows. The pool of fewer levels is the beginning of a dynamic tree's pool,
and nodes of a tree over marginals keep their order within any depth and width.

P states · L levels at most · n numbers of expanded nodes ("topk"), or of ranks that are tried ("width")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from treeopt.errors import InvalidInput
from treeopt.trees.draft import MOST_BLOCK, MOST_LEVELS, MOST_TOPK, MOST_WIDTH

NO_PLACE = 255  # the true path is not in the pool, or too far back for any tree


def columns_of(levels: int) -> slice:
    """The columns of the places in pools of so many levels, by depth from 1.

    >>> columns_of(1), columns_of(3)
    (slice(0, 1, None), slice(3, 6, None))
    """
    return slice(levels * (levels - 1) // 2, levels * (levels + 1) // 2)


class PoolsRecord(TypedDict):
    """The settings of dynamic trees in a trace's meta."""

    levels: Annotated[int, Field(ge=1, le=MOST_LEVELS)]
    topks: Annotated[list[Annotated[int, Field(ge=1, le=MOST_TOPK)]], Field(min_length=1)]


class MarginalsRecord(TypedDict):
    """The settings of trees over marginals in a trace's meta."""

    levels: Annotated[int, Field(ge=1, le=MOST_BLOCK)]
    widths: Annotated[list[Annotated[int, Field(ge=1, le=MOST_WIDTH)]], Field(min_length=1)]


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
        """What a trace of a drafter records: these counts, cut to the tokens and guesses that the drafter has."""
        tokens, guesses = drafter.draft_vocab_size, drafter.num_heads
        topks = tuple(topk for topk in self.topks if topk <= tokens and drafter.has_probabilities)
        widths = tuple(width for width in self.widths if width <= tokens and drafter.has_marginals)
        levels, depth = min(self.levels, guesses) if topks else 0, min(self.depth, guesses) if widths else 0
        return Counts(min(self.top_k, tokens), levels, topks, depth, widths)


RANKS_ALONE = Counts()
USUAL = Counts(levels=MOST_LEVELS, topks=(2, 4, 8), depth=MOST_BLOCK, widths=(MOST_WIDTH,))
USUAL_OF_BLOCKS = Counts(depth=MOST_BLOCK, widths=(MOST_WIDTH,))


SETTINGS = {"pools": "topks", "marginals": "widths"}  # in a trace's meta, beside the levels


@dataclass(frozen=True, eq=False)
class Pools:
    """The pools of every state, for each topk; or its trees over marginals, for each width.

    places : (P, n, L (L + 1) / 2) uint8  column d - 1 of `columns_of` s has the true path's node of depth d: its place from 0
             among the nodes of the first s levels, or NO_PLACE where it is not among them
    """

    levels: int
    topks: tuple[int, ...]
    places: NDArray[np.uint8]

    @classmethod
    def of(cls, name: str, meta: Mapping[str, Any], places: NDArray[np.uint8] | None) -> Pools | None:
        """The pools of places, None without any, by a trace's meta; ``name`` is "pools" or "marginals".

        Raises InvalidInput for places of another shape than the meta says.
        """
        if places is None:
            return None
        if (record := meta.get(name)) is None:
            raise InvalidInput(f"meta must have the levels and {SETTINGS[name]} of the {name}, but has none.")
        levels, topks = record["levels"], tuple(record[SETTINGS[name]])
        shape = (len(places), len(topks), columns_of(levels).stop)
        if places.shape != shape:
            raise InvalidInput(f"places of the {name} must be {shape}, but are {places.shape}.")
        return cls(levels, topks, places)

    def places_in(self, levels: int, topk: int) -> NDArray[np.uint8]:
        """(P, levels) place of the true path's node of each depth in the pool of so many levels."""
        return self.places[:, self.topks.index(topk), columns_of(levels)]
