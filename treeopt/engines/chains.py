"""Chains and dynamic trees as engines are told of them: ranges of batch sizes, flags of a launch command, and of engines that
are Python libraries a generate.py, and the settings that it hands over as JSON.

ranges : (from, to, what) of batch sizes, from 1 on without a gap, the last without end; what is a length K, 0 for none,
         or a dynamic tree, None for none
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from treeopt.engines.base import COMMANDS, Request, Written
from treeopt.errors import InvalidInput
from treeopt.records.drafters import LOOKED_UP
from treeopt.trees.draft import DynamicTree

Value = TypeVar("Value", bound=int | DynamicTree | None)
Ranges = tuple[tuple[int, int | None, Value], ...]  # of batch sizes, with what they get: `Lengths`, `Settings`

SCRIPT = "generate.py"
Keys = Mapping[str, Any]  # of settings in JSON
LAST = 4096  # where a schedule ends that must end somewhere: no engine decodes more sequences at once
BLOCKS = ("dflash", "dflash2", "dspark")  # drafters that guess a block at once, no longer than they were trained for


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
        numbers: dict[str, int] = {"length": length, "rows": length + 1, "looked_up": min(length, LOOKED_UP)}
        numbers |= {"batch_size": size, "batch_rows": size * (length + 1)}
        notes = [note.format(**numbers) for note in (*self.notes, *self.notes_of.get(request.kind, ()))]
        return launch(f"{serve} {self.options[request.kind].format(**numbers)}", [*notes, *self.also(request, length)])


@dataclass(frozen=True)
class Way:
    """How a kind of drafter is asked for of a library: a chain by a key of the settings, guesses by lines of generate.py.

    length, settings  the key of the chain's length, and what else the file has
    argument          what stands for the drafter on the command line of generate.py, perhaps by the request
    loading, options  lines of generate.py, and arguments of its call
    """

    length: str
    settings: Keys = field(default_factory=dict)
    argument: str | Callable[[Request], str] = ""
    loading: str = ""
    options: str = ""


@dataclass(frozen=True)
class Library:
    """Writes generate.py and its settings for a Python library; without drafting where no chain pays.

    together : the settings of sampling and of drafting as the file has them
    """

    engine: str
    script: str
    ways: Mapping[str, Way]
    notes: tuple[str, ...] = ()
    file: str = "generation_config.json"
    together: Callable[[Keys, Keys], Keys] = lambda sampling, drafting: {**sampling, **drafting}

    def __call__(self, request: Request) -> Written:
        way = self.ways[request.kind]
        length = only_length(request, self.engine)
        drafting = {way.length: length, **way.settings} if length else {}
        way = way if length else Way(way.length)
        drafter = way.argument if isinstance(way.argument, str) else way.argument(request)
        arguments = " ".join(filter(None, ("MODEL", drafter, "PROMPT")))
        names = "name, drafter, prompt" if drafter else "name, prompt"
        text = self.script.format(arguments=arguments, names=names, loading=way.loading, options=way.options)
        command = f"python {SCRIPT} {arguments}"
        written = launch(command, self.notes) if length else plain(command)
        settings = json.dumps(self.together(sampling(request), drafting))
        return replace(written, files={**written.files, self.file: f"{settings}\n", SCRIPT: text})


def sampling(request: Request) -> Keys:
    """The keys by which a request asks for the plan's temperature; off is said too: models bring settings of their own."""
    if request.rule == "greedy":
        return {"do_sample": False}
    off = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return {"do_sample": True, **{key: (request.acceptance or {}).get(key) or value for key, value in off.items()}}
