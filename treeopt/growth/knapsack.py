"""The best tree of every size within a shape, exactly, where nodes have values that only add up.

A shape makes nodes depend on others: a node of rank 2 needs its siblings of rank 0 and 1, even unlikely ones, and
the best trees of two sizes need not be nested. They are found by a knapsack over the subtrees, in which
a node's children are a row of which the first few are taken, as Sequoia's dynamic program has it.

value   of a node, at least 0; a node's children are together worth no more than it is
bar     the least value of as many nodes as the largest tree has, nested and of the shape

best(p, n)  value of the best n nodes at and below p, p among them
N nodes looked at · n sizes, of trees up to ``budget`` nodes

Only nodes that can be in a best tree are looked at (`_candidates`). Nodes that a tree can do without all at once
must be worth the bar each on average, since otherwise as many of the nested ones, each worth the bar, would be
better in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeopt.trees.tree import Choice, TreeFamily

Values = Callable[[Choice], list[float]]  # of a path the values of its children of rank 0, 1, ...
Floats = NDArray[np.float64]
IMPOSSIBLE = -np.inf
ROUNDING = 1e-9  # of the root's value: sums that differ by less are the same in another order


@dataclass
class Node:
    """A node that may be in a best tree, and those of its children that may."""

    path: Choice
    value: float
    children: list[Node] = field(default_factory=list)
    best: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # best[n] of n nodes; best[0] unused
    # Of every rank: nodes taken at it to make the best row of n nodes from there on; 0 ends the row.
    taken: list[NDArray[np.int64]] = field(default_factory=list)
    leaves: list[NDArray[np.bool_]] = field(default_factory=list)  # whether that row has leaves only


def best_trees(values: Values, greedy: TreeFamily, *, low_rank_expands: bool) -> TreeFamily:
    """The best tree of every size 1...len(greedy) that is sibling-closed, or also `low-rank-expands`.

    values : asked of a node after its parent; together no more than the node's own
    greedy : nested trees of the same shape, with the nodes' values as gains

    Time O(N x budget) in vector operations of length ``budget``.

    >>> values = {(): [0.3, 0.2], (0,): [0.05, 0.29]}
    >>> greedy = TreeFamily(((), (0,), (1,), (0, 0)), np.array([1.0, 0.3, 0.2, 0.05]))
    >>> found = best_trees(lambda path: values.get(path, []), greedy, low_rank_expands=False)
    >>> [found.tree(size).choices for size in (3, 4)]
    [[[0], [1]], [[0], [0, 0], [0, 1]]]
    """
    top = _candidates(values, greedy, low_rank_expands)
    _fill(top, len(greedy), low_rank_expands)
    trees = [{node.path: node.value for node in _nodes(top, n)} for n in range(1, len(greedy) + 1)]
    gains = {path: value for tree in trees for path, value in tree.items()}
    members = np.array([[path in tree for path in gains] for tree in trees])
    return TreeFamily(tuple(gains), np.array(list(gains.values())), members)


def _candidates(values: Values, greedy: TreeFamily, low_rank_expands: bool) -> Node:
    """The nodes that a best tree can have, and the nested ones.

    What is below a node, or a row's end with what is below it, can be done without. The most that it can be worth
    above the bar is counted on the way up; where it is below zero it is in no best tree. Low ranks that expand
    only because a later sibling does cannot be done without, so these are added.
    """
    bar = float(greedy.gains.min())
    top = Node((), float(greedy.gains[0]))
    near = ROUNDING * top.value
    nested: dict[Choice, int] = {}  # of a path the last rank that the nested trees have below it
    for path in greedy.paths[1:]:
        nested[path[:-1]] = max(nested.get(path[:-1], 0), path[-1])

    def expand(node: Node) -> float:
        """Give the node its children; the most that they and what is below them can be worth above the bar."""
        sums, total = [], 0.0
        for rank, value in enumerate(values(node.path)):
            child = Node((*node.path, rank), value)
            node.children.append(child)
            total += value - bar + below(child)
            sums.append(total)
        most = max(sums, default=IMPOSSIBLE)
        ends = [rank for rank, reached in enumerate(sums) if reached >= most - near]
        del node.children[1 + max([*ends, nested.get(node.path, -1)]) :]
        return most

    def below(node: Node) -> float:
        """Most that what is below a node can be worth above the bar; the node loses its children where it had better."""
        most, needed = 0.0, node.path in nested
        if needed or node.value >= bar - near:
            most = expand(node)
            if most < -near and not needed:
                node.children = []
        return max(most, 0.0) if node.children else 0.0

    expand(top)
    if low_rank_expands:
        waiting = [top]
        while waiting:
            siblings = waiting.pop().children
            last = max((rank for rank, child in enumerate(siblings) if child.children), default=0)
            for child in siblings[:last]:
                if not child.children:
                    expand(child)
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
                more = max(len(leaves) - len(row), 0)  # room for as many nodes
                row = np.append(row, np.full(more, IMPOSSIBLE))
                taken = np.append(taken, np.zeros(more, dtype=np.int64))
                only = leaves > row[: len(leaves)]
                row[: len(leaves)][only], taken[: len(leaves)][only] = leaves[only], 1
                node.leaves.append(np.append(only, np.zeros(len(row) - len(only), dtype=bool)))
            node.taken.append(taken)
        node.taken.reverse()
        node.leaves.reverse()
        node.best = np.append(IMPOSSIBLE, node.value + row)[: budget + 1]


def _joined(own: Floats, rest: Floats, budget: int) -> tuple[Floats, NDArray[np.int64]]:
    """Best value of n nodes, some of a child's and some of the row behind it, and how many are the child's; 0 ends the row."""
    n = min(len(own) - 1 + len(rest) - 1, budget)
    found, taken = np.full(n + 1, IMPOSSIBLE), np.zeros(n + 1, dtype=np.int64)
    found[0] = 0.0
    for k in range(1, min(len(own) - 1, n) + 1):
        there = own[k] + rest[: n - k + 1]
        better = there > found[k : k + len(there)]
        found[k : k + len(there)][better], taken[k : k + len(there)][better] = there[better], k
    return found, taken


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
