"""Adaptive trees: a dynamic tree whose rows are chosen at each step, by what the drafter's own scores promise.

At a state the nodes of depth d among the best N - 1 of the pool claim the share m_d(N) of the drafter's probability. How
often a guess of depth d is then accepted is a logistic function of logit m_d(N), fitted for each depth on other answers. A
step takes the rows N with the largest

    1 + sum_d P(accepted >= d | m_d(N)) - throughput x cost(N)

which is what maximises tokens over time in the long run (the ratio objective of Dinkelbach 1967, "On nonlinear fractional
programming"). In a batch all rows take the same N, by the sum over them.

P states · L levels · G numbers of rows to choose from · C conversations
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.replay import visited
from treeopt.records.pools import Pools
from treeopt.records.trace import RankTrace
from treeopt.trees.tree import IntArray

LEAST = 1e-4  # claimed shares are kept between this and 1 minus it, so that their logit is finite
RIDGE, NEWTON_STEPS = 1e-3, 100
WALKS, SETTLED = 6, 1e-3  # to the rate that a rule reaches; how near is near enough
AT_ONCE = 2**14  # states whose scores are sorted together
FITTED = 2**14  # states that a fit takes, spread evenly: its two numbers a depth need no more

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Promise:
    """How claimed shares become probabilities: P(accepted >= d) = 1 / (1 + exp(-(intercept_d + slope_d logit m_d)))."""

    intercepts: tuple[float, ...]
    slopes: tuple[float, ...]

    def tokens(self, claimed: NDArray[np.float32]) -> Floats:
        """(..., G) tokens to expect of a step, by (..., G, L) claimed shares; 0 where nothing of a depth is among the rows."""
        odds = logit(claimed) * np.array(self.slopes) + np.array(self.intercepts)
        reached = np.where(claimed > 0, 1 / (1 + np.exp(-odds)), 0.0)
        # A guess is accepted only behind its parent.
        found: Floats = 1 + np.minimum.accumulate(reached, axis=-1).sum(-1)
        return found


def logit(share: NDArray[Any]) -> Floats:
    kept = np.clip(share, LEAST, 1 - LEAST)
    found: Floats = np.log(kept / (1 - kept))
    return found


def claimed_shares(parts: Sequence[NDArray[np.float16]], rows: Sequence[int]) -> NDArray[np.float32]:
    """(P, G, L) share of the drafter's probability that the nodes of each depth among the best rows - 1 claim.

    Of levels with more nodes than are kept (`MOST_SCORES`) the best of them count.

    parts : (P, n) scores of each level, best first; decoding takes them with the precision of the record
    """
    levels = len(parts)
    depth = np.repeat(np.arange(levels), [part.shape[1] for part in parts])
    scores = np.concatenate(parts, axis=1)
    found = np.empty((len(scores), len(rows), levels), dtype=np.float32)
    most = min(max(rows) - 1, scores.shape[1])
    ends = np.minimum(np.array(rows) - 1, most)  # nodes of each tree
    for begin in range(0, len(scores), AT_ONCE):
        here = slice(begin, begin + AT_ONCE)
        some = scores[here].astype(np.float32)
        best = np.argsort(-some, axis=1, kind="stable")[:, :most]
        shares = np.zeros((len(some), 1 + most, levels), dtype=np.float32)  # behind no node, the first, ...
        np.put_along_axis(
            shares[:, 1:], depth[best][..., None], np.exp(np.take_along_axis(some, best, 1))[..., None], 2
        )
        found[here] = shares.cumsum(1)[:, ends]
    return found


def lengths_by_rows(pools: Pools, levels: int, topk: int, rows: Sequence[int]) -> NDArray[np.uint8]:
    """(P, G) guesses that a step accepts at each state with each number of rows."""
    places = pools.places_in(levels, topk)
    found = [(places <= n - 2).sum(1) if n > 1 else np.zeros(len(places)) for n in rows]
    return np.stack(found, axis=1).astype(np.uint8)


def fit_promise(claimed: NDArray[np.float32], accepted: NDArray[np.uint8]) -> Promise:
    """The logistic fit of each depth, over all states and numbers of rows, by Newton's method with a small ridge.

    Its steps are shortened so that it settles whatever the claims (Sun and Tran-Dinh 2019, "Generalized self-concordant
    functions").

    claimed : (P, G, L) · accepted : (P, G)
    """
    intercepts, slopes = [], []
    for d in range(claimed.shape[2]):
        share = claimed[..., d]
        some = share > 0
        x, y = logit(share[some].astype(np.float64)), (accepted[some] > d).astype(np.float64)
        weights = np.array([0.0, 1.0])  # the claim itself
        design = np.stack([np.ones_like(x), x], axis=1)
        for _ in range(NEWTON_STEPS if len(x) else 0):
            p = 1 / (1 + np.exp(-design @ weights))
            gradient = design.T @ (y - p) / len(x) - RIDGE * (weights - [0.0, 1.0])
            hessian = (design * (p * (1 - p))[:, None]).T @ design / len(x) + RIDGE * np.eye(2)
            change = np.linalg.solve(hessian, gradient)
            if (length := float(np.linalg.norm(change) * np.hypot(1, np.abs(x).max()))) < 1e-9:
                break
            weights = weights + change * np.log1p(length) / length
        intercepts.append(float(weights[0]))
        slopes.append(float(weights[1]))
    return Promise(tuple(intercepts), tuple(slopes))


@dataclass(frozen=True, eq=False)
class Taken:
    """What decoding took with a rule: (C,) tokens, steps, milliseconds and verified rows of each conversation."""

    tokens: Floats
    steps: Floats
    ms: Floats
    rows: Floats

    @property
    def tokens_per_ms(self) -> float:
        return float(self.tokens.sum() / self.ms.sum())


@dataclass(frozen=True, eq=False)
class Rule:
    """An adaptive tree's rule: what scores promise, what (G,) ``rows`` cost, and what a millisecond has to bring.

    rate : tokens per millisecond of the whole batch
    """

    levels: int
    topk: int
    rows: Sequence[int]
    cost_ms: Floats
    promise: Promise
    rate: float = 0.0

    def expected(self, trace: RankTrace) -> tuple[Floats, NDArray[np.uint8]]:
        """(P, G) tokens to expect of a step at each state, and (P, G) guesses that it accepts."""
        assert trace.pools is not None
        parts = trace.pools.level_scores(self.topk)[: self.levels]
        promised = self.promise.tokens(claimed_shares(parts, self.rows))
        return promised, lengths_by_rows(trace.pools, self.levels, self.topk, self.rows)

    def walk(self, trace: RankTrace, *, batch_size: int) -> Taken:
        """Decode every sequence by it, ``batch_size`` at once; a row whose sequence ends gets the next one."""
        decode = _alike if batch_size == 1 else _together
        return decode(self, trace, *self.expected(trace), batch_size)

    def lengths(self, trace: RankTrace) -> IntArray:
        """(P,) guesses that a step of a sequence alone accepts at each state."""
        promised, accepted = self.expected(trace)
        chosen = (promised - self.rate * self.cost_ms).argmax(1)
        return np.take_along_axis(accepted, chosen[:, None], 1)[:, 0].astype(np.int64)


def fit_rule(
    trace: RankTrace, rows: Sequence[int], levels: int, topk: int, cost_ms: Floats, *, batch_size: int
) -> Rule:
    """The rule that some answers say; its rate is what it reaches on them when it asks for just that much.

    cost_ms : (G,) of a step of the whole batch with each number of ``rows``
    """
    pools = trace.pools
    assert pools is not None
    claimed = claimed_shares(pools.level_scores(topk)[:levels], rows)
    accepted = lengths_by_rows(pools, levels, topk, rows)
    if not (has_step := trace.has_step).any():  # nothing to learn from
        return Rule(levels, topk, rows, cost_ms, Promise((0.0,) * levels, (1.0,) * levels))
    fitted = np.flatnonzero(has_step)[:: -(-int(has_step.sum()) // FITTED)]
    promise = fit_promise(claimed[fitted], accepted[fitted])
    promised = promise.tokens(claimed)
    rate = float((promised[has_step].mean(0) * batch_size / cost_ms).max())
    for _ in range(WALKS):
        rule = Rule(levels, topk, rows, cost_ms, promise, rate)
        reached = _alike(rule, trace, promised, accepted, batch_size).tokens_per_ms
        if abs(reached / rate - 1) < SETTLED:
            break
        rate = reached
    return Rule(levels, topk, rows, cost_ms, promise, rate)


def _alike(rule: Rule, trace: RankTrace, promised: Floats, accepted: NDArray[np.uint8], batch_size: int) -> Taken:
    """The same where all rows of a batch are at states alike, so that each chooses for itself; exact for one row."""
    chosen = (batch_size * promised - rule.rate * rule.cost_ms).argmax(1)
    lengths = np.take_along_axis(accepted, chosen[:, None], 1)[:, 0].astype(np.int64)
    states = visited(trace, lengths)
    sequence = np.searchsorted(trace.starts, states, side="right") - 1
    moved = np.minimum(states + 1 + lengths[states], trace.starts[sequence + 1] - 1)
    values = (
        moved - states,
        np.ones(len(states)),
        rule.cost_ms[chosen[states]] / batch_size,
        np.array(rule.rows)[chosen[states]],
    )
    of = trace.clusters[sequence]
    return Taken(*(np.bincount(of, each, minlength=trace.num_conversations).astype(float) for each in values))


def _together(rule: Rule, trace: RankTrace, promised: Floats, accepted: NDArray[np.uint8], batch_size: int) -> Taken:
    """Step by step, all rows of a batch with the same number of rows to verify."""
    starts, last = trace.starts[:-1], trace.starts[1:] - 1
    waiting = [s for s in range(trace.num_sequences) if starts[s] < last[s]][::-1]
    clusters, rows = trace.clusters, np.array(rule.rows)
    taken = np.zeros((4, trace.num_conversations))
    at, of = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    while waiting or len(at):
        while waiting and len(at) < batch_size:
            of = np.append(of, waiting.pop())
            at = np.append(at, starts[of[-1]])
        g = int((promised[at].sum(0) - rule.rate * rule.cost_ms).argmax())
        moved = np.minimum(at + 1 + accepted[at, g], last[of])
        each = np.ones(len(at))
        values = (moved - at, each, each * rule.cost_ms[g] / len(at), each * rows[g])
        np.add.at(taken.T, clusters[of], np.stack(values, axis=1))
        going = moved < last[of]
        at, of = moved[going], of[going]
    return Taken(*taken)
