"""Dynamic trees: built anew at every step from the drafter's own probabilities (EAGLE-2, section 4).

At every level the drafter expands the ``topk`` likeliest nodes of the last one, each by its ``topk`` likeliest
children. All children enter the pool, with the probability of their path as score; the best of the pool are verified.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from treeopt.errors import InvalidInput

MOST_LEVELS, MOST_TOPK, MOST_ROWS = 8, 10, 64


@dataclass(frozen=True, order=True)
class DynamicTree:
    """The three numbers of a dynamic tree.

    levels : how deep it is drafted · topk : nodes expanded on each level, and children of each
    rows   : rows verified per sequence and step, root included

    >>> DynamicTree(5, 4, 16).name
    '5/4/16'
    """

    levels: int
    topk: int
    rows: int

    def __post_init__(self) -> None:
        rows = min(pool_size(self.levels, self.topk) + 1, MOST_ROWS)
        limits = {"levels": (1, MOST_LEVELS), "topk": (1, MOST_TOPK), "rows": (2, rows)}
        for name, (least, most) in limits.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise InvalidInput(
                    f"{name} of a dynamic tree must be {least} to {most}, but got {value} in {self.name}."
                )

    def __len__(self) -> int:
        return self.rows

    kind = "dynamic"

    @property
    def depth(self) -> int:
        """Depth of the deepest guess."""
        return self.levels

    @property
    def record(self) -> dict[str, Any]:
        """The object that files have for it."""
        return asdict(self)

    def expanding(self) -> list[int]:
        """How many nodes of each depth the drafter expands.

        >>> DynamicTree(3, 4, 16).expanding()
        [1, 4, 4]
        """
        return [1, *[self.topk] * (self.levels - 1)]

    @property
    def name(self) -> str:
        """Levels, topk and rows, as engines' users write them."""
        return f"{self.levels}/{self.topk}/{self.rows}"

    @property
    def cache_rows(self) -> int:
        """Most rows that a cache has to hold behind the text: of the verification, or of the draft's own levels."""
        return max(self.rows, 1 + (self.levels - 1) * self.topk)


@dataclass(frozen=True)
class DynamicLimits:
    """Limits of dynamic trees: at most so many levels, topk and rows.

    within_levels : whether it may have ``topk`` nodes for each level, fewer than its pool has (TensorRT-LLM)
    redrafts      : whether the drafter reads the expanded nodes of all levels above again on each level (TensorRT-LLM)
    chains        : whether chains are asked for too, which are dynamic trees of topk 1

    >>> DynamicLimits().most_rows(3, 4), DynamicLimits(within_levels=True).most_rows(3, 4)
    (37, 13)
    """

    levels: int = MOST_LEVELS
    topk: int = MOST_TOPK
    rows: int = MOST_ROWS
    within_levels: bool = False
    redrafts: bool = False
    chains: bool = False

    def most_rows(self, levels: int, topk: int) -> int:
        """Most rows of a tree with these levels and topk."""
        return min(self.rows, 1 + (topk * levels if self.within_levels else pool_size(levels, topk)))


def pool_size(levels: int, topk: int) -> int:
    """Nodes of the pool: ``topk`` on the first level, their ``topk`` children each on every further one.

    >>> [pool_size(levels, 2) for levels in (1, 2, 3)]
    [2, 6, 10]
    """
    return topk + (levels - 1) * topk**2
