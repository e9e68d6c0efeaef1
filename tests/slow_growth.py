"""Growth state by state, from its definitions: the oracle of tests/test_scale.py.

P states · K heads · R ranks told apart · F parts of the states, for cross-validation
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.heldout import HeldOut
from treeopt.growth.objectives import SAVINGS
from treeopt.growth.shrinkage import IMPOSSIBLE, LEVELS, NONE, STRENGTHS, Chances, Strengths
from treeopt.growth.source import AnswersSource, TraceSource
from treeopt.growth.worth import by_frequencies
from treeopt.records.trace import NO_TRIAL, RankTrace, fold_numbers
from treeopt.trees.shapes import Limits, sibling_closed
from treeopt.trees.tree import Choice, IntArray, Tree, TreeFamily


def mixed(counts: NDArray[Any], strength: float, above: Chances) -> Chances:
    """(..., R) chances of (..., R+1) counts, with so many pseudo-counts of the level above."""
    total = counts[..., -1:] + strength
    known = (total > 0) & np.isfinite(total)
    weight = strength if np.isfinite(strength) else 0.0
    return np.where(known, (counts[..., :-1] + weight * above) / np.where(known, total, 1), above)


def log_likelihood(counts: IntArray, chances: Chances) -> float:
    hits, misses = counts[..., :-1], counts[..., -1] - counts[..., :-1].sum(-1)
    logs = [np.log(np.maximum(each, IMPOSSIBLE)) for each in (chances, 1 - chances.sum(-1))]
    return float((hits * logs[0]).sum() + (misses * logs[1]).sum())


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
    """Chances of every rank below ``top`` after a path, from counts over (P, K) states."""

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

    def _next(self, path: Choice) -> NDArray[np.int16]:
        return self._ranks[(self._ranks[:, : len(path)] == np.array(path, dtype=np.int16)).all(1)][:, len(path)]

    def chances(self, path: Choice) -> Chances:
        """(R,) chances of the next rank, given a trial. Up to depth 1 `previous` is the path itself."""
        above = self._above[len(path)][path[-1] if path else 0]
        strength = self.strengths.path if len(path) > 1 else float("inf")
        return mixed(self.counts(path), strength, above)

    def counts(self, path: Choice) -> IntArray:
        """(R+1,) how often each rank followed the path, and last how many trials there were."""
        return count(self._next(path), self.top)

    def trial_share(self, path: Choice) -> float:
        """Share of the states after the path that have something to guess; 1 for a path never seen."""
        behind = self._next(path)
        return float((behind != NO_TRIAL).mean()) if len(behind) else 1.0


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
    """The strengths under which each fifth of a trace's conversations is likeliest, given the others."""
    fold = fold_numbers(trace)
    if fold.max() < 1:
        return NONE
    states = trace.has_step
    part = np.repeat(fold, trace.lengths)[states]
    unit = len(part) / (1 + int(trace.clusters.max()))  # states of a conversation
    grid = [unit * strength for strength in STRENGTHS]
    return fit_strengths(trace.ranks[states][:, :max_depth], part, top, grid)


def fit_strengths(ranks: NDArray[np.int16], part: IntArray, top: int, grid: Sequence[float]) -> Strengths:
    """The strengths under which each (P,) part of (P, K) states is likeliest, given all the others, level by level."""
    chosen = dict.fromkeys(LEVELS, grid[0])
    depths = [_tables(ranks, part, top, d) for d in range(ranks.shape[1])]
    above = [mixed(tables[0][0].sum(0) - tables[0][0], 0.0, np.zeros(top)) for tables in depths]  # (F, 1, R)
    for number, level in enumerate(LEVELS, 1):
        first = 2 if level == "path" else 1  # up to there a level has the counts of the one above it
        if first >= len(depths):  # nothing to tell its strength by
            chosen[level] = chosen[LEVELS[number - 2]] if number > 1 else 0.0
            continue
        scores = {}
        for strength in grid:
            scores[strength] = sum(
                log_likelihood(counts, mixed(counts.sum(0) - counts, strength, up[:, parent]))
                for (counts, parent), up in zip([t[number] for t in depths[first:]], above[first:], strict=True)
            )
        chosen[level] = max(scores, key=lambda s: (scores[s], s))
        for d in range(first, len(depths)):
            counts, parent = depths[d][number]
            above[d] = mixed(counts.sum(0) - counts, chosen[level], above[d][:, parent])
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


