"""Chances of the next rank after a path, for paths that are too rare to count: Dirichlet back-off.

How often a rank follows a path is mixed with how often it follows anything like it:

    head      rank at head d+1, whatever came before (Medusa's marginal, section 2.3.3)
    depth     the same after d right guesses
    previous  after d right guesses of which the last had this rank
    path      after exactly this path

    chance = (count + strength x chance one level up) / (trials + strength)

Without a count the level above stays as it is, and chances below a node never sum to more than one;
ranks need not be in order. Each level's strength is the one under which held-out conversations are
likeliest (`Fit`).

P states · K heads · R ranks told apart · F parts of the states, for cross-validation
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.paths import Paths, Tally, of_trace
from treeopt.records.trace import RankTrace, fold_numbers
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

    tally     : of the states, all its parts together
    strengths : of each level; by default plain counts
    depth     : heads that count; by default all

    >>> ranks = np.array([[0, 0], [0, 1], [0, -1], [1, 0]], np.int16)
    >>> PathCounts(Tally.of_ranks(ranks, np.zeros(4, np.int64), 2)).chances(()).tolist()
    [0.75, 0.25]
    """

    def __init__(self, tally: Tally, strengths: Strengths = NONE, depth: int | None = None) -> None:
        self._tally, self.strengths = tally.whole, strengths
        self.top, self.depth = tally.paths.top, tally.paths.depth if depth is None else depth
        heads = [self._tally.of_head(d)[0] for d in range(self.depth)]
        self.marginals = np.array([mixed(head, 0.0, np.zeros(self.top)) for head in heads])
        self._node: dict[Choice, int | None] = {(): 0}  # its number in the trie; None where it never came
        self._counts: dict[Choice, IntArray] = {}
        self._above: list[Chances] = [self.marginals[:1]]  # of every depth: (R, R) by the rank before
        for d in range(1, self.depth):
            after = self._tally.after(d)[0]
            above = mixed(after.sum(0), strengths.depth, self.marginals[d])
            self._above.append(mixed(after, strengths.previous, above))

    @property
    def states(self) -> int:
        return self._tally.states

    def _children(self, path: Choice) -> slice:
        """Which nodes of the next depth are an opened path's children."""
        node, parents = self._node[path], self._tally.paths.trie[len(path) + 1].parent
        return slice(*(0, 0) if node is None else np.searchsorted(parents, [node, node + 1]).tolist())

    def open(self, path: Choice, rank: int) -> None:
        """Find a child of an opened path."""
        children = self._children(path)
        place = np.flatnonzero(self._tally.paths.trie[len(path) + 1].rank[children] == rank)
        self._node[(*path, rank)] = int(children.start + place[0]) if len(place) else None

    def counts(self, path: Choice) -> IntArray:
        """(R+1,) how often each rank followed the path, and last how many trials there were."""
        if path not in self._counts:
            found, d, node = np.zeros(self.top + 1, dtype=np.int64), len(path), self._node[path]
            if node is not None:
                children = self._children(path)
                found[self._tally.paths.trie[d + 1].rank[children]] = self._tally.nodes[d + 1][0, children]
                found[self.top] = self._tally.trials[d][0, node]
            self._counts[path] = found
        return self._counts[path]

    def chances(self, path: Choice) -> Chances:
        """(R,) chances of the next rank, given a trial. Up to depth 1 `previous` is the path itself."""
        above = self._above[len(path)][path[-1] if path else 0]
        strength = self.strengths.path if len(path) > 1 else float("inf")
        return mixed(self.counts(path), strength, above)

    def trial_share(self, path: Choice) -> float:
        """Share of the states after the path that have something to guess; 1 for a path never seen."""
        node = self._node[path]
        states = 0 if node is None else int(self._tally.nodes[len(path)][0, node])
        return float(self.counts(path)[-1] / states) if states else 1.0


def mixed(counts: NDArray[Any], strength: float, above: Chances) -> Chances:
    """(..., R) chances of (..., R+1) counts, with so many pseudo-counts of the level above.

    >>> mixed(np.array([3, 1, 4]), 4.0, np.array([0.25, 0.25])).tolist()
    [0.5, 0.25]
    """
    if np.isinf(strength):
        return np.broadcast_to(above, (*counts.shape[:-1], above.shape[-1]))
    total = counts[..., -1:] + strength
    return np.asarray(np.where(total > 0, (counts[..., :-1] + strength * above) / np.where(total > 0, total, 1), above))


