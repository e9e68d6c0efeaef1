"""Latency of a decoding step at one batch size and context: all latencies of plans come from here.

step_ms  latency of one whole decoding step (propose, verify, accept, commit) [ms]
plain    an autoregressive step: no heads, no mask, no gather; speedups are over it

A step is predicted by a smooth surface through all timings (`surface`), before anything is chosen: the fastest of many
noisy timings would owe its place to luck. A step with a tree does all that a plain step does, so a shorter latency is
noise: it is raised to the plain step's. Between two contexts latencies lie on a straight line. Steps with more rows or
levels than were timed, or of a family that was not, have no latency: NaN.

n steps by their costs · B draws
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.latency.measurements import Latency, Measurements, paired_latency, pooled
from treeopt.latency.surface import Surface
from treeopt.records.profile import LatencyProfile, Setting
from treeopt.trees.draft import COPIED
from treeopt.trees.tree import FIXED, BoolArray, Cost

SHOWN = 3.29  # standard errors that a step is below a plain one before that is no noise: 99.9 %, since many are timed
SHOWN_ROUNDS = 5  # that such a step needs
ROUNDING = 1e-9  # added to variances of logarithms, which rounding may make negative
MOST_FITTED = 250  # timings at one setting that a surface is drawn through
ALONE = 64  # rows up to which every number errs for itself
Floats = NDArray[np.float64]


class StepCosts:
    """Latencies of steps at one batch size and context of a profile.

    context_tokens : ``context``, moved into the measured range; by default the shortest measured
    plain          : an autoregressive step
    twin           : plain decoding by the engine as it comes, or with an idle drafter (`is_idle`); None where none was timed
    reach          : the most rows and the most levels of the timed trees
    is_faster      : whether a step with a tree is shown to be faster than a plain one, which happens where an engine's
                     kernels for one row are its worst; such a step is the least latency then
    is_sure        : whether errors are known: not where steps were timed once, or in one round

    Raises OutOfRange for a batch size that was not measured.

    >>> from treeopt.records.profile import StepTiming
    >>> point, plain = StepTiming(1, 128, 9, 2, (4.0,)), StepTiming(1, 128, 1, 0, (2.0,))
    >>> costs = StepCosts(LatencyProfile((point,), (plain,)), 1)
    >>> costs.plain.ms, costs.ms([Cost(FIXED, 9, 2), Cost(FIXED, 10, 2)]).round(6).tolist()
    (2.0, [4.0, nan])
    """

    def __init__(self, profile: LatencyProfile, batch_size: int, context: float | None = None) -> None:
        contexts = [tokens for batch, tokens in profile.settings if batch == batch_size]
        if not contexts:
            covered = ", ".join(map(str, profile.batch_sizes))
            raise OutOfRange(f"The profile covers batch sizes {covered}, but {batch_size} was asked.")
        self.profile, self.batch_size = profile, batch_size
        self.context_tokens = int(min(max(context or 0, contexts[0]), contexts[-1]))
        low = max(tokens for tokens in contexts if tokens <= self.context_tokens)
        high = min(tokens for tokens in contexts if tokens >= self.context_tokens)
        self._near = [_timed(profile, (batch_size, tokens)) for tokens in sorted({low, high})]
        share = (self.context_tokens - low) / max(high - low, 1)
        self._shares = [1 - share, share][: len(self._near)]
        plain = [near.measured.plain for near in self._near]
        self.plain = Latency(
            float(np.dot(self._shares, [p.ms for p in plain])),
            float(np.dot(self._shares, [p.stderr_ms for p in plain])),
        )
        self.reach = min(near.rows[-1] for near in self._near), min(near.depth for near in self._near)
        self.is_sure = all(near.measured.is_sure for near in self._near)
        self.is_idle = bool(profile.runtime.get("launches"))
        least_ms = float(np.dot(self._shares, [p.ms * near.least for p, near in zip(plain, self._near, strict=True)]))
        self.is_faster = least_ms < self.plain.ms
        # An engine with an idle drafter may be faster than the plain engine.
        self._idle = self.twin if self.is_idle else None
        self._least_ms = min(least_ms, self._idle.ms) if self._idle else least_ms

    @cached_property
    def twin(self) -> Latency | None:
        here = [p for p in self.profile.as_it_comes if p.batch_size == self.batch_size]
        if not here:
            return None
        tokens = min({p.context_tokens for p in here}, key=lambda tokens: abs(tokens - self.context_tokens))
        plain = pooled([p for p in self.profile.autoregressive if p.setting == (self.batch_size, tokens)])
        return paired_latency(pooled([p for p in here if p.context_tokens == tokens]), plain)

    def ms(self, costs: Sequence[Cost]) -> Floats:
        """(n,) [ms] of steps; NaN for those that do not lie among the timed ones."""
        ms = np.maximum(self._untouched_ms(costs), self._floors_ms(costs))
        if self._idle:
            ms[self._find_nothing(costs)] = self._idle.ms
        return np.asarray(ms)

    def draws_ms(self, costs: Sequence[Cost], count: int, rng: np.random.Generator) -> Floats:
        """(n, B) draws of the true latencies [ms]; errors that steps share are the same in each draw."""
        draws = np.tensordot(self._shares, [near.draws_ms(costs, count, rng) for near in self._near], 1)
        ms = self._untouched_ms(costs)
        draws *= (np.maximum(ms, self._floors_ms(costs)) / ms)[:, None]  # noise is on both sides of a raised latency
        if self._idle:
            draws[self._find_nothing(costs)] = self._idle.draws_ms(count, rng)
        return np.asarray(draws)

    def _find_nothing(self, costs: Sequence[Cost]) -> BoolArray:
        """(n,) whether a step is of a drafter that copies text and found none, so that it is idle."""
        return np.array([(cost.family, cost.rows) == (COPIED, 1) for cost in costs], dtype=bool)

    def _untouched_ms(self, costs: Sequence[Cost]) -> Floats:
        return np.asarray(np.tensordot(self._shares, [near.ms(costs) for near in self._near], 1))

    def _floors_ms(self, costs: Sequence[Cost]) -> Floats:
        return np.where([cost.rows > 1 for cost in costs], self._least_ms, 0.0)

    @property
    def raised_rows(self) -> list[int]:
        """Rows of the timed steps that came out shorter than a plain one, and are raised to it."""
        timed = sorted({cost for near in self._near for cost in near.measured.timings if cost.rows > 1})
        is_short = self._untouched_ms(timed) < (1 - ROUNDING) * self._floors_ms(timed)
        return sorted({cost.rows for cost, short in zip(timed, is_short.tolist(), strict=True) if short})

    def was_timed(self, costs: Sequence[Cost]) -> BoolArray:
        """(n,) whether as many rows of the family were timed."""
        return np.array([all(near.was_timed(cost) for near in self._near) for cost in costs], dtype=bool)


class _Setting:
    """The timings at one batch size and context.

    rows  : of the timed fixed trees, ascending; 1 where there is none
    depth : of the deepest timed fixed tree; 0 where there is none
    least : the least ratio of any step to a plain one
    """

    def __init__(self, measured: Measurements) -> None:
        self.measured, self._timed = measured, list(measured.timings)
        fixed = [cost for cost in self._timed if cost.family == FIXED]
        self.rows = sorted({cost.rows for cost in fixed}) or [1]
        self.depth = max((cost.depth for cost in fixed), default=0)
        self._only_chains = all(cost.rows == cost.depth + 1 for cost in fixed)
        self.least = 1.0
        is_shown = [len(timing.by_round()) >= SHOWN_ROUNDS for timing in measured.timings.values()]
        if any(is_shown):
            logs = self._surface.estimates(self._timed)
            self.least = float(np.exp(logs[(logs + SHOWN * self.errors < 0) & is_shown].min(initial=0.0)))

    @cached_property
    def errors(self) -> Floats:
        """(A,) standard errors of the logarithms of the timed steps over plain ones."""
        if not self._timed:
            return np.zeros(0)
        return np.asarray(np.sqrt(np.maximum(np.diag(self._surface.covariance(self._timed)), 0.0)))

    @cached_property
    def _surface(self) -> Surface:
        places = _evenly(range(len(self._timed)))
        costs = [self._timed[i] for i in places]
        return Surface(costs, self.measured.log_ratios[places], self.measured.noise(places))

    @cached_property
    def _without_error(self) -> dict[Cost, float]:
        """Logarithms of the ratios that were computed, or timed once."""
        places = np.flatnonzero(self.measured.variances + self.measured.shared == 0).tolist()
        return {self._timed[i]: float(self.measured.log_ratios[i]) for i in places}

    @cached_property
    def _by_rows(self) -> Surface:
        """The surface of copied text: levels cost nothing there, and a plain step is the step of one row."""
        fixed = _evenly([i for i, cost in enumerate(self._timed) if cost.family == FIXED])
        costs = [Cost(COPIED, 1, 0), *(Cost(COPIED, self._timed[i].rows, 0) for i in fixed)]
        noise = np.pad(self.measured.noise(fixed), (1, 0))
        return Surface(costs, np.append(0.0, self.measured.log_ratios[fixed]), noise)

    def _is_among_timed(self, cost: Cost) -> bool:
        """Whether a step lies among the timed ones."""
        if cost.family == COPIED:
            return cost.rows <= self.rows[-1]
        if cost.family == FIXED and self._only_chains and cost.rows not in (*self.rows, cost.depth + 1):
            return False
        if cost.family not in self._bounds:
            return False
        fewest, most, _, deepest = self._bounds[cost.family]
        return fewest <= cost.rows <= most and cost.depth <= deepest

    @cached_property
    def _bounds(self) -> dict[str, tuple[int, int, int, int]]:
        """Fewest and most rows, and fewest and most levels, of each family that was timed.

        A draft that is made anew costs what a fixed tree does and what making it costs, so it has the bounds of both.
        """
        bounds = {}
        for family in {cost.family for cost in self._timed}:
            families = (family,) if self._only_chains else (family, FIXED)
            costs = [cost for cost in self._timed if cost.family in families]
            rows, depths = [cost.rows for cost in costs], [cost.depth for cost in costs if cost.rows > 1] or [0]
            bounds[family] = min(rows), max(rows), min(depths), max(depths)
        return bounds

    def was_timed(self, cost: Cost) -> bool:
        family = FIXED if cost.family == COPIED else cost.family
        return cost.rows == 1 or (family, cost.rows) in self._timed_rows

    @cached_property
    def _timed_rows(self) -> set[tuple[str, int]]:
        return {(cost.family, cost.rows) for cost in self._timed}

    def _by_surface(self, costs: Sequence[Cost]) -> Iterator[tuple[Surface, list[Cost], list[int]]]:
        """Each surface, the costs that are read from it, and their places."""
        places = [i for i, cost in enumerate(costs) if cost.rows > 1 and self._is_among_timed(cost)]
        if copied := [i for i in places if costs[i].family == COPIED]:
            yield self._by_rows, [Cost(COPIED, costs[i].rows, 0) for i in copied], copied
        if others := [i for i in places if costs[i].family != COPIED]:
            # Fewer levels than any that were timed cost as much as these.
            deep = [costs[i]._replace(depth=max(costs[i].depth, self._bounds[costs[i].family][2])) for i in others]
            yield self._surface, deep, others

    def ms(self, costs: Sequence[Cost]) -> Floats:
        """(n,) [ms]; NaN for steps that do not lie among the timed ones."""
        ratios = np.array([1.0 if cost.rows == 1 else np.nan for cost in costs])
        for surface, some, places in self._by_surface(costs):
            timed, rows = np.unique([cost.rows for cost in surface.costs]), np.array([cost.rows for cost in some])
            above = np.searchsorted(timed, rows)
            # An estimate between two timed numbers of rows is never below the lower of the estimates at these two.
            fewer, more = (surface.estimates(_with_rows(some, timed[i])) for i in (above - 1, above))
            least = np.where(timed[above] == rows, -np.inf, np.minimum(fewer, more))
            logs = np.maximum(surface.estimates(some), least)
            ratios[places] = np.exp([self._without_error.get(cost, log) for cost, log in zip(some, logs, strict=True)])
        return np.asarray(self.measured.plain.ms * ratios)

    def draws_ms(self, costs: Sequence[Cost], count: int, rng: np.random.Generator) -> Floats:
        """(n, B) draws [ms]; the plain step's error is in all of them."""
        plain = self.measured.plain
        draws = (self.ms(costs) / plain.ms)[:, None] * plain.draws_ms(count, rng)
        for surface, some, places in self._by_surface(costs):
            unsure = [(cost, i) for cost, i in zip(some, places, strict=True) if cost not in self._without_error]
            if not unsure:
                continue
            groups = [_group(cost) for cost, _ in unsure]
            distinct = list(dict.fromkeys(groups))
            numbers = {group: i for i, group in enumerate(distinct)}
            covariance = surface.covariance(distinct) + ROUNDING * np.eye(len(distinct))
            errors = np.linalg.cholesky(covariance) @ rng.standard_normal((len(distinct), count))
            draws[[i for _, i in unsure]] *= np.exp(errors)[[numbers[group] for group in groups]]
        return draws


