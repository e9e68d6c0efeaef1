"""Shapes of trees that serving engines can take, from the freest to the strictest.

any               every tree
sibling-closed    a node's children have the ranks 0...c-1: the engine keeps how many there are, not which
low-rank-expands  sibling-closed, and the children that have children themselves have the lowest ranks
chain             one child each, of rank 0: the engine keeps a length

Each contains the next one. Trees are grown sibling-closed, or as chains.
"""

from collections.abc import Callable
from dataclasses import dataclass

from treeopt.files.options import Options, option
from treeopt.trees.tree import MAX_RANK, MOST_DEPTH, MOST_NODES, MOST_RANK, Tree


def sibling_closed(tree: Tree) -> bool:
    """Whether the children of every node have the ranks 0...c-1.

    >>> sibling_closed(Tree.dense([2, 1])), sibling_closed(Tree.from_choices([[0], [2]]))
    (True, False)
    """
    paths = set(tree.paths)
    return all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths for path in tree.paths[1:])


def low_rank_expands(tree: Tree) -> bool:
    """Whether the tree is sibling-closed, and a node has children only where its next likelier sibling has some too.

    >>> low_rank_expands(Tree.from_choices([[0], [1], [1, 0]]))
    False
    """
    expanding = {path[:-1] for path in tree.paths[1:]}
    likelier = [(*path[:-1], path[-1] - 1) for path in expanding if path and path[-1] > 0]
    return sibling_closed(tree) and expanding.issuperset(likelier)


SHAPES: dict[str, Callable[[Tree], bool]] = {
    "any": lambda tree: True,
    "sibling-closed": sibling_closed,
    "low-rank-expands": low_rank_expands,
    "chain": lambda tree: tree.kind in ("plain", "chain"),
}
GROWN = ("sibling-closed", "chain")


@dataclass(frozen=True)
class Limits(Options):
    """Limits of trees.

    >>> Limits(budget=64, max_depth=0)
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: max_depth must be at least 1, but got 0.
    """

    budget: int = option("most rows verified per sequence and step, the root included", 64, least=1, most=MOST_NODES)
    max_depth: int | None = option("depth of the deepest node; None for the number of heads", least=1, most=MOST_DEPTH)
    max_rank: int = option("largest rank of a node", MAX_RANK, least=0, most=MOST_RANK)
    shape: str = option("shape of trees", "sibling-closed", choices=GROWN)

    def depth(self, num_heads: int) -> int:
        """Depth of the deepest node with a drafter of so many heads.

        >>> Limits(max_depth=3).depth(5), Limits().depth(5)
        (3, 5)
        """
        return min(self.max_depth or MOST_DEPTH, num_heads)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that a node can have. A chain has rank 0 alone."""
        return 1 if self.shape == "chain" else self.max_rank + 1
