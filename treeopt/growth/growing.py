"""Trees grown node by node at the states that decoding with them visits, several families of one trace together.

Families that are grown on most of the same answers have the same trees for a long while, and these are decoded once.

N nodes of a tree · F parts of the answers · R ranks told apart
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.shrinkage import PathCounts, mixed
from treeopt.growth.walk import Decoded, Walk
from treeopt.growth.worth import expands_after, frequencies
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, IntArray, TreeFamily

SAVINGS = 0.1  # strength for the mean saving of a node, as a share of that for its children


@dataclass
class Growing:
    """A family while it grows.

    known    : chances of ranks after paths, on the answers that it is grown on
    left_out : the part of the answers that it is not grown on; None for none
    paths    : its nodes; parents, above, index : of each its parent, its children's chances, and of a path which it is
    steps    : what decoding takes on the answers that it is grown on, by size
    """

    known: PathCounts
    limits: Limits
    left_out: int | None = None
    paths: list[Choice] = field(default_factory=lambda: [()])
    parents: list[int] = field(default_factory=lambda: [0])
    index: dict[Choice, int] = field(default_factory=lambda: {(): 0})
    above: list[NDArray[np.float64]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.above.append(self.known.chances(()))
        self.joint, _ = frequencies(self.known).best_first(self.limits.budget, self.limits.shape)

    def seen(self, counts: IntArray) -> IntArray:
        """The sum over the parts that it is grown on."""
        found: IntArray = counts.sum(0) - (0 if self.left_out is None else counts[self.left_out])
        return found

    def next_path(self, decoded: Decoded) -> Choice:
        """The node that saves the most steps; where nothing would be saved, what `grow_joint` would add."""
        counts, saving = _ends(self, decoded)
        saved = _saved(counts, saving, self.paths, self.parents, np.array(self.above), self.known.strengths.path)
        saved[~_addable(self.index, self.parents, self.known.top, self.limits.shape)] = -1.0
        if saved.max() <= 0:
            return next(p for p in self.joint if p not in self.index)
        parent, rank = divmod(int(saved.argmax()), self.known.top)
        return *self.paths[parent], rank

    def add(self, path: Choice) -> None:
        self.known.open(path[:-1], path[-1])
        self.parents.append(self.index[path[:-1]])
        self.index[path] = len(self.paths)
        self.paths.append(path)
        behind = len(path) < self.known.depth
        self.above.append(self.known.chances(path) if behind else np.zeros(self.known.top))

    def family(self, tokens: int) -> TreeFamily:
        """Its trees, by the tokens of the answers that it was grown on."""
        curve = tokens / np.maximum(self.steps, 1)
        return TreeFamily(tuple(self.paths), np.diff(curve, prepend=0.0))


def grow_together(walk: Walk, growing: list[Growing]) -> Iterator[list[Decoded]]:
    """Grow families of as many nodes each; for every size what decoding with the tree of each visits."""
    decoded = [walk.alone()] * len(growing)
    while True:
        for one, now in zip(growing, decoded, strict=True):
            one.steps.append(int(one.seen(now.counts).sum()))
        yield decoded
        if len(growing[0].paths) == len(growing[0].joint):
            return
        wanted: dict[frozenset[Choice], tuple[Decoded, Choice]] = {}
        for one, now in zip(growing, decoded, strict=True):
            one.add(path := one.next_path(now))
            wanted.setdefault(frozenset(one.paths), (now, path))
        found = dict(zip(wanted, walk.added(list(wanted.values())), strict=True))
        decoded = [found[frozenset(one.paths)] for one in growing]


def _ends(one: Growing, decoded: Decoded) -> tuple[IntArray, NDArray[np.float64]]:
    """(N, R+2) how many visited states end at each node by the rank they wanted, and
    (N,) what one more accepted guess saves at them on average [steps].

    One more guess at state t, where a were accepted, saves to_go[t+1+a] - to_go[t+2+a]. Of the mean over all nodes so many
    states are mixed into that of each.
    """
    order, top = [decoded.nodes[path] for path in one.paths], one.known.top
    strength = SAVINGS * one.known.strengths.path
    counts, saved = one.seen(decoded.counts)[order], one.seen(decoded.saved)[order]
    tried, total = counts[:, : top + 1].sum(1), saved[:, : top + 1].sum(1)
    mean = total.sum() / max(tried.sum(), 1)
    return counts, (total + strength * mean) / np.maximum(tried + strength, 1e-9)


def _addable(index: dict[Choice, int], parents: list[int], top: int, shape: str) -> NDArray[np.bool_]:
    """(nodes, R) which children may be added next: those that are not there yet and keep the shape.

    index : of every path which node it is, in order
    """
    found = np.ones((len(index), top), dtype=bool)
    for (path, _), parent in zip(list(index.items())[1:], parents[1:], strict=True):
        found[parent, path[-1]] = False
    if shape != "any":
        next_rank = np.bincount(parents[1:], minlength=len(index))
        found &= np.arange(top) == next_rank[:, None]
    for path, node in index.items() if shape == "low-rank-expands" else ():
        before = expands_after(path, shape)
        found[node] &= before is None or before in index
    return found


def _saved(
    counts: IntArray,
    saving: NDArray[np.float64],
    paths: list[Choice],
    parents: list[int],
    above: NDArray[np.float64],
    strength: float,
) -> NDArray[np.float64]:
    """(N, R) steps that each child of each node would save at the states now visited.

    counts, saving : of `_ends` · above : (N, R) chances of the children over all states, mixed in as ``strength`` states
    """
    top = above.shape[1]
    reached = counts.sum(1)  # visited states at which each node is accepted, its descendants' too
    for node in range(len(paths) - 1, 0, -1):
        counts[parents[node], paths[node][-1]] = reached[node]
        reached[parents[node]] += reached[node]
    tried = counts[:, : top + 1].sum(1)
    chances = mixed(np.column_stack([counts[:, :top], tried]), strength, above)
    share = np.where(reached > 0, tried / np.maximum(reached, 1), 1.0)
    expected = np.zeros(len(paths))  # the same as reached, by the mixed chances
    expected[0] = reached[0]
    for node in range(1, len(paths)):
        parent = parents[node]
        expected[node] = expected[parent] * share[parent] * chances[parent, paths[node][-1]]
    found: NDArray[np.float64] = (expected * share * saving)[:, None] * chances
    return found
