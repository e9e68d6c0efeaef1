"""An engine's files for what a request asks: what it can take is checked, then its own file writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeopt import __version__
from treeopt.engines.base import COMMANDS, Method, Request, Settings, Written
from treeopt.engines.chains import BLOCKS, merged
from treeopt.engines.registry import ENGINES, method_of, removal_notes, search_for
from treeopt.errors import InvalidInput
from treeopt.records.rules import marked_rule, option_of, rule_of
from treeopt.trees.dynamic import DynamicLimits
from treeopt.trees.shapes import SHAPES
from treeopt.trees.tree import Tree

COMMENTED = (".sh", ".py", ".yml", ".pbtxt")  # files that can hold a comment
TAKEN = {
    "sibling-closed": "trees whose siblings have ranks without a gap",
    "low-rank-expands": "trees in which the likeliest siblings have the children, without a gap",
    "chain": "chains",
}  # by shape


def export_request(request: Request, engine: str, *, method: str | None = None) -> Written:
    """An engine's files for a tree, for chain lengths or for dynamic trees, as the request has them.

    >>> written = export_request(Request(tree=Tree.chain(2), num_heads=4, drafter="medusa"), "medusa")
    >>> written.files["medusa_choices.json"]
    '[[0], [0, 0]]\\n'
    """
    way = method_of(engine, request.drafter, method)
    asked = check_rule_of(request.acceptance, way, engine)
    check_options(request, way, engine)
    if way.shape == "chain" and request.tree is not None:
        check_shape_of(request.tree, way, engine)
        request = replace(request, lengths=((1, None, request.tree.depth),), tree=None)
    if way.dynamic:
        check_dynamics(merged(request.dynamics), way, engine)
    elif request.dynamic or request.settings:
        raise InvalidInput(f"{engine} with {way.name} takes no dynamic trees.")
    elif request.tree is not None:
        check_tree(request.tree, way, engine, request)
    elif way.shape == "chain" and (most := longest(request)) > (way.max_depth or most):
        said = f"{engine} takes chains of up to {way.max_depth} guesses, but this one has {most}"
        raise InvalidInput(f"{said}: {search_for(engine, way)}")
    written = way.write(request)
    line = f"# For {ENGINES[engine].title}, checked against {way.checked}. Written by treeopt {__version__}.\n"
    texts = {**written.files, COMMANDS: written.files.get(COMMANDS, f"{written.command}\n")}
    files = {name: line + text if name.endswith(COMMENTED) else text for name, text in texts.items()}
    notes = (*written.notes, *asked, *notes_on(request, way, engine), *removal_notes(way, engine))
    return replace(written, files=files, notes=notes)


def longest(request: Request) -> int:
    """Guesses of the longest chain that is asked for."""
    return max((length for *_, length in merged(request.lengths)), default=0) if request.lengths else 0


def notes_on(request: Request, way: Method, engine: str) -> list[str]:
    """Notes on a request that an engine can take: what differs there, and what the plan leaves open."""
    notes = []
    if request.drafter == "ngram":
        notes.append(
            f"{engine} looks n-grams up in its own way, so its tokens per step differ. Measure them in the "
            "engine, and read them with treeopt import."
        )
    speculates = any(what for *_, what in (request.dynamics if way.dynamic else request.lengths))
    if request.drafter in BLOCKS and (most := longest(request)):
        notes.append(
            f"DRAFTER must have been trained for blocks that guess {most} tokens or more: engines cut or refuse what is "
            "longer."
        )
    elif request.drafter is None and request.tree is None and speculates:
        notes.append(f"The plan does not name its drafter; this is written for {way.drafters[0]}.")
    if not way.decodes(request.batch_size):
        notes.append(
            f"{engine} decodes at most {way.max_batch_size} sequence at a time this way; this plan is for "
            f"batch size {request.batch_size}."
        )
    return notes


def check_options(request: Request, way: Method, engine: str) -> None:
    """Raise InvalidInput for an option that makes no difference for the method."""
    for flag, given, heeded in (
        ("`version`", request.version, way.by_version),
        ("`max_draft_len`", request.max_draft_len, way.built_for_size),
    ):
        if given is not None and not heeded:
            raise InvalidInput(f"{flag} makes no difference for {engine} with {way.name}: leave it out.")


def check_rule_of(record: Mapping[str, Any] | None, way: Method, engine: str) -> list[str]:
    """A note where a plan holds for another rule than greedy decoding; InvalidInput where the engine lacks it."""
    rule = rule_of(record)
    if rule == "greedy" or record is None:
        return []
    if rule in way.rules:
        return [f"The plan holds for {option_of(record)}: requests must ask for the same."]
    able = [
        name
        for name, other in ENGINES.items()
        for one in other.methods
        if rule in one.rules and set(one.drafters) & set(way.drafters)
    ]
    cure = f"export --to {' or '.join(able)}, or plan" if able else "plan"
    raise InvalidInput(
        f"{engine} with {way.name} accepts by the rule {' or '.join(way.rules)}, but the plan holds for {marked_rule(record)}: {cure} "
        "for greedy decoding (treeopt calibrate --acceptance greedy)."
    )


def check_shape_of(tree: Tree, way: Method, engine: str) -> None:
    """Raise InvalidInput for a tree that is not of the method's shape, with the command that finds one that is."""
    if not SHAPES[way.shape](tree):
        raise InvalidInput(
            f"{engine} takes {TAKEN[way.shape]} only, but this tree of {len(tree)} rows, {tree.depth} deep, is none: "
            f"{search_for(engine, way)}"
        )


