"""Grow the trees that reach most under a rule that accepts several siblings, from a probe.

A tree's tokens per step are a coverage (`probed`), to which each node adds less the more of the tree is there (the
sum is monotone and submodular), so a tree is grown by marginal gain. A node may gain nothing until its children are
in, hence the growth looks ahead: at whole paths, by gain per node.

P steps · T nodes of the probe tree
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.objectives import grow_independent
from treeopt.growth.probed import useful
from treeopt.records.calibration import Calibration
from treeopt.records.probe import Probe
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MAX_RANK, BoolArray, Choice, Tree, TreeFamily

COVERAGE = "coverage"  # the objective that a plan names
SHAPES = ("any", "sibling-closed", "chain")
_ONES = np.array([i.bit_count() for i in range(2**16)], dtype=np.uint8)  # bits that are set in 16 of them


def probe_tree(
    calibration: Calibration, *, size: int = 256, max_rank: int = MAX_RANK, policy: Tree | None = None
) -> Tree:
    """A tree of ``size`` nodes to probe, from ranks counted on given or greedy answers; besides those of ``policy``.

    Grown by products of marginals, as if a guess of rank r passed wherever the truth has rank r or a later one:
    a likelier guess than the truth is likely enough itself. That is wider and deeper than the trees for the truth.

    >>> calibration = Calibration(np.array([[0, 9], [0, 8]]), np.array([10, 10]))  # the truth is never first
    >>> probe_tree(calibration, size=4).choices
    [[0], [1], [0, 0]]
    """
    or_later = np.cumsum(calibration.accept[:, ::-1], axis=1)[:, ::-1]
    grown = grow_independent(or_later, Limits(size, max_rank=max_rank))
    nodes = set(grown.paths) | set(policy.paths if policy else ())
    return Tree.from_choices(nodes - {()})


def grow_coverage(probe: Probe, limits: Limits) -> TreeFamily:
    """Nested trees within the probe tree, grown by `coverage` with look-ahead.

    Of all nodes that are not in, the next is the one whose path, with what the shape needs besides, gains most per
    node and still fits; all of it is added. Where nothing gains any more, the nodes that were accepted most often
    follow. Greedy growth of a submodular gain is not always best (a test bounds its loss against brute force).
    Time O(budget x T x P / 16) at most, in table look-ups.
    """
    if limits.shape not in SHAPES:
        raise InvalidInput(
            f"Trees from a probe can have --shape {', '.join(SHAPES)}, but not {limits.shape}: use "
            "sibling-closed, and an engine that takes it."
        )
    if not len(probe.accepted):
        raise OutOfRange("Growing needs answers of more than one token, but the probe has none.")
    growth = _Growth(probe, _allowed(probe.tree, limits), closed=limits.shape != "any")
    while len(growth.nodes) < limits.budget and growth.grow(limits.budget - len(growth.nodes)):
        pass
    paths = tuple(probe.tree.paths[node] for node in growth.nodes)
    return TreeFamily(paths, np.array(growth.gains) / len(probe.accepted))


class _Growth:
    """A tree that grows. ``left[v]`` are the steps at which node v would be the first accepted one of its depth."""

    def __init__(self, probe: Probe, allowed: BoolArray, *, closed: bool) -> None:
        self.tree = tree = probe.tree
        bits = np.packbits(useful(probe).T, axis=1)
        self.left = np.zeros((len(tree), -(-bits.shape[1] // 2) * 2), dtype=np.uint8)  # whole words of 16 bits
        self.left[:, : bits.shape[1]] = bits
        self.left = self.left.view(np.uint16)  # (T, words)
        self.often = probe.accepted.sum(0)
        self.inside = ~allowed
        self.inside[0] = True
        self.allowed = allowed
        # The sibling that must be in before a node: of the rank before, where the shape asks for it.
        index = {path: i for i, path in enumerate(tree.paths)}
        self.before = np.array(
            [
                index[(*path[:-1], path[-1] - 1)] if closed and path and path[-1] > 0 and allowed[i] else 0
                for i, path in enumerate(tree.paths)
            ]
        )
        # Counted again only where a depth has changed: gain and nodes of the siblings missing up to a node.
        self.gain, self.cost = np.zeros((2, len(tree)), dtype=np.int64)
        for depth in range(1, tree.depth + 1):
            self._count(depth)
        self.nodes, self.gains = [0], [len(probe.accepted)]

    def _count(self, depth: int) -> None:
        """Gain and cost of every node of a depth, with its missing siblings of lower rank."""
        at = self.tree.depths == depth
        together: dict[int, NDArray[np.uint16]] = {}
        for node in np.flatnonzero(at & ~self.inside).tolist():
            before = int(self.before[node])
            missing = not self.inside[before]
            together[node] = self.left[node] | together[before] if missing else self.left[node]
            self.cost[node] = 1 + (self.cost[before] if missing else 0)
        if together:
            self.gain[list(together)] = _ONES[np.stack(list(together.values()))].sum(1, dtype=np.int64)

    def grow(self, room: int) -> bool:
        """Add the best path of at most ``room`` nodes; False where there is none."""
        tree, gain, cost = self.tree, self.gain.copy(), self.cost.copy()
        for depth in range(2, tree.depth + 1):  # with the ancestors that are missing
            nodes = np.flatnonzero((tree.depths == depth) & ~self.inside[tree.parents])
            gain[nodes] += gain[tree.parents[nodes]]
            cost[nodes] += cost[tree.parents[nodes]]
        nodes = np.flatnonzero(~self.inside & (cost <= room))
        if not len(nodes):
            return False
        per_node = gain[nodes] / cost[nodes]
        best = int(nodes[np.lexsort((-self.often[nodes], cost[nodes], -per_node))[0]])
        changed = set()
        for node in self._path(best):
            depth = int(tree.depths[node])
            new = self.left[node].copy()
            self.left[tree.depths == depth] &= ~new
            self.inside[node] = True
            self.nodes.append(node)
            self.gains.append(int(_ONES[new].sum(dtype=np.int64)))
            changed.add(depth)
        for depth in changed:
            self._count(depth)
        return True

    def _path(self, node: int) -> list[int]:
        """What is missing for a node, itself last."""
        found: list[int] = []
        while not self.inside[node]:
            siblings = [node]
            while not self.inside[before := int(self.before[siblings[0]])]:
                siblings.insert(0, before)
            found = siblings + found
            node = int(self.tree.parents[node])
        return found


def _allowed(tree: Tree, limits: Limits) -> BoolArray:
    """(T,) nodes that a tree within these limits can have."""
    known: set[Choice] = {()}
    depth = limits.depth(tree.depth)
    for path in tree.paths[1:]:
        complete = limits.shape == "any" or path[-1] == 0 or (*path[:-1], path[-1] - 1) in known
        if path[:-1] in known and complete and path[-1] < limits.num_ranks and len(path) <= depth:
            known.add(path)
    return np.array([path in known for path in tree.paths])
