"""The result of a search, one entry per batch size and context: ``plan.json``.

Each class below is an object of the file, its fields are the object's keys; None stands for unknown.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

from pydantic import BeforeValidator, Field

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files.fields import Amount, Count, Positive, Share, from_list
from treeopt.records.display import Exported, one_line, viewer
from treeopt.records.estimate import Estimate
from treeopt.records.exchange import Beyond, ExportOptions
from treeopt.records.figure import FLAT, Figure, FigureOfFile, fastest
from treeopt.records.origins import DrafterRecord, JsonRecord, Provenance, RuleRecord, Runtime
from treeopt.trees.draft import Draft, draft_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, Tree

ROOT = Tree.chain(0)
EXACT = "plain, exact"  # plain decoding by an engine that is told to be exact, where the same one as it comes is faster
DraftT = TypeVar("DraftT")  # unbound: the type checker asks for bounds before it knows what Draft has
Gain = Annotated[tuple[Annotated[Choice, BeforeValidator(from_list)], float], BeforeValidator(from_list)]
Ranges = tuple[tuple[int, int | None, DraftT], ...]  # (from, to, draft) of batch sizes: from 1 on, the last without end


class Decoder(Protocol):
    """Whatever decodes a plan's drafts: treeopt's engines, and the methods of serving engines.

    follows_schedule : whether it decodes a range of the plan's schedule by one draft
    """

    @property
    def follows_schedule(self) -> bool: ...
    def takes(self, draft: Draft, num_heads: int | None, /) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class PlannedEngine:
    """The engine that a plan is for.

    name   : as `treeopt list engines` has it
    method : one of its ways to speculate
    """

    name: str
    method: str


@dataclass(frozen=True, kw_only=True)
class Basis:
    """How much the chosen draft's tokens per step rest on.

    sequences     : answers
    conversations : that they are of
    steps         : replayed steps; left out where nothing can be replayed, and tokens per step are a product of
                    accuracies
    """

    sequences: Positive | None = None
    conversations: Positive | None = None
    steps: Count | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanEntry(Figure):
    """The chosen draft for one batch size, held out where the plan was made from a trace; a lone root means "do not speculate".

    context_tokens : of the profile; left out without one
    tied_sizes     : sizes that the data cannot tell from the fastest; of one draft for a mix, over the mix
    accepted       : share of the steps that emit 0, 1, ... guesses, held out
    basis          : how much its tokens per step rest on
    warnings       : what the search left out or could not know
    runner_up      : the fastest draft of another size
    others         : the best draft by kind ("tree", "chain", "dynamic", "ddtree"), but for the chosen kind; its
                     `over_chosen` compares the two. `plain, exact` is plain decoding by an engine that is told to
                     be exact, where the same one as it comes is faster, and speedups are over that
    groups         : the chosen draft on each group of prompts, held out
    growth_order   : [path, tokens per step that it adds in-sample] of the best fixed tree's nodes in the order in
                     which they were added; first its own, then on to the whole budget
    curve          : the best fixed tree of every size; where text is copied, the settings that were compared
    """

    context_tokens: Count | None = None
    tied_sizes: list[Positive] = field(default_factory=list)
    accepted: list[Share] = field(default_factory=list)
    basis: Basis = Basis()
    warnings: list[str] = field(default_factory=list)
    runner_up: FigureOfFile | None = None
    others: dict[str, FigureOfFile] = field(default_factory=dict)
    groups: dict[str, FigureOfFile] = field(default_factory=dict)
    growth_order: list[Gain] = field(default_factory=list)
    curve: list[FigureOfFile] = field(default_factory=list)

    __repr__ = one_line

    @property
    def chosen(self) -> Figure:
        """What its draft reaches, alone."""
        return Figure(**{part.name: getattr(self, part.name) for part in fields(Figure)})

    def served(self, figure: Figure) -> "PlanEntry":
        """The entry with another draft."""
        return replace(self, **vars(figure))

    @property
    def tree(self) -> Tree:
        """The best fixed tree, which may not be the chosen draft; a lone root for "do not speculate"."""
        best = self.chosen if not self.speculates else self.best("tree") or self.best("chain")
        return draft_tree(best.draft) if best else ROOT

    @property
    def speculates(self) -> bool:
        """Whether more than plain decoding was chosen."""
        return self.size > 1

    def best(self, kind: str) -> Figure | None:
        """The best draft of a kind, which may be the chosen draft (a chain is a tree, too); None where none is known."""
        chosen = self.draft.kind
        return self.chosen if chosen == kind or (chosen, kind) == ("chain", "tree") else self.others.get(kind)

    def serving(self, takes: Callable[[Draft], bool]) -> Figure:
        """The chosen draft if the decoder ``takes`` it, else the fastest one that it takes and that beats plain decoding.

        Raises InvalidInput where the plan has no draft that the decoder takes.
        """
        if not self.speculates or takes(self.draft):
            return self.chosen
        best = fastest([figure for figure in self.others.values() if figure.size > 1 and takes(figure.draft)])
        if best is None:
            raise InvalidInput(f"The plan has no draft of that kind for batch size {self.batch_size}.")
        return best if best.speedup is None or best.speedup > 1 else self.plain

    @property
    def plain(self) -> Figure:
        rate, ms = Estimate(1.0), self.plain_ms
        step_ms = None if ms is None else Estimate(ms)
        return Figure(draft=ROOT, batch_size=self.batch_size, tokens_per_step=rate, step_ms=step_ms, plain_ms=ms)


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The limits of a search.

    budget    : most rows of a draft
    max_rank  : largest rank of a guess
    shape     : `sibling-closed` or `chain`
    max_depth : most guesses in a row
    mix       : batch size to the share of the time that it has, of any sum, where one tree is for all
    engine    : the engine and method that the limits stand for
    """

    budget: Positive | None = None
    max_rank: Count | None = None
    shape: str | None = None
    max_depth: Count | None = None
    mix: dict[int, Amount] | None = None
    engine: PlannedEngine | None = None


