"""Growth state by state, as it was before states were counted by their paths: the oracle of tests/test_scale.py.

P states · K heads · R ranks told apart · F parts of the states, for cross-validation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.growing import SAVINGS, _addable
from treeopt.growth.heldout import HeldOut
from treeopt.growth.shrinkage import IMPOSSIBLE, LEVELS, NONE, STRENGTHS, Chances, Strengths, mixed
from treeopt.growth.source import AnswersSource, TraceSource
from treeopt.growth.worth import DIGITS, Value, Worth
from treeopt.records.trace import MISS, NO_TRIAL, RankTrace, fold_numbers
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, IntArray, TreeFamily


class SlowSource(TraceSource):
    """A trace whose folds are taken out of it, each grown on and replayed by itself."""

    def grow(self, limits: Limits, objective: str) -> TreeFamily:
        if objective == "independent":
            return super().grow(limits, objective)
        strengths = strengths_of(self.record, min(limits.max_rank + 1, self.record.top_k), limits.max_depth)
        return (grow_joint if objective == "joint" else grow_replay)(self.record, limits, strengths=strengths)

    def crossfit(self, limits: Limits, objective: str) -> HeldOut:
        return AnswersSource.crossfit(self, limits, objective)


class PathCounts:
    """Chances of every rank after the paths that were opened, from counts over states.

    ranks     : (P, K) of the states to count
    top       : ranks 0 ... top-1 are told apart; all else is a miss
    strengths : of each level; by default plain counts
    """

    def __init__(self, ranks: NDArray[np.int16], top: int, strengths: Strengths = NONE) -> None:
        self.top, self.strengths = top, strengths
        self.marginals = np.array([mixed(count(column, top), 0.0, np.zeros(top)) for column in ranks.T])
        self._states: dict[Choice, NDArray[np.int16]] = {(): ranks}
        self._counts: dict[Choice, IntArray] = {}
        self._above: list[Chances] = [self.marginals[:1]]  # of every depth: (R, R) by the rank before
        for d in range(1, ranks.shape[1]):
            ranks = ranks[(ranks[:, d - 1] >= 0) & (ranks[:, d - 1] < top)]
            after = count_after(ranks[:, d - 1], ranks[:, d], top)
            depth = mixed(after.sum(0), strengths.depth, self.marginals[d])
            self._above.append(mixed(after, strengths.previous, depth))

    def open(self, path: Choice, rank: int) -> None:
        """Count what follows a child of an opened path."""
        states = self._states[path]
        self._states[(*path, rank)] = states[states[:, len(path)] == rank]

    def counts(self, path: Choice) -> IntArray:
        """(R+1,) how often each rank followed the path, and last how many trials there were."""
        if path not in self._counts:
            self._counts[path] = count(self._states[path][:, len(path)], self.top)
        return self._counts[path]

    def chances(self, path: Choice) -> Chances:
        """(R,) chances of the next rank, given a trial. Up to depth 1 `previous` is the path itself."""
        above = self._above[len(path)][path[-1] if path else 0]
        strength = self.strengths.path if len(path) > 1 else float("inf")
        return mixed(self.counts(path), strength, above)

    def trial_share(self, path: Choice) -> float:
        """Share of the states after the path that have something to guess; 1 for a path never seen."""
        states = len(self._states[path])
        return float(self.counts(path)[-1] / states) if states else 1.0


def count(column: NDArray[np.int16], top: int) -> IntArray:
    """(R+1,) how often each rank came, and last how many trials there were."""
    hits = np.bincount(column[(column >= 0) & (column < top)], minlength=top)
    return np.append(hits, (column != NO_TRIAL).sum())


def count_after(before: NDArray[np.int16], column: NDArray[np.int16], top: int) -> IntArray:
    """(R, R+1) the same after each rank of the column before."""
    tried = column != NO_TRIAL
    rank = np.where((column < 0) | (column >= top), top, column)[tried].astype(np.int64)
    table = np.bincount(before[tried] * (top + 1) + rank, minlength=top * (top + 1)).reshape(top, top + 1)
    table[:, top] = table.sum(1)
    return table


def strengths_of(trace: RankTrace, top: int, max_depth: int | None = None) -> Strengths:
    """The strengths under which each fifth of a trace's conversations is likeliest, given the others.

    Plain counts where there is a single conversation.
    """
    fold = fold_numbers(trace)
    if fold.max() < 1:
        return NONE
    states = trace.has_step
    part = np.repeat(fold, trace.lengths)[states]
    unit = len(part) / (1 + int(trace.clusters.max()))  # states of a conversation
    grid = [unit * strength for strength in STRENGTHS]
    return fit_strengths(trace.ranks[states][:, :max_depth], part, top, grid)


def fit_strengths(ranks: NDArray[np.int16], part: IntArray, top: int, grid: Sequence[float]) -> Strengths:
    """The strengths under which each part of the states is likeliest, given all the others.

    ranks : (P, K)  rank of the true token at every state
    part  : (P,)    number of the part that a state belongs to
    grid  :         pseudo-counts to choose from

    Level by level, each with those above it already chosen. Time O(P x K), memory O(paths x R).
    """
    chosen = dict.fromkeys(LEVELS, grid[0])
    depths = [_tables(ranks, part, top, d) for d in range(ranks.shape[1])]
    above = [mixed(_others(tables[0][0]), 0.0, np.zeros(top)) for tables in depths]  # (F, 1, R)
    for number, level in enumerate(LEVELS, 1):
        first = 2 if level == "path" else 1  # up to there a level has the counts of the one above it
        if first >= len(depths):  # nothing to tell its strength by
            chosen[level] = chosen[LEVELS[number - 2]] if number > 1 else 0.0
            continue
        scores = {}
        for strength in grid:
            scores[strength] = sum(
                _log_likelihood(counts, mixed(_others(counts), strength, up[:, parent]))
                for (counts, parent), up in zip([t[number] for t in depths[first:]], above[first:], strict=True)
            )
        chosen[level] = max(scores, key=lambda s: (scores[s], s))
        for d in range(first, len(depths)):
            counts, parent = depths[d][number]
            above[d] = mixed(_others(counts), chosen[level], above[d][:, parent])
    return Strengths(**chosen)


def _tables(ranks: NDArray[np.int16], part: IntArray, top: int, depth: int) -> list[tuple[IntArray, IntArray]]:
    """Of the marginal and of every level at one depth: (F, contexts, R+1) counts of each part, and
    (contexts,) which context of the level above each belongs to."""
    right: NDArray[Any] = np.asarray(((ranks[:, :depth] >= 0) & (ranks[:, :depth] < top)).all(1))
    base = top ** np.arange(depth, dtype=np.int64)[::-1]
    path, index = np.unique(ranks[right, :depth].astype(np.int64) @ base, return_inverse=True)
    only = np.zeros(1, dtype=np.int64)
    before = ranks[right, depth - 1].astype(np.int64) if depth else np.zeros(int(right.sum()), np.int64)

    def table(states: NDArray[Any], context: IntArray, n: int) -> IntArray:
        column, n_parts = ranks[states, depth], int(part.max()) + 1
        rank = np.where((column < 0) | (column >= top), top, column).astype(np.int64)
        key = (part[states] * n + context) * (top + 1) + rank
        counts = np.bincount(key[column != NO_TRIAL], minlength=n_parts * n * (top + 1))
        counts = counts.reshape(n_parts, n, top + 1)
        counts[..., top] = counts.sum(-1)
        return counts

    everything = np.ones(len(ranks), dtype=bool)
    return [
        (table(everything, np.zeros(len(ranks), np.int64), 1), only),
        (table(right, np.zeros_like(before), 1), only),
        (table(right, before, top), np.zeros(top, np.int64)),
        (table(right, index, len(path)), path % top),
    ]


def _others(counts: IntArray) -> IntArray:
    """Counts of all parts but each."""
    others: IntArray = counts.sum(0) - counts
    return others


def _log_likelihood(counts: IntArray, chances: Chances) -> float:
    """Of (F, contexts, R+1) counts under (F, contexts, R) chances; nothing is thought quite impossible."""
    misses = counts[..., -1] - counts[..., :-1].sum(-1)
    miss = np.maximum(1 - chances.sum(-1), IMPOSSIBLE)
    return float((counts[..., :-1] * np.log(np.maximum(chances, IMPOSSIBLE))).sum() + (misses * np.log(miss)).sum())


def frequencies(ranks: NDArray[np.int16], top: int, strengths: Strengths) -> Worth:
    """Values of paths: how many states begin with them, and the product of marginals where that is equal.

    ranks : (P, D) of the states · top : ranks 0 ... top-1 are told apart · strengths : see `shrinkage`
    """
    paths = PathCounts(ranks, top, strengths)

    def children(path: Choice, value: Value) -> list[Value]:
        if len(path) == ranks.shape[1]:
            return []
        if path:
            paths.open(path[:-1], path[-1])
        reached = round(value[0] * paths.trial_share(path), DIGITS)
        counts = np.round(reached * paths.chances(path), DIGITS)
        return list(zip(counts.tolist(), (value[1] * paths.marginals[len(path)]).tolist(), strict=True))

    return Worth(children, (len(ranks), 1.0))


class Walk:
    """Greedy decoding of every sequence of a trace with a tree that begins as a lone root.

    node    : (P,) deepest accepted node at each state
    depth   : (P,) its depth, the guesses accepted there
    wanted  : (P,) rank of the guess that would be accepted next; ``top`` for none of ours, ``top`` + 1
              where there is nothing to guess
    visited : (P,) whether a step is taken at the state
    to_go   : (P,) steps from the state to the end of its sequence, 0 at its last state
    """

    def __init__(self, trace: RankTrace, max_depth: int, top: int) -> None:
        ranks = trace.ranks[:, :max_depth].astype(np.int16)
        ranks[(ranks == MISS) | (ranks >= top)] = top
        ranks[ranks == NO_TRIAL] = top + 1
        none = np.full((len(ranks), 1), top + 1, dtype=np.int16)
        self.ranks = np.hstack([ranks, none])  # (P, D+1)
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

    def ends(self, nodes: int, strength: float) -> tuple[IntArray, NDArray[np.float64]]:
        """(nodes, R+2) how many visited states end at each node by the rank they wanted, and
        (nodes,) what one more accepted guess saves at them on average [steps].

        One more guess at state t, where a were accepted, saves to_go[t+1+a] - to_go[t+2+a]. ``strength``
        states of the mean over all nodes are mixed into that of each.
        """
        t, width = np.flatnonzero(self.visited), self.top + 2
        node, wanted = self.node[t], self.wanted[t]
        counts = np.bincount(node * width + wanted, minlength=nodes * width).reshape(nodes, width)
        following, last = t + 1 + self.depth[t], self.last[t]
        saved = self.to_go[np.minimum(following, last)] - self.to_go[np.minimum(following + 1, last)]
        saved[wanted == self.top + 1] = 0
        tried = counts[:, : self.top + 1].sum(1)
        mean = saved.sum() / max(tried.sum(), 1)
        total = np.bincount(node, weights=saved, minlength=nodes)
        return counts, (total + strength * mean) / np.maximum(tried + strength, 1e-9)

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


def grow_joint(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """The trees that maximise tokens of a step averaged over all states of the trace.

    Without ``strengths`` plain counts, and the trees are optimal for every size; paths that are equally
    frequent (never seen, for one) go by the product of marginals. With them rare paths are shrunk
    towards common ones (`treeopt.growth.shrinkage`), which is better on answers not seen.
    Time O(P x K + budget x ranks), memory O(P x K).
    """
    ranks = trace.ranks[trace.has_step][:, : limits.max_depth]
    worth = frequencies(ranks, min(limits.num_ranks, trace.top_k), strengths)
    return worth.best(limits.budget, limits.shape)


def grow_replay(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """Trees grown node by node, each saving the most steps at the states visited with the tree so far.

    How often a child is accepted there is counted, and with ``strengths`` mixed with its chance over all
    states; what an accepted guess saves is a mean over its parent (`Walk.ends`). Where nothing would be
    saved, nodes are added as `grow_joint` would. Nested by construction; the best trees of every
    size are not nested in general, so this is a heuristic (a test bounds its loss against brute force).
    Time O(budget x P) at most, memory O(P x K).
    """
    depth, top = limits.depth(trace.num_heads), min(limits.num_ranks, trace.top_k)
    ranks = trace.ranks[trace.has_step][:, :depth]
    joint, _ = frequencies(ranks, top, strengths).best_first(limits.budget, limits.shape)
    walk = Walk(trace, depth, top)
    known = PathCounts(ranks, top, strengths)
    paths: list[Choice] = [()]
    index: dict[Choice, int] = {(): 0}
    parents, above = [0], [known.chances(())]  # of every node its parent, its children's chances
    tokens, steps = int((trace.lengths - 1).sum()), [walk.steps()]
    while len(paths) < len(joint):
        saved = _saved(walk, paths, parents, np.array(above), strengths.path)
        saved[~_addable(index, parents, top, limits.shape)] = -1.0
        parent, rank = divmod(int(saved.argmax()), top)
        path = (*paths[parent], rank)
        if saved.max() <= 0:
            path = next(p for p in joint if p not in index)
            parent, rank = index[path[:-1]], path[-1]
        index[path] = len(paths)
        walk.add(parent, rank, len(paths))
        known.open(paths[parent], rank)
        paths.append(path)
        parents.append(parent)
        above.append(known.chances(path) if len(path) < depth else np.zeros(top))
        steps.append(walk.steps())
    curve = tokens / np.maximum(steps, 1)
    return TreeFamily(tuple(paths), np.diff(curve, prepend=0.0))


def _saved(
    walk: Walk, paths: list[Choice], parents: list[int], above: NDArray[np.float64], strength: float
) -> NDArray[np.float64]:
    """(nodes, R) steps that each child of each node would save at the states now visited.

    above : (nodes, R)  chances of the children over all states, mixed in as ``strength`` states
    """
    counts, saving = walk.ends(len(paths), SAVINGS * strength)
    top = walk.top
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
