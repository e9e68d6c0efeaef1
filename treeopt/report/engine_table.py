"""The engines in words: all in a short table, one with everything that is known of it, the tables of docs/engines.md, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from treeopt.engines.base import Method, ServingEngine
from treeopt.engines.registry import ENGINES, search_for
from treeopt.report.table import Table, texts
from treeopt.report.terminal import together

if TYPE_CHECKING:
    from rich.console import RenderableType

LIMITS = {"max_rank": "rank", "max_depth": "depth", "max_nodes": "choices", "max_batch_size": "batch"}
NONE = "–"
TAKES = {
    "any": "any tree",
    "sibling-closed": "a tree without gaps",
    "low-rank-expands": "a tree, likelier nodes first",
    "chain": "one chain",
}  # by the shape
LEFT_OUT = ("name", "write")  # of a method: functions, and what has another name


def records(engines: Mapping[str, ServingEngine]) -> list[dict[str, Any]]:
    """Every method with all that the table knows of it, JSON-ready."""
    return [
        {
            "engine": engine.name,
            "title": engine.title,
            "package": engine.package,
            "method": method.name,
            **{f.name: getattr(method, f.name) for f in fields(method) if f.name not in LEFT_OUT},
        }
        for engine in engines.values()
        for method in engine.methods
    ]


def limits(method: Method) -> str:
    """The bounds of a tree or chain beside its shape.

    >>> from treeopt.engines.registry import ENGINES
    >>> limits(ENGINES["tgi"].methods[0])
    '–'
    """
    bounds = [f"{word} ≤ {getattr(method, name)}" for name, word in LIMITS.items() if getattr(method, name) is not None]
    return ", ".join(bounds) or NONE


def takes(method: Method) -> str:
    """The drafts that the engine takes this way, in a few words.

    >>> from treeopt.engines.registry import ENGINES
    >>> [takes(method) for method in ENGINES["vllm"].methods]
    ['a chain for each batch size', 'one chain', 'one chain']
    """
    if method.by_batch_size:
        return f"{'a dynamic tree' if method.dynamic else 'a chain'} for each batch size"
    return "one dynamic tree" if method.dynamic else TAKES[method.shape]


def by_batch_size(method: Method) -> str:
    """Whether the engine changes with the batch: by a schedule, by another build, or not at all."""
    if method.by_batch_size:
        return "schedule"
    return "a build each" if method.built_for_size else NONE


def available(method: Method) -> str:
    """Which releases have it, and whether they still do."""
    return method.versions if method.status == "live" else f"{method.versions}; {method.status}"


def checked(method: Method) -> str:
    """The release, month or commit that a method was checked against, or when it was removed, in a few words.

    >>> from treeopt.engines.registry import ENGINES
    >>> [checked(method) for method in ENGINES["vllm"].methods]
    ['0.33.0', '0.33.0', 'removed in 0.33.0']
    """
    if method.status != "live":
        return method.status.replace("upstream ", "")
    return method.checked.split(", ")[0].split(" (")[0].split()[-1]


BEGIN, END = "<!-- table of engines: begin -->", "<!-- table of engines: end -->"
HEADS = ("engine", "method", "drafters", "shape", "limits", "acceptance", "by batch size", "versions", "checked")
DETAILS = ("method", "carrier", "syntax", "must match", "source")


def refreshed(page: str) -> str:
    """docs/engines.md with its tables made anew: all methods, then how each is written and where that was read."""
    methods = [(engine.name, method) for engine in ENGINES.values() for method in engine.methods]
    rows = []
    for name, m in methods:
        shape = "dynamic" if m.dynamic else m.shape
        takes_it = (f"`{name}`", m.name, ", ".join(m.drafters), shape, limits(m), ", ".join(m.rules))
        rows.append((*takes_it, by_batch_size(m), available(m), m.checked))
    details = [
        (f"`{name}` {m.name}", m.carrier, f"`{m.syntax}`", "; ".join(m.derived) or NONE, m.source)
        for name, m in methods
    ]
    before, _, rest = page.partition(BEGIN)
    tables = f"{_markdown(HEADS, rows)}\n{_markdown(DETAILS, details)}"
    return f"{before}{BEGIN}\n\n{tables}\n{END}\n" + rest.partition(f"{END}\n")[2]


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        [cell.replace("|", "\\|").replace("<=", "≤") for cell in row] for row in [heads, ["---"] * len(heads), *rows]
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def engine_table(engines: Mapping[str, ServingEngine]) -> Table:
    """One row a method, the usual one of each engine first."""
    rows = [
        (engine.name if i == 0 else "", takes(method), ", ".join(method.drafters), checked(method))
        for engine in engines.values()
        for i, method in enumerate(engine.methods)
    ]
    more = "Limits, files and sources of an engine: treeopt list engines NAME"
    columns = texts("engine", "takes", "drafters", "checked", names=4)
    return Table("Engines that --for and --to take", columns, rows, caption=more)


def method_table(engine: ServingEngine) -> RenderableType:
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
        tables.append(Table(f"{engine.title}: {method.name}{usual}", texts("", "", names=2), fields))
    return together(*tables)
