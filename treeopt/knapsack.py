"""The best tree of every size within a shape, exactly, where nodes have values that only add up.

A node's value never exceeds its parent's, so without a shape the most valuable nodes are the best tree.
A shape ties nodes to others: a node of rank 2 needs its siblings of rank 0 and 1, likely or not, and
the best trees of two sizes need not be nested. They are found by a knapsack over the subtrees, in which
a node's children are a row of which the first few are taken, as Sequoia's dynamic program has it.

Only nodes that can be in a best tree are looked at (`_candidates`): where values fall with rank a few more than
the largest size, where they rise many more, since every likely node then needs its unlikely siblings.

best(p, n)  value of the best n nodes at and below p, p among them
N nodes looked at · n sizes, of trees up to ``budget`` nodes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeopt.tree import Choice, Tree, TreeFamily

Values = Callable[[Choice], list[float]]  # of a path the values of its children of rank 0, 1, ...
IMPOSSIBLE = -np.inf


@dataclass
class Node:
    """A node that may be in a best tree, and those of its children that may."""

    path: Choice
    value: float
    children: list[Node] = field(default_factory=list)
    best: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros(0)
    )  # best[n] of n nodes; best[0] unused
    # Of every rank: nodes taken at it to make the best row of n nodes from there on; 0 ends the row.
    taken: list[NDArray[np.int64]] = field(default_factory=list)
    leaves: list[NDArray[np.bool_]] = field(default_factory=list)  # whether that row has leaves only


def best_trees(values: Values, greedy: TreeFamily, *, low_rank_expands: bool) -> TreeFamily:
    """The best tree of every size 1...len(greedy) that is sibling-closed, or also `low-rank-expands`.

    values : asked of a node after its parent; none is more than the node's own
    greedy : nested trees of the same shape with the values as gains; no best node is worth less than all of theirs

    Time O(N x budget) in vector operations of length ``budget``.

    >>> values = {(): [0.3, 0.2], (0,): [0.05, 0.29]}
    >>> greedy = TreeFamily(((), (0,), (1,), (0, 0)), np.array([1.0, 0.3, 0.2, 0.05]))
    >>> found = best_trees(lambda path: values.get(path, []), greedy, low_rank_expands=False)
    >>> [found.tree(size).choices for size in (3, 4)]
    [[[0], [1]], [[0], [0, 0], [0, 1]]]
    """
    top = _candidates(values, greedy, low_rank_expands)
    _fill(top, len(greedy), low_rank_expands)
    return family_of([{node.path: node.value for node in _nodes(top, n)} for n in range(1, len(greedy) + 1)])


def uniform_trees(values: Values, root: float, budget: int) -> TreeFamily:
    """The best `level-uniform` tree within every size up to ``budget``: all widths are tried.

    values : asked of a node after its parent; ``root`` that of the root itself

    >>> table = {(): [0.6, 0.3], (0,): [0.4], (1,): [0.1]}
    >>> found = uniform_trees(lambda path: table.get(path, []), 1.0, 5)
    >>> [tree.choices for tree in map(found.tree, found.sizes)]
    [[], [[0]], [[0], [0, 0]], [[0], [1], [0, 0], [1, 0]]]
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {1: (root, ())}  # size: worth, widths

    def widen(widths: tuple[int, ...], level: list[Choice], size: int, worth: float) -> None:
        rows = [values(path) for path in level]
        if not rows[0]:
            return
        for width, more in enumerate(np.cumsum(np.sum(rows, axis=0)).tolist(), 1):
            larger, deeper = size + width * len(level), (*widths, width)
            if larger > budget:
                return
            if worth + more > best.get(larger, (IMPOSSIBLE,))[0]:
                best[larger] = worth + more, deeper
            if larger + width * len(level) <= budget:
                widen(
                    deeper, [(*path, rank) for path in level for rank in range(width)], larger, worth + more
                )

    widen((), [()], 1, root)
    chosen, most = [], IMPOSSIBLE
    for size in sorted(best):
        worth, widths = best[size]
        if worth > most:
            most = worth
            paths = Tree.dense(widths).paths
            chosen.append({path: values(path[:-1])[path[-1]] if path else root for path in paths})
    return family_of(chosen)


