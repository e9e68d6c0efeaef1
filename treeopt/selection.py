"""Candidates for the tree of a batch size, and the choice among them when both factors have noise.

throughput = batch_size x tokens per step / step latency. Tokens per step come from a sample of
conversations, latencies from a sample of rounds: both are drawn again, the same draws for all candidates,
and a candidate is *tied* with the fastest one where that is not faster in 97.5 % of the draws.

n candidates · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.heldout import HeldOut
from treeopt.latency import LatencyProfile
from treeopt.statistics import BOOTSTRAPS, SEED
from treeopt.tree import IntArray

NEGLIGIBLE = 0.005  # share of the throughput that a smaller tree may cost where they are tied
POWER = 1.96 + 0.84  # standard errors between two trees that 95 % intervals separate in 80 % of the cases
ROUNDING = 1e-9  # of a latency without noise, one that was computed
ASKED = 1e5  # conversations that nobody will collect to separate two trees

Floats = NDArray[np.float64]


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
            self, held_out=[self.held_out[i] for i in which], sizes=self.sizes[which],
            depths=self.depths[which], rates=self.rates[which], rate_draws=self.rate_draws[which],
            ms=part(self.ms), ms_draws=part(self.ms_draws), ms_stderr=part(self.ms_stderr),
        )  # fmt: skip


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
    families: list[HeldOut],
    profile: LatencyProfile | None,
    batch_size: int,
    context: int | None,
    measured_only: bool,
) -> Candidates:
    """What can be chosen; without a profile every size of the deepest family."""
    held_out, rows, sizes, depths, weights, straight = [], [], [], [], [], []
    for limit, family in enumerate(families, 1):
        if profile is None and limit < len(families):
            continue
        trees = zip(family.family.sizes.tolist(), family.family.depths().tolist(), strict=True)
        for row, (size, depth) in enumerate(trees):
            if profile is not None and context is not None:
                if max(depth, 1) != limit:
                    continue  # a shallower tree was seen under its own limit
                found = profile.weights(batch_size, context, size, depth, measured_only=measured_only)
                if found is None:
                    continue
                weights.append(found)
                straight.append(
                    profile.weights(
                        batch_size, context, size, depth, measured_only=measured_only, pooled=False
                    )
                    or found
                )
            held_out.append(family)
            rows.append(row)
            sizes.append(size)
            depths.append(depth)
    if sizes == [1] and max(len(family.family) for family in families) > 1 and not measured_only:
        smallest = sorted({int(size) for family in families for size in family.family.sizes if size > 1})[:4]
        raise OutOfRange(
            f"The profile must have timed some of the trees that can be planned, but at batch size {batch_size} it has "
            f"none: time sizes {', '.join(map(str, smallest))}."
        )
    rates = np.array([h.tokens_per_step[row] for h, row in zip(held_out, rows, strict=True)])
    rate_draws = np.stack([h.draws[row] for h, row in zip(held_out, rows, strict=True)])
    ms = ms_draws = ms_stderr = plain = None
    if profile is not None and context is not None:
        anchors = sorted({anchor for found in weights for anchor in found})
        place = {anchor: i for i, anchor in enumerate(anchors)}
        table, lines = np.zeros((2, len(weights), len(anchors)))  # (n, anchors), pooled and straight
        for i, pair in enumerate(zip(weights, straight, strict=True)):
            for which, found in zip((table, lines), pair, strict=True):
                for anchor, weight in found.items():
                    which[i, place[anchor]] = weight
        known = np.array([profile.anchors[anchor].ms for anchor in anchors])
        rng = np.random.default_rng([SEED, batch_size])
        count = rate_draws.shape[1] if rate_draws.shape[1] > 1 else BOOTSTRAPS
        ms, ms_draws = table @ known, table @ profile.draws(anchors, count, rng).T
        unsure = np.abs(ms - lines @ known) / 2  # as much as the two ways between measured sizes differ
        ms_draws = np.maximum(
            ms_draws + unsure[:, None] * rng.standard_normal(ms_draws.shape), ms[:, None] / 4
        )
        spread = ms_draws.std(axis=1)
        ms_stderr = np.where(spread > ROUNDING * ms, spread, 0.0)
        lone = sizes.index(1)
        plain = np.append(ms[lone], ms_draws[lone])
    return Candidates(batch_size, context, held_out, np.array(sizes), np.array(depths), rates, rate_draws,
                      ms, ms_draws, ms_stderr, plain)  # fmt: skip


def common(options: list[Candidates]) -> list[Candidates]:
    """The candidates that every batch size has, in the same order."""
    keys = [[(id(h), int(size)) for h, size in zip(c.held_out, c.sizes, strict=True)] for c in options]
    shared = set(keys[0]).intersection(*keys[1:])
    return [
        c.only(np.array([i for i, key in enumerate(k) if key in shared]))
        for c, k in zip(options, keys, strict=True)
    ]


def select(
    options: list[Candidates], shares: Sequence[float], *, take: tuple[int, int] | None = None
) -> Selection:
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
    tied = np.flatnonzero(np.quantile(draws / draws[fastest], 0.975, axis=1) >= 1)
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
    """Which candidate has the wanted size and depth."""
    return int(np.flatnonzero((c.sizes == wanted[0]) & (c.depths == wanted[1]))[0])


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
