"""Grow nested families of speculation trees, the best of every size first.

independent   gain of a node = product of the marginal accuracies along its path (Medusa, section 2.3.3)
joint         gain of a node = share of all states whose ranks begin with its path; the N most frequent
              prefixes are the best N-node tree, since events of distinct paths are nested or disjoint
replay        gain of a node = tokens per step it adds at the states that decoding with the current
              tree really visits (Hydra, section 4); decoding jumps over the easy runs

With ``gap_free`` a node's children have ranks 0...c-1 without a gap, which several engines need; ranks
are nearly always in order, and where they are not it is noise more often than not.

accept : (K, R)  P(head k has the true token at rank r)
ranks  : (P, K)  rank of the true token at every state
budget           most nodes, root included
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.errors import InvalidInput
from treeopt.trace import RankTrace
from treeopt.tree import Choice, IntArray, TreeFamily

MAX_RANK = 9  # Medusa, Hydra, EAGLE and Neuron look at ten candidates per head

TRIED = 4  # children that replay growth decodes with before it takes the best

Value = tuple[float, float]  # compared in this order; a child's value never exceeds its parent's
Children = Callable[[Choice, Value], Iterator[tuple[Value, int]]]


def grow_independent(
    accept: NDArray[np.float64],
    *,
    budget: int,
    max_depth: int | None = None,
    max_rank: int = MAX_RANK,
    gap_free: bool = False,
) -> TreeFamily:
    """The trees that maximise expected tokens per step if heads erred independently.

    The product never rises along a path, so taking the largest products one by one is optimal for
    every size; accuracies need not fall with rank.

    >>> grow_independent(np.array([[0.6, 0.2], [0.5, 0.1]]), budget=4).paths
    ((), (0,), (0, 0), (1,))
    """
    accept = accept[:max_depth, : max_rank + 1]
    best = np.argsort(-accept, axis=1, kind="stable")
    order = (np.indices(accept.shape)[1] if gap_free else best).tolist()
    table = accept.tolist()

    def children(path: Choice, value: Value) -> Iterator[tuple[Value, int]]:
        depth = len(path)
        if depth < len(table):
            for rank in order[depth]:
                yield (value[0] * table[depth][rank], 0.0), rank

    paths, values = _best_first(children, (1.0, 0.0), budget)
    return TreeFamily(paths, np.array([value for value, _ in values]))


def grow_joint(
    trace: RankTrace,
    *,
    budget: int,
    max_depth: int | None = None,
    max_rank: int = MAX_RANK,
    gap_free: bool = False,
) -> TreeFamily:
    """The trees that maximise tokens of a step averaged over all states of the trace, exactly.

    Paths that are equally frequent (never seen, for one) go by the product of marginals.
    Time O(P x K + budget x ranks).
    """
    ranks = trace.ranks[trace.has_step][:, :max_depth]
    top = min(max_rank + 1, trace.top_k)
    accept = Calibration.from_trace(trace).accept[:max_depth, :top]
    states: dict[Choice, NDArray[np.int16]] = {(): ranks}

    def children(path: Choice, value: Value) -> Iterator[tuple[Value, int]]:
        here, depth = states.pop(path), len(path)
        if depth == ranks.shape[1]:
            return
        column = here[:, depth]
        counts = np.bincount(column[(column >= 0) & (column < top)], minlength=top)
        products = value[1] * accept[depth]
        for rank in range(top) if gap_free else np.lexsort((-products, -counts)).tolist():
            states[(*path, rank)] = here[column == rank]
            yield (int(counts[rank]), float(products[rank])), rank

    paths, values = _best_first(children, (len(ranks), 1.0), budget)
    return TreeFamily(paths, np.array([count for count, _ in values]) / len(ranks))


def grow_replay(
    trace: RankTrace,
    *,
    budget: int,
    max_depth: int | None = None,
    max_rank: int = MAX_RANK,
    gap_free: bool = False,
) -> TreeFamily:
    """Trees grown node by node, each saving the most steps at the states visited with the tree so far.

    A new node changes only the states whose accepted path ended at its parent, so only sequences
    with one of them are decoded again. Where no visited state would gain, nodes are added in the
    order of `grow_joint`. Nested by construction; the best trees of every size are not nested in
    general, so this is a heuristic (a test bounds its loss against brute force).
    """
    joint = grow_joint(trace, budget=budget, max_depth=max_depth, max_rank=max_rank, gap_free=gap_free)
    walk = _Walk(trace, max_depth or trace.num_heads, min(max_rank + 1, trace.top_k))
    paths: list[Choice] = [()]
    index: dict[Choice, int] = {(): 0}
    children = np.zeros(len(joint), dtype=np.int64)  # of every node so far
    tokens, steps = int((trace.lengths - 1).sum()), [walk.steps()]
    while len(paths) < len(joint):
        parent, rank = walk.best_child(children if gap_free else None, len(paths))
        path = (*paths[parent], rank)
        if rank < 0:
            path = next(p for p in joint.paths if p not in index)
            parent, rank = index[path[:-1]], path[-1]
        index[path] = len(paths)
        children[parent] += 1
        walk.add(parent, rank, len(paths))
        paths.append(path)
        steps.append(walk.steps())
    curve = tokens / np.maximum(steps, 1)
    return TreeFamily(tuple(paths), np.diff(curve, prepend=0.0))


OBJECTIVES: dict[str, Callable[..., TreeFamily]] = {
    "independent": lambda trace, **limits: grow_independent(Calibration.from_trace(trace).accept, **limits),
    "joint": grow_joint,
    "replay": grow_replay,
}


def grow(trace: RankTrace, *, objective: str, **limits: Any) -> TreeFamily:
    """The family of one of `OBJECTIVES` on the whole trace (in-sample; see `planner.crossfit`)."""
    check_objective(objective)
    return OBJECTIVES[objective](trace, **limits)


def check_objective(objective: str) -> None:
    """Raise InvalidInput for a name that is not one of `OBJECTIVES`."""
    if objective not in OBJECTIVES:
        raise InvalidInput(f"--objective must be one of {', '.join(OBJECTIVES)}, but got {objective!r}.")


def product_values(accept: NDArray[np.float64], paths: tuple[Choice, ...]) -> NDArray[np.float64]:
    """(N,) product of marginals along each path, 1 for the root.

    >>> product_values(np.array([[0.6, 0.2], [0.5, 0.1]]), ((), (0,), (0, 1))).round(3).tolist()
    [1.0, 0.6, 0.06]
    """
    return np.array([np.prod([accept[d, rank] for d, rank in enumerate(p)]) for p in paths])


def _best_first(children: Children, root: Value, budget: int) -> tuple[tuple[Choice, ...], list[Value]]:
    """Up to ``budget`` nodes in order of (value descending, depth, path), parents first.

    ``children`` yields a node's children from the most valuable on (in order of rank where gaps are not
    allowed, so a less likely sibling may hold a likelier one back); only the next sibling and the first
    child of a taken node wait in the heap, so N nodes cost O(N log N).
    """
    if budget < 1:
        raise InvalidInput(f"--budget must be at least 1, but got {budget}.")
    paths: list[Choice] = [()]
    values = [root]
    heap: list[tuple[float, float, int, Choice, Iterator[tuple[Value, int]]]] = []

    def offer(siblings: Iterator[tuple[Value, int]], parent: Choice) -> None:
        for value, rank in siblings:
            path = (*parent, rank)
            heapq.heappush(heap, (-value[0], -value[1], len(path), path, siblings))
            return

    offer(children((), root), ())
    while heap and len(paths) < budget:
        first, second, _, path, siblings = heapq.heappop(heap)
        value = (-first, -second)
        paths.append(path)
        values.append(value)
        offer(siblings, path[:-1])
        offer(children(path, value), path)
    return tuple(paths), values


class _Walk:
    """Greedy decoding of a whole trace with a growing tree, kept up to date node by node.

    to_go[t] is the number of steps from state t to the end of its sequence (0 at its last state), so
    that one more accepted guess at t, where a were accepted, saves to_go[t+1+a] - to_go[t+2+a] steps.
    """

    def __init__(self, trace: RankTrace, max_depth: int, top: int) -> None:
        ranks = trace.ranks[:, :max_depth].astype(np.int64)
        ranks[(ranks < 0) | (ranks >= top)] = top  # one column for "no candidate of ours"
        none = np.full((len(ranks), 1), top)
        self.ranks: IntArray = np.hstack([ranks, none])  # (P, D+1)
        self.top, self.starts = top, trace.starts
        self.sequence = np.repeat(np.arange(trace.num_sequences), trace.lengths)
        self.last = (trace.starts[1:] - 1)[self.sequence]  # (P,) last state of the state's sequence
        self.node = np.zeros(len(ranks), dtype=np.int64)  # deepest accepted node
        self.depth = np.zeros(len(ranks), dtype=np.int64)  # its depth: accepted guesses
        self.wanted = self.ranks[:, 0].copy()  # rank of the guess that would be accepted next
        self.visited = trace.has_step.copy()
        self.to_go = self.last - np.arange(len(ranks))

    def steps(self) -> int:
        return int(self.to_go[self.starts[:-1]].sum())

    def gains(self, nodes: int) -> NDArray[Any]:
        """(nodes, ranks) steps that a new child of each node would save at the states now visited."""
        t, width = np.flatnonzero(self.visited), self.top + 1
        following = t + 1 + self.depth[t]
        saved = self.to_go[np.minimum(following, self.last[t])]
        saved -= self.to_go[np.minimum(following + 1, self.last[t])]
        key = self.node[t] * width + self.wanted[t]
        gains = np.bincount(key, weights=saved, minlength=nodes * width).reshape(nodes, width)
        return gains[:, : self.top]

    def best_child(self, children: IntArray | None, nodes: int) -> tuple[int, int]:
        """(parent, rank) of the child that saves most steps; rank -1 where none saves any.

        children : (nodes,)  how many each node has: only that rank may follow; None for any rank

        `gains` counts a child's effect on each state by itself; the `TRIED` best by that count are
        decoded with, since accepting a guess moves all later steps of its sequence.
        """
        gains = self.gains(nodes)
        if children is not None:
            gains = np.where(np.arange(self.top) == children[:nodes, None], gains, 0.0)
        tried = np.argsort(-gains, axis=None, kind="stable")[:TRIED]
        offered = [divmod(int(i), self.top) for i in tried if gains.flat[i] > 0]
        return max(offered, key=lambda child: self.saving(*child), default=(0, -1))

    def saving(self, parent: int, rank: int) -> int:
        """Steps that the whole trace would take less with child ``rank`` of ``parent``."""
        changed = (self.node == parent) & (self.wanted == rank)
        sequences = np.unique(self.sequence[changed])
        t, last = self.starts[sequences], self.starts[sequences + 1] - 1
        before, steps = int(self.to_go[t].sum()), 0
        while len(t):
            alive = t < last
            t, last = t[alive], last[alive]
            steps += len(t)
            t = t + 1 + self.depth[t] + changed[t]
        return before - steps

    def add(self, parent: int, rank: int, node: int) -> None:
        """Add child ``rank`` of ``parent`` as ``node`` and decode the sequences it changes again."""
        changed = np.flatnonzero((self.node == parent) & (self.wanted == rank))
        self.node[changed] = node
        self.depth[changed] += 1
        self.wanted[changed] = self.ranks[changed, self.depth[changed]]
        sequences = np.unique(self.sequence[changed])
        begins, ends = self.starts[sequences], self.starts[sequences + 1] - 1
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            self.visited[begin:end] = False
        order = np.argsort(begins - ends, kind="stable")  # longest first, all backwards at once
        t, lengths = ends[order], (ends - begins)[order]
        for back in range(1, int(lengths.max(initial=0)) + 1):
            t = t[: np.searchsorted(-lengths, -back, side="right")] - 1
            self.to_go[t] = 1 + self.to_go[np.minimum(t + 1 + self.depth[t], self.last[t])]
        t = self.starts[sequences]
        while len(t := t[t < self.last[t]]):
            self.visited[t] = True
            t = np.minimum(t + 1 + self.depth[t], self.last[t])
