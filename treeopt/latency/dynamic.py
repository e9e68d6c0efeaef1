"""Latencies of steps with dynamic trees, from those with fixed ones and a few that were timed.

The verification of so many rows costs the same whatever tree they are, and so does a level with few nodes. What drafting
``topk`` nodes a level and ranking the pool adds is taken to rise evenly with the levels; it is fitted for each topk to the
dynamic trees that were timed (two levels and the deepest: `treeopt.pipeline.profile.placement`). Where an engine's drafter
reads the nodes of all levels above again, level i costs what i x topk nodes cost by the line through those of the topks.

An engine that verifies chains and dynamic trees alone has no fixed trees to begin with. There the trees of each topk are
measured themselves, and costs between them are estimated as those of fixed trees are (`treeopt.latency.estimate`).

n settings · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from treeopt.latency.estimate import StepCosts, pooled
from treeopt.latency.interpolation import rising_line
from treeopt.latency.paired import paired_latency
from treeopt.records.profile import LatencyProfile, Setting, StepTiming
from treeopt.trees.draft import Draft

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Extra:
    """Cost of a dynamic step beyond that of a fixed tree of as many rows and levels: ms + ms_per_level x (levels - 1)."""

    ms: float
    ms_per_level: float
    stderr_ms: float

    def at(self, levels: int) -> float:
        return self.ms + self.ms_per_level * (levels - 1)


NOTHING = Extra(0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class DynamicCosts:
    """Step latencies of dynamic trees at one batch size and context."""

    costs: StepCosts
    extra: dict[int, Extra]  # of each topk that was timed; a chain is a fixed tree
    redrafts: bool = False  # see `DynamicLimits`
    tables: Mapping[int, StepCosts] = field(default_factory=dict)  # of each topk, where there are no fixed trees

    @classmethod
    def of(cls, costs: StepCosts, profile: LatencyProfile, *, redrafts: bool = False) -> DynamicCosts:
        """By the timings of the nearest context that has some."""
        contexts = {p.context_tokens for p in profile.dynamic if p.batch_size == costs.batch_size}
        nearest = min(contexts, key=lambda tokens: abs(tokens - costs.context_tokens), default=None)
        trees = [p for p in profile.fixed if p.batch_size == costs.batch_size]
        if contexts and all(p.size == p.depth + 1 for p in trees):
            return cls(costs, {1: NOTHING}, redrafts=redrafts, tables=_tables(costs, profile))
        if nearest is None:
            return cls(costs, {1: NOTHING}, redrafts)
        setting = costs.batch_size, nearest
        there = StepCosts(profile, *setting)
        plain = pooled([p for p in profile.autoregressive if p.setting == setting])
        known = {kind: paired_latency(pooled(same), plain) for kind, same in _kinds(profile.dynamic, setting).items()}
        found: dict[int, list[tuple[int, float, float]]] = {}  # topk to levels, extra ms and its standard error
        for (size, depth, topk), latency in known.items():
            if fixed := there.step(size, depth):
                error = float(np.hypot(latency.stderr_ms, fixed.stderr_ms))
                found.setdefault(topk, []).append((depth, latency.ms - fixed.ms, error))
        extra = {1: NOTHING, **{topk: _line(points) for topk, points in found.items()}}
        return cls(costs, extra, redrafts)

    def extra_ms(self, draft: Draft) -> float:
        """[ms] beyond a fixed tree of as many rows and levels; NaN where the topk was not timed."""
        topk = draft.topk or 1
        if topk not in self.extra:
            return float("nan")
        once = self.extra[topk].at(draft.depth)
        if not self.redrafts or topk == 1:  # a chain is drafted as one
            return once
        return once + self._node_ms * topk * (draft.depth - 1) * (draft.depth - 2) / 2

    @cached_property
    def _node_ms(self) -> float:
        """[ms] that a further node on a level adds, at least 0."""
        levels = [extra.ms_per_level for extra in self.extra.values()]
        return rising_line(list(self.extra), levels)[1]

    def ms(self, drafts: Sequence[Draft]) -> Floats:
        """(n,) [ms]; NaN where the topk was not timed, or no measurements enclose rows and levels."""
        if self.tables:
            return self._from_tables(drafts, lambda table, sizes, levels: table.ms(sizes, levels))
        extra = np.array([self.extra_ms(draft) for draft in drafts])
        found: Floats = np.maximum(self.costs.ms(*_sizes(drafts)) + extra, self.costs.plain.ms)
        return found

    def draws_ms(self, drafts: Sequence[Draft], n: int, rng: np.random.Generator) -> Floats:
        """(n, B) what each would be with other rounds; those of one topk err together."""
        if self.tables:
            at = deepcopy(rng)
            return self._from_tables(drafts, lambda *of: of[0].draws_ms(*of[1:], n, deepcopy(at)), n)
        base, fixed = self.costs.draws_ms(*_sizes(drafts), n, rng), self.costs.ms(*_sizes(drafts))
        noise = {topk: extra.stderr_ms * rng.standard_normal(n) for topk, extra in sorted(self.extra.items())}
        extra_ms = np.stack([self.extra_ms(draft) + noise[draft.topk or 1] for draft in drafts])
        found: Floats = np.maximum(base + extra_ms * (base / fixed[:, None]), base / 4)
        return found

    def _from_tables(self, drafts: Sequence[Draft], ask: Callable[..., Floats], *shape: int) -> Floats:
        """(n, ...) what the table of each one's topk answers; NaN where there is none. A chain is a fixed tree."""
        found = np.full((len(drafts), *shape), np.nan)
        for topk in {draft.topk or 1 for draft in drafts}:
            table = self.costs if topk == 1 else self.tables.get(topk)
            if table is not None:
                places = [i for i, draft in enumerate(drafts) if (draft.topk or 1) == topk]
                found[places] = ask(table, *_sizes([drafts[i] for i in places]))
        return found


