"""Medusa's list of choices: how it is written, and read.

Hydra, Neuron and Model Optimizer's benchmark build buffers of it as Medusa does (medusa/model/utils.py), EAGLE-1 its mask. All
candidates lie in one row: the root's token, then ten of every head. A node points at candidate 1 + rank + 10 x (depth -
1), so that rank 10 of one head is rank 0 of the next. Nothing of it is checked.
"""

import ast
import json
from typing import Any

from treeopt.engines.base import About, Written
from treeopt.errors import InvalidInput
from treeopt.files.bounds import parse_python
from treeopt.files.shell import shell_word
from treeopt.records.plan import Ranges, only
from treeopt.trees.tree import MAX_RANK, Tree

Choices = list[Any]  # of lists or tuples of ranks, or of anything else: a list of a user's
TOPK = MAX_RANK + 1  # candidates of a head, and the stride between heads


def listed(tree: Tree) -> str:
    """The choices as JSON, which is Python as well."""
    return json.dumps(tree.choices)


def no_tree(served: Ranges[Tree], about: About) -> str | None:
    """Why an engine refuses to decode without a tree; None if there is one."""
    if all(len(tree) > 1 for *_, tree in served):
        return None
    return "needs a tree, but the plan is not to speculate here; serve the model alone, or plan again"


def in_python(served: Ranges[Tree], about: About, *, engine: str) -> Written:
    """A Python file with the choices, and the command of Medusa's or Hydra's benchmark."""
    tree, rule = only(served), about.acceptance or {}
    choices = listed(tree)
    names = {"temperature": "temperature", "epsilon": "posterior_threshold", "delta": "posterior_alpha"}
    given = {name: rule[key] for key, name in names.items() if rule.get(key) is not None}
    flags = "".join(f" --{name.replace('_', '-')} {value:g}" for name, value in given.items())
    arguments = "".join(f", {name}={value:g}" for name, value in given.items())
    call = f"model.{engine}_generate(input_ids, {engine}_choices=treeopt_...{arguments})"
    return Written(
        files={f"{engine}_choices.py": f"treeopt_{len(tree) - 1} = {choices}\n"},
        command=f"python llm_judge/gen_model_answer_{engine}.py --model-path HEADS --model-id treeopt "
        f"--{engine}-choices {shell_word(choices)}{flags}",
        notes=(f"In your own code: {call}, one sequence at a time.",),
    )


def the_list(text: str) -> Choices | None:
    """The only list in a Python or JSON file, unchecked; None if there is none.

    Raises InvalidInput for several lists, and for a list that code makes of others: nothing of a file is run.

    >>> the_list("mine = [(0,), (0, 0)]")
    [(0,), (0, 0)]
    """
    lists, names = list[Choices](), list[str]()
    try:
        for statement in parse_python(text).body:
            variables = [part for part in ast.walk(statement) if isinstance(part, ast.Name)]
            is_literal = not any(isinstance(variable.ctx, ast.Load) for variable in variables)
            if is_literal and isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.List):
                lists.append(ast.literal_eval(statement.value))
            elif not any(variable.id in names for variable in variables):
                continue
            target = next(iter(getattr(statement, "targets", [])), None)
            names.append(target.id if isinstance(target, ast.Name) else f"line {statement.lineno}")
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None
    if len(names) > 1:
        cure = "keep one of them" if len(lists) == len(names) else "code is not run, so write out the one that is meant"
        raise InvalidInput(f"it must hold one list of choices, but has {', '.join(names)}: {cure}.")
    return lists[0] if lists else None
