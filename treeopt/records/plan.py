"""The result of a search, one entry per batch size and context: ``plan.json``.

Each class below is an object of the file, its fields are the object's keys; None stands for unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files import storage
from treeopt.records.agreement import SUMS, agree, at_place, rounding, shares, within
from treeopt.records.display import Drawn, Exported, viewer
from treeopt.records.expected import (
    AdaptiveFigures,
    BestChain,
    CurvePoint,
    DynamicFigures,
    GroupFigures,
    Interval95,
    Mixture,
    PlannedEngine,
    PlanPredicted,
    RunnerUp,
    Sample,
    TreeFigures,
    Verified,
    check_speed,
)
from treeopt.records.origins import Acceptance, Drafter, Runtime
from treeopt.records.ranges import BatchRange, check_schedule, each_its_own
from treeopt.trees.shapes import SHAPES, Limits
from treeopt.trees.tree import Choice, Tree

# Keys that earlier releases did not write: left out where they say nothing.
LATER = {"provenance", "total", "error_between", "tests_between", "elsewhere", "own", "between", "dynamic", "adaptive"}
LATER |= {"sample"}


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """The chosen tree for one batch size. Size 1 with no choices means "do not speculate".

    tokens_per_step is held-out (cross-fitted replay) where the plan was made from a trace; step_ms,
    tokens_per_s and speedup are None where there was no profile. ``*_stderr`` are standard errors.

    growth_order  : (path, gain [tokens per step]), first those of the chosen tree, size - 1 of them; then on to
                    the whole budget where trees are nested
    tied_sizes    : sizes that the data cannot tell from the fastest
    accepted      : share of the steps that emit 0, 1, ... guesses
    unconstrained : what the best tree without the limits reaches
    elsewhere     : batch size of the plan -> share of the throughput that the tree loses there against that one's own
    dynamic, adaptive : the fastest such trees, where the trace has their pools
    own           : of one tree for a mix: what the best tree for this batch size alone reaches
    curve         : the best tree of every size
    """

    batch_size: int
    context_tokens: int | None
    size: int
    depth: int
    medusa_choices: list[list[int]]
    tokens_per_step: float
    step_ms: float | None
    tokens_per_s: float | None
    speedup: float | None
    tokens_per_step_stderr: float | None = None
    step_ms_stderr: float | None = None
    tokens_per_s_stderr: float | None = None
    speedup_stderr: float | None = None
    growth_order: list[tuple[Choice, float]] = field(default_factory=list)
    predicted: PlanPredicted = field(default_factory=PlanPredicted)
    interval95: Interval95 | None = None
    tied_sizes: list[int] = field(default_factory=list)
    runner_up: RunnerUp | None = None
    accepted: list[float] = field(default_factory=list)
    verified: Verified | None = None
    best_chain: BestChain | None = None
    unconstrained: TreeFigures | None = None
    elsewhere: dict[int, float] = field(default_factory=dict)
    own: TreeFigures | None = None
    dynamic: DynamicFigures | None = None
    adaptive: AdaptiveFigures | None = None
    warnings: list[str] = field(default_factory=list)
    groups: dict[str, GroupFigures] = field(default_factory=dict)
    curve: list[CurvePoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        tree = self.tree
        if (len(tree), tree.depth) != (self.size, self.depth):
            raise InvalidInput(
                f"An entry's size and depth must be its tree's ({len(tree)}, {tree.depth}), "
                f"but are ({self.size}, {self.depth})."
            )

    @property
    def tree(self) -> Tree:
        return Tree.from_choices(self.medusa_choices)

    @property
    def rate(self) -> float:
        """What trees are compared by: tokens per second, or per step where no latency is known."""
        return self.tokens_per_s or self.tokens_per_step

    def check(self, source: str | Path, where: str) -> None:
        """Raise InvalidInput, with the place in the file, where the figures contradict one another."""
        with at_place(source, where):
            within(1, batch_size=self.batch_size)
            within(0, context_tokens=self.context_tokens, **{k: v for k, v in vars(self).items() if "stderr" in k})
            check_speed(self.size, self.tokens_per_step, self.step_ms, self.tokens_per_s, self.batch_size)
            self._check_predicted()
            self._check_growth()
            if self.interval95:
                self.interval95.check()
            if self.verified:
                self.verified.check(self.size, self.depth, self.batch_size)
        for i, point in enumerate(self.curve):
            with at_place(source, f"{where}.curve.{i}"):
                point.check(self.batch_size)
        with at_place(source, where):
            self._check_curve()
        for name in ("best_chain", "unconstrained", "own", "dynamic", "adaptive"):
            if (figures := getattr(self, name)) is not None:
                with at_place(source, f"{where}.{name}"):
                    figures.check(self.batch_size)
        if self.runner_up:
            with at_place(source, f"{where}.runner_up"):
                self.runner_up.check(self.tokens_per_s)
        for name, group in self.groups.items():
            with at_place(source, f"{where}.groups.{name}"):
                group.check(self.size, self.tokens_per_step, self.speedup)

    def _check_predicted(self) -> None:
        of, rate = self.predicted, self.tokens_per_step
        within(1, self.size, product=of.product, joint=of.joint, replayed=of.replayed)
        within(0, replayed_stderr=of.replayed_stderr)
        within(1, sequences=of.sequences, steps=of.steps)
        within(1, of.sequences or inf, conversations=of.conversations)
        agree("predicted.replayed", of.replayed, rate, "the entry's tokens_per_step", rate)
        if self.tokens_per_step_stderr is not None:
            error = self.tokens_per_step_stderr
            agree("predicted.replayed_stderr", of.replayed_stderr, error, "the entry's tokens_per_step_stderr", error)
        if of.replayed is None:
            agree("predicted.product", of.product, rate, "the entry's tokens_per_step", rate)
        shares("accepted", self.accepted)
        if self.accepted:  # a step that ends an answer may emit a guess and no token behind it
            ending = 1.0 if of.joint is None else (of.sequences or 1) / (of.steps or 1)
            slack = sum(i * rounding(share) for i, share in enumerate(self.accepted)) + rounding(rate)
            mean = 1 + sum(i * share for i, share in enumerate(self.accepted))
            most = rate + slack + (ending if of.replayed is not None else 0.0)
            within(rate - slack, most, **{"1 + the mean of accepted": mean})

    def _check_growth(self) -> None:
        if not self.growth_order:
            return
        own = [path for path, _ in self.growth_order[: self.size - 1]]
        if {tuple(path) for path in own} != set(self.tree.paths[1:]):
            raise InvalidInput(
                f"growth_order must begin with the {self.size - 1} paths of the tree, but has {own[:8]}."
            )
        sums, slack = 1.0, 0.0
        for n, (_, gain) in enumerate(self.growth_order, 1):
            sums, slack = sums + gain, slack + rounding(gain)
            within(1 - slack, n + 1 + slack, **{f"1 + the first {n} gains of growth_order": sums})
            if n == self.size - 1 and self.predicted.product is not None and self.predicted.replayed is None:
                rate = self.tokens_per_step + slack
                within(rate - 2 * slack, rate, **{"1 + the gains of the tree": sums})

    def _check_curve(self) -> None:
        sizes = [point.size for point in self.curve]
        for name, found in (("curve", sizes), ("tied_sizes", self.tied_sizes)):
            if found != sorted(set(found)) or (found and found[0] < 1):
                raise InvalidInput(f"The sizes of {name} must rise, but are {found[:8]}.")
        points = {point.size: point for point in self.curve}
        named = {self.size, *self.tied_sizes, *((self.interval95 and self.interval95.size) or ())}
        named |= {self.runner_up.size} if self.runner_up else set()
        if points and (strange := sorted(named - points.keys())):
            raise InvalidInput(
                f"curve must have a point for every size that is named, but has none for {strange[0]:g}."
            )
        if self.tied_sizes and self.size not in self.tied_sizes and self.verified is None:
            raise InvalidInput(
                f"tied_sizes must have the chosen size {self.size} among them, but are {self.tied_sizes[:8]}."
            )
        if points and (runner := self.runner_up):
            best = points[runner.size]
            if best.depth == runner.depth and (speed := best.tokens_per_s) is not None:
                agree("runner_up.tokens_per_s", runner.tokens_per_s, speed, "the curve's", speed)
        if own := points.get(self.size):
            if own.depth == self.depth:
                agree("tokens_per_step", self.tokens_per_step, own.tokens_per_step, "the curve's", own.tokens_per_step)
                if own.step_ms is not None:
                    agree("step_ms", self.step_ms, own.step_ms, "the curve's", own.step_ms)
            else:
                within(
                    0, own.rate + rounding(own.rate) + rounding(self.rate), **{"tokens per second or step": self.rate}
                )
        if (plain := points.get(1)) and plain.step_ms and self.step_ms:
            of = self.tokens_per_step, plain.step_ms, self.step_ms
            agree(
                "speedup", self.speedup, of[0] * of[1] / of[2], "tokens_per_step x the step_ms of size 1 / step_ms", *of
            )


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The limits of a search; ``mix`` is the share of the time that each batch size has, where one tree was asked for."""

    budget: int | None = None
    max_rank: int | None = None
    shape: str | None = None
    max_depth: int | None = None
    measured_only: bool = False
    mix: dict[int, float] | None = None
    engine: PlannedEngine | None = None

    def check(self, entry: PlanEntry) -> None:
        """Raise InvalidInput where an entry's tree is not within the limits."""
        tree = entry.tree
        within(0, inf if self.budget is None else self.budget, size=len(tree))
        within(0, inf if self.max_depth is None else self.max_depth, depth=tree.depth)
        within(0, inf if self.max_rank is None else self.max_rank, **{"the largest rank": max(tree.max_rank, 0)})
        if self.shape in SHAPES and not SHAPES[self.shape](tree):  # older releases had one more
            raise InvalidInput(f"The tree must be {self.shape}, as the search was asked, but is not.")
        if self.mix is not None and not self.mix.get(entry.batch_size, 0) > 0:
            raise InvalidInput(f"mix must have a share above 0 for batch size {entry.batch_size}, but has {self.mix}.")


