"""Medusa's list of choices: how it is written, and read.

Hydra, Neuron and Model Optimizer's benchmark build buffers of it as Medusa does (medusa/model/utils.py), EAGLE-1 its mask. All
candidates lie in one row: the root's token, then ten of every head. A node points at candidate 1 + rank + 10 x (depth -
1), so that rank 10 of one head is rank 0 of the next. Nothing of it is checked.
"""

import ast
import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from treeopt.engines.base import Request, Written
from treeopt.errors import InvalidInput
from treeopt.files.bounds import parse_python
from treeopt.files.shell import shell_word
from treeopt.trees.tree import MAX_RANK, Tree

P = TypeVar("P", bound=Sequence[int])
Choices = list[Any]  # of lists or tuples of ranks, or of anything else: a list of a user's
TOPK = MAX_RANK + 1  # candidates of a head, and the stride between heads


def listed(tree: Tree) -> str:
    """The choices as JSON, which is Python as well."""
    return json.dumps(tree.choices)


def in_python(request: Request, engine: str) -> Written:
    """The list as Python, and the benchmark with it, as Medusa's repository and its fork Hydra have them."""
    tree, rule = request.tree_of(engine), request.acceptance or {}
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
    """The one list in a Python file or in JSON, its items as they are; None without one, InvalidInput for several.

    >>> the_list("mine = [(0,), (0, 0)]")
    [(0,), (0, 0)]
    """
    try:
        statements = [one for one in parse_python(text).body if isinstance(one, ast.Assign | ast.Expr)]
        found = [ast.literal_eval(one.value) for one in statements if isinstance(one.value, ast.List)]
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None
    if len(found) > 1:
        raise InvalidInput(f"it must hold one list of choices, but it has {len(found)}: keep one of them.")
    return found[0] if found else None


def in_order(paths: Iterable[P]) -> list[P]:
    """Paths by depth, those of a depth by rank: the order that engines sort them into."""
    return sorted(paths, key=lambda path: (len(path), path))
