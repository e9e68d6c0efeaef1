"""Latencies from samples: medians, ratios to a plain step of the same round, and all of a batch size and context.

round  a stretch of time in which everything was measured once. A step's latency is the plain one's times the
       median over rounds of the ratio of the two, so that a slow minute falls on both.

A kinds of steps that were timed · R rounds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.records.profile import LatencyProfile, Setting, StepTiming
from treeopt.trees.tree import Cost

USUAL_ROUNDS = 4  # rounds that the usual spread counts as, beside those of a timing itself
MEDIAN = 1.2533**2  # variance of a median over that of a mean
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Latency:
    """A median latency and its standard error [ms]."""

    ms: float
    stderr_ms: float

    def draws_ms(self, count: int, rng: np.random.Generator) -> Floats:
        """(B,) draws of the true latency [ms]."""
        return np.asarray(self.ms * np.exp(self.stderr_ms / self.ms * rng.standard_normal(count)))


def median_latency(samples: Sequence[float]) -> Latency:
    """Median with the standard error of a median, by the median absolute deviation.

    >>> median_latency([1.0, 2.0, 3.0]).ms
    2.0
    """
    values = np.asarray(samples, dtype=float)
    middle = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    return Latency(middle, 1.2533 * spread / float(np.sqrt(len(values))))


def paired_latency(point: StepTiming, plain: StepTiming) -> Latency:
    """Latency of a step as the plain one's median times the median ratio of the two over their rounds.

    A sample is compared with plain steps of its own round only, and a round that was disturbed is one
    ratio among many, so that neither drift nor interruptions reach the median. Without common rounds
    it is the median of the samples. The standard error is that of the ratio; the plain step's is its own.

    >>> point = StepTiming(1, 128, size=8, depth=2, step_ms=(3.0, 6.0), round=(0, 1))
    >>> plain = StepTiming(1, 128, size=1, depth=0, step_ms=(2.0, 4.0), round=(0, 1))
    >>> paired_latency(point, plain).ms  # the second round was slow for both
    4.5
    """
    ratios = paired_ratios(point, plain)
    if not len(ratios):
        return median_latency(point.step_ms)
    reference, ratio = median_latency(plain.step_ms).ms, median_latency(ratios.tolist())
    return Latency(reference * ratio.ms, reference * ratio.stderr_ms)


def paired_ratios(point: StepTiming, plain: StepTiming) -> NDArray[np.float64]:
    """(R,) the point over the plain step, in every round that has both; empty where rounds are not known."""
    point_ms, plain_ms = point.by_round(), plain.by_round()
    return np.array([point_ms[number] / plain_ms[number] for number in point_ms if number in plain_ms])


@dataclass(frozen=True, eq=False)
class Measurements:
    """Everything that was timed at one batch size and context.

    plain      : the plain step
    timings    : every other kind of step by its cost, repeated timings pooled
    log_ratios : (A,) logarithms of their latencies over the plain step's
    variances  : (A,) of the errors that they do not share; 0 where each was timed once
    shared     : variance of the error that all share, the plain step's
    is_sure    : whether the errors are known: not where most were timed once, or in one round
    """

    plain: Latency
    timings: Mapping[Cost, StepTiming]
    log_ratios: Floats
    variances: Floats
    shared: float
    is_sure: bool

    @classmethod
    def at(cls, profile: LatencyProfile, setting: Setting) -> Measurements:
        plain = pooled([p for p in profile.autoregressive if p.setting == setting])
        # Samples of a round are alike, so the plain step's error is that of its rounds.
        error = median_latency(list(plain.by_round().values()) or plain.step_ms).stderr_ms
        latency = Latency(median_latency(plain.step_ms).ms, error)
        kinds: dict[Cost, list[StepTiming]] = {}
        for point in profile.points:
            if point.setting == setting and not point.as_it_comes:
                kinds.setdefault(point.cost, []).append(point)
        timings = {cost: pooled(points) for cost, points in sorted(kinds.items())}
        log_ratios, variances, shared, timed_once = _ratios_to(plain, list(timings.values()))
        is_sure = len(plain.by_round() or plain.step_ms) > 1 and 2 * timed_once <= len(timings)
        return cls(latency, timings, log_ratios, variances, shared, is_sure)

    def noise(self, places: Sequence[int]) -> Floats:
        """(n, n) covariance of the errors of the log ratios at some places."""
        return np.asarray(np.diag(self.variances[places]) + self.shared)

    def latencies(self) -> dict[Cost, Latency]:
        """The latency of each kind of step as it was measured, not smoothed."""
        errors = np.sqrt(self.variances + self.shared)
        ratios = zip(self.timings, np.exp(self.log_ratios).tolist(), errors.tolist(), strict=True)
        return {
            cost: Latency(self.plain.ms * ratio, ratio * float(np.hypot(self.plain.ms * error, self.plain.stderr_ms)))
            for cost, ratio, error in ratios
        }


def _ratios_to(plain: StepTiming, timings: Sequence[StepTiming]) -> tuple[Floats, Floats, float, int]:
    """Log ratios to the plain step, variances of their errors, the variance that all share, and how many were timed once.

    The spread of few samples is unreliable, so it is shrunk towards the median spread of all steps. Steps of a block are compared
    with one plain visit, so they share its error.
    """
    logs = [np.log(paired_ratios(timing, plain)) for timing in timings]
    is_paired = bool(plain.by_round()) and all(len(log) for log in logs)
    if not is_paired:
        reference = median_latency(plain.step_ms)
        logs = [np.log(np.asarray(timing.step_ms) / reference.ms) for timing in timings]
    samples = np.array([len(log) for log in logs])
    medians, spreads = np.array([np.median(log) for log in logs]), np.array([_variance(log) for log in logs])
    several = samples > 1
    usual = float(np.median(spreads[several])) if several.any() else 0.0
    spreads = (USUAL_ROUNDS * usual + np.where(several, samples * spreads, 0.0)) / (USUAL_ROUNDS + samples * several)
    variances = MEDIAN * spreads / samples
    if is_paired:
        shared = _shared_variance(plain, timings, logs)
        variances = np.maximum(variances - shared, variances / 4)
    else:
        shared = (reference.stderr_ms / reference.ms) ** 2
    return medians, variances, shared, int((~several).sum())


def _variance(values: Floats) -> float:
    """Variance by the median absolute deviation."""
    return float(1.4826 * np.median(np.abs(values - np.median(values)))) ** 2


def _shared_variance(plain: StepTiming, timings: Sequence[StepTiming], logs: Sequence[Floats]) -> float:
    """Variance that all ratios share, since plain visits err: how far ratios of one block err together, over all blocks."""
    sums, squares, pairs = Counter[int](), Counter[int](), Counter[int]()
    blocks = plain.by_round()
    for timing, log in zip(timings, logs, strict=True):
        spread = _variance(log) ** 0.5
        errors = np.clip(log - np.median(log), -3 * spread, 3 * spread)  # a disturbed visit says nothing of the others
        for number, error in zip([n for n in timing.by_round() if n in blocks], errors.tolist(), strict=True):
            sums[number] += error
            squares[number] += error**2
            pairs[number] += 1
    together = sum(sums[n] ** 2 - squares[n] for n in pairs)
    return MEDIAN * max(together / max(sum(k * (k - 1) for k in pairs.values()), 1), 0.0) / len(blocks)


def pooled(timings: Sequence[StepTiming]) -> StepTiming:
    """All samples of one kind of step as one timing; without rounds where those of any are unknown."""
    first = timings[0]
    have_rounds = all(p.round is not None and len(p.round) == len(p.step_ms) for p in timings)
    return StepTiming(
        *first.setting,
        first.size,
        first.depth,
        step_ms=tuple(ms for p in timings for ms in p.step_ms),
        round=tuple(r for p in timings for r in p.round or ()) if have_rounds else None,
    )
