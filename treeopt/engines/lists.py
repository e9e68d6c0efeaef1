"""Medusa's list of choices: how it is written.

Medusa builds its buffers from the list, and Hydra, Neuron and Model Optimizer's benchmark build theirs alike
(medusa/model/utils.py); EAGLE-1 builds its mask so. All candidates lie in one row: the root's token, then ten of every head. A
node points at candidate 1 + rank + 10 x (depth - 1), so that rank 10 of one head is rank 0 of the next. Nothing checks that.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeopt.engines.base import About, Written
from treeopt.engines.chains import plain
from treeopt.files.shell import shell_word
from treeopt.records.plan import Ranges, only
from treeopt.trees.tree import MAX_RANK, Tree

Choices = list[Any]  # of lists or tuples of ranks, or of anything else: a list of a user's
TOPK = MAX_RANK + 1  # candidates of a head, and the stride between heads
TYPICAL = {"temperature": "temperature", "epsilon": "posterior_threshold", "delta": "posterior_alpha"}  # Medusa's names


@dataclass(frozen=True, kw_only=True)
class ListOfChoices:
    """Writes one tree for all batch sizes as a list of choices, from templates alone.

    files, command, notes : templates; {choices} is the list, {word} the list as a word of a shell, {lines} the list with a
              choice a line, {nodes} their number, {rows} one more, {heads}, {layers} and {batch_size} are numbers of `About`,
              {flags} and {arguments} those of typical acceptance
    alone   : the template of the command that serves without a tree; empty where the engine needs one
    warnings: further notes, that depend on the tree
    """

    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...] = ()
    alone: str = ""
    warnings: Callable[[Tree], Sequence[str]] = lambda tree: ()

    def __call__(self, served: Ranges[Tree], about: About) -> Written:
        tree = only(served)
        if tree.depth == 0:
            return plain(self.alone.format(batch_size=about.batch_size), "tree")
        choices, rule = json.dumps(tree.choices), about.acceptance or {}
        typical = {name: rule[key] for key, name in TYPICAL.items() if rule.get(key) is not None}
        holes = {
            "choices": choices,
            "word": shell_word(choices),
            "lines": "".join(f"- {json.dumps(choice)}\n" for choice in tree.choices),
            "nodes": len(tree) - 1,
            "rows": len(tree),
            "heads": about.num_heads,
            "layers": about.num_layers,
            "batch_size": about.batch_size,
            "flags": "".join(f" --{name.replace('_', '-')} {value:g}" for name, value in typical.items()),
            "arguments": "".join(f", {name}={value:g}" for name, value in typical.items()),
        }
        files = {name: template.format(**holes) for name, template in self.files.items()}
        notes = [template.format(**holes) for template in self.notes]
        return Written(files=files, command=self.command.format(**holes), notes=(*notes, *self.warnings(tree)))


def no_tree(served: Ranges[Tree], about: About) -> str | None:
    """Why an engine refuses to decode without a tree; None if there is one."""
    if all(len(tree) > 1 for *_, tree in served):
        return None
    return "needs a tree, but the plan is not to speculate here; serve the model alone, or plan again"
