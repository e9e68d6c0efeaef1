"""Candidates for the tree of a batch size: every size of every depth, with its tokens per step and its latency.

throughput = batch_size x tokens per step / step latency. Tokens per step come from a sample of conversations,
latencies from a sample of rounds: both are drawn again, the same draws for all candidates.

n candidates · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.heldout import HeldOut
from treeopt.growth.source import Source, objective_for
from treeopt.latency.estimate import StepCosts
from treeopt.records.bootstrap import BOOTSTRAPS, SEED
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray

ROUNDING = 1e-9  # of a latency without noise, one that was computed

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
    ms: Floats | None = None
    ms_draws: Floats | None = None
    ms_stderr: Floats | None = None
    plain_ms: Floats | None = None

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


def families_of(source: Source, limits: Limits, objective: str, *, timed: bool) -> list[HeldOut]:
    """The trees of depth limits 1, 2, ..., and what they reach on answers that they were not grown on.

    timed : whether there are latencies; without them the deepest limit is all that is looked at
    """
    objective, deepest = objective_for(source, objective), limits.depth(source.num_heads)
    depths = range(1 if timed else deepest, deepest + 1)
    return [source.crossfit(replace(limits, max_depth=depth), objective) for depth in depths]


def candidates_of(families: Sequence[HeldOut], batch_size: int, costs: StepCosts | None) -> Candidates:
    """What can be chosen; without latencies every size of the deepest family.

    families : of depth limits 1, 2, ...
    """
    if costs is None:
        deepest = families[-1]
        return _candidates([(deepest, np.arange(len(deepest.family.sizes)))], batch_size, None)
    found = []  # families, each with which of its trees
    for max_depth, held_out in enumerate(families, 1):
        sizes, depths = held_out.family.sizes, held_out.family.depths()
        own = np.maximum(depths, 1) == max_depth  # a shallower tree was seen under its own limit
        found.append((held_out, np.flatnonzero(own & ~np.isnan(costs.ms(sizes, depths)))))
    c = _candidates(found, batch_size, costs.context_tokens)
    known = sorted({int(size) for held_out in families for size in held_out.family.sizes if size > 1})
    if c.sizes.tolist() == [1] and known and not costs.measured_only:
        raise OutOfRange(
            f"The profile must have timed some of the trees that can be planned, but at batch size {batch_size} it has "
            f"none: time sizes {', '.join(map(str, known[:4]))}."
        )
    count = c.rate_draws.shape[1] if c.rate_draws.shape[1] > 1 else BOOTSTRAPS
    ms = costs.ms(c.sizes, c.depths)
    ms_draws = costs.draws_ms(c.sizes, c.depths, count, np.random.default_rng([SEED, batch_size]))
    spread = ms_draws.std(axis=1)
    lone = c.sizes.tolist().index(1)
    return replace(
        c,
        ms=ms,
        ms_draws=ms_draws,
        ms_stderr=np.where(spread > ROUNDING * ms, spread, 0.0),
        plain_ms=np.append(ms[lone], ms_draws[lone]),
    )


def _candidates(found: Sequence[tuple[HeldOut, IntArray]], batch_size: int, context: int | None) -> Candidates:
    """Some trees of families, without latencies."""
    return Candidates(
        batch_size,
        context,
        [held_out for held_out, rows in found for _ in rows],
        sizes=np.concatenate([held_out.family.sizes[rows] for held_out, rows in found]),
        depths=np.concatenate([held_out.family.depths()[rows] for held_out, rows in found]),
        rates=np.concatenate([held_out.tokens_per_step[rows] for held_out, rows in found]),
        rate_draws=np.concatenate([held_out.draws[rows] for held_out, rows in found]),
    )


def common(options: list[Candidates]) -> list[Candidates]:
    """The candidates that every batch size has, in the same order."""
    keys = [[c.key(i) for i in range(len(c.sizes))] for c in options]
    shared = set(keys[0]).intersection(*keys[1:])
    return [
        c.only(np.array([i for i, key in enumerate(k) if key in shared])) for c, k in zip(options, keys, strict=True)
    ]
