"""The table of engines as people read it, in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from treeopt.export.engine import Engine, Method

if TYPE_CHECKING:
    from rich.console import RenderableType

LIMITS = {"max_rank": "rank", "max_depth": "depth", "max_nodes": "choices", "max_batch_size": "batch"}
NONE = "–"
WIDTHS = {"drafters": 2, "shape and limits": 2, "carrier": 4, "versions": 3}  # shares of the line
LEFT_OUT = ("name", "write", "parse")  # of a method: functions, and what has another name


def records(engines: Mapping[str, Engine]) -> list[dict[str, Any]]:
    """Every method with all that the table knows of it, JSON-ready.

    reads_back  whether treeopt re-reads what it writes with a port of the engine's own rules
    """
    return [
        {
            "engine": engine.name,
            "title": engine.title,
            "method": method.name,
            **{f.name: getattr(method, f.name) for f in fields(method) if f.name not in LEFT_OUT},
            "reads_back": method.parse is not None,
        }
        for engine in engines.values()
        for method in engine.methods
    ]


def limits(method: Method) -> str:
    """What bounds a tree or chain beside its shape.

    >>> from treeopt.export.table import ENGINES
    >>> limits(ENGINES["tgi"].methods[0])
    '–'
    """
    bounds = [f"{word} ≤ {getattr(method, name)}" for name, word in LIMITS.items() if getattr(method, name) is not None]
    return ", ".join(bounds) or NONE


def by_batch_size(method: Method) -> str:
    """Whether the engine changes with the batch: by a schedule, by another build, or not at all."""
    if method.by_batch_size:
        return "schedule"
    return "a build each" if method.built_for_size else NONE


def available(method: Method) -> str:
    """Which releases have it, and whether they still do."""
    return method.versions if method.status == "live" else f"{method.versions}; {method.status}"


def table(engines: Mapping[str, Engine]) -> RenderableType:
    """One row a method, the usual one of each engine first."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(
        title="Engines that --for and --to take",
        title_justify="left",
        caption="Sources, fields that must match and syntax: treeopt list engines --json",
        caption_justify="left",
        expand=True,
    )
    for name in ("engine", "method", "drafters", "shape and limits", "acceptance", "carrier", "by batch", "versions"):
        width = 15 if name.startswith("shape") else None
        shown.add_column(name, min_width=width, overflow="fold", ratio=WIDTHS.get(name), no_wrap=name == "engine")
    for engine in engines.values():
        for i, method in enumerate(engine.methods):
            name, drafters, shape, bounds, rules, *rest = cells(method)
            shape += "" if bounds == NONE else f", {bounds}"
            row = [engine.name if i == 0 else "", name, drafters, shape, rules, method.carrier, *rest]
            shown.add_row(*map(escape, row))
        shown.add_section()
    return shown


def cells(method: Method) -> list[str]:
    """What tables say of a method: name, drafters, shape, limits, acceptance, by batch size, versions."""
    drafters, rules = ", ".join(method.drafters), ", ".join(method.rules)
    return [method.name, drafters, method.shape, limits(method), rules, by_batch_size(method), available(method)]
