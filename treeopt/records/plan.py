"""The result of a search, one entry per batch size and context: ``plan.json``.

Each class below is an object of the file, its fields are the object's keys; None stands for unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files import storage
from treeopt.records.benchmark import Predicted, Ratio
from treeopt.records.display import Drawn, Exported, viewer
from treeopt.records.origins import Acceptance, Drafter, Runtime
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, Tree


@dataclass(frozen=True, kw_only=True)
class PlanPredicted(Predicted):
    """The predictions of an entry, and how many sequences, conversations and steps they rest on."""

    sequences: int | None = None
    conversations: int | None = None
    steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Interval95:
    """95 % intervals, [low, high], of an entry's figures and of the size that would be fastest."""

    tokens_per_step: list[float] | None = None
    tokens_per_s: list[float] | None = None
    speedup: list[float] | None = None
    size: list[float] | None = None


@dataclass(frozen=True, kw_only=True)
class TreeFigures:
    """What a tree is expected to reach; tokens_per_s is None where there was no profile."""

    size: int
    depth: int
    tokens_per_step: float
    tokens_per_s: float | None = None

    @property
    def rate(self) -> float:
        """What trees are compared by: tokens per second, or per step where no latency is known."""
        return self.tokens_per_s or self.tokens_per_step


@dataclass(frozen=True, kw_only=True)
class BestChain(TreeFigures):
    """The fastest chain of top-1 guesses."""

    step_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class CurvePoint(TreeFigures):
    """The best tree of one size."""

    step_ms: float | None = None
    tokens_per_s_stderr: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """The fastest tree of another size.

    behind : log of the chosen tree's tokens per second over this one's, with its standard error
    prompts_to_separate : conversations that would tell the two apart; None where more would not
    """

    size: int
    depth: int
    tokens_per_s: float
    behind: float
    behind_stderr: float
    prompts_to_separate: int | None = None


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What real decoding with a tree reached; speedup is over plain decoding, None where nothing was timed."""

    name: str
    size: int
    tokens_per_step: float
    tokens_per_s: float | None
    speedup: Ratio | None


@dataclass(frozen=True, kw_only=True)
class DecodedAfresh(Decoded):
    """What the winner reached on prompts that it was not chosen by."""

    prompts: int


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A choice by real decoding: all that decoded the same ``prompts``, plain decoding among them, and the winner."""

    size: int
    depth: int
    finalists: list[Decoded]
    prompts: int
    afresh: DecodedAfresh


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """What the chosen tree is expected to reach on a group of prompts."""

    tokens_per_step: float | None = None
    tokens_per_step_stderr: float | None = None
    speedup: float | None = None


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


@dataclass(frozen=True, kw_only=True)
class PlannedEngine:
    """The engine and its method that a plan's limits are."""

    name: str
    method: str


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


@dataclass(frozen=True, kw_only=True)
class BatchRange:
    """Batch sizes ``first`` to ``last`` (None: all from ``first`` on) get the tree of ``entries[entry]``.

    ``loss`` is the largest share of the throughput that it costs at a batch size of the range, None where there is
    no profile. In the file ``first`` and ``last`` are "from" and "to".
    """

    first: int
    last: int | None
    entry: int
    loss: float | None = None

    def __str__(self) -> str:
        return f"from {self.first} to {'the end' if self.last is None else self.last}: entry {self.entry}"


@dataclass(frozen=True, kw_only=True)
class Plan(Drawn):
    """The trees that a search chose, and what it knew when it did.

    runtime    : whose latencies these are
    inputs     : file -> sha256 of what it was made from
    provenance : command, time, versions and machine of the search
    schedule   : ranges of batch sizes, from 1 on without a gap, the last one open
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

        batch_size    : which of the plan's trees; by default its schedule, where the engine takes one
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
            {"from": part.first, "to": part.last, "entry": part.entry, "loss": part.loss} for part in self.schedule
        ]
        if self.provenance is None:
            del document["provenance"]
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
        return storage.typed(cls, document, path)


def each_its_own(batch_sizes: list[int]) -> list[BatchRange]:
    """The schedule in which every entry serves the batch sizes from its own up to the next one's.

    >>> print(*each_its_own([2, 8]), sep="; ")
    from 1 to 7: entry 0; from 8 to the end: entry 1
    """
    first = {size: i for i, size in reversed(list(enumerate(batch_sizes)))}
    begins = [1, *sorted(first)[1:]]
    ends = [*(begin - 1 for begin in begins[1:]), None]
    return [
        BatchRange(first=begin, last=end, entry=first[size])
        for size, begin, end in zip(sorted(first), begins, ends, strict=True)
    ]


def check_schedule(schedule: list[BatchRange], n_entries: int) -> None:
    """Raise InvalidInput where ranges overlap, leave a gap, or name no entry."""
    begin: int | None = 1
    for part in schedule:
        if part.first != begin or (part.last is not None and part.last < part.first):
            raise InvalidInput(f"A schedule must have ranges from 1 on that follow each other, but has '{part}'.")
        if not 0 <= part.entry < n_entries:
            raise InvalidInput(f"A schedule must name entries 0 to {n_entries - 1}, but has '{part}'.")
        begin = None if part.last is None else part.last + 1
    if begin is not None:
        raise InvalidInput("The last range of a schedule must be open: its 'to' is null.")
