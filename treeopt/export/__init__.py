"""Write a chosen tree as an engine's own configuration, after checking what that engine accepts.

Engines check little, and several decode with another tree than the one they were given, silently:
so every rule of `ENGINES` is checked here first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from treeopt.errors import InvalidInput, Unsupported
from treeopt.export import medusa, tensorrt_llm, tgi
from treeopt.plan import PlanEntry
from treeopt.tree import Tree


@dataclass(frozen=True)
class Engine:
    """What an engine accepts, and how its files are written.

    most_rank       largest rank; beyond it the engine reads another head's candidates
    gap_free_depth  depths at which siblings must have ranks 0...c-1 without a gap (0: nowhere)
    plain           whether its files can also say not to speculate
    most_batch_size rows that the engine decodes with a tree at once; None for no bound
    write           (entry, number of heads, of their layers) to file name and text
    read            the text of such a file to its choices; None where it is not one
    notes           what a user has to know, always
    entry_notes     what this entry loses or risks
    chain           whether it takes a chain only; then the entry's best chain is written
    """

    most_rank: int
    gap_free_depth: int
    most_batch_size: int | None
    write: Callable[[PlanEntry, int, int], Mapping[str, str]]
    read: Callable[[str], list[Any] | None]
    plain: bool = False
    notes: tuple[str, ...] = ()
    entry_notes: Callable[[PlanEntry], list[str]] = lambda entry: []
    chain: bool = False


ENGINES = {
    "medusa": Engine(9, 0, 1, medusa.write, medusa.read),
    "tensorrt-llm": Engine(
        15,
        1,
        None,
        tensorrt_llm.write,
        tensorrt_llm.read,
        plain=True,
        notes=(
            "TensorRT-LLM takes medusa_choices on its TensorRT engine path only, which releases after "
            "1.2 no longer have.",
            "Every step costs max_draft_len + 1 rows, whatever the tree: build the engine with the "
            "max_draft_len given here.",
            "It reads the heads from medusa_lm_head.pt: treeopt convert DRAFTER --to medusa-pt --output HEADS",
        ),
    ),
    "tgi": Engine(0, 0, None, tgi.write, tgi.read, plain=True, entry_notes=tgi.notes, chain=True),
}


@dataclass(frozen=True)
class Export:
    """Files to write, by name, and what to tell the user."""

    files: Mapping[str, str]
    notes: tuple[str, ...]


def export_entry(entry: PlanEntry, engine_name: str, *, num_heads: int, num_layers: int = 1) -> Export:
    """The configuration of one entry for one engine.

    Raises InvalidInput for a tree that the engine would read otherwise, Unsupported for an engine
    that is not known.
    """
    if engine_name not in ENGINES:
        raise Unsupported(f"--to must be one of {', '.join(ENGINES)}, but got {engine_name!r}.")
    engine, tree = ENGINES[engine_name], entry.tree
    if engine.chain:
        paying = entry if chain_pays(entry) else replace(entry, best_chain=None)
        return Export(
            engine.write(paying, num_heads, num_layers), (*engine.notes, *engine.entry_notes(paying))
        )
    if len(tree) == 1 and engine.plain:
        note = (
            f"No tree pays at batch size {entry.batch_size}: these files serve the model without its heads."
        )
        return Export(engine.write(entry, num_heads, num_layers), (note,))
    check(tree, engine, engine_name, num_heads)
    notes = list(engine.notes)
    if engine.most_batch_size is not None and entry.batch_size > engine.most_batch_size:
        notes.append(
            f"{engine_name} decodes at most {engine.most_batch_size} row at a time with a tree; this "
            f"one was chosen for batch size {entry.batch_size}."
        )
    if (len(tree) - 1) % 32 == 0 and engine_name == "tensorrt-llm":
        notes.append("Trees of 32 or 64 choices are suspected to overrun its packed mask; prefer 31 or 63.")
    return Export(engine.write(entry, num_heads, num_layers), tuple(notes))


def read_choices(text: str) -> list[Any] | None:
    """The choices of any file that `export_entry` writes; None where the text is no such file.

    >>> read_choices("- [0]\\n- [1]\\n")
    [[0], [1]]
    """
    found = (engine.read(text) for engine in ENGINES.values())
    return next((choices for choices in found if choices is not None), None)


def chain_pays(entry: PlanEntry) -> bool:
    """Whether the best chain is faster than not speculating; without a profile it is taken to be."""
    plain = next((point.get("tokens_per_s") for point in entry.curve if point.get("size") == 1), None)
    chain = entry.best_chain or {}
    if not plain or not chain.get("tokens_per_s"):
        return bool(chain)
    return bool(chain["tokens_per_s"] > plain)


def check(tree: Tree, engine: Engine, name: str, num_heads: int) -> None:
    """Raise InvalidInput where the engine would refuse the tree, or silently use another."""
    if len(tree) == 1:
        raise InvalidInput(
            f"{name} needs at least one choice, but the plan says not to speculate at this batch size: "
            "serve the model without its heads."
        )
    if tree.depth > num_heads:
        raise InvalidInput(f"A tree may be {num_heads} deep, one per head, but this one is {tree.depth}.")
    if max(tree.ranks) > engine.most_rank:
        raise InvalidInput(
            f"{name} takes ranks up to {engine.most_rank}, but the tree has {max(tree.ranks)}: "
            f"search again with --max-rank {engine.most_rank}."
        )
    known = set(tree.paths)
    for path in tree.paths[1:]:
        left = (*path[:-1], path[-1] - 1)
        if len(path) <= engine.gap_free_depth and path[-1] > 0 and left not in known:
            raise InvalidInput(
                f"{name} needs ranks without gaps at depth {len(path)}, but the tree has {path} "
                f"without {left}: calibrate on more prompts, so that ranks are in order."
            )
