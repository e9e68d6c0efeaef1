"""Medusa's list of choices: how it is written, and what its own builder makes of it, right or wrong.

Hydra, Neuron and Model Optimizer's benchmark build buffers the same way (medusa/model/utils.py), EAGLE-1 its mask. All
candidates lie in one row: the root's token, then ten of every head. A node points at candidate 1 + rank + 10 x (depth -
1), so that rank 10 of one head is rank 0 of the next. Nothing of it is checked.

n nodes, root included · c candidates
"""

import ast
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treeopt.engines.base import Choices, Request, Written
from treeopt.errors import InvalidInput
from treeopt.files.bounds import parse_python
from treeopt.files.shell import shell_word
from treeopt.trees.tree import MAX_RANK, Choice, Tree

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


@dataclass(frozen=True, eq=False)
class Buffers:
    """The arrays that the decoder gets.

    tree_indices     : (n,)    candidate that each node verifies
    position_ids     : (n,)    depth of each node
    attention_mask   : (n, n)  whether node i attends to node j
    """

    tree_indices: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    attention_mask: NDArray[np.bool_]


def in_order(paths: Iterable[P]) -> list[P]:
    """Paths by depth, those of a depth by rank: the order that engines sort them into."""
    return sorted(paths, key=lambda path: (len(path), path))


def medusa_buffers(choices: Sequence[Sequence[int]]) -> Buffers:
    """The buffers of a list of choices; ValueError or IndexError where the engine's builder raises them.

    Duplicates, negative ranks and ranks from 10 on pass, and make buffers of another tree.

    >>> medusa_buffers([[0], [1], [0, 0], [0, 1]]).tree_indices.tolist()
    [0, 1, 2, 11, 12]
    >>> medusa_buffers([[0], [10], [0, 0]]).tree_indices.tolist()  # the last two are one token
    [0, 1, 11, 11]
    """
    paths = in_order(choices)
    if not paths:
        raise ValueError("the list is empty")
    depths = [0, *map(len, paths)]
    if 0 in depths[1:]:
        raise IndexError("the root is among the choices")
    if any(below > above + 1 for above, below in pairwise(depths)):
        raise IndexError("a whole depth is missing")
    mask = np.eye(len(depths), dtype=bool)
    mask[:, 0] = True
    places: dict[tuple[Any, ...], int] = {}  # of lists and tuples apart, as Python compares them
    for i, path in enumerate(paths, 1):
        places.setdefault((type(path), *path), i)
        if len(path) > 1:
            parent = places.get((type(path), *path[:-1]))
            if parent is None:
                raise ValueError(f"{path[:-1]!r} is not in list")
            mask[i] |= mask[parent]
    indices = [0, *(1 + path[-1] + TOPK * (len(path) - 1) for path in paths)]
    return Buffers(np.array(indices), np.array(depths), mask)


def decoded(buffers: Buffers) -> Tree:
    """The tree that a decoder with these buffers verifies.

    Raises InvalidInput where a node's candidate is not of its depth's head, or two nodes verify the same.

    >>> decoded(medusa_buffers([[0], [0, 1]])).choices
    [[0], [0, 1]]
    >>> decoded(medusa_buffers([[0], [10], [0, 0]]))
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: Node 2 at depth 1 would verify rank 0 of head 2.
    """
    paths: list[Choice] = [()]
    for i, (index, depth) in enumerate(zip(buffers.tree_indices[1:], buffers.position_ids[1:], strict=True), 1):
        head, rank = divmod(int(index) - 1, TOPK)
        if head != depth - 1:
            raise InvalidInput(f"Node {i} at depth {depth} would verify rank {rank} of head {head + 1}.")
        parent = max((j for j in np.flatnonzero(buffers.attention_mask[i]) if j != i), key=lambda j: len(paths[j]))
        paths.append((*paths[parent], rank))
    return Tree.from_choices(paths[1:])
