"""Grow the best trees of every size.

Decoding jumps over the easy states, so an average over all states is not what it emits. Trees have the most frequent rank
paths of the states that decoding visits. These depend on the tree, so growing and replaying take turns. In a tree of few
rows it also matters where a guess leads, so a second family begins with nodes chosen by replay. Every size takes the better
of the two trees by in-sample replay.

Siblings come in order of rank, so that trees have no gaps: most engines keep only how many children a node has.

P states · S sequences · N distinct paths · K heads · R ranks · G sets of sequences to grow on · M trees
"""

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.lanes import Lanes, as_bits, lanes_of, steps_of, visits_of
from treeopt.growth.paths import Paths
from treeopt.growth.replay import growth_index
from treeopt.records.calibration import count_hits
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import BoolArray, Choice, GrownTrees, IntArray, TreeFamily

DIGITS = 12  # of products of marginals
ROUNDS = 3  # of counting at the states that the last tree visits
SMALL = 8  # rows of the largest tree that is grown node by node
Nodes = frozenset[Choice]  # of a tree
Value = tuple[float, float]  # of a node, compared in this order; a child's never exceeds its parent's


def best_first(
    children: Callable[[Choice, Value], list[Value]], root: Value, budget: int
) -> list[tuple[Choice, float]]:
    """Up to ``budget`` nodes with the first part of their values; always the most valuable node comes next.

    children : values of the nodes (*path, 0), (*path, 1), ... by a path and its value

    Only the next sibling and the first child of a node of the tree wait, so n nodes cost O(n log n).
    """
    nodes: list[tuple[Choice, float]] = []
    siblings: dict[Choice, list[Value]] = {}
    waiting: list[tuple[float, float, int, Choice]] = [(-root[0], -root[1], 0, ())]

    def offer(parent: Choice, rank: int) -> None:
        if rank < len(siblings[parent]):
            first, second = siblings[parent][rank]
            heapq.heappush(waiting, (-first, -second, len(parent) + 1, (*parent, rank)))

    while waiting and len(nodes) < budget:
        first, second, _, path = heapq.heappop(waiting)
        nodes.append((path, -first))
        siblings[path] = children(path, (-first, -second))
        offer(path, 0)
        if path:
            offer(path[:-1], path[-1] + 1)
    return nodes


def grow_products(accept: NDArray[np.float64], limits: Limits) -> GrownTrees:
    """The trees with the most expected tokens per step by (K, R) marginals, as if heads erred independently.

    Products never rise along a path, so the trees of all sizes are optimal where accuracies fall with rank.

    >>> grow_products(np.array([[0.6, 0.2], [0.5, 0.1]]), Limits(4)).paths
    ((), (0,), (0, 0), (1,))
    """
    table = accept[: limits.max_depth, : limits.num_ranks].tolist()

    def children(path: Choice, value: Value) -> list[Value]:
        row = table[len(path)] if len(path) < len(table) else []
        return [(value[0] * share, 0.0) for share in row]

    paths, values = zip(*best_first(children, (1.0, 0.0), limits.budget), strict=True)
    return GrownTrees.nested(paths, np.array(values))


def most_frequent(paths: Paths, counts: IntArray, accept: NDArray[np.float64], limits: Limits) -> tuple[Choice, ...]:
    """The nodes with the most frequent paths, in this order. Equally frequent paths are ordered by the product of marginals.

    counts : (N,) number of states with each distinct path
    accept : (K, R) marginals
    """
    sums, depth = np.append(0, counts.cumsum()), limits.depth(len(accept))

    def children(path: Choice, value: Value) -> list[Value]:
        if len(path) == depth:
            return []
        frequencies = np.diff(sums[paths.children(path)])
        products = np.round(value[1] * accept[len(path)], DIGITS)  # equal ones may differ in the last bit
        return list(zip(frequencies.tolist(), products.tolist(), strict=True))

    return tuple(path for path, _ in best_first(children, (float(sums[-1]), 1.0), limits.budget))