def strengths_of(trace: RankTrace, top: int, max_depth: int | None = None) -> Strengths:
    """The strengths under which each fifth of a trace's conversations is likeliest, given the others.

    Plain counts where there is a single conversation.
    """
    part = fold_numbers(trace)
    tally = of_trace(trace, Paths.of_ranks(trace.ranks[:, :max_depth], top), part[None])[0]
    return fitted_strengths(tally, trace.num_conversations)[-1]


def fitted_strengths(tally: Tally, conversations: int) -> list[Strengths]:
    """Strengths for trees of depth 1, 2, ..., by conversations in parts; plain counts where there is a single one."""
    if conversations < 2:
        return [NONE] * tally.paths.depth
    unit = tally.states / conversations  # states of a conversation
    fit = Fit(tally, [unit * strength for strength in STRENGTHS])
    return [fit.strengths(depth) for depth in range(1, tally.paths.depth + 1)]


class Fit:
    """The strengths under which each part of the states is likeliest, given all the others.

    tally : of the states, by part
    grid  : pseudo-counts to choose from

    Trees of several depths are fitted together: what they have in common is worked out once.
    Time O(nodes of the trie x ranks x grid), memory O(nodes x ranks).
    """

    def __init__(self, tally: Tally, grid: Sequence[float]) -> None:
        self._tally, self._grid, self._top = tally, grid, tally.paths.top
        self._scores: dict[tuple[float, ...], float] = {}
        # By depth (F, contexts, R+1) counts of each part, of the marginal and the levels behind it.
        self._counts: dict[int, list[IntArray]] = {}
        for d in range(1, tally.paths.depth):
            after = tally.after(d)
            self._counts[d] = [tally.of_head(d)[:, None], after.sum(1, keepdims=True), after, tally.behind(d)]

    def strengths(self, depth: int) -> Strengths:
        """Strengths for trees of a depth, chosen level by level, each with those above it already there."""
        chosen: list[float] = []
        for level in LEVELS:
            first = 2 if level == "path" else 1  # up to there a level has the counts of the one above it
            if first >= depth:  # nothing to tell its strength by
                chosen.append(chosen[-1] if chosen else 0.0)
                continue
            scores = {s: sum(self._score(d, (*chosen, s)) for d in range(first, depth)) for s in self._grid}
            chosen.append(max(scores, key=lambda s: (scores[s], s)))
        return Strengths(*chosen)

    def _score(self, d: int, chosen: tuple[float, ...]) -> float:
        """Log-likelihood at one depth of the level that the last of the strengths is of."""
        key = (d, *chosen)
        if key not in self._scores:
            self._scores[key] = _log_likelihood(self._counts[d][len(chosen)], self._above(d, chosen))
        return self._scores[key]

    def _above(self, d: int, chosen: Sequence[float]) -> Chances:
        """(F, contexts, R) chances by all parts but each, with the strengths of the first levels."""
        found = mixed(_others(self._counts[d][0]), 0.0, np.zeros(self._top))
        for level, strength in enumerate(chosen, 1):
            if level == len(LEVELS):  # of every path that which ends with its last rank
                found = found[:, self._tally.paths.trie[d].rank]
            found = mixed(_others(self._counts[d][level]), strength, found)
        return found


def _others(counts: IntArray) -> IntArray:
    """Counts of all parts but each."""
    return np.asarray(counts.sum(0) - counts)


def _log_likelihood(counts: IntArray, chances: Chances) -> float:
    """Log-likelihood of (F, contexts, R+1) counts under (F, contexts, R) chances; nothing is thought quite impossible."""
    misses = counts[..., -1] - counts[..., :-1].sum(-1)
    miss = np.maximum(1 - chances.sum(-1), IMPOSSIBLE)
    return float((counts[..., :-1] * np.log(np.maximum(chances, IMPOSSIBLE))).sum() + (misses * np.log(miss)).sum())
