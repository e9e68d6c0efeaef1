"""The engines, for the terminal: all in a short table, or one with everything that is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from treeopt.export.engine import Engine
from treeopt.export.listing import NONE, available, by_batch_size, checked, limits, takes
from treeopt.export.write import search_for
from treeopt.report.terminal import grid, together

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("engine", "takes", "drafters", "checked")


def engine_table(engines: Mapping[str, Engine]) -> RenderableType:
    """One row a method, the usual one of each engine first."""
    rows = [
        (engine.name if i == 0 else "", takes(method), ", ".join(method.drafters), checked(method))
        for engine in engines.values()
        for i, method in enumerate(engine.methods)
    ]
    more = "Limits, files and sources of an engine: treeopt list engines NAME"
    return grid("Engines that --for and --to take", COLUMNS, rows, left=len(COLUMNS), caption=more)


def method_table(engine: Engine) -> RenderableType:
    """Everything of one engine, method by method."""
    tables = []
    for i, method in enumerate(engine.methods):
        fields = (
            ("takes", takes(method)),
            ("limits", limits(method)),
            ("drafters", ", ".join(method.drafters)),
            ("acceptance", ", ".join(method.rules)),
            ("goes to", method.carrier),
            ("as", method.syntax),
            ("must match", "; ".join(method.derived) or NONE),
            ("by batch size", by_batch_size(method)),
            ("versions", available(method)),
            ("checked", method.checked),
            ("package", engine.package or "its source is not on the Python package index"),
            ("read in", method.source),
            ("plan with", search_for(engine.name, method)),
        )
        usual = ", the usual one" if i == 0 < len(engine.methods) - 1 else ""
        title = f"{engine.title}: {method.name}{usual}"
        tables.append(grid(title, ("", ""), fields, left=2))
    return together(*tables)
