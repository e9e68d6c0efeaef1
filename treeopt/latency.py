"""What a decoding step costs: measured samples, and the estimate for the sizes between them.

step_ms  latency of one whole decoding step (propose, verify, accept, commit) [ms]
plain    an autoregressive step: no heads, no mask, no gather; what speedups are measured against
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from treeopt import storage
from treeopt.errors import InvalidInput, OutOfRange


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

    def __post_init__(self) -> None:
        if not self.step_ms or not all(np.isfinite(ms) and ms > 0 for ms in self.step_ms):
            raise InvalidInput(f"step_ms must be positive samples in ms, but got {self.step_ms[:3]}.")
        if self.batch_size < 1 or self.size < 1 or not min(self.size - 1, 1) <= self.depth < self.size:
            raise InvalidInput(
                "A timing needs batch_size >= 1, size >= 1 and 1 <= depth < size (depth 0 for size 1), "
                f"but got {self.batch_size}, {self.size}, {self.depth}."
            )


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

    def __post_init__(self) -> None:
        if not self.autoregressive:
            raise InvalidInput("A profile must have at least one autoregressive timing.")

    @cached_property
    def settings(self) -> list[tuple[int, int]]:
        """Every measured (batch_size, context_tokens), sorted."""
        return sorted({(p.batch_size, p.context_tokens) for p in self.autoregressive})

    def context(self, batch_size: int) -> int:
        """The context length that a batch size was measured at; OutOfRange if none or several were."""
        contexts = [context for batch, context in self.settings if batch == batch_size]
        if not contexts:
            have = ", ".join(str(b) for b in sorted({b for b, _ in self.settings}))
            raise OutOfRange(
                f"The profile covers batch sizes {have}, but {batch_size} was asked. "
                f"Measure it with: treeopt profile --batch-size {batch_size}"
            )
        if len(contexts) > 1:
            raise OutOfRange(
                f"A plan needs one context length per batch size, but the profile has {contexts} for "
                f"batch size {batch_size}: keep the timings of one."
            )
        return contexts[0]

    def plain(self, batch_size: int, context_tokens: int) -> Latency:
        """One autoregressive step."""
        return self._plain[batch_size, context_tokens]

    def step(self, batch_size: int, context_tokens: int, size: int, depth: int) -> Latency | None:
        """A step with a tree of ``size`` rows and ``depth``; None beyond what was measured.

        Size 1 is a plain step. Between two measured sizes of the same depth the estimate is linear;
        a depth that was not measured costs as the next deeper one that was.
        """
        if size == 1:
            return self.plain(batch_size, context_tokens)
        by_depth = self._medians.get((batch_size, context_tokens), {})
        for measured_depth in sorted(d for d in by_depth if d >= max(depth, 1)):
            sizes = by_depth[measured_depth]
            below = max((s for s in sizes if s <= size), default=None)
            above = min((s for s in sizes if s >= size), default=None)
            if below is not None and above is not None:
                w = (size - below) / (above - below) if above > below else 0.0
                low, high = sizes[below], sizes[above]
                return Latency((1 - w) * low.ms + w * high.ms, (1 - w) * low.stderr_ms + w * high.stderr_ms)
        return None

    def largest(self, batch_size: int, context_tokens: int) -> int:
        """The largest size measured."""
        by_depth = self._medians.get((batch_size, context_tokens), {})
        return max((size for sizes in by_depth.values() for size in sizes), default=1)

    def deepest(self, batch_size: int, context_tokens: int) -> int:
        """The largest depth measured."""
        return max(self._medians.get((batch_size, context_tokens), {}), default=0)

    @cached_property
    def _plain(self) -> dict[tuple[int, int], Latency]:
        """Setting -> median of the plain step, pooled over repeated timings."""
        samples: dict[tuple[int, int], list[float]] = {}
        for p in self.autoregressive:
            samples.setdefault((p.batch_size, p.context_tokens), []).extend(p.step_ms)
        return {setting: median_latency(ms) for setting, ms in samples.items()}

    @cached_property
    def _medians(self) -> dict[tuple[int, int], dict[int, dict[int, Latency]]]:
        """Setting -> depth -> size -> median, pooled over repeated points."""
        samples: dict[tuple[int, int], dict[int, dict[int, list[float]]]] = {}
        for p in self.points:
            at = samples.setdefault((p.batch_size, p.context_tokens), {}).setdefault(p.depth, {})
            at.setdefault(p.size, []).extend(p.step_ms)
        return {
            setting: {
                depth: {size: median_latency(ms) for size, ms in sizes.items()}
                for depth, sizes in depths.items()
            }
            for setting, depths in samples.items()
        }

    def document(self) -> dict[str, Any]:
        """What ``profile.json`` says."""
        return {
            "points": [_without_unknown(asdict(p)) for p in self.points],
            "autoregressive": [
                {k: v for k, v in _without_unknown(asdict(p)).items() if k not in ("size", "depth")}
                for p in self.autoregressive
            ],
            "runtime": self.runtime,
            **self.info,
        }

    def save(self, path: Path) -> None:
        storage.write_json(path, "profile", self.document())

    @classmethod
    def load(cls, path: Path) -> LatencyProfile:
        document = storage.read_json(path, "profile", required=("points", "autoregressive"))
        plain = [
            {"size": 1, "depth": 0, **p} if isinstance(p, dict) else p
            for p in _list(document, "autoregressive")
        ]
        rest = ("schema", "points", "autoregressive", "runtime")
        info = {k: v for k, v in document.items() if k not in rest}
        return storage.typed(cls, {**document, "autoregressive": plain, "info": info}, path)


def _list(document: dict[str, Any], key: str) -> list[Any]:
    value = document[key]
    return value if isinstance(value, list) else [value]


def _without_unknown(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}
