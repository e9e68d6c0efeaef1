"""Chains and dynamic trees as engines are told of them: a launch command with flags, and for engines that are Python libraries
a generate.py with its settings as JSON.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treeopt.engines.base import COMMANDS, About, Written
from treeopt.records.drafters import LOOKED_UP
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import Draft

SCRIPT = "generate.py"
Keys = Mapping[str, Any]  # of settings in JSON


def launch(command: str, notes: Sequence[str] = (), files: Mapping[str, str] | None = None) -> Written:
    """The files and the launch command; `COMMANDS` holds the command."""
    return Written(files={**(files or {}), COMMANDS: f"{command}\n"}, command=command, notes=tuple(notes))


def plain(command: str, what: str = "chain") -> Written:
    """The command that serves the base model alone, and a note that no chain or tree pays."""
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
    notes   : of every chain, then by kind of drafter; they take the same numbers, and {batch_size}
    also    : notes that depend on what is told: the chain's length too
    """

    serve: str
    alone: str = ""
    options: Mapping[str, str]
    slots: tuple[int, str] = (0, "")
    notes: tuple[str, ...] = ()
    notes_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    also: Callable[[About, int], Sequence[str]] = lambda about, length: ()

    def __call__(self, served: Ranges[Draft], about: About) -> Written:
        length, size, (slots, more) = only(served).depth, about.batch_size, self.slots
        serve = self.serve + (more.format(batch_size=size) if size > slots else "")
        if length == 0:
            return plain(f"{serve}{self.alone}")
        numbers: dict[str, int] = {"length": length, "rows": length + 1, "looked_up": min(length, LOOKED_UP)}
        numbers |= {"batch_size": size, "batch_rows": size * (length + 1)}
        notes = [note.format(**numbers) for note in (*self.notes, *self.notes_of.get(about.kind, ()))]
        return launch(f"{serve} {self.options[about.kind].format(**numbers)}", [*notes, *self.also(about, length)])


@dataclass(frozen=True)
class Way:
    """How a library loads one kind of drafter: a key of its settings, and lines of generate.py.

    length, settings  the key of the chain's length, and what else the file has
    argument          what stands for the drafter on the command line of generate.py, perhaps by which drafter it is
    loading, options  lines of generate.py, and arguments of its call
    """

    length: str
    settings: Keys = field(default_factory=dict)
    argument: str | Callable[[About], str] = ""
    loading: str = ""
    options: str = ""


@dataclass(frozen=True)
class Library:
    """Writes generate.py and its settings for a Python library; both decode without a drafter if no chain pays.

    together : the settings of sampling and of drafting as the file has them
    """

    script: str
    ways: Mapping[str, Way]
    notes: tuple[str, ...] = ()
    file: str = "generation_config.json"
    together: Callable[[Keys, Keys], Keys] = lambda sampling, drafting: {**sampling, **drafting}

    def __call__(self, served: Ranges[Draft], about: About) -> Written:
        way, length = self.ways[about.kind], only(served).depth
        drafting = {way.length: length, **way.settings} if length else {}
        way = way if length else Way(way.length)
        drafter = way.argument if isinstance(way.argument, str) else way.argument(about)
        arguments = " ".join(filter(None, ("MODEL", drafter, "PROMPT")))
        names = "name, drafter, prompt" if drafter else "name, prompt"
        text = self.script.format(arguments=arguments, names=names, loading=way.loading, options=way.options)
        command = f"python {SCRIPT} {arguments}"
        written = launch(command, self.notes) if length else plain(command)
        settings = json.dumps(self.together(sampling(about), drafting))
        return replace(written, files={**written.files, self.file: f"{settings}\n", SCRIPT: text})


def sampling(about: About) -> Keys:
    """Sampling settings of a request. What is off is written too, because models have defaults of their own."""
    if about.rule == "greedy":
        return {"do_sample": False}
    off = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return {"do_sample": True, **{key: (about.acceptance or {}).get(key) or value for key, value in off.items()}}
