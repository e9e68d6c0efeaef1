"""What a decoding step took, as it was measured: the samples of ``profile.json``.

step_ms    samples of the latency of one whole decoding step (propose, verify, accept, commit) [ms]
plain      an autoregressive step, of size 1: no heads, no mask, no gather
setting    a batch size and a context length
round      a stretch of time in which everything was measured once
level      of drafting: a drafter that works level by level (Hydra heads, EAGLE, a draft model) runs once for every
           depth 0...D-1 of a tree, on the nodes there that have children (its *expanding* nodes), and finds these

Estimates from them are made by `treeopt.latency.estimate.StepCosts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.records.agreement import agree, at_place, within
from treeopt.records.display import Drawn
from treeopt.records.origins import Runtime, check_origins
from treeopt.trees.dynamic import MOST_TOPK

LAST_DIGIT = 1e-5  # of what the file says of its precision

Setting = tuple[int, int]  # batch_size, context_tokens


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
    topk: int | None = (
        None  # of a dynamic tree of ``depth`` levels: nodes that it expands on each, and children of each
    )
    adaptive: bool | None = None  # whether it chose its ``size`` rows by its scores

    def __post_init__(self) -> None:
        if not self.step_ms or not all(np.isfinite(ms) and ms > 0 for ms in self.step_ms):
            raise InvalidInput(f"step_ms must be positive samples in ms, but got {self.step_ms[:3]}.")
        if self.batch_size < 1 or self.size < 1 or not min(self.size - 1, 1) <= self.depth < self.size:
            raise InvalidInput(
                "A timing needs batch_size >= 1, size >= 1 and 1 <= depth < size (depth 0 for size 1), "
                f"but got {self.batch_size}, {self.size}, {self.depth}."
            )
        if self.expanding is not None:
            _check_expanding(self.expanding, inf if self.topk else self.size, self.depth)
        within(1, MOST_TOPK, topk=self.topk)
        within(0, context_tokens=self.context_tokens)
        within(0, self.depth, accepted_mean=self.accepted_mean)
        _check_rounds(self.round, self.step_ms)
        counts = {len(samples) for samples in (self.parts_ms or {}).values()}
        if len(counts) > 1 or 0 in counts:
            raise InvalidInput(
                f"parts_ms must have as many samples of every part, at least one, but has {sorted(counts)}."
            )
        for part, samples in (self.parts_ms or {}).items():
            within(0, **{f"parts_ms of {part}": min(samples)})

    @property
    def setting(self) -> Setting:
        return self.batch_size, self.context_tokens

    def by_round(self) -> dict[int, float]:
        """Median sample of every round; empty where rounds are not known."""
        samples: dict[int, list[float]] = {}
        for number, ms in zip(self.round or (), self.step_ms, strict=False):
            samples.setdefault(number, []).append(ms)
        return {number: median(samples[number]) for number in sorted(samples)}

    def whole_parts(self) -> dict[str, list[float]]:
        """The samples of every part, the levels of drafting taken together, sample by sample.

        >>> parts = {"draft 0": (1.0, 2.0), "draft 1": (0.5, 0.5), "target": (3.0, 3.0)}
        >>> StepTiming(1, 128, 8, 2, (5.0, 6.0), parts_ms=parts).whole_parts()
        {'draft': [1.5, 2.5], 'target': [3.0, 3.0]}
        """
        found: dict[str, list[float]] = {}
        for name, samples in (self.parts_ms or {}).items():
            part = name.split(" ")[0]
            found[part] = [a + b for a, b in zip(found[part], samples, strict=True)] if part in found else list(samples)
        return found


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How well latencies are known: halves of 95 % intervals as shares, what was wanted and the widest."""

    wanted: float
    reached: bool | None = None
    worst: float | None = None
    missed: int | None = None
    timings: int | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A setting of which something is said."""

    batch_size: int
    context_tokens: int


@dataclass(frozen=True, kw_only=True)
class Floor(Place):
    """The least time of a plain step at a memory bandwidth."""

    gb_per_s: float
    weight_bytes: int
    cache_bytes: int
    floor_ms: float
    plain_over_floor: float

    def check(self, plain: StepTiming) -> None:
        """Raise InvalidInput where the figures contradict one another, or the plain step there."""
        within(0, weight_bytes=self.weight_bytes, cache_bytes=self.cache_bytes)
        if not (self.gb_per_s > 0 and self.floor_ms > 0):
            raise InvalidInput(
                f"gb_per_s and floor_ms must be above 0, but are {self.gb_per_s:g} and {self.floor_ms:g}."
            )
        floor_ms = 1e-6 * (self.weight_bytes + self.cache_bytes) / self.gb_per_s
        agree("floor_ms", self.floor_ms, floor_ms, "(weight_bytes + cache_bytes) / gb_per_s", self.gb_per_s)
        over = median(plain.step_ms) / self.floor_ms
        agree("plain_over_floor", self.plain_over_floor, over, "the median plain step / floor_ms", self.floor_ms)


@dataclass(frozen=True, kw_only=True)
class Info:
    """What a file says of its timings that can be checked against them."""

    precision: Precision | None = None
    drift: list[Place] | None = None
    bandwidth_floor: list[Floor] | None = None
    weight_bytes: dict[str, int] | None = None
    processor_share: float | None = None


@dataclass(frozen=True, eq=False)
class LatencyProfile(Drawn):
    """Measured step latencies: ``profile.json``.

    >>> point = StepTiming(1, 128, size=8, depth=2, step_ms=(3.0,))
    >>> plain = StepTiming(1, 128, size=1, depth=0, step_ms=(2.0,))
    >>> LatencyProfile((point,), (plain,)).settings
    [(1, 128)]
    """

    points: tuple[StepTiming, ...]
    autoregressive: tuple[StepTiming, ...]
    runtime: Runtime = field(default_factory=Runtime)
    info: dict[str, Any] = field(default_factory=dict)  # the file's other keys

    def __post_init__(self) -> None:
        if not self.autoregressive:
            raise InvalidInput("A profile must have at least one autoregressive timing.")
        known = set(self.settings)
        for point in self.points:
            if point.size == 1 and point.step_ms not in [p.step_ms for p in self.autoregressive]:
                raise InvalidInput(
                    "A point of size 1 is the plain step and must have its samples, but the point of batch size "
                    f"{point.batch_size} has others: leave it out."
                )
            if point.setting not in known:
                raise InvalidInput(
                    "Every point of a profile must have a plain timing beside it, but batch size "
                    f"{point.batch_size} at context {point.context_tokens} has none."
                )

    @property
    def fixed(self) -> list[StepTiming]:
        """The timings of fixed trees."""
        return [point for point in self.points if point.topk is None]

    @property
    def dynamic(self) -> list[StepTiming]:
        """Those of dynamic trees, but for those that chose their rows."""
        return [point for point in self.points if point.topk is not None and not point.adaptive]

    @property
    def adaptive(self) -> list[StepTiming]:
        """Those of dynamic trees that chose their rows."""
        return [point for point in self.points if point.topk is not None and point.adaptive]

    @cached_property
    def settings(self) -> list[Setting]:
        """Every measured (batch_size, context_tokens), sorted."""
        return sorted({p.setting for p in self.autoregressive})

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({batch for batch, _ in self.settings})

    def document(self) -> dict[str, Any]:
        """What ``profile.json`` says."""
        return {
            "schema": storage.schema("profile"),
            "points": [_without_unknown(asdict(p)) for p in self.points],
            "autoregressive": [
                {k: v for k, v in _without_unknown(asdict(p)).items() if k not in ("size", "depth")}
                for p in self.autoregressive
            ],
            "runtime": self.runtime,
            **self.info,
        }

    def save(self, path: str | Path) -> None:
        storage.write_json(path, "profile", self.document())

    @classmethod
    def load(cls, path: str | Path) -> LatencyProfile:
        document = storage.read_json(path, "profile", required=("points", "autoregressive"))
        check_origins(document, path)
        alone = document["autoregressive"]
        alone = alone if isinstance(alone, list) else [alone]
        plain = [{"size": 1, "depth": 0, **p} if isinstance(p, dict) else p for p in alone]
        rest = ("schema", "points", "autoregressive", "draft", "runtime")  # "draft" is of earlier files
        info = {k: v for k, v in document.items() if k not in rest}
        profile = storage.typed(cls, {**document, "autoregressive": plain, "info": info}, path)
        profile.check(path)
        return profile

    def check(self, source: str | Path) -> None:
        """Raise InvalidInput, with the place in the file ``source``, where what it says of its timings contradicts them."""
        plain = {timing.setting: timing for timing in self.autoregressive}
        known = storage.typed(Info, self.info, source)
        weights = known.weight_bytes or {}
        with at_place(source, "processor_share"):
            within(0, 1, processor_share=known.processor_share)
        with at_place(source, "weight_bytes"):
            within(0, **weights)
            within(0, weights.get("target", inf), plain_step=weights.get("plain_step"))
        if of := known.precision:
            with at_place(source, "precision"):
                agree("timings", of.timings, len(self.points) + len(plain), "the points and the plain steps")
                within(0, inf if of.timings is None else of.timings, missed=of.missed)
                if of.missed is not None and of.worst is not None:
                    low, high = (of.wanted, inf) if of.missed else (0.0, of.wanted)
                    within(low - LAST_DIGIT, high + LAST_DIGIT, worst=of.worst)
                    agree("reached", of.reached, int(not of.missed), "whether none is missed")
        for name, places in (("drift", known.drift), ("bandwidth_floor", known.bandwidth_floor)):
            for i, at in enumerate(places or ()):
                with at_place(source, f"{name}.{i}"):
                    if (timing := plain.get((at.batch_size, at.context_tokens))) is None:
                        raise InvalidInput(
                            f"there is no plain step at batch size {at.batch_size} and context {at.context_tokens}."
                        )
                    if isinstance(at, Floor):
                        at.check(timing)


def _without_unknown(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}


def _check_rounds(rounds: Sequence[int] | None, samples: Sequence[float]) -> None:
    """Raise InvalidInput unless every sample has a round, or none."""
    if rounds is not None:
        agree("the rounds", len(rounds), len(samples), "one for each sample")
        within(0, round=min(rounds, default=0))


def _check_expanding(expanding: Sequence[int], size: float, depth: int) -> None:
    """Raise InvalidInput unless a tree of so many rows and levels can have these expanding nodes."""
    first = min(depth, 1)
    if (
        len(expanding) != depth
        or min(expanding, default=1) < 1
        or sum(expanding[:1]) != first
        or sum(expanding) >= size
    ):
        raise InvalidInput(
            f"expanding must say for each of {depth} levels how many nodes have children. It must begin with "
            f"1, the root, and its sum must be below the size, {size:g}, but it is {list(expanding)}."
        )