@dataclass(frozen=True, kw_only=True)
class BatchRange:
    """Batch sizes that one entry's draft is for.

    first : the smallest
    last  : the largest; left out for all from `first` on
    entry : place of the entry, from 0
    """

    first: Positive
    last: Positive | None = None
    entry: Count

    def __str__(self) -> str:
        return f"from {self.first} to {'the end' if self.last is None else self.last}: entry {self.entry}"


def by_batch_size(said: Mapping[int, Sequence[str]] | Mapping[int | None, Sequence[str]]) -> list[str]:
    """Each sentence once, with the batch sizes that it is for unless these are all.

    >>> by_batch_size({1: ["Beware.", "Slow."], 8: ["Beware."]})
    ['Beware.', 'Batch size 1: Slow.']
    """
    sizes: dict[str, list[str]] = {}
    for size, sentences in said.items():
        for text in dict.fromkeys(sentences):
            sizes.setdefault(text, []).append(str(size))
    return [text if len(of) == len(said) else f"Batch size {', '.join(of)}: {text}" for text, of in sizes.items()]


def each_its_own(batch_sizes: list[int]) -> list[BatchRange]:
    """The schedule in which every entry serves its batch size and all up to the next entry's.

    >>> print(*each_its_own([2, 8]), sep="; ")
    from 1 to 7: entry 0; from 8 to the end: entry 1
    """
    sizes = sorted(set(batch_sizes))
    begins, ends = [1, *sizes[1:]], [*(size - 1 for size in sizes[1:]), None]
    return [
        BatchRange(first=begin, last=end, entry=batch_sizes.index(size))
        for size, begin, end in zip(sizes, begins, ends, strict=True)
    ]


def for_all(draft: DraftT) -> Ranges[DraftT]:
    """One draft for all batch sizes."""
    return ((1, None, draft),)


