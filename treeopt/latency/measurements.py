"""Everything measured at one batch size and context: repeated timings of one size and depth as one latency.

A measurements, the plain step first · R rounds · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.latency.paired import Latency, median_latency, paired_latency, paired_ratios
from treeopt.records.profile import LatencyProfile, Setting, StepTiming
from treeopt.trees.tree import BoolArray, IntArray

Floats = NDArray[np.float64]


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
        together = rng.integers(0, max(rounds, 1), (n, rounds))
        for i in np.flatnonzero(used).tolist():
            ms = self.ms[i]
            if not rounds:
                found[i] = np.maximum(ms + self.stderr_ms[i] * rng.standard_normal(n), ms / 2)
                continue
            found[i] = ms * np.median(self.plain_rounds[together], axis=1) / np.median(self.plain_rounds)
            if i and len(ratios := self.ratios[i]):
                same = len(ratios) == rounds  # else it joined later
                picks = together if same else rng.integers(0, len(ratios), (n, len(ratios)))
                found[i] *= np.median(ratios[picks], axis=1) / np.median(ratios)
        return found


def by_kind(timings: Sequence[StepTiming]) -> dict[tuple[int, int, int], list[StepTiming]]:
    """Timings by topk (0 of fixed trees), size and depth."""
    found: dict[tuple[int, int, int], list[StepTiming]] = {}
    for p in timings:
        found.setdefault((p.topk or 0, p.size, p.depth), []).append(p)
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
