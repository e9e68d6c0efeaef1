"""How chains and dynamic trees are written: as flags of a launch command, or as a generate.py with its settings as JSON.

Engines with a server take flags. Engines that are Python libraries get a program.
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


def plain(command: str, draft: str = "chain") -> Written:
    """The command that serves the base model alone, and a note that no ``draft`` pays: no chain, or no tree."""
    text = f"# No {draft} pays: the base model without speculation.\n{command}\n"
    note = f"No {draft} pays here: the command serves the base model."
    return Written(files={COMMANDS: text}, command=command, notes=(note,))


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Writes one chain for all batch sizes as flags of a launch command, from templates alone.

    serve    : the command · alone: what follows it without speculation
    options  : kind of drafter to the flags that follow the command: {length} is the chain's, {rows} one more, {looked_up} the
               tokens of an n-gram that is looked up, {batch_size} the sequences and {batch_rows} the rows of all sequences
    slots    : sequences that the engine decodes at once by default, and the flags for more
    notes    : notes on every chain · notes_of: notes by kind of drafter; both have the holes of ``options``
    warnings : further notes, that depend on `About` and the length of the chain
    """

    serve: str
    alone: str = ""
    options: Mapping[str, str]
    slots: tuple[int, str] = (0, "")
    notes: tuple[str, ...] = ()
    notes_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: Callable[[About, int], Sequence[str]] = lambda about, length: ()

    def __call__(self, served: Ranges[Draft], about: About) -> Written:
        length, size, (slots, flags) = only(served).depth, about.batch_size, self.slots
        serve = self.serve + (flags.format(batch_size=size) if size > slots else "")
        if length == 0:
            return plain(f"{serve}{self.alone}")
        holes = {
            "length": length,
            "rows": length + 1,
            "looked_up": min(length, LOOKED_UP),
            "batch_size": size,
            "batch_rows": size * (length + 1),
        }
        notes = [note.format(**holes) for note in (*self.notes, *self.notes_of.get(about.kind, ()))]
        options = self.options[about.kind].format(**holes)
        return launch(f"{serve} {options}", [*notes, *self.warnings(about, length)])


@dataclass(frozen=True)
class Loading:
    """How a library loads one kind of drafter.

    length, settings  the key of the chain's length, and further settings
    argument          the word for the drafter on the command line of generate.py
    lines, options    lines of generate.py, and arguments of its call
    """

    length: str
    settings: Keys = field(default_factory=dict)
    argument: str = ""
    lines: str = ""
    options: str = ""


@dataclass(frozen=True)
class Library:
    """Writes generate.py and its settings for a Python library; both decode without a drafter if no chain pays.

    script   : the template of generate.py
    loadings : kind of drafter to how it is loaded
    together : makes the settings of the file from those of sampling and of drafting
    """

    script: str
    loadings: Mapping[str, Loading]
    notes: tuple[str, ...] = ()
    file: str = "generation_config.json"
    together: Callable[[Keys, Keys], Keys] = lambda sampling, drafting: {**sampling, **drafting}

    def __call__(self, served: Ranges[Draft], about: About) -> Written:
        loading, length, drafting = self.loadings[about.kind], only(served).depth, dict[str, Any]()
        if length:
            drafting = {loading.length: length, **loading.settings}
        else:
            loading = Loading(loading.length)
        arguments, names = "MODEL PROMPT", "name, prompt"
        if loading.argument:
            arguments, names = f"MODEL {loading.argument} PROMPT", "name, drafter, prompt"
        program = self.script.format(arguments=arguments, names=names, loading=loading.lines, options=loading.options)
        command = f"python {SCRIPT} {arguments}"
        written = launch(command, self.notes) if length else plain(command)
        settings = json.dumps(self.together(sampling(about), drafting))
        return replace(written, files={**written.files, self.file: f"{settings}\n", SCRIPT: program})


def sampling(about: About) -> Keys:
    """Sampling settings of a request. Settings that are off are written too, because models have defaults of their own."""
    if about.rule == "greedy":
        return {"do_sample": False}
    off = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return {"do_sample": True, **{key: (about.acceptance or {}).get(key) or value for key, value in off.items()}}
