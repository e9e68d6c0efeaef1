"""Chances of the next rank after a path, for paths that are too rare to count: Dirichlet back-off.

How often a rank follows a path is mixed with how often it follows anything like it:

    head      rank at head d+1, whatever came before (Medusa's marginal, section 2.3.3)
    depth     the same after d right guesses
    previous  after d right guesses of which the last had this rank
    path      after exactly this path

    chance = (count + strength x chance one level up) / (trials + strength)

Without a count the level above stays as it is, and chances below a node never sum to more than one;
ranks need not be in order. Each level's strength is the one under which held-out conversations are
likeliest (`fit_strengths`).

P states · K heads · R ranks told apart · F parts of the states, for cross-validation
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.records.trace import NO_TRIAL, RankTrace, fold_numbers
from treeopt.trees.tree import Choice, IntArray

LEVELS = ("depth", "previous", "path")
# To choose from, in conversations: states of one conversation are alike, and no unit of ours should matter.
STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
IMPOSSIBLE = 1e-9  # chance that a likelihood gives to what the counts never saw
Chances = NDArray[np.float64]


@dataclass(frozen=True)
class Strengths:
    """Pseudo-counts that each level is given of the one above it."""

    depth: float
    previous: float
    path: float


NONE = Strengths(0.0, 0.0, 0.0)


class PathCounts:
    """Chances of every rank after the paths that were opened, from counts over states.

    ranks     : (P, K) of the states to count
    top       : ranks 0 ... top-1 are told apart; all else is a miss
    strengths : of each level; by default plain counts

    >>> ranks = np.array([[0, 0], [0, 1], [0, -1], [1, 0]], np.int16)
    >>> PathCounts(ranks, 2).chances(()).tolist()
    [0.75, 0.25]
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
    """(R+1,) how often each rank came, and last how many trials there were.

    >>> count(np.array([0, 0, 1, 7, -1, -2], np.int16), 2).tolist()
    [2, 1, 5]
    """
    hits = np.bincount(column[(column >= 0) & (column < top)], minlength=top)
    return np.append(hits, (column != NO_TRIAL).sum())


def count_after(before: NDArray[np.int16], column: NDArray[np.int16], top: int) -> IntArray:
    """(R, R+1) the same after each rank of the column before."""
    tried = column != NO_TRIAL
    rank = np.where((column < 0) | (column >= top), top, column)[tried].astype(np.int64)
    table = np.bincount(before[tried] * (top + 1) + rank, minlength=top * (top + 1)).reshape(top, top + 1)
    table[:, top] = table.sum(1)
    return table


def mixed(counts: NDArray[Any], strength: float, above: Chances) -> Chances:
    """(..., R) chances of (..., R+1) counts, with so many pseudo-counts of the level above.

    >>> mixed(np.array([3, 1, 4]), 4.0, np.array([0.25, 0.25])).tolist()
    [0.5, 0.25]
    """
    trials = counts[..., -1:]
    if np.isinf(strength):
        return np.broadcast_to(above, (*counts.shape[:-1], above.shape[-1]))
    some = trials + strength > 0
    found: Chances = np.where(some, (counts[..., :-1] + strength * above) / np.where(some, trials + strength, 1), above)
    return found


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