def family_of(trees: Sequence[Mapping[Choice, float]]) -> TreeFamily:
    """A family of trees given by their nodes' values, the smallest first, parents first."""
    gains = {path: value for tree in trees for path, value in tree.items()}
    members = np.array([[path in tree for path in gains] for tree in trees])
    return TreeFamily(tuple(gains), np.array(list(gains.values())), members)


def _candidates(values: Values, greedy: TreeFamily, low_rank_expands: bool) -> Node:
    """The nodes that a best tree can have.

    A best tree that lacks a greedy node could take the first such one instead of any node that it can do
    without; so it has no node to do without that is worth less than every greedy one. The others are
    those that such nodes need: likelier-ranked siblings, and the first children that make these expand.
    """
    known, least = set(greedy.paths), float(greedy.gains.min())
    top = Node((), float(greedy.gains[0]))
    waiting = [top]
    while waiting:
        node = waiting.pop()
        row = values(node.path)
        good = [value > least or (*node.path, rank) in known for rank, value in enumerate(row)]
        last = max((rank for rank, one in enumerate(good) if one), default=-1)
        node.children = [Node((*node.path, rank), row[rank]) for rank in range(last + 1)]
        waiting += [child for child, one in zip(node.children, good, strict=False) if one]
    if low_rank_expands:
        waiting = [top]
        while waiting:
            siblings = waiting.pop().children
            last = max((rank for rank, child in enumerate(siblings) if child.children), default=0)
            for child in siblings[:last]:
                if not child.children:
                    child.children = [Node((*child.path, 0), values(child.path)[0])]
            waiting += siblings
    return top


def _fill(top: Node, budget: int, low_rank_expands: bool) -> None:
    """Work out ``best`` and ``taken`` of every node, children first."""
    order, waiting = [], [top]
    while waiting:
        order.append(node := waiting.pop())
        waiting += node.children
    for node in reversed(order):
        row = np.zeros(1)  # row[n]: best of n nodes at and below the children from this rank on; none left
        leaves = np.zeros(1)  # the same of leaves only
        node.taken, node.leaves = [], []
        for child in reversed(node.children):
            own = child.best.copy()
            if low_rank_expands:
                own[1] = IMPOSSIBLE  # a leaf makes all that follow leaves: below
            row, taken = _joined(own, row, budget)
            if low_rank_expands:
                leaves = np.append(0.0, child.value + leaves)[: budget + 1]
                row, taken = _longest(row, taken, len(leaves))
                only = leaves > row[: len(leaves)]
                row[: len(leaves)][only], taken[: len(leaves)][only] = leaves[only], 1
                node.leaves.append(np.append(only, np.zeros(len(row) - len(only), dtype=bool)))
            node.taken.append(taken)
        node.taken.reverse()
        node.leaves.reverse()
        node.best = np.append(IMPOSSIBLE, node.value + row)[: budget + 1]


def _joined(
    own: NDArray[np.float64], rest: NDArray[np.float64], budget: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Best of n nodes of a child's and of the row behind it, and how many are the child's; 0 ends the row."""
    n = min(len(own) - 1 + len(rest) - 1, budget)
    found, taken = np.full(n + 1, IMPOSSIBLE), np.zeros(n + 1, dtype=np.int64)
    found[0] = 0.0
    for k in range(1, min(len(own) - 1, n) + 1):
        there = own[k] + rest[: n - k + 1]
        better = there > found[k : k + len(there)]
        found[k : k + len(there)][better], taken[k : k + len(there)][better] = there[better], k
    return found, taken


def _longest(
    row: NDArray[np.float64], taken: NDArray[np.int64], n: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The same with room for at least n entries."""
    more = max(n - len(row), 0)
    return np.append(row, np.full(more, IMPOSSIBLE)), np.append(taken, np.zeros(more, dtype=np.int64))


def _nodes(top: Node, size: int) -> Iterator[Node]:
    """The nodes of the best tree of ``size``, parents and siblings of lower rank first."""
    waiting = [(top, size)]
    while waiting:
        node, n = waiting.pop()
        yield node
        row, left = [], n - 1
        for rank, child in enumerate(node.children):
            if left and node.leaves and node.leaves[rank][left]:
                row += [(leaf, 1) for leaf in node.children[rank : rank + left]]
                left = 0
            if not left:
                break
            row.append((child, int(node.taken[rank][left])))
            left -= row[-1][1]
        waiting += reversed(row)