def check_dynamics(settings: Settings, way: Method, engine: str) -> None:
    """Raise InvalidInput for a dynamic tree that is beyond the method's limits."""
    limits = way.dynamic_limits or DynamicLimits()
    for *_, tree in settings:
        if tree and (tree.levels > limits.levels or tree.rows > limits.most_rows(tree.levels, tree.topk)):
            raise InvalidInput(
                f"{engine} takes up to {limits.levels} levels, and {limits.most_rows(tree.levels, tree.topk)} rows of "
                f"{tree.levels} levels with topk {tree.topk}, but this dynamic tree is {tree.name}: "
                f"{search_for(engine, way)}"
            )
        filled = way.fills_levels == "all" or (way.fills_levels == "chains" and tree is not None and tree.topk == 1)
        if tree and filled and tree.rows <= tree.levels:
            raise InvalidInput(
                f"{engine} needs a row for each of {tree.levels} levels and one more, but this dynamic tree has "
                f"{tree.rows}: {search_for(engine, way)}"
            )


def check_tree(tree: Tree, way: Method, engine: str, request: Request) -> None:
    """Raise InvalidInput where the engine would refuse the tree, or silently use another."""
    if len(tree) == 1:
        return  # the methods' own files, or their refusal
    if tree.depth > request.num_heads:
        raise InvalidInput(f"A tree may be {request.num_heads} deep, one per head, but this one is {tree.depth} deep.")
    first = [path[0] for path in tree.paths[1:] if len(path) == 1]
    limits = (
        (way.max_depth, tree.depth, "trees up to depth {}, but this one has {}"),
        (way.max_rank, tree.max_rank, "ranks up to {}, but the tree has {}, which it would read as another candidate"),
        (way.max_nodes, len(tree) - 1, "up to {} choices, but the tree has {}"),
    )
    for most, has, words in limits:
        if most is not None and has > most:
            raise InvalidInput(f"{engine} takes {words.format(most, has)}: {search_for(engine, way)}")
    if way.first_depth_closed and first != list(range(len(first))):
        raise InvalidInput(
            f"{engine} needs ranks without gaps at depth 1, but the tree has {first} there, and two of these "
            f"would get the same place: {search_for(engine, way)}"
        )
    check_shape_of(tree, way, engine)
