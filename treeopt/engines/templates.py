"""How drafts are written: by templates of a launch command and of files, or as a generate.py with its settings as JSON.

Engines with a server take flags. Engines that are Python libraries get a program.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treeopt.engines.base import COMMANDS, About, Written
from treeopt.files.shell import shell_word
from treeopt.records.drafters import LOOKED_UP
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import Draft
from treeopt.trees.tree import Tree

SCRIPT = "generate.py"
TYPICAL = {"temperature": "temperature", "epsilon": "posterior_threshold", "delta": "posterior_alpha"}  # Medusa's names
Keys = Mapping[str, Any]  # of settings in JSON


def launch(
    command: str,
    notes: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    environment: Sequence[str] = (),
) -> Written:
    """The files and the launch command with its options, which `COMMANDS` holds unless the files have it."""
    texts, command = dict(files or {}), " ".join([*environment, command, *map(shell_word, options)])
    texts.setdefault(COMMANDS, f"{command}\n")
    return Written(
        files=texts, command=command, notes=tuple(notes), options=tuple(options), environment=tuple(environment)
    )


def plain(command: str, draft: str = "chain", options: Sequence[str] = ()) -> Written:
    """The command that serves the base model alone, and a note that no ``draft`` pays: no chain, or no tree."""
    written = launch(command, [f"No {draft} pays here: the command serves the base model."], options=options)
    text = f"# No {draft} pays: the base model without speculation.\n{written.command}\n"
    return replace(written, files={COMMANDS: text})


@dataclass(frozen=True, kw_only=True)
class Templates:
    """Writes one chain or fixed tree for all batch sizes from templates alone.

    command  : the launch command · alone: that without speculation; by default the same
    options  : kind of drafter to the flags that follow the command
    slots    : sequences that the engine decodes at once by default, and the flags of both commands for more
    files    : name to text
    notes    : notes on every draft · notes_of: notes by kind of drafter
    warnings : further notes, that depend on the draft and on `About`

    The templates have holes: {length} is the chain's, {rows} one more, {looked_up} the tokens of an n-gram that is looked up,
    {batch_size} the sequences and {batch_rows} the rows of all of them. {choices} is the tree's list of choices, {word} the list
    as a word of a shell, {lines} the list with a choice a line, {nodes} their number, {size} one more. {heads} and {layers} are
    those of `About`, {flags} and {arguments} those of typical acceptance.
    """

    command: str
    alone: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    slots: tuple[int, str] = (0, "")
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    notes_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: Callable[[Any, About], Sequence[str]] = lambda draft, about: ()

    def __call__(self, served: Ranges[Any], about: About) -> Written:
        draft, (slots, flags) = only(served), self.slots
        holes = _holes(draft, about)
        options = shlex.split(flags.format(**holes)) if about.batch_size > slots else []
        if draft.depth == 0:
            return plain((self.alone or self.command).format(**holes), "chain" if self.options else "tree", options)
        command = self.command.format(**holes)
        if self.options:
            options += shlex.split(self.options[about.drafter].format(**holes))
        files = {name: text.format(**holes) for name, text in self.files.items()}
        notes = [note.format(**holes) for note in (*self.notes, *self.notes_of.get(about.drafter, ()))]
        return launch(command, [*notes, *self.warnings(draft, about)], files, options)


def _holes(draft: Draft, about: About) -> dict[str, object]:
    """What fills the holes of `Templates`."""
    choices, rule = draft.choices if isinstance(draft, Tree) else [], about.acceptance or {}
    typical = {name: rule[key] for key, name in TYPICAL.items() if rule.get(key) is not None}
    return {
        "length": draft.depth,
        "rows": draft.depth + 1,
        "looked_up": min(draft.depth, LOOKED_UP),
        "batch_size": about.batch_size,
        "batch_rows": about.batch_size * (draft.depth + 1),
        "choices": json.dumps(choices),
        "word": shell_word(json.dumps(choices)),
        "lines": "".join(f"- {json.dumps(choice)}\n" for choice in choices),
        "nodes": len(choices),
        "size": len(choices) + 1,
        "heads": about.num_heads,
        "layers": about.num_layers,
        "flags": "".join(f" --{name.replace('_', '-')} {value:g}" for name, value in typical.items()),
        "arguments": "".join(f", {name}={value:g}" for name, value in typical.items()),
    }


def no_tree(served: Ranges[Tree], about: About) -> str | None:
    """Why an engine refuses to decode without a tree; None if there is one."""
    if all(len(tree) > 1 for *_, tree in served):
        return None
    return "needs a tree, but the plan is not to speculate here; serve the model alone, or plan again"


def program(
    script: str,
    file: str,
    settings: Keys,
    *,
    speculates: bool,
    drafter: bool = False,
    notes: Sequence[str] = (),
    **holes: str,
) -> Written:
    """generate.py for a Python library, and its settings as JSON in a file.

    script     : the template of generate.py: {arguments} and {names} are those of its command line, beside other ``holes``
    speculates : whether anything is drafted · drafter: whether the command line names a drafter
    """
    arguments, names = "MODEL PROMPT", "name, prompt"
    if drafter:
        arguments, names = "MODEL DRAFTER PROMPT", "name, drafter, prompt"
    command = f"python {SCRIPT} {arguments}"
    written = launch(command, notes) if speculates else plain(command)
    text = script.format(arguments=arguments, names=names, **holes)
    return replace(written, files={**written.files, file: f"{json.dumps(settings)}\n", SCRIPT: text})


def sampling(about: About) -> Keys:
    """Sampling settings of a request. Settings that are off are written too, because models have defaults of their own."""
    if about.rule == "greedy":
        return {"do_sample": False}
    off = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return {"do_sample": True, **{key: (about.acceptance or {}).get(key) or value for key, value in off.items()}}
