"""FasterDecoding/Medusa: a Python literal for ``medusa_generate(medusa_choices=...)``."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.plan import PlanEntry


def write(entry: PlanEntry, num_heads: int, num_layers: int) -> Mapping[str, str]:
    """``medusa_choices.py`` for medusa/model/medusa_choices.py, and the bare list as JSON."""
    choices = json.dumps(entry.medusa_choices)
    return {
        "medusa_choices.py": f"treeopt_{len(entry.medusa_choices)} = {choices}\n",
        "medusa_choices.json": f"{choices}\n",
    }


def read(text: str) -> list[Any] | None:
    """The list of a Python file or of JSON; None where the text is neither, or holds no list.

    Raises InvalidInput for several lists, as medusa/model/medusa_choices.py itself has.

    >>> read("mine = [(0,), (0, 0)]")
    [(0,), (0, 0)]
    """
    try:
        found = {
            ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else "":
            ast.literal_eval(statement.value)
            for statement in ast.parse(text).body
            if isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.List)
        }  # fmt: skip
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
    if len(found) > 1:
        raise InvalidInput(
            f"it must hold one list of choices, but it has {', '.join(found)}: keep one of them."
        )
    return next(iter(found.values()), None)
