"""Shapes of trees that serving engines can take, from the freest to the strictest.

any               every tree
sibling-closed    a node's children have the ranks 0...c-1: the engine keeps how many there are, not which
low-rank-expands  the same, and of a node's children those with children of their own have the lowest ranks
chain             one child each, of rank 0: the engine keeps a length

Each contains the next one. A shape is a set of trees; `growth` and `knapsack` find the best in it.
"""

from __future__ import annotations

from collections.abc import Callable

from treeopt.errors import InvalidInput
from treeopt.trees.tree import Tree


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


def chain(tree: Tree) -> bool:
    """Whether it is a chain of the likeliest guesses, or the lone root.

    >>> chain(Tree.chain(3)), chain(Tree.from_choices([[0], [1]]))
    (True, False)
    """
    return len(tree) == tree.depth + 1 and bool((tree.ranks[1:] == 0).all())


SHAPES: dict[str, Callable[[Tree], bool]] = {
    "any": lambda tree: True,
    "sibling-closed": sibling_closed,
    "low-rank-expands": low_rank_expands,
    "chain": chain,
}


def check_shape(name: str) -> None:
    """Raise InvalidInput for a name that is not one of `SHAPES`."""
    if name not in SHAPES:
        raise InvalidInput(f"--shape must be one of {', '.join(SHAPES)}, but got {name!r}.")
