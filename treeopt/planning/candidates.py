"""Candidates for the tree of a batch size, and the choice among them when both factors have noise.

throughput = batch_size x tokens per step / step latency. Tokens per step come from a sample of
conversations, latencies from a sample of rounds: both are drawn again, the same draws for all candidates,
and a candidate is *tied* with the fastest one where none is faster than it in 97.5 % of the draws.

n candidates · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.heldout import HeldOut
from treeopt.latency.interpolation import Weights
from treeopt.records.bootstrap import BOOTSTRAPS, SEED
from treeopt.records.profile import LatencyProfile
from treeopt.trees.tree import IntArray

CERTAIN = 0.975  # share of the draws in which one candidate is faster than another that it is not tied with
NEGLIGIBLE = 0.005  # share of the throughput that a smaller tree may cost where they are tied
POWER = 1.96 + 0.84  # standard errors between two trees that 95 % intervals separate in 80 % of the cases
ROUNDING = 1e-9  # of a latency without noise, one that was computed
ASKED = 1e5  # conversations that nobody will collect to separate two trees

Floats = NDArray[np.float64]
Key = tuple[int, int]  # size and depth of a candidate


@dataclass(frozen=True, eq=False)
class Candidates:
    """Every size of every depth limit that the profile covers, at one batch size.

    held_out : n families that they come from · sizes, depths : (n,)
    rates    : (n,) held-out tokens per step, rate_draws (n, B)
    ms       : (n,) latency of a step, ms_draws (n, B), ms_stderr (n,); plain_ms (1 + B,) of a plain step
               first the estimate. All None without a profile.
    """

    batch_size: int
    context: int | None
    held_out: list[HeldOut]
    sizes: IntArray
    depths: IntArray
    rates: Floats
    rate_draws: Floats
    ms: Floats | None
    ms_draws: Floats | None
    ms_stderr: Floats | None
    plain_ms: Floats | None

    def key(self, i: int) -> Key:
        """What tells a candidate's tree from the others at every batch size."""
        return int(self.sizes[i]), int(self.depths[i])

    @property
    def throughput(self) -> Floats:
        """(n,) tokens per second; tokens per step where no latency is known."""
        return self.rates if self.ms is None else 1e3 * self.batch_size * self.rates / self.ms

    @property
    def throughput_draws(self) -> Floats:
        """(n, B)"""
        if self.ms_draws is None:
            return self.rate_draws
        found: Floats = 1e3 * self.batch_size * self.rate_draws / self.ms_draws
        return found

    def only(self, which: IntArray) -> Candidates:
        """Some of them."""

        def part(values: Floats | None) -> Floats | None:
            return None if values is None else values[which]

        return replace(
            self,
            held_out=[self.held_out[i] for i in which],
            sizes=self.sizes[which],
            depths=self.depths[which],
            rates=self.rates[which],
            rate_draws=self.rate_draws[which],
            ms=part(self.ms),
            ms_draws=part(self.ms_draws),
            ms_stderr=part(self.ms_stderr),
        )


@dataclass(frozen=True, eq=False)
class Selection:
    """Which candidate was chosen, and how sure that is.

    chosen    : the smallest of the tied ones that costs at most `NEGLIGIBLE` throughput
    tied      : all that the data cannot tell from the fastest
    runner_up : the fastest of another size; None where there is no other
    sizes95   : 95 % interval of the fastest size over the draws
    """

    chosen: int
    tied: IntArray
    runner_up: int | None
    sizes95: list[int]


def candidates_of(
    families: Sequence[HeldOut],
    profile: LatencyProfile | None,
    batch_size: int,
    context: int | None,
    measured_only: bool,
) -> Candidates:
    """What can be chosen; without a profile every size of the deepest family.

    families : of depth limits 1, 2, ...
    """
    if profile is None or context is None:
        deepest = families[-1]
        return _candidates([(deepest, list(range(len(deepest.family.sizes))))], batch_size, context)
    found: list[tuple[HeldOut, list[int]]] = []  # with which of its trees
    ways: list[tuple[Weights, Weights]] = []  # pooled and straight
    for max_depth, held_out in enumerate(families, 1):
        family, rows = held_out.family, []
        for row, (size, depth) in enumerate(zip(family.sizes.tolist(), family.depths().tolist(), strict=True)):
            if max(depth, 1) != max_depth:
                continue  # a shallower tree was seen under its own limit
            pooled = profile.weights(batch_size, context, size, depth, measured_only=measured_only)
            straight = profile.weights(batch_size, context, size, depth, measured_only=measured_only, pooled=False)
            if pooled is None:
                continue
            rows.append(row)
            ways.append((pooled, straight or pooled))
        found.append((held_out, rows))
    c = _candidates(found, batch_size, context)
    largest = max(len(held_out.family) for held_out in families)
    if c.sizes.tolist() == [1] and largest > 1 and not measured_only:
        smallest = sorted({int(n) for held_out in families for n in held_out.family.sizes if n > 1})[:4]
        raise OutOfRange(
            f"The profile must have timed some of the trees that can be planned, but at batch size {batch_size} it has "
            f"none: time sizes {', '.join(map(str, smallest))}."
        )
    anchors = sorted({anchor for pair in ways for weights in pair for anchor in weights})
    place = {anchor: i for i, anchor in enumerate(anchors)}
    table, lines = np.zeros((2, len(ways), len(anchors)))  # (n, anchors), pooled and straight
    for i, pair in enumerate(ways):
        for which, weights in zip((table, lines), pair, strict=True):
            for anchor, weight in weights.items():
                which[i, place[anchor]] = weight
    whole = np.array([profile.anchors[anchor].ms for anchor in anchors])
    rng = np.random.default_rng([SEED, batch_size])
    count = c.rate_draws.shape[1] if c.rate_draws.shape[1] > 1 else BOOTSTRAPS
    ms = table @ whole
    ms_draws = table @ profile.draws(anchors, count, rng).T
    unsure = np.abs(ms - lines @ whole) / 2  # as much as the two ways between measured sizes differ
    ms_draws = np.maximum(ms_draws + unsure[:, None] * rng.standard_normal(ms_draws.shape), ms[:, None] / 4)
    spread = ms_draws.std(axis=1)
    lone = c.sizes.tolist().index(1)
    return replace(
        c,
        ms=ms,
        ms_draws=ms_draws,
        ms_stderr=np.where(spread > ROUNDING * ms, spread, 0.0),
        plain_ms=np.append(ms[lone], ms_draws[lone]),
    )


