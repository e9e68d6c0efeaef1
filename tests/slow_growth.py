"""Growth state by state, from its definitions: the oracle of tests/test_scale.py.

P states · K heads · R ranks told apart · F parts of the states, for cross-validation
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.heldout import HeldOut
from treeopt.growth.objectives import SAVINGS, _addable, _saved
from treeopt.growth.shrinkage import LEVELS, NONE, STRENGTHS, Chances, Strengths, _log_likelihood, _others, mixed
from treeopt.growth.source import AnswersSource, TraceSource
from treeopt.growth.worth import frequencies
from treeopt.records.trace import NO_TRIAL, RankTrace, fold_numbers
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
    """Chances of every rank after a path, from counts over states.

    ranks     : (P, K) of the states to count
    top       : ranks 0 ... top-1 are told apart; all else is a miss
    strengths : of each level; by default plain counts
    """

    def __init__(self, ranks: NDArray[np.int16], top: int, strengths: Strengths = NONE) -> None:
        self._ranks, self.top, self.strengths = ranks, top, strengths
        self.states, self.depth = ranks.shape
        self.marginals = np.array([mixed(count(column, top), 0.0, np.zeros(top)) for column in ranks.T])
        self._above: list[Chances] = [self.marginals[:1]]  # of every depth: (R, R) by the rank before
        for d in range(1, self.depth):
            ranks = ranks[(ranks[:, d - 1] >= 0) & (ranks[:, d - 1] < top)]
            after = count_after(ranks[:, d - 1], ranks[:, d], top)
            depth = mixed(after.sum(0), strengths.depth, self.marginals[d])
            self._above.append(mixed(after, strengths.previous, depth))

    def open(self, path: Choice, rank: int) -> None:
        """Nothing has to be done before a path is counted."""

    def _behind(self, path: Choice) -> NDArray[np.int16]:
        return self._ranks[(self._ranks[:, : len(path)] == np.array(path, dtype=np.int16)).all(1)]

    def counts(self, path: Choice) -> IntArray:
        """(R+1,) how often each rank followed the path, and last how many trials there were."""
        return count(self._behind(path)[:, len(path)], self.top)

    def chances(self, path: Choice) -> Chances:
        """(R,) chances of the next rank, given a trial. Up to depth 1 `previous` is the path itself."""
        above = self._above[len(path)][path[-1] if path else 0]
        strength = self.strengths.path if len(path) > 1 else float("inf")
        return mixed(self.counts(path), strength, above)

    def trial_share(self, path: Choice) -> float:
        """Share of the states after the path that have something to guess; 1 for a path never seen."""
        states = len(self._behind(path))
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


def visits(trace: RankTrace, depth: int, top: int, paths: list[Choice]) -> tuple[int, list[tuple[int, int, int]]]:
    """Steps of all sequences with a tree, and of every visited state its last accepted node, the rank that it wanted next
    (``top`` for none of ours, ``top`` + 1 where there is nothing to guess), and the steps that one more guess saves."""
    index, steps, found = {path: i for i, path in enumerate(paths)}, 0, []
    for begin, end in pairwise(trace.starts.tolist()):
        rows, accepted, last = trace.ranks[begin:end, :depth].tolist(), [], end - begin - 1
        for row in rows:
            path: Choice = ()
            while len(path) < len(row) and (*path, row[len(path)]) in index:
                path = (*path, row[len(path)])
            accepted.append(path)
        to_go = [0] * (last + 1)
        for t in range(last - 1, -1, -1):
            to_go[t] = 1 + to_go[min(t + 1 + len(accepted[t]), last)]
        steps, t = steps + to_go[0], 0
        while t < last:
            path, then = accepted[t], t + 1 + len(accepted[t])
            rank = rows[t][len(path)] if len(path) < len(rows[t]) else NO_TRIAL
            wanted = top + 1 if rank == NO_TRIAL else rank if 0 <= rank < top else top
            saved = to_go[min(then, last)] - to_go[min(then + 1, last)]
            found.append((index[path], wanted, saved if wanted <= top else 0))
            t = min(then, last)
    return steps, found


def grow_joint(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """As `treeopt.growth.objectives.grow_joint`."""
    ranks = trace.ranks[trace.has_step][:, : limits.max_depth]
    known: Any = PathCounts(ranks, min(limits.num_ranks, trace.top_k), strengths)
    return frequencies(known).best(limits.budget, limits.shape)


def grow_replay(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """As `treeopt.growth.objectives.grow_replay`, each tree decoded anew from the first state to the last."""
    depth, top = limits.depth(trace.num_heads), min(limits.num_ranks, trace.top_k)
    known: Any = PathCounts(trace.ranks[trace.has_step][:, :depth], top, strengths)
    joint, _ = frequencies(known).best_first(limits.budget, limits.shape)
    paths: list[Choice] = [()]
    steps, found = visits(trace, depth, top, paths)
    curve = [steps]
    while len(paths) < len(joint):
        index = {path: i for i, path in enumerate(paths)}
        parents = [index[path[:-1]] for path in paths]
        above = np.array([known.chances(path) if len(path) < depth else np.zeros(top) for path in paths])
        counts, total = np.zeros((len(paths), top + 2), dtype=np.int64), np.zeros(len(paths))
        for node, wanted, saves in found:
            counts[node, wanted] += 1
            total[node] += saves
        tried, strength = counts[:, : top + 1].sum(1), SAVINGS * strengths.path
        saving = (total + strength * (total.sum() / max(tried.sum(), 1))) / np.maximum(tried + strength, 1e-9)
        saved = _saved(counts, saving, paths, parents, above, strengths.path)
        saved[~_addable(index, parents, top, limits.shape)] = -1.0
        parent, rank = divmod(int(saved.argmax()), top)
        paths.append((*paths[parent], rank) if saved.max() > 0 else next(p for p in joint if p not in index))
        steps, found = visits(trace, depth, top, paths)
        curve.append(steps)
    tokens = int((trace.lengths - 1).sum())
    return TreeFamily(tuple(paths), np.diff(tokens / np.maximum(curve, 1), prepend=0.0))
