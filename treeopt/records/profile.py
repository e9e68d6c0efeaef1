"""What a decoding step costs: measured samples, and the estimate for the sizes between them.

step_ms  latency of one whole decoding step (propose, verify, accept, commit) [ms]
plain    an autoregressive step: no heads, no mask, no gather; what speedups are measured against
rows     batch_size x size, the tokens that the target's matrix products see in one step
round    a stretch of time in which everything was measured once. A step's latency is the plain one's
         times the median over rounds of the ratio of the two, so a slow minute falls on both.

Latency over rows is a staircase (Medusa, Table 8): matrix products cost by the tile. Its shape is pooled
over all batch sizes of a profile, and says how to go from one measured size to the next.
Trees of one size and depth are taken to cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files import storage
from treeopt.latency.drafting import DraftTiming, check_expanding, draft_timings
from treeopt.latency.interpolation import Anchor, Setting, Weights, between_contexts, between_sizes, enclosing_contexts
from treeopt.latency.staircase import fit_staircase


@dataclass(frozen=True)
class StepTiming:
    """Samples of one kind of step: trees of ``size`` rows and ``depth``, for ``batch_size`` rows."""

    batch_size: int
    context_tokens: int
    size: int
    depth: int
    step_ms: tuple[float, ...]
    accepted_mean: float | None = None  # guesses accepted per row and step
    round: tuple[int, ...] | None = None  # the round in which each sample was taken
    parts_ms: dict[str, tuple[float, ...]] | None = None  # samples of draft, target, verify and commit
    expanding: tuple[int, ...] | None = None  # of each depth, how many nodes of the tree have children

    def __post_init__(self) -> None:
        if not self.step_ms or not all(np.isfinite(ms) and ms > 0 for ms in self.step_ms):
            raise InvalidInput(f"step_ms must be positive samples in ms, but got {self.step_ms[:3]}.")
        if self.batch_size < 1 or self.size < 1 or not min(self.size - 1, 1) <= self.depth < self.size:
            raise InvalidInput(
                "A timing needs batch_size >= 1, size >= 1 and 1 <= depth < size (depth 0 for size 1), "
                f"but got {self.batch_size}, {self.size}, {self.depth}."
            )
        if self.expanding is not None:
            check_expanding(self.expanding, self.size, self.depth)


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
    ratios = _ratios(point, plain)
    if not len(ratios):
        return median_latency(point.step_ms)
    reference, ratio = median_latency(plain.step_ms).ms, median_latency(ratios.tolist())
    return Latency(reference * ratio.ms, reference * ratio.stderr_ms)


def by_round(timing: StepTiming) -> dict[int, float]:
    """Median sample of every round; empty where rounds are not known."""
    samples: dict[int, list[float]] = {}
    for number, ms in zip(timing.round or (), timing.step_ms, strict=False):
        samples.setdefault(number, []).append(ms)
    return {number: median(samples[number]) for number in sorted(samples)}


def _ratios(point: StepTiming, plain: StepTiming) -> NDArray[np.float64]:
    """(rounds,) the point over plain, in every round that has both."""
    ours, theirs = by_round(point), by_round(plain)
    return np.array([ours[number] / theirs[number] for number in ours if number in theirs])


@dataclass(frozen=True)
class LatencyProfile:
    """Measured step latencies: ``profile.json``.

    >>> point = StepTiming(1, 128, size=8, depth=2, step_ms=(3.0,))
    >>> plain = StepTiming(1, 128, size=1, depth=0, step_ms=(2.0,))
    >>> LatencyProfile((point,), (plain,)).plain(1, 128).ms
    2.0
    """

    points: tuple[StepTiming, ...]
    autoregressive: tuple[StepTiming, ...]
    runtime: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)  # the file's other keys
    draft: tuple[DraftTiming, ...] = ()  # by default what the points' parts say

    def __post_init__(self) -> None:
        if not self.draft:
            object.__setattr__(self, "draft", draft_timings(self.points))
        if not self.autoregressive:
            raise InvalidInput("A profile must have at least one autoregressive timing.")
        known = set(self.settings)
        for point in self.points:
            if point.size == 1 and point.step_ms not in [p.step_ms for p in self.autoregressive]:
                raise InvalidInput(
                    "A point of size 1 must have the samples of the plain step, which is what size 1 costs, but "
                    f"that of batch size {point.batch_size} has others: leave it out."
                )
            if (point.batch_size, point.context_tokens) not in known:
                raise InvalidInput(
                    "Every point of a profile must have a plain timing beside it, but batch size "
                    f"{point.batch_size} at context {point.context_tokens} has none."
                )

    @cached_property
    def settings(self) -> list[tuple[int, int]]:
        """Every measured (batch_size, context_tokens), sorted."""
        return sorted({(p.batch_size, p.context_tokens) for p in self.autoregressive})

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({batch for batch, _ in self.settings})

    def context(self, batch_size: int, wanted: float | None = None) -> int:
        """The context length to plan a batch size for: ``wanted``, moved into the measured range.

        Without a wish the shortest measured. OutOfRange for a batch size that was not measured.
        """
        contexts = [context for batch, context in self.settings if batch == batch_size]
        if not contexts:
            have = ", ".join(map(str, self.batch_sizes))
            raise OutOfRange(
                f"The profile covers batch sizes {have}, but {batch_size} was asked. "
                f"Measure it too with: treeopt profile --batch-size {batch_size}"
            )
        return int(min(max(wanted or 0, contexts[0]), contexts[-1]))

    def plain(self, batch_size: int, context_tokens: int) -> Latency:
        """One autoregressive step; between two measured contexts the mean of them, by distance."""
        found = self.estimate(self.weights(batch_size, context_tokens, 1, 0))
        assert found is not None
        return found

    def step(
        self, batch_size: int, context_tokens: int, size: int, depth: int, *, measured_only: bool = False
    ) -> Latency | None:
        """A step with a tree of ``size`` rows and ``depth``; None beyond what was measured.

        Size 1 is a plain step. Nothing is extrapolated. Where the pooled staircase and a straight line
        differ, half of that is part of the standard error.
        """
        weights = self.weights(batch_size, context_tokens, size, depth, measured_only=measured_only)
        found = self.estimate(weights)
        if found is None or size == 1:
            return found
        if measured_only:
            return found
        straight = self.estimate(self.weights(batch_size, context_tokens, size, depth, pooled=False))
        assert straight is not None
        return Latency(found.ms, float(np.hypot(found.stderr_ms, (found.ms - straight.ms) / 2)))

    def estimate(self, weights: Weights | None) -> Latency | None:
        """The weighted mean of anchors."""
        if weights is None:
            return None
        parts = [(w, self.anchors[anchor]) for anchor, w in weights.items()]
        return Latency(sum(w * a.ms for w, a in parts), sum(w * a.stderr_ms for w, a in parts))

    def weights(
        self,
        batch_size: int,
        context_tokens: int,
        size: int,
        depth: int,
        *,
        measured_only: bool = False,
        pooled: bool = True,
    ) -> Weights | None:
        """Which measurements make up the estimate for a tree; None where they do not enclose it.

        Between two measured sizes of one depth the way is that of the staircase over rows, pooled over
        all batch sizes (``pooled``), or straight. A depth that was not measured costs as the next
        deeper one that was; between two contexts, or two chains, the way is straight.
        """

        def at(context: int) -> Weights | None:
            setting = batch_size, context
            return between_sizes(
                setting,
                self._sizes.get(setting, {}),
                size,
                depth,
                measured_only=measured_only,
                way=(lambda sizes: self.staircase(batch_size * sizes)) if pooled else None,
            )

        return between_contexts(self._enclosing(batch_size, context_tokens), context_tokens, at)

    def draws(self, anchors: Sequence[Anchor], n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """(n, anchors) [ms] what each would have been with other rounds, resampled together in a setting.

        Where rounds are not known it is the estimate with normal noise of its standard error.
        """
        found = np.array([[self.anchors[anchor].ms for anchor in anchors]] * n)
        for setting in {anchor[:2] for anchor in anchors}:
            plain = self._plain(setting)
            reference = np.array(list(by_round(plain).values()))
            together = rng.integers(0, max(len(reference), 1), (n, len(reference)))
            for i, anchor in [(i, anchor) for i, anchor in enumerate(anchors) if anchor[:2] == setting]:
                if not len(reference):
                    noise = self.anchors[anchor].stderr_ms * rng.standard_normal(n)
                    found[:, i] = np.maximum(found[:, i] + noise, found[:, i] / 2)
                    continue
                found[:, i] *= np.median(reference[together], axis=1) / np.median(reference)
                if anchor[2] == 1:
                    continue
                if len(ratios := _ratios(self._timings[anchor], plain)):
                    same = len(ratios) == len(reference)  # else it joined later
                    picks = together if same else rng.integers(0, len(ratios), (n, len(ratios)))
                    found[:, i] *= np.median(ratios[picks], axis=1) / np.median(ratios)
        return found

    def staircase(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Latency over rows = batch_size x size, up to a constant [ms]: the shape common to all batch sizes.

        Least squares of step_ms = curve(rows) + one constant a setting and depth, then made to rise.
        """
        return np.asarray(np.interp(rows, *self._staircase))

    @cached_property
    def _staircase(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        lone = [setting for setting, depths in self._sizes.items() if 0 in depths]  # a root timed as a tree, an end
        measured = [a for a in self._timings if a[3] > 0 or a[:2] in lone]
        return fit_staircase(
            rows=[a[0] * a[2] for a in measured],
            offsets=[[a[:2] for a in measured], [a[3] for a in measured]],
            step_ms=np.array([self.anchors[a].ms for a in measured]),
        )

    def _enclosing(self, batch_size: int, context_tokens: int) -> tuple[int, int] | None:
        return enclosing_contexts([c for batch, c in self.settings if batch == batch_size], context_tokens)

    def reach(self, batch_size: int, context_tokens: int) -> tuple[int, int]:
        """The largest size and the largest depth measured; between two contexts the smaller of both."""
        found = []
        for context in self._enclosing(batch_size, context_tokens) or ():
            here = [p for p in self.points if (p.batch_size, p.context_tokens) == (batch_size, context)]
            found.append((max((p.size for p in here), default=1), max((p.depth for p in here), default=0)))
        return (min(size for size, _ in found), min(depth for _, depth in found)) if found else (1, 0)

    @cached_property
    def anchors(self) -> dict[Anchor, Latency]:
        """Everything measured; a plain step has size 1 and depth 0."""
        found = {}
        for anchor, timing in self._timings.items():
            plain = self._plain(anchor[:2])
            medians = list(by_round(plain).values()) or plain.step_ms  # samples of a round are alike
            reference = Latency(median_latency(plain.step_ms).ms, median_latency(medians).stderr_ms)
            found[anchor] = reference
            if anchor[2] > 1:
                own = paired_latency(timing, plain)
                shared = reference.stderr_ms * own.ms / reference.ms if len(_ratios(timing, plain)) else 0.0
                found[anchor] = Latency(own.ms, float(np.hypot(own.stderr_ms, shared)))
        return found

    def _plain(self, setting: Setting) -> StepTiming:
        return self._timings[(*setting, 1, 0)]

    @cached_property
    def _timings(self) -> dict[Anchor, StepTiming]:
        """All samples of one size and depth at a setting as one timing."""
        groups: dict[Anchor, list[StepTiming]] = {}
        for p in (*self.autoregressive, *(p for p in self.points if p.size > 1)):
            groups.setdefault((p.batch_size, p.context_tokens, p.size, p.depth), []).append(p)
        found = {}
        for anchor, timings in groups.items():
            samples = tuple(ms for p in timings for ms in p.step_ms)
            known = all(p.round is not None and len(p.round) == len(p.step_ms) for p in timings)
            rounds = tuple(r for p in timings for r in p.round or ()) if known else None
            found[anchor] = StepTiming(*anchor, step_ms=samples, round=rounds)
        return found

    @cached_property
    def _sizes(self) -> dict[tuple[int, int], dict[int, set[int]]]:
        """Setting -> depth -> sizes measured; a lone root timed as a tree counts at every depth."""
        found: dict[tuple[int, int], dict[int, set[int]]] = {}
        for p in self.points:
            found.setdefault((p.batch_size, p.context_tokens), {}).setdefault(p.depth, set()).add(p.size)
        for depths in found.values():
            for sizes in depths.values():
                sizes |= {1} & depths.get(0, set())
        return found

    def document(self) -> dict[str, Any]:
        """What ``profile.json`` says."""
        return {
            "schema": storage.schema("profile"),
            "points": [_without_unknown(asdict(p)) for p in self.points],
            "autoregressive": [
                {k: v for k, v in _without_unknown(asdict(p)).items() if k not in ("size", "depth")}
                for p in self.autoregressive
            ],
            **({"draft": [_without_unknown(asdict(d)) for d in self.draft]} if self.draft else {}),
            "runtime": self.runtime,
            **self.info,
        }

    def save(self, path: Path) -> None:
        storage.write_json(path, "profile", self.document())

    @classmethod
    def load(cls, path: Path) -> LatencyProfile:
        document = storage.read_json(path, "profile", required=("points", "autoregressive"))
        alone = document["autoregressive"]
        alone = alone if isinstance(alone, list) else [alone]
        plain = [{"size": 1, "depth": 0, **p} if isinstance(p, dict) else p for p in alone]
        rest = ("schema", "points", "autoregressive", "draft", "runtime")
        info = {k: v for k, v in document.items() if k not in rest}
        return storage.typed(cls, {**document, "autoregressive": plain, "info": info}, path)


def _without_unknown(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}