def _with_rows(costs: Sequence[Cost], rows: NDArray[np.int64]) -> list[Cost]:
    return [cost._replace(rows=n) for cost, n in zip(costs, rows.tolist(), strict=True)]


def _evenly(numbers: Sequence[int]) -> list[int]:
    """`MOST_FITTED` of the numbers, or all of fewer."""
    return [numbers[i] for i in np.linspace(0, len(numbers) - 1, min(len(numbers), MOST_FITTED)).astype(int)]


def _group(cost: Cost) -> Cost:
    """One cost for steps of many rows that differ by 3 % at most: these have one error."""
    if cost.rows <= ALONE:
        return cost
    return cost._replace(rows=round(ALONE * 1.03 ** round(np.log(cost.rows / ALONE) / np.log(1.03))))


@lru_cache(maxsize=64)
def _timed(profile: LatencyProfile, setting: Setting) -> _Setting:
    return _Setting(Measurements.at(profile, setting))


def margins_of_error(profile: LatencyProfile) -> list[float]:
    """Half of each latency's 95 % interval, as a share of the latency. A tree's is that of its ratio to a plain step."""
    margins = list[float]()
    for setting in profile.settings:
        timed = _timed(profile, setting)
        plain = timed.measured.plain
        margins += [1.96 * plain.stderr_ms / plain.ms, *(1.96 * timed.errors).tolist()]
    return margins
