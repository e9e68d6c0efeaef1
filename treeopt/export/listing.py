"""The table of engines in words, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from treeopt.export.engine import Engine, Method

LIMITS = {"max_rank": "rank", "max_depth": "depth", "max_nodes": "choices", "max_batch_size": "batch"}
NONE = "–"
TAKES = {
    "any": "any tree",
    "sibling-closed": "a tree without gaps",
    "low-rank-expands": "a tree, likelier nodes first",
    "chain": "one chain",
}  # by the shape
LEFT_OUT = ("name", "write", "parse")  # of a method: functions, and what has another name


def records(engines: Mapping[str, Engine]) -> list[dict[str, Any]]:
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
    """What bounds a tree or chain beside its shape.

    >>> from treeopt.export.table import ENGINES
    >>> limits(ENGINES["tgi"].methods[0])
    '–'
    """
    bounds = [f"{word} ≤ {getattr(method, name)}" for name, word in LIMITS.items() if getattr(method, name) is not None]
    return ", ".join(bounds) or NONE


def takes(method: Method) -> str:
    """What the engine takes this way, in a few words.

    >>> from treeopt.export.table import ENGINES
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

    >>> from treeopt.export.table import ENGINES
    >>> [checked(method) for method in ENGINES["vllm"].methods]
    ['0.33.0', '0.33.0', 'removed in 0.33.0']
    """
    if method.status != "live":
        return method.status.replace("upstream ", "")
    return method.checked.split(", ")[0].split(" (")[0].split()[-1]


def cells(method: Method) -> list[str]:
    """What tables say of a method: name, drafters, shape, limits, acceptance, by batch size, versions, checked."""
    drafters, rules = ", ".join(method.drafters), ", ".join(method.rules)
    shape = "dynamic" if method.dynamic else method.shape
    what = [method.name, drafters, shape, limits(method), rules, by_batch_size(method)]
    return [*what, available(method), method.checked]