def only(ranges: Ranges[DraftT]) -> DraftT:
    """The draft of ranges that have a single one for all batch sizes."""
    ((_, _, draft),) = ranges
    return draft


def merged(ranges: Ranges[DraftT]) -> Ranges[DraftT]:
    """The ranges, with neighbours of the same draft joined.

    >>> chain = Tree.chain(3)
    >>> merged(((1, 4, chain), (5, 8, chain), (9, None, ROOT))) == ((1, 8, chain), (9, None, ROOT))
    True
    """
    joined: list[tuple[int, int | None, DraftT]] = []
    for first, last, draft in ranges:
        begin = joined.pop()[0] if joined and joined[-1][2] == draft else first
        joined.append((begin, last, draft))
    return tuple(joined)


def check_schedule(schedule: list[BatchRange], n_entries: int) -> None:
    """Raise InvalidInput where ranges overlap, leave a gap, or name no entry."""
    begin: int | None = 1
    for part in schedule:
        if part.first != begin or (part.last or begin) < begin or part.entry >= n_entries:
            entries = f"the entries 0 to {n_entries - 1}"
            raise InvalidInput(
                f"A schedule must have ranges from 1 on that follow each other, of {entries}, but has '{part}'."
            )
        begin = part.last and part.last + 1
    if begin is not None:
        raise InvalidInput("The last range of a schedule must be open: its 'last' is null.")


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(JsonRecord):
    """The drafts that a search chose, and what it knew when it did.

    entries             : one per batch size
    schedule            : which entry's draft serves which batch sizes: ranges from 1 on without a gap, the last
                          one open. Ranges share a draft where it is tied with the best. Left out: every entry from
                          its batch size up to the next
    objective           : how trees were grown: `replay` from a trace, `independent` (products of accuracies) from
                          a calibration, `coverage` from a probe
    drafter, acceptance : as in the trace
    constraint          : what the search was allowed
    runtime             : the runtime whose latencies were used
    part                : the part of a step that latencies are of, as `linear layers`; left out for whole steps.
                          Of a part only ratios mean something
    inputs              : file to sha256 of what the plan was made from
    provenance          : command, time, versions and machine of the search; one that finds the same again leaves
                          the file as it is
    """

    file_kind = "plan"
    first_keys = ("entries", "schedule", "mix_tokens_per_s", "mix_speedup")
    entries: Annotated[tuple[Annotated[PlanEntry, FLAT], ...], Field(min_length=1)]
    objective: str | None = None
    drafter: DrafterRecord | None = None
    acceptance: RuleRecord | None = None
    constraint: Constraint | None = None
    runtime: Runtime | None = None
    part: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    provenance: Provenance | None = None
    schedule: list[BatchRange] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.schedule:
            object.__setattr__(self, "schedule", each_its_own([e.batch_size for e in self.entries]))
        check_schedule(self.schedule, len(self.entries))

    @property
    def width(self) -> int | None:
        """How many guesses the drafter makes; None where the plan does not say."""
        return (self.drafter or {}).get("num_heads")

    copies = property(lambda self: (self.drafter or {}).get("kind") == "copied-text")  # text, by an engine's settings

    def entry(self, batch_size: int | None = None) -> PlanEntry:
        """The entry of a batch size, or the only entry; OutOfRange where there is none."""
        if batch_size is None and len(self.entries) == 1:
            return self.entries[0]
        for entry in self.entries:
            if entry.batch_size == batch_size:
                return entry
        have = f"The plan has trees for batch sizes {', '.join(str(e.batch_size) for e in self.entries)}"
        if batch_size is None:
            raise OutOfRange(f"{have}: say which with `batch_size`.")
        raise OutOfRange(f"{have}, but {batch_size} was asked: search again with `batch_size` {batch_size}.")

    def served_by(self, decoder: Decoder) -> "Plan":
        """The plan with the fastest draft of each entry that the decoder takes; the plan itself if it takes all chosen ones."""

        def takes(draft: Draft) -> bool:
            return decoder.takes(draft, self.width)

        if all(not entry.speculates or takes(entry.draft) for entry in self.entries):
            return self
        entries = tuple(entry.served(entry.serving(takes)) for entry in self.entries)
        return replace(self, entries=entries, schedule=[])

    def with_warnings(self, warnings: Sequence[str]) -> "Plan":
        """The plan with more sentences to beware of at every batch size."""
        entries = tuple(replace(entry, warnings=[*entry.warnings, *warnings]) for entry in self.entries)
        return replace(self, entries=entries)

    def ranges(self, decoder: Decoder) -> Ranges[Draft]:
        """Ranges of batch sizes, each with the draft to decode with there; neighbours differ."""
        plan = self.served_by(decoder)
        parts = plan.schedule if decoder.follows_schedule else each_its_own([e.batch_size for e in plan.entries])
        return merged(tuple((part.first, part.last, plan.entries[part.entry].draft) for part in parts))

    def limits(self, default: Limits) -> Limits:
        """The limits of the search; a limit that the plan does not say is that of ``default``."""
        known = {name: getattr(self.constraint, name, None) for name in Limits.__dataclass_fields__}
        return replace(default, **{name: limit for name, limit in known.items() if limit is not None})

    @property
    def mix(self) -> dict[int, float] | None:
        """Batch size -> share of the time, where one draft was chosen for all."""
        return self.constraint.mix if self.constraint else None

    def over_mix(self, figures: Callable[[PlanEntry], Figure | None]) -> Estimate | None:
        """Mean tokens per second of one figure of each entry, weighted by its share of the time; None where one is unknown."""
        known = {entry.batch_size: figures(entry) for entry in self.entries}
        rates = {size: figure.tokens_per_s for size, figure in known.items() if figure and figure.tokens_per_s}
        if self.mix is None or len(rates) < len(known):
            return None
        return Estimate(sum(self.mix[size] * rate for size, rate in rates.items()) / sum(self.mix.values()))

    @property
    def mix_tokens_per_s(self) -> Estimate | None:
        """Mean tokens per second of one draft for a mix, over the time."""
        return self.over_mix(lambda e: e)

    @property
    def mix_speedup(self) -> Estimate | None:
        """Tokens per second of one draft for a mix over those of plain decoding in the same mix."""
        ours, plain = self.over_mix(lambda e: e), self.over_mix(lambda e: e.plain)
        return None if ours is None or plain is None else Estimate(ours / plain)

    @property
    def break_even(self) -> int | None:
        """The batch size from which on speculation does not pay; None if it pays at the largest batch size, or nowhere."""
        pays = [self.entries[part.entry].speculates for part in self.schedule]
        return None if pays[-1] or not any(pays) else self.schedule[-pays[::-1].index(True)].first

    @property
    def speculates(self) -> bool:
        """Whether more than plain decoding was chosen at any batch size."""
        return any(entry.speculates for entry in self.entries)

    def __getitem__(self, batch_size: int) -> PlanEntry:
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
        beyond: Beyond = "off",
    ) -> Exported:
        """Write the plan as an engine's own files (``treeopt list engines``) into ``folder``.

        method        : one of the engine's ways to speculate; by default the drafter's
        batch_size    : which of the plan's trees, where it has several; by default the schedule where the engine takes one,
                        else a folder for each
        beyond        : what a schedule does above the largest batch size of the plan, where nobody searched: off, it does not
                        speculate; last, it goes on as there

        Raises InvalidInput for what the engine would refuse or misread.
        """
        options = ExportOptions(batch_size=batch_size, method=method, beyond=beyond)
        exported: Exported = viewer().write_export(self, engine, Path(folder), options)
        return exported

    @property
    def notes(self) -> list[str]:
        """What to beware of, each sentence once, with the batch sizes that it is for."""
        return by_batch_size({entry.batch_size: entry.warnings for entry in self.entries})
