"""Latency of a decoding step at one batch size and context: the one place where a latency is asked for.

step_ms  latency of one whole decoding step (propose, verify, accept, commit) [ms]
plain    an autoregressive step: no heads, no mask, no gather; what speedups are measured against

A step with a tree does all that a plain step does, so a shorter latency is noise: it is raised to the plain step's. Where an engine
with a drafter was timed guessing nothing, that may be the shorter one, and is the least in its place.

Trees of one size and depth are taken to cost the same. Between measured sizes a latency is interpolated along a straight
line, or along a staircase that is fitted to all batch sizes of the profile together: whichever errs less at timed sizes
that are left out (`between`). A depth that was not measured costs as much as the next deeper one that was. Between two
contexts the interpolation is linear. Sizes and depths beyond the measured ones give NaN.

A dynamic tree costs as much as a fixed one of its rows and levels and an *extra*: what drafting ``topk`` nodes a level and
ranking the pool adds, taken to rise evenly with the levels, fitted for each topk to those that were timed. A tree over
marginals has one too, which rises with its rows. An engine that verifies chains and dynamic trees alone has no fixed trees
to begin with: there the trees of each topk are a *table* of their own. A chain is a fixed tree.

n steps asked for · A steps measured, at the one or two contexts next to that asked for · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.errors import OutOfRange
from treeopt.latency.interpolation import Between, Curve, between, reach_ms, rising_line, size_weights, way_to
from treeopt.latency.measurements import Latency, Measurements, by_kind, paired_latency, pooled
from treeopt.records.profile import LatencyProfile, Setting
from treeopt.trees.draft import OVER_MARGINALS
from treeopt.trees.tree import BoolArray, IntArray

SHOWN = 3.29  # standard errors that a step is below a plain one before that is no noise: 99.9 %, since many are timed
SHOWN_ROUNDS = 5  # in which that was measured
NOTICEABLE = 0.005  # share by which a step is shorter than a plain one before that is worth a sentence

# By how much steps with trees cost more or less, against plain ones, when they decode at another time than they were timed
# (standard deviation, all trees alike). Profiles and later benchmarks were 4 % apart (root mean square of 14; docs/log.md).
ANOTHER_TIME = 0.03
Floats = NDArray[np.float64]


class Extra(NamedTuple):
    """Cost of a step beyond that of a fixed tree of as many rows and levels, which rises with the levels, or the rows, from the second on."""

    ms: float = 0.0
    ms_each: float = 0.0
    stderr_ms: float = 0.0


class StepCosts:
    """Latencies of steps at one batch size and context of a profile.

    context_tokens : ``context``, moved into the measured range; by default the shortest measured
    plain          : an autoregressive step
    reach          : the largest size and the largest depth measured; between two contexts the smaller of both
    is_faster      : whether a step with a tree is shown to be faster than a plain one, as where an engine's kernels for one
                     row are its worst; latencies then go down to the fastest that is shown
    below_plain    : whether a tree was timed noticeably faster than that, which is noise

    With ``as_measured`` latencies below those stay as they are, and are not taken to another time; with ``redrafts``
    the drafter reads the nodes of all levels above again, so that level i costs what i x topk nodes cost; with ``any_depth``
    trees of all depths tell what rows cost. Raises OutOfRange for a batch size that was not measured.

    >>> from treeopt.records.profile import StepTiming
    >>> point, plain = StepTiming(1, 128, 9, 2, (4.0,)), StepTiming(1, 128, 1, 0, (2.0,))
    >>> costs = StepCosts(LatencyProfile((point,), (plain,)), 1)
    >>> costs.plain.ms, costs.ms([9, 10], [2, 2]).tolist()
    (2.0, [4.0, nan])
    """

    def __init__(
        self,
        profile: LatencyProfile,
        batch_size: int,
        context: float | None = None,
        *,
        as_measured: bool = False,
        redrafts: bool = False,
        any_depth: bool = False,
    ) -> None:
        contexts = [tokens for batch, tokens in profile.settings if batch == batch_size]
        if not contexts:
            known = ", ".join(map(str, profile.batch_sizes))
            raise OutOfRange(f"The profile covers batch sizes {known}, but {batch_size} was asked.")
        self.profile, self.batch_size, self._redrafts, self._any_depth = profile, batch_size, redrafts, any_depth
        self.context_tokens = int(min(max(context or 0, contexts[0]), contexts[-1]))
        low = max(tokens for tokens in contexts if tokens <= self.context_tokens)
        high = min(tokens for tokens in contexts if tokens >= self.context_tokens)
        measurements = measured_by(profile)
        self._near = near = [measurements[batch_size, tokens] for tokens in sorted({low, high})]
        self._ms, self._stderr_ms = (np.concatenate([getattr(m, name) for m in near]) for name in ("ms", "stderr_ms"))
        self.reach = min(int(m.sizes.max()) for m in near), min(int(m.depths.max()) for m in near)
        far = float(way_to(self.context_tokens, low, high))
        self._shares = [1 - far, far][: len(near)]
        self._plain = np.concatenate([share * (m.sizes == 1) for share, m in zip(self._shares, near, strict=True)])
        self.plain = Latency(float(self._plain @ self._ms), float(self._plain @ self._stderr_ms))
        sure = [np.array([len(ratios) >= SHOWN_ROUNDS for ratios in m.ratios]) for m in near]
        below = [
            m.ms[(m.ms + SHOWN * m.stderr_ms < m.ms[0]) & by_round] for m, by_round in zip(near, sure, strict=True)
        ]
        shown = [some.min(initial=m.ms[0]) for some, m in zip(below, near, strict=True)]
        least_ms = float(np.dot(self._shares, shown))
        self.is_faster = least_ms < self.plain.ms
        if self.idle:  # the engine that has the drafter may be the faster one
            idle_ms = float(self.idle.ms([2], [1])[0])
            least_ms, shown = min(least_ms, idle_ms), [min(ms, idle_ms) for ms in shown]
        floors_ms = [(1 - NOTICEABLE) * ms for ms in shown]
        self.below_plain = any(bool((m.ms < floor_ms).any()) for m, floor_ms in zip(near, floors_ms, strict=True))
        self._least_ms = 0.0 if as_measured else least_ms

    def ms(self, sizes: ArrayLike, depths: ArrayLike, topks: ArrayLike = 0) -> Floats:
        """(n,) [ms] of steps with drafts of these sizes and depths; NaN for those that no measurements enclose.

        topks : how each is drafted, see `treeopt.trees.draft.Draft`; NaN, too, for one that was not timed
        """
        sizes, depths, topks = np.broadcast_arrays(sizes, depths, topks)
        found = np.full(len(sizes), np.nan)
        for costs, mine in self._parts(topks):
            weights = costs._weights(sizes[mine], depths[mine])
            found[mine] = np.maximum(np.where(weights.any(1), weights @ costs._ms, np.nan), costs._least_ms)
        return found + self._extra_ms(sizes, depths, topks)

    def latencies(self, sizes: ArrayLike, depths: ArrayLike) -> tuple[Floats, Floats]:
        """(n,) the same of fixed trees, and (n,) standard errors, with the doubt of the way between measured sizes in them."""
        weights, ms, doubt_ms = self._estimates(sizes, depths)
        stderr_ms = np.hypot(weights @ self._stderr_ms, doubt_ms)
        return np.maximum(ms, self._least_ms), np.where(
            ms < self._least_ms, np.maximum(stderr_ms, self.plain.stderr_ms), stderr_ms
        )

    def step(self, size: int, depth: int) -> Latency | None:
        """One step; None beyond what was measured."""
        (ms,), (stderr_ms,) = self.latencies([size], [depth])
        return None if np.isnan(ms) else Latency(float(ms), float(stderr_ms))

    def judged(self, sizes: ArrayLike, depths: ArrayLike, topks: ArrayLike = 0) -> BoolArray:
        """(3, n) of each step whether it is *exact*, *timed* and *sure*, one behind the other.

        exact : as many rows and levels were timed at each context: no estimate is needed
        timed : as many rows were, with these levels or the next deeper ones that were
        sure  : its error is known: of what was timed once, or in one round, it is not
        """
        sizes, depths, topks = np.broadcast_arrays(sizes, depths, topks)
        found = np.zeros((3, len(sizes)), dtype=bool)
        for costs, mine in self._parts(topks):
            n, d = sizes[mine], depths[mine]
            # On a straight line: along stairs a size between two may cost as much as one of them, and have its weight alone.
            tables = [costs._weights_in(m, n, d) for m in costs._near]
            timed = np.all([(table > 0).sum(1) == 1 for table in tables], axis=0) | (n == 1)
            used, once = (costs._weights(n, d) > 0) | (costs._plain > 0), np.concatenate([m.once for m in costs._near])
            found[:, mine] = costs._was_timed(n, d), timed, ~(used & once).any(1)
        return found

    def _was_timed(self, sizes: IntArray, depths: IntArray) -> BoolArray:
        timed = [{(1, 0), *zip(m.sizes.tolist(), m.depths.tolist(), strict=True)} for m in self._near]
        asked = zip(*(a.tolist() for a in np.broadcast_arrays(sizes, depths)), strict=True)
        return np.array([all(step in known for known in timed) for step in asked], dtype=bool)

    def draws_ms(
        self, sizes: ArrayLike, depths: ArrayLike, n: int, rng: np.random.Generator, topks: ArrayLike = 0
    ) -> Floats:
        """(n, B) what each would be with other rounds, the same for all, another way between sizes, at another time.

        The extras of one topk err together.
        """
        sizes, depths, topks = np.broadcast_arrays(sizes, depths, topks)
        found = np.full((len(sizes), n), np.nan)
        for costs, mine in self._parts(topks):
            if mine.any():
                here = deepcopy(rng)
                found[mine] = costs._draws_ms(sizes[mine], depths[mine], n, here)
        dynamic = topks != 0
        if dynamic.any() and not self._tables:
            noise = {topk: extra.stderr_ms * here.standard_normal(n) for topk, extra in sorted(self._extras.items())}
            extra_ms = self._extra_ms(sizes, depths, topks)[dynamic, None] + [
                noise[topk] for topk in topks[dynamic].tolist()
            ]
            base = found[dynamic]
            fixed = self.ms(sizes[dynamic], depths[dynamic])
            found[dynamic] = np.maximum(base + extra_ms * (base / fixed[:, None]), base / 4)
        return found

    def _draws_ms(self, sizes: IntArray, depths: IntArray, n: int, rng: np.random.Generator) -> Floats:
        """(n, B) the draws of fixed trees."""
        another_time = np.exp(ANOTHER_TIME * rng.standard_normal(n))  # first, so that trees asked for later share it
        weights, ms, doubt_ms = self._estimates(sizes, depths)
        used = np.split(weights.any(0) | (self._plain > 0), np.cumsum([len(near.ms) for near in self._near])[:-1])
        draws = np.concatenate([near.draws(which, n, rng) for near, which in zip(self._near, used, strict=True)])
        found: Floats = weights @ draws
        # What lies between the same measurements errs together.
        between = np.unique(weights > 0, axis=0, return_inverse=True)[1].ravel()
        found += doubt_ms[:, None] * rng.standard_normal((int(between.max(initial=0)) + 1, n))[between]
        np.maximum(found, ms[:, None] / 4, out=found)
        found *= (np.maximum(ms, self._least_ms) / ms)[:, None]  # about the raised latency, noise on both sides of it
        if self._least_ms and all(len(near.plain_rounds) for near in self._near):
            found[sizes > 1] *= another_time
        return found

    def _estimates(self, sizes: ArrayLike, depths: ArrayLike) -> tuple[Floats, Floats, Floats]:
        """(n, A) weights, (n,) ms, and (n,) the doubt of what was not timed."""
        tables = self._tables_of(sizes, depths)
        weights = self._joined(tables)
        ms = np.where(weights.any(1), weights @ self._ms, np.nan)
        unknown = ~self._was_timed(np.asarray(sizes), np.asarray(depths))
        if not unknown.any():
            return weights, ms, np.zeros(len(ms))
        reach = [
            share * reach_ms(table, m.ms) for share, table, m in zip(self._shares, tables, self._near, strict=True)
        ]
        return weights, ms, np.where(unknown, self.between.share * np.sum(reach, axis=0), 0.0)

    @property
    def between(self) -> Between:
        return between_of(self.profile)

    def _weights(self, sizes: ArrayLike, depths: ArrayLike) -> Floats:
        """(n, A) the share of every measurement in each latency; rows of zeros where none enclose it."""
        return self._joined(self._tables_of(sizes, depths))

    def _joined(self, tables: Sequence[Floats]) -> Floats:
        known = np.all([table.any(1) for table in tables], axis=0)
        return np.hstack([share * table * known[:, None] for share, table in zip(self._shares, tables, strict=True)])

    def _tables_of(self, sizes: ArrayLike, depths: ArrayLike) -> list[Floats]:
        """(n, A) weights at each of the contexts next to that asked for; profiles that timed everything need no curve."""
        asked = np.asarray(sizes), np.asarray(depths)
        found = [self._weights_in(m, *asked) for m in self._near]
        if all(((table > 0).sum(1) < 2).all() for table in found) or not (curve := self.between.curve(self.batch_size)):
            return found
        return [self._weights_in(m, *asked, curve) for m in self._near]

    def _weights_in(self, m: Measurements, sizes: IntArray, depths: IntArray, curve: Curve | None = None) -> Floats:
        return size_weights(sizes, depths, m.sizes, m.depths, m.plain_ends, any_depth=self._any_depth, curve=curve)

    def _parts(self, topks: IntArray) -> Iterator[tuple[StepCosts, BoolArray]]:
        """What tells the costs of (n,) drafts as if they were fixed trees, and of which of them."""
        yield self, topks == 0
        if not self._tables:
            yield self, topks != 0
        for topk, table in self._tables.items():
            yield table, topks == topk

    @cached_property
    def _tables(self) -> dict[int, StepCosts]:
        """The costs by rows and levels of the dynamic trees of each topk, where chains alone were timed besides."""
        here = [p for p in self.profile.points if p.batch_size == self.batch_size]
        topks = {p.topk for p in here if p.topk is not None}
        if not topks or any(p.size != p.depth + 1 for p in here if not p.drafted):
            return {}
        found = {1: self}
        for topk in topks - {1}:
            points = tuple(replace(p, topk=None) for p in self.profile.dynamic if p.topk == topk)
            profile = LatencyProfile(points, self.profile.autoregressive)
            found[topk] = StepCosts(profile, self.batch_size, self.context_tokens)
        return found

    @property
    def as_it_comes(self) -> StepCosts | None:
        """What plain decoding by the engine as it comes costs, as if it were a chain of 1; None where that is not told apart."""
        return None if self.profile.runtime.get("launches") else self._twin

    @property
    def idle(self) -> StepCosts | None:
        """Likewise what a step costs of an engine whose drafter is there and guesses nothing."""
        return self._twin if self.profile.runtime.get("launches") else None

    @cached_property
    def _twin(self) -> StepCosts | None:
        here = [p for p in self.profile.as_it_comes if p.batch_size == self.batch_size]
        points = tuple(replace(p, size=2, depth=1, as_it_comes=None) for p in here)
        profile = LatencyProfile(points, self.profile.autoregressive)
        return StepCosts(profile, self.batch_size, self.context_tokens, as_measured=True) if points else None

    @cached_property
    def _extras(self) -> dict[int, Extra]:
        """The extra of each topk, and of trees over marginals, by the timings of the nearest context that has some."""
        contexts = {p.context_tokens for p in self.profile.anew if p.batch_size == self.batch_size}
        if not contexts:
            return {1: Extra()}
        setting = self.batch_size, min(contexts, key=lambda tokens: abs(tokens - self.context_tokens))
        there, found = StepCosts(self.profile, *setting), dict[int, list[tuple[int, float, float]]]()
        plain = pooled([p for p in self.profile.autoregressive if p.setting == setting])
        for (topk, size, depth), same in by_kind([p for p in self.profile.anew if p.setting == setting]).items():
            if fixed := there.step(size, depth):
                latency = paired_latency(pooled(same), plain)
                error = float(np.hypot(latency.stderr_ms, fixed.stderr_ms))
                found.setdefault(topk, []).append((int(_beyond(size, depth, topk)), latency.ms - fixed.ms, error))
        extras = {1: Extra()}
        for topk, points in found.items():
            levels, extra, errors = zip(*points, strict=True)
            extras[topk] = Extra(*rising_line(levels, extra), float(np.sqrt(np.square(errors).mean())))
        return extras

    def _extra_ms(self, sizes: IntArray, depths: IntArray, topks: IntArray) -> Floats:
        """(n,) [ms] beyond a fixed tree of as many rows and levels; NaN where none that is drafted so was timed."""
        if self._tables:
            return np.zeros(len(topks))
        found = np.where(topks != 0, np.nan, 0.0)
        if not topks.any():
            return found
        dynamic = {topk: extra for topk, extra in self._extras.items() if topk > 0}
        node_ms = rising_line(list(dynamic), [extra.ms_each for extra in dynamic.values()])[1]
        for topk, extra in self._extras.items():
            here = topks == topk
            found[here] = extra.ms + extra.ms_each * _beyond(sizes[here], depths[here], topk)
            if self._redrafts and topk > 1:  # a chain is drafted as one
                found[here] += node_ms * topk * (depths[here] - 1) * (depths[here] - 2) / 2
        return found


def _beyond(sizes: ArrayLike, depths: ArrayLike, drafted: int) -> IntArray:
    """(n,) what an extra rises with: levels beyond the first, or rows of a tree over marginals."""
    return np.asarray(sizes if drafted == OVER_MARGINALS else depths) - 1


@lru_cache(maxsize=4)
def measured_by(profile: LatencyProfile) -> dict[Setting, Measurements]:
    return {setting: Measurements.at(profile, setting) for setting in profile.settings}


@lru_cache(maxsize=4)
def between_of(profile: LatencyProfile) -> Between:
    """How the latencies of a profile lie between those that were measured."""
    return between(measured_by(profile))