@dataclass(frozen=True, eq=False)
class TraceGrowth:
    """Growth on sets of a trace's sequences. Depth limits share the paths and counts.

    top      : number of ranks; a guess of a later rank is a miss
    grown_on : (G, S) whether a set has a sequence
    """

    trace: RankTrace
    top: int
    grown_on: BoolArray

    def __post_init__(self) -> None:
        if not (self.grown_on & (self.trace.lengths > 1)).any(axis=1).all():
            raise OutOfRange(
                "Growing needs answers of more than one token, but the trace has none: calibrate on others."
            )

    @cached_property
    def paths(self) -> Paths:
        return Paths.of_ranks(self.trace.ranks, self.top)

    @cached_property
    def lanes(self) -> list[Lanes]:
        return lanes_of(self.trace, self.paths.of)

    @cached_property
    def marginals(self) -> list[NDArray[np.float64]]:
        """(K, R) accuracies of the heads on each set."""
        accuracies = []
        for sequences in self.grown_on:
            states = self.trace.has_step & np.repeat(sequences, self.trace.lengths)
            hits, trials = count_hits(self.trace.ranks[states], self.top)
            accuracies.append(np.asarray(hits / np.maximum(trials, 1)[:, None]))
        return accuracies

    @cached_property
    def counts(self) -> IntArray:
        """(G, N) number of states of each set with each path: a lone root visits all of them."""
        return self._visits([frozenset[Choice]([()])] * len(self.grown_on))

    @cached_property
    def _small_steps(self) -> dict[Nodes, IntArray]:
        """Small tree -> its (G,) steps on the sequences of each set, for trees that were replayed."""
        return {}

    def grow(self, limits: Limits) -> Iterator[tuple[GrownTrees, IntArray]]:
        """For each set the best trees on it, and the (n, S) steps of every sequence with each of them."""
        pairs = [*zip(self._from_small(limits), self._from_counts(limits), strict=True)]
        trees = list(dict.fromkeys(tree for paths in itertools.chain(*pairs) for tree in _nested(paths)))
        steps_of_tree = dict(zip(trees, self._replayed(trees), strict=True))
        for grown_on, pair in zip(self.grown_on, pairs, strict=True):
            rows = [steps_of_tree[tree] for paths in pair for tree in _nested(paths)]
            steps = np.reshape(rows, (len(pair), -1, len(grown_on)))  # (2, n, S)
            taken, tokens = steps @ grown_on, (self.trace.lengths - 1) @ grown_on
            gains, better = np.diff(tokens / taken, prepend=0.0), taken.argmin(axis=0)
            families = [TreeFamily(*family) for family in zip(pair, gains, strict=True)]
            yield GrownTrees(tuple(families[i] for i in better)), steps[better, np.arange(len(better))]

    def _from_counts(self, limits: Limits) -> list[tuple[Choice, ...]]:
        """For each set the most frequent paths of the states that the largest tree visits."""
        sets = range(len(self.grown_on))
        fewest, best = [math.inf] * len(sets), [tuple[Choice, ...]()] * len(sets)
        counts, last = self.counts, list[Nodes]()
        for _ in range(1 + ROUNDS):
            grown = [self._most_frequent(g, counts[g], limits) for g in sets]
            trees = [frozenset(paths) for paths in grown]
            if trees == last:
                break
            counts, last = self._visits(trees), trees
            for g, steps in enumerate(counts.sum(axis=1).tolist()):
                if steps < fewest[g]:
                    fewest[g], best[g] = steps, grown[g]
        return best

    def _from_small(self, limits: Limits) -> list[tuple[Choice, ...]]:
        """For each set `SMALL` nodes chosen by replay, then the most frequent paths of the states that these visit.

        Replay chooses one node after the other: the one with which decoding takes the fewest steps.
        """
        sets = range(len(self.grown_on))
        frequent = [self._most_frequent(g, self.counts[g], limits) for g in sets]
        grown: list[list[Choice]] = [[()] for _ in sets]
        while len(grown[0]) < min(SMALL, len(frequent[0])):
            following = [[path for path in frequent[g] if _may_follow(path, grown[g])] for g in sets]
            trees = [[frozenset([*grown[g], path]) for path in following[g]] for g in sets]
            new = [tree for tree in dict.fromkeys(itertools.chain(*trees)) if tree not in self._small_steps]
            self._small_steps.update(zip(new, self._replayed(new) @ self.grown_on.T, strict=True))
            for g in sets:
                steps = [int(self._small_steps[tree][g]) for tree in trees[g]]
                grown[g].append(following[g][int(np.argmin(steps))])
        counts = self._visits([frozenset(paths) for paths in grown])
        rest = [self._most_frequent(g, counts[g], limits) for g in sets]
        return [tuple(dict.fromkeys((*grown[g], *rest[g])))[: len(frequent[g])] for g in sets]

    def _most_frequent(self, g: int, counts: IntArray, limits: Limits) -> tuple[Choice, ...]:
        return most_frequent(self.paths, counts, self.marginals[g], limits)

    def _visits(self, trees: Sequence[Nodes]) -> IntArray:
        """(G, N) number of steps at states with each path, when the sequences of each set are decoded with the set's tree."""
        order, has = self._nodes(trees)
        starts = as_bits(self.grown_on.T)
        counts = np.zeros((len(trees), self.paths.ranks.shape[1]), dtype=np.int64)
        for lanes in self.lanes:
            visits = visits_of(lanes, order, as_bits(has), starts[lanes.sequences])
            for g, count in enumerate(counts):
                here = (visits & np.uint64(1 << g)) > 0
                count += np.bincount(lanes.paths[here], minlength=len(count))
        return counts

    def _replayed(self, trees: Sequence[Nodes]) -> IntArray:
        """(M, S) steps of every sequence with each tree."""
        return steps_of(self.trace, self.lanes, *self._nodes(trees))

    def _nodes(self, trees: Sequence[Nodes]) -> tuple[IntArray, BoolArray]:
        """(N, D) node of each prefix of every path, and (nodes + 1, M) whether a tree has a node; the last is no node."""
        nodes = sorted(frozenset[Choice]([()]).union(*trees), key=lambda path: (len(path), path))
        has = [[path in tree for tree in trees] for path in nodes] + [[False] * len(trees)]
        return growth_index(self.paths.ranks.T, tuple(nodes)), np.array(has)


