"""Shapes of trees that serving engines can take, from the freest to the strictest.

any               every tree
sibling-closed    a node's children have the ranks 0...c-1: the engine keeps how many there are, not which
low-rank-expands  the same, and of a node's children those with children of their own have the lowest ranks
chain             one child each, of rank 0: the engine keeps a length

Each contains the next one. Trees are grown sibling-closed, or as chains.
"""

from collections.abc import Callable
from dataclasses import dataclass

from treeopt.errors import InvalidInput
from treeopt.trees.tree import MAX_RANK, MOST_DEPTH, MOST_NODES, MOST_RANK, Tree


def sibling_closed(tree: Tree) -> bool:
    """Whether the children of every node have the ranks 0...c-1.

    >>> sibling_closed(Tree.dense([2, 1])), sibling_closed(Tree.from_choices([[0], [2]]))
    (True, False)
    """
    known = set(tree.paths)
    return all(p[-1] == 0 or (*p[:-1], p[-1] - 1) in known for p in tree.paths[1:])


def low_rank_expands(tree: Tree) -> bool:
    """Whether a node has children only where its next likelier sibling has some too.

    >>> low_rank_expands(Tree.from_choices([[0], [1], [1, 0]]))
    False
    """
    expanding = {path[:-1] for path in tree.paths[1:]}
    return sibling_closed(tree) and all(p[-1] == 0 or (*p[:-1], p[-1] - 1) in expanding for p in expanding if p)


SHAPES: dict[str, Callable[[Tree], bool]] = {
    "any": lambda tree: True,
    "sibling-closed": sibling_closed,
    "low-rank-expands": low_rank_expands,
    "chain": lambda tree: tree.kind in ("plain", "chain"),
}
GROWN = ("sibling-closed", "chain")


@dataclass(frozen=True)
class Limits:
    """Limits of trees: size, depth, ranks and shape. Checked once, here; the names are those of the options.

    budget    : most rows verified per sequence and step, the root included
    max_depth : depth of the deepest node; None for as many as there are heads
    max_rank  : largest rank of a node
    shape     : one of `GROWN`

    >>> Limits(budget=64, max_depth=0)
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: max_depth must be at least 1, but got 0.
    """

    budget: int = 64
    max_depth: int | None = None
    max_rank: int = MAX_RANK
    shape: str = "sibling-closed"

    def __post_init__(self) -> None:
        limits = {"budget": (1, MOST_NODES), "max_rank": (0, MOST_RANK), "max_depth": (1, MOST_DEPTH)}
        for option, (least, most) in limits.items():
            value = getattr(self, option)
            if value is not None and not least <= value <= most:
                said = f"at least {least}" if value < least else f"at most {most}"
                raise InvalidInput(f"`{option}` must be {said}, but got {value}.")
        if self.shape not in GROWN:
            raise InvalidInput(f"`shape` must be {' or '.join(GROWN)}, but got {self.shape!r}.")

    def depth(self, num_heads: int) -> int:
        """Depth of the deepest node that a drafter with so many heads allows.

        >>> Limits(max_depth=3).depth(5), Limits().depth(5)
        (3, 5)
        """
        return min(self.max_depth or MOST_DEPTH, num_heads)

    @property
    def num_ranks(self) -> int:
        """How many ranks a node can have: a chain has rank 0 alone."""
        return 1 if self.shape == "chain" else self.max_rank + 1
