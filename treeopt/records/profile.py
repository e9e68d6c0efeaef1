"""The profile: measured latencies of decoding steps, ``profile.json``.

step_ms    samples of the latency of one whole decoding step (propose, verify, accept, commit) [ms]
plain      an autoregressive step, of size 1: no heads, no mask, no gather
setting    a batch size and a context length
round      a stretch of time in which everything was measured once
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.files.fields import Amount, Count, NotNegative, Positive, Share
from treeopt.records.origins import JsonRecord, Origins, Runtime
from treeopt.trees.draft import MOST_TOPK, OVER_MARGINALS, topk_family
from treeopt.trees.tree import FIXED, Cost

Setting = tuple[int, int]  # batch_size, context_tokens


@dataclass(frozen=True)
class AtSetting:
    """The base of records that have a batch size and a context."""

    batch_size: Positive
    context_tokens: Count

    @property
    def setting(self) -> Setting:
        return self.batch_size, self.context_tokens


@dataclass(frozen=True)
class StepTiming(AtSetting):
    """Latencies of one kind of step.

    batch_size     : sequences decoded at once
    context_tokens : the `--context` that rows were held at, or the median length of the rows while this was timed;
                     0: not known
    size           : rows of the draft, root included; left out of plain steps
    depth          : guesses that the draft accepts at most, below its size; left out of plain steps
    step_ms        : samples, milliseconds of a step of the whole batch
    round          : in which part of a round each sample was taken: it is compared with plain steps of the same
                     number
    topk           : of a dynamic tree, whose levels are `depth`: the nodes that it expands on each level, and the
                     children of each
    over_marginals : whether it is a tree over marginals
    as_it_comes    : whether it is a plain step of an engine in its default setting, where `autoregressive` has
                     exact ones
    depth_assumed  : whether the depth is unknown. The draft is then as deep as the drafter's guesses and its size
                     allow
    """

    size: Positive
    depth: Count
    step_ms: Annotated[tuple[Amount, ...], Field(min_length=1)]
    round: tuple[Count, ...] | None = None
    topk: Annotated[int, Field(ge=1, le=MOST_TOPK)] | None = None
    over_marginals: bool | None = None
    as_it_comes: bool | None = None
    depth_assumed: bool | None = None

    @property
    def cost(self) -> Cost:
        """What the latency depends on."""
        family = OVER_MARGINALS if self.over_marginals else topk_family(self.topk or 1)
        return Cost(family, self.size, self.depth)

    def __post_init__(self) -> None:
        if not min(self.size - 1, 1) <= self.depth < self.size:
            raise InvalidInput(
                f"A timing needs 1 <= depth < size (depth 0 for size 1), but got depth {self.depth} and size {self.size}."
            )

    def by_round(self) -> dict[int, float]:
        """Round to its median sample; empty where rounds are unknown."""
        samples: dict[int, list[float]] = {}
        for number, ms in zip(self.round or (), self.step_ms, strict=False):
            samples.setdefault(number, []).append(ms)
        return {number: median(samples[number]) for number in sorted(samples)}


@dataclass(frozen=True, kw_only=True)
class ProfileSetting(AtSetting):
    """A batch size and a context that were measured.

    batch_size     : sequences decoded at once
    context_tokens : that rows were held at, or had
    nominal        : whether all rows were held at that context
    """

    nominal: bool = True


class ProfileInfo(Origins, total=False):
    """Types of the other keys of a file.

    precision       : margin of error of every latency that was aimed at: half of its 95 % interval, as a share
    settings        : what was measured
    processor_share : processor time of the process over the time that rounds took; less than 0.8: the machine was
                      busy
    inputs          : file to sha256 of what the timed drafts were grown on, or of what was read
    measures        : `step`: whole steps; `linear layers`: those alone; `step (analytical)`: nothing, steps are
                      computed
    roofline        : with `--analytical`: what latencies were computed from
    """

    inputs: dict[str, str] | None
    measures: str | None
    roofline: dict[str, Any] | None
    precision: NotNegative | None
    settings: list[ProfileSetting] | None
    processor_share: Share | None


@dataclass(frozen=True, eq=False, repr=False)
class LatencyProfile(JsonRecord):
    """Measured step latencies: ``profile.json``.

    points         : steps that verify drafts
    autoregressive : plain steps, without `size` and `depth`; one for each batch size that is planned for
    runtime        : whose latencies these are; `weights` is `random weights` where none were loaded; `command` the
                     one of `--launch`

    >>> point = StepTiming(1, 128, size=8, depth=2, step_ms=(3.0,))
    >>> plain = StepTiming(1, 128, size=1, depth=0, step_ms=(2.0,))
    >>> LatencyProfile((point,), (plain,)).settings
    [(1, 128)]
    """

    file_kind = "profile"
    points: tuple[StepTiming, ...]
    autoregressive: Annotated[tuple[StepTiming, ...], Field(min_length=1)]
    runtime: Runtime = field(default_factory=Runtime)
    info: dict[str, Any] = field(default_factory=dict)  # the file's other keys

    def __post_init__(self) -> None:
        for point in self.points:
            if point.setting not in self.settings:
                raise InvalidInput(
                    "Every point of a profile must have a plain timing beside it, but batch size "
                    f"{point.batch_size} at context {point.context_tokens} has none."
                )

    def as_deep_as(self, num_heads: int) -> LatencyProfile:
        """The profile for a drafter of so many heads, which decide the depths that are assumed."""
        if not any(point.depth_assumed for point in self.points):
            return self
        points = [replace(p, depth=min(p.size - 1, num_heads)) if p.depth_assumed else p for p in self.points]
        return replace(self, points=tuple(points))

    @property
    def fixed(self) -> list[StepTiming]:
        """The timings of fixed trees."""
        return [point for point in self.points if point.cost.family == FIXED and not point.as_it_comes]

    @property
    def as_it_comes(self) -> list[StepTiming]:
        """The plain steps of an engine in its default setting; empty where ``autoregressive`` has these."""
        return [point for point in self.points if point.as_it_comes]

    @property
    def dynamic(self) -> list[StepTiming]:
        """The timings of dynamic trees."""
        return [point for point in self.points if point.topk is not None]

    @property
    def anew(self) -> list[StepTiming]:
        """The timings of drafts that are built anew at every step, of every kind."""
        return [point for point in self.points if point.cost.family != FIXED]

    @cached_property
    def settings(self) -> list[Setting]:
        """Every measured (batch_size, context_tokens), sorted."""
        return sorted({p.setting for p in self.autoregressive})

    @property
    def part(self) -> str | None:
        """The part of a step that was timed; None where whole steps were."""
        measures = str(self.info.get("measures") or "step")
        return None if measures.startswith("step") else measures

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({batch for batch, _ in self.settings})

    def document(self) -> dict[str, object]:
        plain = storage.document(self.autoregressive)
        for timing in plain:
            del timing["size"], timing["depth"]
        keys = {"points": self.points, "autoregressive": plain, "runtime": self.runtime, **self.info}
        return {"schema": storage.schema("profile"), **storage.document(keys)}

    @classmethod
    def load(cls, path: str | Path) -> LatencyProfile:
        document = storage.read_json(path, "profile")
        plain = document.get("autoregressive")
        for timing in plain if isinstance(plain, list) else ():
            if isinstance(timing, dict):
                timing |= {"size": 1, "depth": 0, **timing}
        profile = storage.typed(cls, {**document, "info": {}}, path)
        info = {k: v for k, v in document.items() if k not in ("schema", *cls.__dataclass_fields__)}
        checked = storage.typed(ProfileInfo, info, path)
        return replace(profile, info=info | ({"settings": checked["settings"]} if "settings" in info else {}))
