"""Latencies from samples: medians, and ratios to a plain step that was timed in the same round.

round  a stretch of time in which everything was measured once. A step's latency is the plain one's times the
       median over rounds of the ratio of the two, so that a slow minute falls on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.records.profile import StepTiming


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
