"""Latencies from samples: medians, ratios to a plain step of the same round, and all of a batch size and context.

round  a stretch of time in which everything was measured once. A step's latency is the plain one's times the
       median over rounds of the ratio of the two, so that a slow minute falls on both.

A measurements, the plain step first · R rounds · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.records.profile import LatencyProfile, Setting, StepTiming
from treeopt.trees.tree import BoolArray, IntArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Latency:
    """A median latency and its standard error [ms]."""

    ms: float
    stderr_ms: float


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
    ours, theirs = point.by_round(), plain.by_round()
    return np.array([ours[number] / theirs[number] for number in ours if number in theirs])


@dataclass(frozen=True, eq=False)
class Measurements:
    """Everything measured at one batch size and context, by size and depth; the plain step first.

    sizes, depths, ms, stderr_ms : (A,)
    own_ms       : (A,) standard errors without what all share: the plain step's
    ratios       : of every step (R,) how long it took over the plain one in each round; empty where rounds are unknown
    plain_rounds : (R,) of the plain step the median of each round [ms]
    once         : (A,) whether it was timed once, or in one round, so that its error is not known
    plain_ends   : whether a root alone was timed as a tree, so that the plain step is one of every depth
    """

    sizes: IntArray
    depths: IntArray
    ms: Floats
    stderr_ms: Floats
    own_ms: Floats
    ratios: list[Floats]
    plain_rounds: Floats
    once: BoolArray
    plain_ends: bool

    @classmethod
    def at(cls, profile: LatencyProfile, setting: Setting) -> Measurements:
        """The measurements of a setting, repeated timings of one size and depth pooled."""
        points = [p for p in profile.fixed if p.setting == setting]
        plain = pooled([p for p in profile.autoregressive if p.setting == setting])
        timings = [pooled(same) for _, same in sorted(by_kind([p for p in points if p.size > 1]).items())]
        rounds = list(plain.by_round().values())
        # Samples of a round are alike, so the plain step's error is that of its rounds.
        reference = Latency(median_latency(plain.step_ms).ms, median_latency(rounds or plain.step_ms).stderr_ms)
        latencies, ratios, own_ms = [reference], [np.ones(len(rounds))], [0.0 if rounds else reference.stderr_ms]
        seen: list[Floats | tuple[float, ...]] = []
        for timing in timings:
            own = paired_latency(timing, plain)
            ratios.append(paired_ratios(timing, plain))
            seen.append(ratios[-1] if len(ratios[-1]) else timing.step_ms)
            shared = reference.stderr_ms * own.ms / reference.ms if len(ratios[-1]) else 0.0
            latencies.append(Latency(own.ms, float(np.hypot(own.stderr_ms, shared))))
            own_ms.append(own.stderr_ms)
        return cls(
            np.array([1, *(timing.size for timing in timings)]),
            np.array([0, *(timing.depth for timing in timings)]),
            np.array([latency.ms for latency in latencies]),
            np.array([latency.stderr_ms for latency in latencies]),
            np.array(own_ms),
            ratios,
            np.array(rounds),
            np.array([len(one) < 2 for one in (rounds or plain.step_ms, *seen)]),
            plain_ends=any(p.size == 1 for p in points),
        )

    def draws(self, used: NDArray[np.bool_], n: int, rng: np.random.Generator) -> Floats:
        """(A, B) what each measurement would have been with other rounds, the same for all; zeros where not used.

        Where rounds are not known it is the estimate with normal noise of its standard error.
        """
        found, rounds = np.zeros((len(self.ms), n)), len(self.plain_rounds)
        # Ratios are in the order of their rounds, so those of steps with as many are of the same rounds.
        picks = {k: rng.integers(0, max(k, 1), (n, k)) for k in sorted({rounds, *map(len, self.ratios)})}
        for i in np.flatnonzero(used).tolist():
            ms = self.ms[i]
            if not rounds:
                found[i] = np.maximum(ms + self.stderr_ms[i] * rng.standard_normal(n), ms / 2)
                continue
            found[i] = ms * np.median(self.plain_rounds[picks[rounds]], axis=1) / np.median(self.plain_rounds)
            if i and len(ratios := self.ratios[i]):
                found[i] *= np.median(ratios[picks[len(ratios)]], axis=1) / np.median(ratios)
        return found


def by_kind(timings: Sequence[StepTiming]) -> dict[tuple[int, int, int], list[StepTiming]]:
    """Timings by how the tree is drafted (`treeopt.trees.draft.Draft.drafted`), size and depth."""
    found: dict[tuple[int, int, int], list[StepTiming]] = {}
    for p in timings:
        found.setdefault((p.drafted, p.size, p.depth), []).append(p)
    return found


def pooled(timings: Sequence[StepTiming]) -> StepTiming:
    """All samples of one kind of step as one timing; without rounds where those of any are unknown."""
    first = timings[0]
    known = all(p.round is not None and len(p.round) == len(p.step_ms) for p in timings)
    return StepTiming(
        *first.setting,
        first.size,
        first.depth,
        step_ms=tuple(ms for p in timings for ms in p.step_ms),
        round=tuple(r for p in timings for r in p.round or ()) if known else None,
    )