def _nested(paths: Sequence[Choice]) -> list[Nodes]:
    """The trees of the first 1, 2, ... nodes."""
    return [frozenset(paths[:n]) for n in range(1, len(paths) + 1)]


def _may_follow(path: Choice, nodes: Collection[Choice]) -> bool:
    """Whether a node may come next: the tree has its parent and its siblings of lower rank."""
    return path not in nodes and path[:-1] in nodes and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in nodes)


def grow(trace: RankTrace, limits: Limits) -> GrownTrees:
    """The best trees of every size on the whole trace, in-sample; see `treeopt.growth.heldout`."""
    all_sequences = np.ones((1, trace.num_sequences), dtype=bool)
    ((grown, _),) = TraceGrowth(trace, min(limits.num_ranks, trace.top_k), all_sequences).grow(limits)
    return grown


def product_values(accept: NDArray[np.float64], paths: tuple[Choice, ...]) -> NDArray[np.float64]:
    """(N,) product of marginals along each path, 1 for the root.

    >>> product_values(np.array([[0.6, 0.2], [0.5, 0.1]]), ((), (0,), (0, 1))).round(3).tolist()
    [1.0, 0.6, 0.06]
    """
    return np.array([np.prod([accept[d, rank] for d, rank in enumerate(p)]) for p in paths])