def _sizes(drafts: Sequence[Draft]) -> tuple[list[int], list[int]]:
    """Rows and depths of some drafts."""
    return [draft.rows for draft in drafts], [draft.depth for draft in drafts]


def price(costs: StepCosts, draft: Draft, n: int, rng: np.random.Generator) -> tuple[float, Floats]:
    """[ms] of a step with any draft, and (B,) what it would be with other rounds; NaN where that is not known."""
    priced = DynamicCosts.of(costs, costs.profile) if draft.topk else DynamicCosts(costs, {1: NOTHING})
    ms = float(priced.ms([draft])[0])
    return ms, np.full(n, ms) if np.isnan(ms) else priced.draws_ms([draft], n, rng)[0]


def _tables(costs: StepCosts, profile: LatencyProfile) -> dict[int, StepCosts]:
    """The costs by rows and levels of the dynamic trees of each topk."""
    found = {}
    for topk in {p.topk for p in profile.dynamic if p.topk is not None}:
        points = tuple(replace(p, topk=None) for p in profile.dynamic if p.topk == topk)
        if any(p.batch_size == costs.batch_size for p in points):
            found[topk] = StepCosts(
                LatencyProfile(points, profile.autoregressive), costs.batch_size, costs.context_tokens
            )
    return found


def _kinds(points: Sequence[StepTiming], setting: Setting) -> dict[tuple[int, int, int], list[StepTiming]]:
    """The timings of a setting by rows, levels and topk."""
    found: dict[tuple[int, int, int], list[StepTiming]] = {}
    for p in points:
        if p.setting == setting and p.topk is not None:
            found.setdefault((p.size, p.depth, p.topk), []).append(p)
    return found


def _line(points: Sequence[tuple[int, float, float]]) -> Extra:
    """The line through the extras at their levels; level where one alone was timed.

    Neither it nor its slope is below 0: more nodes are drafted and ranked than for a fixed tree, and the rest is noise.
    """
    levels, extra, errors = zip(*points, strict=True)
    error = float(np.sqrt(np.square(errors).mean()))
    return Extra(*rising_line([level - 1 for level in levels], extra), error)
