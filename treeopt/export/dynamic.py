"""Dynamic trees as engines are told of them: what their exports share.

levels, topk, rows : the three numbers of `treeopt.trees.dynamic.DynamicTree`; each engine has its own names, and counts
                     levels and rows in its own way
"""

from __future__ import annotations

from collections.abc import Mapping

from treeopt.errors import InvalidInput
from treeopt.export.chains import merged, whole
from treeopt.export.engine import Request, Settings
from treeopt.trees.dynamic import DynamicTree

NO_SPECULATION: Settings = ((1, None, None),)


def only_setting(request: Request, engine: str) -> DynamicTree | None:
    """The one setting for all batch sizes, None for no speculation; InvalidInput where the plan has several."""
    settings = merged(request.dynamics)
    if len(settings) > 1:
        raise InvalidInput(
            f"{engine} takes one dynamic tree for all batch sizes, but the plan has {said(settings)}: export one of them "
            "with --batch-size."
        )
    return settings[0][2]


def said(settings: Settings) -> str:
    """The ranges in words.

    >>> said(((1, 8, DynamicTree(3, 2, 8)), (9, None, None)))
    '1-8: 3/2/8, from 9 on: none'
    """
    named = ((a, b, tree.name if tree else "none") for a, b, tree in settings)
    return ", ".join(f"{a}-{b}: {name}" if b is not None else f"from {a} on: {name}" for a, b, name in named)


def numbers(given: Mapping[str, str], *names: str) -> list[int]:
    """The whole numbers of a launch command's flags; InvalidInput where one is missing or none."""
    return [whole(given.get(name, ""), name) for name in names]