@dataclass(frozen=True, kw_only=True)
class Plan(Drawn):
    """The trees that a search chose, and what it knew when it did.

    runtime    : whose latencies these are
    inputs     : file -> sha256 of what it was made from
    provenance : command, time, versions and machine of the search
    schedule   : ranges of batch sizes, from 1 on without a gap, the last one open
    total      : of one tree for a mix of batch sizes, what it reaches over all
    error_between : how far a range's loss ``between`` may be off, tested at so many (``tests_between``) of the batch sizes
                    that were searched
    sample     : the conversations that were drawn to plan with; None for all
    """

    entries: tuple[PlanEntry, ...]
    objective: str | None = None
    drafter: Drafter | None = None
    acceptance: Acceptance | None = None
    constraint: Constraint | None = None
    runtime: Runtime | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] | None = None
    schedule: list[BatchRange] = field(default_factory=list)
    total: Mixture | None = None
    error_between: float | None = None
    tests_between: int | None = None
    sample: Sample | None = None

    def __post_init__(self) -> None:
        if not self.entries:
            raise InvalidInput("A plan must have at least one entry.")
        if not self.schedule:
            object.__setattr__(self, "schedule", each_its_own([e.batch_size for e in self.entries]))
        check_schedule(self.schedule, len(self.entries))

    def entry(self, batch_size: int | None = None) -> PlanEntry:
        """The entry of a batch size, which may be left out where there is only one.

        Raises OutOfRange for a batch size that the plan has not, or none where it has several.
        """
        if batch_size is None and len(self.entries) == 1:
            return self.entries[0]
        have = ", ".join(str(e.batch_size) for e in self.entries)
        for entry in self.entries:
            if entry.batch_size == batch_size:
                return entry
        if batch_size is None:
            raise OutOfRange(f"The plan has trees for batch sizes {have}: say which with --batch-size.")
        raise OutOfRange(
            f"The plan has trees for batch sizes {have}, but {batch_size} was asked: search again with "
            f"--batch-size {batch_size}."
        )

    def limits(self, default: Limits) -> Limits:
        """The limits of the search; where the plan does not say, those of ``default``."""
        known = {name: getattr(self.constraint, name, None) for name in Limits.__dataclass_fields__}
        return replace(default, **{name: limit for name, limit in known.items() if limit is not None})

    @property
    def mix(self) -> dict[int, float] | None:
        """Batch size -> share of the time, where one tree was chosen for all."""
        return self.constraint.mix if self.constraint else None

    def __getitem__(self, batch_size: int) -> PlanEntry:
        """The entry of a batch size."""
        return self.entry(batch_size)

    def __iter__(self) -> Iterator[PlanEntry]:
        return iter(self.entries)

    def export(
        self,
        engine: str,
        folder: str | Path,
        *,
        batch_size: int | None = None,
        method: str | None = None,
        version: str | None = None,
        max_draft_len: int | None = None,
    ) -> Exported:
        """Write the plan as an engine's own files (``treeopt list engines``) into ``folder``.

        batch_size    : which of the plan's trees; by default its schedule where the engine takes one, else a folder for each
        method        : one of the engine's ways to speculate; by default the drafter's
        version       : its release, where its files differ by release
        max_draft_len : of a TensorRT-LLM engine that is built already

        Raises InvalidInput for what the engine would refuse or misread.
        """
        options = {"batch_size": batch_size, "method": method, "version": version, "max_draft_len": max_draft_len}
        return viewer().write_export(self, engine, Path(folder), options)

    def document(self) -> dict[str, Any]:
        """What ``plan.json`` says."""
        document = {"schema": storage.schema("plan"), **asdict(self)}
        document["schedule"] = [
            {{"first": "from", "last": "to"}.get(key, key): value for key, value in part.items()}
            for part in document["schedule"]
        ]
        kinds = [entry[kind] for entry in document["entries"] for kind in ("dynamic", "adaptive") if entry[kind]]
        for part in (document, *document["entries"], *document["schedule"], *kinds):
            for key in LATER & part.keys():
                if not part[key] and part[key] != 0:
                    del part[key]
        for entry in document["entries"]:
            if entry["interval95"]:
                entry["interval95"] = {name: ends for name, ends in entry["interval95"].items() if ends}
        return document

    def save(self, path: str | Path) -> None:
        storage.write_json(path, "plan", self.document())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        document = storage.read_json(path, "plan", required=("entries",))
        if isinstance(document.get("schedule"), list):
            names = {"from": "first", "to": "last"}
            document["schedule"] = [
                {names.get(key, key): value for key, value in part.items()} if isinstance(part, dict) else part
                for part in document["schedule"]
            ]
        plan = storage.typed(cls, document, path)
        plan.check(path)
        return plan

    def check(self, source: str | Path) -> None:
        """Raise InvalidInput, with the place in the file ``source``, where numbers contradict one another."""
        heads = (self.drafter or {}).get("num_heads")
        for i, entry in enumerate(self.entries):
            entry.check(source, f"entries.{i}")
            with at_place(source, f"entries.{i}"):
                within(0, inf if heads is None else heads, depth=entry.depth)
                if self.constraint:
                    self.constraint.check(entry)
        for i, part in enumerate(self.schedule):
            with at_place(source, f"schedule.{i}"):
                within(0, 1, loss=part.loss, between=part.between)
        with at_place(source, "total"):
            within(0, 1, error_between=self.error_between)
            within(1, max(len(self.entries) - 2, 1), tests_between=self.tests_between)
            if self.total:
                self._check_total(self.total)
            if self.sample:
                within(1, self.sample.of - 1, **{"sample.conversations": self.sample.conversations})
        for i, entry in enumerate(self.entries):
            with at_place(source, f"entries.{i}.elsewhere"):
                self._check_elsewhere(entry)

    def _check_total(self, total: Mixture) -> None:
        shares, speeds = [(self.mix or {}).get(entry.batch_size, 0.0) for entry in self.entries], []
        for e in self.entries:
            if not (e.tokens_per_s and e.speedup and e.own and e.own.tokens_per_s and sum(shares)):
                raise InvalidInput("A total needs the shares, tokens_per_s, speedup and own of every entry.")
            speeds.append((e.tokens_per_s, e.tokens_per_s / e.speedup, e.own.tokens_per_s))
        total.check(shares, speeds)

    def _check_elsewhere(self, entry: PlanEntry) -> None:
        for batch_size, loss in entry.elsewhere.items():
            other = next((e for e in self.entries if e.batch_size == batch_size), None)
            if other is None:
                raise InvalidInput(f"its batch sizes must be those of entries, but one is {batch_size}.")
            within(-inf, 1, **{str(batch_size): loss})
            same = [p.tokens_per_s for p in other.curve if (p.size, p.depth) == (entry.size, entry.depth)]
            if same and same[0] and other.tokens_per_s:
                follows, slack = 1 - same[0] / other.tokens_per_s, rounding(loss) + SUMS
                slack += 2 * sum(rounding(speed) / speed for speed in (same[0], other.tokens_per_s))
                within(follows - slack, follows + slack, **{str(batch_size): loss})
