"""Lists of choices as files of engines have them, read as strictly as a round trip needs."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.export.chains import flags
from treeopt.export.engine import COMMANDS
from treeopt.files.bounds import parse_python
from treeopt.trees.tree import Tree


def the_list(text: str) -> list[Any]:
    """The one list in a Python file or in JSON, its items as they are; InvalidInput for several or none.

    >>> the_list("mine = [(0,), (0, 0)]")
    [(0,), (0, 0)]
    """
    try:
        found = {
            ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else "": ast.literal_eval(
                statement.value
            )
            for statement in parse_python(text).body
            if isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.List)
        }
    except (ValueError, TypeError, MemoryError, RecursionError):
        found = {}
    if len(found) > 1:
        raise InvalidInput(f"it must hold one list of choices, but it has {', '.join(found)}: keep one of them.")
    if not found:
        raise InvalidInput("it must hold a list of choices, but it has none.")
    choices: list[Any] = next(iter(found.values()))
    return choices


def lists_of(files: Mapping[str, str]) -> Iterator[list[Any]]:
    """The list of every file; that of the launch command stands behind a flag."""
    for name, text in files.items():
        if name != COMMANDS:
            yield the_list(text)
        else:
            yield from (the_list(value) for flag, value in flags(files).items() if flag.endswith("choices"))


def listed(tree: Tree) -> str:
    """The choices as JSON, which is Python as well."""
    return json.dumps(tree.choices)


def same(trees: Iterable[Tree]) -> Tree:
    """The one tree that they all are; InvalidInput where files of one export differ."""
    found = list(trees)
    if any(tree != found[0] for tree in found):
        raise InvalidInput("The files of one export must have the same tree, but they differ.")
    return found[0]
