"""An engine's files for what a request asks: what it can take is checked, then its own file writes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeopt import __version__
from treeopt.engines.base import COMMANDS, EARLIEST, Method, Request, Written
from treeopt.engines.chains import BLOCKS, merged
from treeopt.engines.registry import ENGINES, method_of, removal_notes, search_for
from treeopt.errors import InvalidInput
from treeopt.records.rules import marked_rule, option_of, rule_of
from treeopt.trees.dynamic import DynamicLimits, DynamicTree
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
    return write_request(request, method_of(engine, request.drafter, method), engine)


def write_request(request: Request, way: Method, engine: str) -> Written:
    """The files by one of the engine's methods; InvalidInput for what it would refuse, or silently take for another."""
    asked = check_rule_of(request.acceptance, way, engine)
    for name, heeded in (("version", way.by_version), ("max_draft_len", way.built_for_size)):
        if getattr(request, name) is not None and not heeded:
            raise InvalidInput(f"`{name}` makes no difference for {engine} with {way.name}: leave it out.")
    tree, reason = request.tree, ""
    if way.shape == "chain" and tree is not None:
        request = replace(request, lengths=((1, None, tree.depth),), tree=None)
    longest = max((length for *_, length in merged(request.lengths)), default=0) if request.lengths else 0
    if tree is not None and not SHAPES[way.shape](tree):
        reason = f"takes {TAKEN[way.shape]} only, but this tree of {len(tree)} rows, {tree.depth} deep, is none"
    elif way.dynamic:
        reason = _beyond(merged(request.dynamics), way)
    elif request.tree is not None:
        reason = _misread(request.tree, way, request.num_heads)
    elif way.max_depth is not None and longest > way.max_depth:
        reason = f"takes chains of up to {way.max_depth} guesses, but this one has {longest}"
    if reason:
        raise InvalidInput(f"{engine} {reason}: {search_for(engine, way)}")
    for one in request.groups.values():
        write_request(one, way, engine)  # says what cannot be written for it
    written = way.write(request if request.drafter else replace(request, drafter=way.drafters[0]))
    line = f"# For {ENGINES[engine].title}, checked against {way.checked}. Written by treeopt {__version__}.\n"
    texts = {**written.files, COMMANDS: written.files.get(COMMANDS, f"{written.command}\n")}
    files = {name: line + text if name.endswith(COMMENTED) else text for name, text in texts.items()}
    notes = (*written.notes, *asked, *_notes_on(request, way, engine, longest), *removal_notes(way, engine))
    return replace(written, files=files, notes=notes)


def _notes_on(request: Request, way: Method, engine: str, longest: int) -> list[str]:
    """Notes on a request that an engine can take: what differs there, and what the plan leaves open."""
    notes = []
    if request.drafter == "ngram":
        said = f"{engine} looks n-grams up in its own way{way.looks_up and f', {way.looks_up}'}, so its tokens per step differ. "
        said += "Measure them in the engine, and read them with treeopt import."
        fits = request.drafter_id == "ngram:earliest" and way.looks_up == EARLIEST
        notes.append(f"{engine} looks n-grams up as ngram:earliest does: {way.looks_up}." if fits else said)
    speculates = any(what for *_, what in (request.dynamics if way.dynamic else request.lengths))
    if request.drafter in BLOCKS and longest:
        notes.append(
            f"DRAFTER must have been trained for blocks that guess {longest} tokens or more: engines cut or refuse what is "
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


def check_rule_of(record: Mapping[str, Any] | None, way: Method, engine: str) -> list[str]:
    """A note where a plan holds for another rule than greedy decoding; InvalidInput where the engine lacks it."""
    rule = rule_of(record)
    if rule == "greedy" or record is None:
        return []
    if rule in way.rules:
        return [f"The plan holds for {option_of(record)}: requests must ask for the same."]
    every = [(name, one) for name, other in ENGINES.items() for one in other.methods if rule in one.rules]
    able = [name for name, one in every if set(one.drafters) & set(way.drafters)]
    cure = f"export --to {' or '.join(able)}, or plan" if able else "plan"
    raise InvalidInput(
        f"{engine} with {way.name} accepts by the rule {' or '.join(way.rules)}, but the plan holds for {marked_rule(record)}: {cure} "
        "for greedy decoding (treeopt calibrate --acceptance greedy)."
    )


def _beyond(settings: tuple[tuple[int, int | None, DynamicTree | None], ...], way: Method) -> str:
    """Which dynamic tree is beyond a method's limits; empty for none."""
    limits = way.dynamic_limits or DynamicLimits()
    for tree in (tree for *_, tree in settings if tree):
        most = limits.most_rows(tree.levels, tree.topk)
        if tree.levels > limits.levels or tree.rows > most:
            return (
                f"takes up to {limits.levels} levels, and {most} rows of {tree.levels} levels with topk {tree.topk}, "
                f"but this dynamic tree is {tree.name}"
            )
        filled = way.fills_levels == "all" or (way.fills_levels == "chains" and tree.topk == 1)
        if filled and tree.rows <= tree.levels:
            return f"needs a row for each of {tree.levels} levels and one more, but this dynamic tree has {tree.rows}"
    return ""


def _misread(tree: Tree, way: Method, num_heads: int) -> str:
    """Why a method would refuse a tree, or silently use another; empty where it takes it."""
    if len(tree) == 1:
        return ""  # the methods' own files, or their refusal
    first = [path[0] for path in tree.paths[1:] if len(path) == 1]
    limits = (
        (num_heads, tree.depth, "takes trees up to {} deep, one per head, but this one is {} deep"),
        (way.max_depth, tree.depth, "takes trees up to depth {}, but this one has {}"),
        (
            way.max_rank,
            tree.max_rank,
            "takes ranks up to {}, but the tree has {}, which it would read as another candidate",
        ),
        (way.max_nodes, len(tree) - 1, "takes up to {} choices, but the tree has {}"),
    )
    for most, has, words in limits:
        if most is not None and has > most:
            return words.format(most, has)
    if way.first_depth_closed and first != list(range(len(first))):
        return (
            f"needs ranks without gaps at depth 1, but the tree has {first} there, and two of these would get one place"
        )
    return ""
