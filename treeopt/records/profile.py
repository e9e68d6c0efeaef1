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
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.records.display import Drawn
from treeopt.records.origins import Runtime, check_origins

LEVEL = "draft "  # in parts_ms: "draft 0", "draft 1", ... are the levels

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

    def __post_init__(self) -> None:
        if not self.step_ms or not all(np.isfinite(ms) and ms > 0 for ms in self.step_ms):
            raise InvalidInput(f"step_ms must be positive samples in ms, but got {self.step_ms[:3]}.")
        if self.batch_size < 1 or self.size < 1 or not min(self.size - 1, 1) <= self.depth < self.size:
            raise InvalidInput(
                "A timing needs batch_size >= 1, size >= 1 and 1 <= depth < size (depth 0 for size 1), "
                f"but got {self.batch_size}, {self.size}, {self.depth}."
            )
        if self.expanding is not None:
            _check_expanding(self.expanding, self.size, self.depth)

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


@dataclass(frozen=True)
class DraftTiming:
    """Samples of drafting the children of so many nodes of one depth: a record of ``draft`` in ``profile.json``."""

    batch_size: int
    level: int
    expanding_nodes: int
    ms: tuple[float, ...]
    context_tokens: int | None = None  # None: whatever the context
    round: tuple[int, ...] | None = None  # the round in which each sample was taken

    def __post_init__(self) -> None:
        if not self.ms or not all(np.isfinite(ms) and ms >= 0 for ms in self.ms):
            raise InvalidInput(f"draft ms must be samples of at least 0 ms, but got {self.ms[:3]}.")
        if self.batch_size < 1 or self.level < 0 or self.expanding_nodes < 1:
            raise InvalidInput(
                "A draft timing needs batch_size >= 1, level >= 0 and expanding_nodes >= 1, but got "
                f"{self.batch_size}, {self.level}, {self.expanding_nodes}."
            )
        if self.level == 0 and self.expanding_nodes != 1:
            raise InvalidInput(
                f"On level 0 of a draft timing the root expands alone, but it says {self.expanding_nodes} nodes."
            )


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
            if point.setting not in known:
                raise InvalidInput(
                    "Every point of a profile must have a plain timing beside it, but batch size "
                    f"{point.batch_size} at context {point.context_tokens} has none."
                )

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
            **({"draft": [_without_unknown(asdict(d)) for d in self.draft]} if self.draft else {}),
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
        rest = ("schema", "points", "autoregressive", "draft", "runtime")
        info = {k: v for k, v in document.items() if k not in rest}
        return storage.typed(cls, {**document, "autoregressive": plain, "info": info}, path)


def _without_unknown(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if value is not None}


def _check_expanding(expanding: Sequence[int], size: int, depth: int) -> None:
    """Raise InvalidInput unless a tree of so many rows and levels can have these expanding nodes."""
    first = min(depth, 1)
    if (
        len(expanding) != depth
        or min(expanding, default=1) < 1
        or sum(expanding[:1]) != first
        or sum(expanding) >= size
    ):
        raise InvalidInput(
            f"expanding must have {depth} numbers for depth {depth}, of the nodes with children on every level, the "
            f"root's 1 first, for {size} rows less than {size} together, but is {list(expanding)}."
        )


def draft_timings(points: Sequence[StepTiming]) -> tuple[DraftTiming, ...]:
    """What the timings of trees say of each level, by their parts "draft 0", "draft 1", ...; levels alike pooled.

    Timings that do not tell the levels apart, or not which nodes of the tree expand, say nothing. Where the parts of
    a timing take longer than its step, its levels are shorter by that share.
    """
    found: dict[tuple[int, int, int, int], list[tuple[float, int | None]]] = {}
    for point in points:
        share = _scale(point)
        for part, samples in (point.parts_ms or {}).items():
            number = part.removeprefix(LEVEL)
            if point.expanding is None or number == part or not number.isdecimal():
                continue
            level, rounds = int(number), sorted(set(point.round or ()))
            known = len(rounds) == len(samples)  # one of each round
            key = (point.batch_size, point.context_tokens, level, point.expanding[level])
            found.setdefault(key, []).extend(
                zip((share * ms for ms in samples), rounds if known else [None] * len(samples), strict=True)
            )
    return tuple(
        DraftTiming(
            batch_size,
            level,
            nodes,
            tuple(ms for ms, _ in samples),
            context,
            tuple(n for _, n in samples if n is not None) if all(n is not None for _, n in samples) else None,
        )
        for (batch_size, context, level, nodes), samples in sorted(found.items())
    )


def _scale(point: StepTiming) -> float:
    """What the parts of a timing are multiplied by so that they take no longer together than its steps; 1 at most.

    Parts are timed with a synchronisation after each. They are compared with the steps of their round.
    """
    steps, together = list(point.by_round().values()), 0.0
    for samples in filter(None, (point.parts_ms or {}).values()):
        known = steps if len(steps) == len(samples) else [median(point.step_ms)] * len(samples)
        together += median(ms / step for ms, step in zip(samples, known, strict=True))
    return min(1 / together, 1.0) if together > 0 else 1.0
