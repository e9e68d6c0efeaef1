"""The result of a search, one entry per batch size and context: ``plan.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files import storage
from treeopt.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """The chosen tree for one batch size. Size 1 with no choices means "do not speculate".

    tokens_per_step is held-out (cross-fitted replay) where the plan was made from a trace; step_ms,
    tokens_per_s and speedup are None where there was no profile. ``*_stderr`` are standard errors.
    growth_order begins with the chosen tree, size - 1 paths, and goes on to the whole budget where trees are nested.
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
    growth_order: list[list[Any]] = field(default_factory=list)
    predicted: dict[str, Any] = field(default_factory=dict)
    interval95: dict[str, list[float]] | None = None
    tied_sizes: list[int] = field(default_factory=list)  # sizes that the data cannot tell from the fastest
    runner_up: dict[str, Any] | None = None
    accepted: list[float] = field(default_factory=list)  # share of the steps that emit 0, 1, ... guesses
    verified: dict[str, Any] | None = None
    best_chain: dict[str, Any] | None = None
    unconstrained: dict[str, Any] | None = None  # what the best tree without the limits reaches
    warnings: list[str] = field(default_factory=list)
    groups: dict[str, dict[str, float | None]] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if any(len(item) != 2 or not isinstance(item[0], list) for item in self.growth_order):
            raise InvalidInput("growth_order must list [path, gain] pairs.")
        tree = self.tree
        if (len(tree), tree.depth) != (self.size, self.depth):
            raise InvalidInput(
                f"An entry's size and depth must be its tree's ({len(tree)}, {tree.depth}), "
                f"but are ({self.size}, {self.depth})."
            )

    @property
    def tree(self) -> Tree:
        return Tree.from_choices(self.medusa_choices)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The trees that a search chose, and what it knew when it did.

    schedule : ranges {"from", "to", "entry", "loss"} of batch sizes, from 1 on without a gap; the last has
               "to" None. A range's tree is that of entries[entry]; loss is the largest share of the
               throughput that it costs at a batch size of the range, None where there is no profile
    """

    entries: tuple[PlanEntry, ...]
    objective: str | None = None
    drafter: dict[str, Any] | None = None
    acceptance: dict[str, Any] | None = None
    constraint: dict[str, Any] | None = None
    runtime: dict[str, Any] | None = None  # whose latencies these are
    inputs: dict[str, str] = field(default_factory=dict)  # file: sha256
    schedule: list[dict[str, Any]] = field(default_factory=list)

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

    def document(self) -> dict[str, Any]:
        """What ``plan.json`` says."""
        return {"schema": storage.schema("plan"), **asdict(self)}

    def save(self, path: Path) -> None:
        storage.write_json(path, "plan", self.document())

    @classmethod
    def load(cls, path: Path) -> Plan:
        return storage.typed(cls, storage.read_json(path, "plan", required=("entries",)), path)


def each_its_own(batch_sizes: list[int]) -> list[dict[str, Any]]:
    """The schedule in which every entry serves the batch sizes from its own up to the next one's.

    >>> each_its_own([2, 8])
    [{'from': 1, 'to': 7, 'entry': 0, 'loss': None}, {'from': 8, 'to': None, 'entry': 1, 'loss': None}]
    """
    first = {size: i for i, size in reversed(list(enumerate(batch_sizes)))}
    begins = [1, *sorted(first)[1:]]
    ends = [*(begin - 1 for begin in begins[1:]), None]
    return [
        {"from": begin, "to": end, "entry": first[size], "loss": None}
        for size, begin, end in zip(sorted(first), begins, ends, strict=True)
    ]


def check_schedule(schedule: list[dict[str, Any]], n_entries: int) -> None:
    """Raise InvalidInput where ranges overlap, leave a gap, or name no entry."""
    begin: int | None = 1
    for part in schedule:
        first, last, entry = part.get("from"), part.get("to"), part.get("entry")
        if first != begin or not isinstance(first, int) or not (last is None or (type(last) is int and last >= first)):
            raise InvalidInput(f"A schedule must have ranges from 1 on that follow each other, but has {part!r}.")
        if type(entry) is not int or not 0 <= entry < n_entries:
            raise InvalidInput(f"A schedule must name entries 0 to {n_entries - 1}, but has {part!r}.")
        begin = None if last is None else last + 1
    if begin is not None:
        raise InvalidInput("The last range of a schedule must be open: its 'to' is null.")
