"""Medusa's list of choices: how it is written, and what its own builder makes of it, right or wrong.

Hydra, Neuron and Model Optimizer's benchmark build buffers the same way (medusa/model/utils.py), EAGLE-1 its mask. All
candidates lie in one row: the root's token, then ten of every head. A node points at candidate 1 + rank + 10 x (depth -
1), so that rank 10 of one head is rank 0 of the next. Nothing of it is checked.
"""

import ast
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from treeopt.engines.base import Choices, Request, Written
from treeopt.errors import InvalidInput
from treeopt.files.bounds import parse_python
from treeopt.files.shell import shell_word
from treeopt.trees.tree import MAX_RANK, Tree

P = TypeVar("P", bound=Sequence[int])
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


def once(choices: Choices) -> Choices:
    """The list without choices that come again; lists and tuples stay what they are."""
    return list({(type(choice), *choice): choice for choice in choices}.values())


def as_lists(choices: Choices) -> Choices:
    """The list without choices that come again, tuples as lists: as readers have it that tell the two not apart."""
    return once([list(choice) if isinstance(choice, tuple) else choice for choice in choices])


def in_order(paths: Iterable[P]) -> list[P]:
    """Paths by depth, those of a depth by rank: the order that engines sort them into."""
    return sorted(paths, key=lambda path: (len(path), path))


def in_rows(choices: Sequence[P]) -> list[P]:
    """The paths of a list in the order of the builder's rows; ValueError or IndexError where it raises them."""
    paths = in_order(choices)
    if not paths:
        raise ValueError("the list is empty")
    depths = [0, *map(len, paths)]
    if 0 in depths[1:]:
        raise IndexError("the root is among the choices")
    if any(below > above + 1 for above, below in pairwise(depths)):
        raise IndexError("a whole depth is missing")
    known = {(type(path), *path) for path in paths}  # lists and tuples apart, as Python compares them
    for path in paths:
        if len(path) > 1 and (type(path), *path[:-1]) not in known:
            raise ValueError(f"{path[:-1]!r} is not in list")
    return paths


def decoded(choices: Sequence[Sequence[int]]) -> Tree:
    """The tree that a decoder with the builder's buffers verifies; ValueError or IndexError where that raises them.

    Raises InvalidInput where a node's candidate is not of its depth's head, or two nodes verify the same.

    >>> decoded([[0], [0, 1]]).choices
    [[0], [0, 1]]
    >>> decoded([[0], [10], [0, 0]])
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: Node 2 at depth 1 would verify rank 0 of head 2.
    """
    paths = in_rows(choices)
    for i, path in enumerate(paths, 1):
        head, rank = divmod(path[-1] + TOPK * (len(path) - 1), TOPK)
        if head != len(path) - 1:
            raise InvalidInput(f"Node {i} at depth {len(path)} would verify rank {rank} of head {head + 1}.")
    return Tree.from_choices(paths)