def _candidates(found: Sequence[tuple[HeldOut, list[int]]], batch_size: int, context: int | None) -> Candidates:
    """Some trees of families, without latencies."""
    return Candidates(
        batch_size,
        context,
        [held_out for held_out, rows in found for _ in rows],
        sizes=np.concatenate([held_out.family.sizes[rows] for held_out, rows in found]),
        depths=np.concatenate([held_out.family.depths()[rows] for held_out, rows in found]),
        rates=np.concatenate([held_out.tokens_per_step[rows] for held_out, rows in found]),
        rate_draws=np.concatenate([held_out.draws[rows] for held_out, rows in found]),
        ms=None,
        ms_draws=None,
        ms_stderr=None,
        plain_ms=None,
    )


def common(options: list[Candidates]) -> list[Candidates]:
    """The candidates that every batch size has, in the same order."""
    keys = [[c.key(i) for i in range(len(c.sizes))] for c in options]
    shared = set(keys[0]).intersection(*keys[1:])
    return [
        c.only(np.array([i for i, key in enumerate(k) if key in shared])) for c, k in zip(options, keys, strict=True)
    ]


def select(options: list[Candidates], shares: Sequence[float], *, take: tuple[int, int] | None = None) -> Selection:
    """The best candidate for the batch sizes together, each with its share of the time.

    take : (size, depth) of the one to choose whatever the prediction says
    """
    first = options[0]
    total = np.sum([w * c.throughput for w, c in zip(shares, options, strict=True)], axis=0)
    if first.ms is None:  # nothing says what a step costs: the whole budget
        chosen = _place(first, take) if take else int(first.sizes.argmax())
        return Selection(chosen, np.array([chosen]), None, [int(first.sizes[chosen])] * 2)
    draws = np.sum([w * c.throughput_draws for w, c in zip(shares, options, strict=True)], axis=0)
    fastest = int(total.argmax())
    near = np.flatnonzero((draws[fastest] > draws).mean(axis=1) < CERTAIN)
    # The fastest may be one that is hardly known: then another may still be clearly faster than what is near to it.
    tied = np.array([i for i in near if i == fastest or ((draws > draws[i]).mean(axis=1) < CERTAIN).all()])
    good = [i for i in tied.tolist() if total[i] >= (1 - NEGLIGIBLE) * total[fastest]]
    chosen = min(good, key=lambda i: (first.sizes[i], -total[i]))
    if take is not None:
        chosen = _place(first, take)
    others = np.flatnonzero(first.sizes != first.sizes[chosen])
    runner_up = int(others[total[others].argmax()]) if len(others) else None
    winners = np.sort(first.sizes[draws.argmax(0)])
    ends = [int(winners[int(share * (len(winners) - 1))]) for share in (0.025, 0.975)]
    return Selection(chosen, tied, runner_up, ends)


def _place(c: Candidates, wanted: tuple[int, int]) -> int:
    """Which candidate has the wanted size and depth, the fastest one if there are several."""
    found = np.flatnonzero((c.sizes == wanted[0]) & (c.depths == wanted[1]))
    return int(found[c.throughput[found].argmax()])


def runner_up(c: Candidates, selection: Selection) -> dict[str, Any] | None:
    """The fastest tree of another size, how far behind it is, and how many conversations would tell.

    So many tell two trees apart in four of five cases. None where there are as many already: more would make
    tokens per step surer, but not the latencies, which need a longer profile.
    """
    i, j = selection.chosen, selection.runner_up
    if j is None or c.ms is None:
        return None
    behind = float(np.log(c.throughput[i] / c.throughput[j]))
    noise = np.log(c.throughput_draws[i] / c.throughput_draws[j])
    of_prompts = float(np.log(c.rate_draws[i] / c.rate_draws[j]).std())
    n = c.held_out[i].conversations
    needed = n * (POWER * of_prompts / behind) ** 2 if behind else np.inf
    return {
        "size": int(c.sizes[j]),
        "depth": int(c.depths[j]),
        "tokens_per_s": float(c.throughput[j]),
        "behind": behind,
        "behind_stderr": float(noise.std()),
        "prompts_to_separate": int(np.ceil(needed)) if n and n < needed <= ASKED else None,
    }