def visits(trace: RankTrace, depth: int, paths: list[Choice]) -> tuple[int, list[tuple[Choice, list[int], int]]]:
    """Steps of all sequences with a tree; of every visited state its last accepted node, its ranks, and the steps that one
    more guess saves."""
    index, steps, found = set(paths), 0, []
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
            then = min(t + 1 + len(accepted[t]), last)
            found.append((accepted[t], [*rows[t], NO_TRIAL], to_go[then] - to_go[min(then + 1, last)]))
            t = then
    return steps, found


def grow_joint(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """As `treeopt.growth.objectives.grow_joint`."""
    ranks = trace.ranks[trace.has_step][:, : limits.max_depth]
    known: Any = PathCounts(ranks, min(limits.num_ranks, trace.top_k), strengths)
    return by_frequencies(known, limits.budget)


def grow_replay(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """As `treeopt.growth.objectives.grow_replay`, each tree decoded anew from the first state to the last."""
    depth, top = limits.depth(trace.num_heads), min(limits.num_ranks, trace.top_k)
    known: Any = PathCounts(trace.ranks[trace.has_step][:, :depth], top, strengths)
    joint = by_frequencies(known, limits.budget).paths
    paths: list[Choice] = [()]
    curve = []
    while True:
        steps, found = visits(trace, depth, paths)
        curve.append(steps)
        if len(paths) == len(joint):
            tokens = int((trace.lengths - 1).sum())
            return TreeFamily(tuple(paths), np.diff(tokens / np.maximum(curve, 1), prepend=0.0))
        saved = savings(found, paths, known)
        best = max(saved, key=lambda path: saved[path], default=())
        paths.append(best if saved.get(best, 0) > 0 else next(p for p in joint if p not in paths))


def savings(found: list[tuple[Choice, list[int], int]], paths: list[Choice], known: Any) -> dict[Choice, float]:
    """Steps that the next child of each node would save at the visited states."""
    reached, ended, total = (dict.fromkeys(paths, 0) for _ in range(3))
    counts = {path: np.zeros(known.top + 1, dtype=np.int64) for path in paths}
    for last, row, saves in found:
        for d in range(len(last) + 1):
            reached[last[:d]] += 1
            counts[last[:d]][known.top] += row[d] != NO_TRIAL
            counts[last[:d]][row[d] if 0 <= row[d] < known.top else []] += 1
        if row[len(last)] != NO_TRIAL:
            ended[last], total[last] = ended[last] + 1, total[last] + saves
    strength, expected, saved = SAVINGS * known.strengths.path, {(): reached[()] + 0.0}, {}
    mean = sum(total.values()) / max(sum(ended.values()), 1)
    for path in sorted(paths, key=len):
        if len(path) == known.depth:
            continue
        chances = mixed(counts[path], known.strengths.path, known.chances(path))
        tried = expected[path] * (counts[path][known.top] / reached[path] if reached[path] else 1.0)
        saving = (total[path] + strength * mean) / max(ended[path] + strength, 1e-9)
        for rank, chance in enumerate(chances.tolist()):
            child = (*path, rank)
            expected[child] = tried * chance
            if child not in counts and sibling_closed(Tree.from_choices([*paths[1:], child])):
                saved[child] = tried * saving * chance
    order = {path: i for i, path in enumerate(paths)}  # of equals the first node's first child is taken
    return dict(sorted(saved.items(), key=lambda one: (order[one[0][:-1]], one[0][-1])))
