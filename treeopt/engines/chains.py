"""Chains and dynamic trees as engines are told of them: ranges of batch sizes, and flags of a launch command.

ranges : (from, to, what) of batch sizes, from 1 on without a gap, the last without end; what is a length K, 0 for none,
         or a dynamic tree, None for none
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from treeopt.engines.base import COMMANDS, Request, Written
from treeopt.errors import InvalidInput
from treeopt.records.drafters import LOOKED_UP
from treeopt.trees.draft import DynamicTree

Value = TypeVar("Value", bound=int | DynamicTree | None)
Ranges = tuple[tuple[int, int | None, Value], ...]  # of batch sizes, with what they get: `Lengths`, `Settings`

LAST = 4096  # where a schedule ends that must end somewhere: no engine decodes more sequences at once
BLOCKS = ("dflash", "dspark")  # drafters that guess a block at once, as long as they were trained for at most


def merged(ranges: Ranges[Value]) -> Ranges[Value]:
    """Ranges of batch sizes in which neighbours differ, from any that follow one another.

    Raises InvalidInput where the last begins where no schedule goes.

    >>> merged(((1, 4, 3), (5, 8, 3), (9, None, 0)))
    ((1, 8, 3), (9, None, 0))
    """
    found: list[tuple[int, int | None, Value]] = []
    for begin, end, what in ranges:
        first = found.pop()[0] if found and found[-1][2] == what else begin
        found.append((first, end, what))
    if ranges[-1][0] > LAST:
        raise InvalidInput(f"The last range of a schedule must begin at {LAST} at most, but begins at {ranges[-1][0]}.")
    return tuple(found)


def said(ranges: Ranges[Value]) -> str:
    """The ranges in words.

    >>> said(((1, 8, 4), (9, None, 0))), said(((1, 8, DynamicTree(3, 2, 8)), (9, None, None)))
    ('1-8: 4, from 9 on: 0', '1-8: 3/2/8, from 9 on: none')
    """
    words = [(f"from {a} on" if b is None else f"{a}-{b}", what) for a, b, what in ranges]
    return ", ".join(f"{range_}: {'none' if what is None else getattr(what, 'name', what)}" for range_, what in words)


def only_length(request: Request, engine: str) -> int:
    """The one length for all batch sizes; InvalidInput where the schedule has several."""
    return only(request.lengths, f"{engine} takes one chain length")


def only(ranges: Ranges[Value], takes: str) -> Value:
    """What all batch sizes get; InvalidInput where the ranges differ."""
    (_, _, first), *others = ranges = merged(ranges)
    if others:
        raise InvalidInput(
            f"{takes} for all batch sizes, but the plan has {said(ranges)}: export one of them with `batch_size`."
        )
    return first


def check_heads(length: int, request: Request, engine: str) -> None:
    """Raise InvalidInput where a chain is longer than there are heads, of which each makes one guess."""
    if length > request.num_heads:
        raise InvalidInput(
            f"{engine} takes a chain up to the number of heads, {request.num_heads}, but this one has "
            f"{length} guesses: search again with `max_depth={request.num_heads}`."
        )


def launch(command: str, notes: Iterable[str] = (), files: Mapping[str, str] | None = None) -> Written:
    """The files, and the launch command as one more."""
    return Written(files={**(files or {}), COMMANDS: f"{command}\n"}, command=command, notes=tuple(notes))


def plain(command: str, what: str = "chain") -> Written:
    """The base model alone, where no chain pays, or no tree."""
    text = f"# No {what} pays: the base model without speculation.\n{command}\n"
    note = f"No {what} pays here: the command serves the base model."
    return Written(files={COMMANDS: text}, command=command, notes=(note,))


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Writes one chain for all batch sizes as flags of a launch command, from data alone.

    serve   : the command; what ends it with speculation, and what without
    options : kind of drafter to its flags: {length} is the chain's, {rows} one more, {looked_up} an n-gram's and
              {batch_rows} the rows of all sequences
    slots   : sequences that it decodes at once unless told otherwise, and what tells it
    heads   : kinds of drafters whose heads make one guess each
    notes   : of every chain, then by kind of drafter; they take the same numbers, and {batch_size}
    also    : notes that a request needs with a chain of a length
    """

    engine: str
    serve: str
    alone: str = ""
    options: Mapping[str, str]
    slots: tuple[int, str] = (0, "")
    heads: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    notes_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    also: Callable[[Request, int], Sequence[str]] = lambda request, length: ()

    def __call__(self, request: Request) -> Written:
        length, size, (slots, more) = only_length(request, self.engine), request.batch_size, self.slots
        serve = self.serve + (more.format(batch_size=size) if size > slots else "")
        if length == 0:
            return plain(f"{serve}{self.alone}")
        if request.kind in self.heads:
            check_heads(length, request, self.engine)
        numbers = {"length": length, "rows": length + 1, "looked_up": min(length, LOOKED_UP)}
        numbers |= {"batch_size": size, "batch_rows": size * (length + 1)}
        notes = [note.format(**numbers) for note in (*self.notes, *self.notes_of.get(request.kind, ()))]
        return launch(f"{serve} {self.options[request.kind].format(**numbers)}", [*notes, *self.also(request, length)])
