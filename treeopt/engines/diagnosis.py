"""A tree from elsewhere: what was meant, what had to be repaired, and what each engine makes of the list as it stood.

Repaired is what has one repair: order, duplicates, a listed root, tuples, an unclosed brace, and lists of leaves,
whose parents are added. A parent that is missing beside others that are there has none, and is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from treeopt.engines import triton
from treeopt.engines.base import Choices, Unknown
from treeopt.engines.lists import in_order
from treeopt.engines.reading import check_chars, in_braces, read_choices
from treeopt.engines.registry import ENGINES
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import loads, parse_literal
from treeopt.trees.tree import Choice, Tree, check_size

UNREADABLE = "The file must hold a tree: a list of choices, an object with 'medusa_choices', a plan, or an engine's configuration."


@dataclass(frozen=True)
class Reading:
    """How an engine reads a list: reads is "the same", "another tree" or "nothing"."""

    engine: str
    reads: str
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """The tree that was meant, what was repaired to get it, and the engines that read the list otherwise."""

    tree: Tree
    repaired: tuple[str, ...]
    readings: tuple[Reading, ...]


def diagnose(text: str) -> Diagnosis:
    """The tree of a text; InvalidInput where it is none, or where no repair is obvious.

    >>> found = diagnose("[[1, 0], [0]]")
    >>> found.tree.choices, found.repaired
    ([[0], [1], [1, 0]], ('The list has only leaves: 1 parent was added.',))
    """
    choices, repaired, syntax = _meant(text)
    tree, more = repair(choices)
    known = {reading.engine for reading in syntax}
    readings = (*syntax, *(r for r in _readings(choices, tree) if r.engine not in known))
    return Diagnosis(tree, (*repaired, *more), tuple(r for r in readings if r.reads != "the same"))


def repair(choices: Choices) -> tuple[Tree, tuple[str, ...]]:
    """The tree that a list means, and what had to be repaired.

    >>> repair([(0,), (0,), ()])[1]
    ('The root was listed. It is left out.', 'Choices that came twice are kept once: [0].')
    """
    repaired = []
    for choice in choices:
        whole = isinstance(choice, list | tuple) and all(type(rank) is int for rank in choice)
        if not whole or min(choice, default=0) < 0:
            silent = ", though Medusa's buffers and Triton's parser take a negative rank" if whole else ""
            raise InvalidInput(
                f"Every choice must be a list of ranks 0, 1, ..., but there is {quoted(choice)}{silent}."
            )
    if len({type(choice) for choice in choices}) > 1:
        repaired.append("Lists and tuples were mixed. All are lists now.")
    paths: list[Choice] = [tuple(choice) for choice in choices if choice]
    if len(paths) < len(choices):
        repaired.append("The root was listed. It is left out.")
    once = dict.fromkeys(paths)
    if len(once) < len(paths):
        repaired.append(f"Choices that came twice are kept once: {_few(paths, once)}.")
    added = dict.fromkeys(p[:depth] for p in once for depth in range(1, len(p)) if p[:depth] not in once)
    if added and any(path[:depth] in once for path in once for depth in range(1, len(path))):
        orphan = next(path for path in once if len(path) > 1 and path[:-1] not in once)
        raise InvalidInput(
            f"Every choice needs its parent in the list, but {quoted(list(orphan))} lacks {quoted(list(orphan[:-1]))} where others have "
            "theirs: add it, or leave the choice out. TensorRT-LLM's C++ would silently put it below the root; its "
            "Python runtime would build more nodes than it counts; Medusa and EAGLE would fail."
        )
    if added:
        repaired.append(
            f"The list has only leaves: {len(added)} {'parent was' if len(added) == 1 else 'parents were'} added."
        )
    elif in_order(once) != list(once):
        repaired.append("The choices were in another order. That makes no difference to the engines.")
    return Tree.from_choices([*once, *added]), tuple(repaired)


def _few(paths: list[Choice], once: dict[Choice, None]) -> str:
    """The first of the choices that are there more often than once."""
    times = Counter(paths)
    twice = [quoted(list(path)) for path in once if times[path] > 1]
    return ", ".join(twice[:3]) + (f" and {len(twice) - 3} more" if len(twice) > 3 else "")


def _meant(text: str) -> tuple[Choices, tuple[str, ...], tuple[Reading, ...]]:
    """The choices that a text means, what was repaired in its syntax, and who reads the syntax otherwise."""
    check_chars(text)
    if (found := in_braces(text)) is not None:
        return _braces(*found)
    try:
        document = loads(text)
    except ValueError:
        document = None
    choices = read_choices(text)
    if choices is None:
        raise InvalidInput(UNREADABLE)
    if isinstance(document, dict) and "0" in document:  # Neuron's lists of children
        nodes = {"0", *document, *(str(child) for row in document.values() for child in row)}
        if lost := len(nodes) - 1 - len(choices):
            note = f"{lost} nodes that the root does not reach are left out, as Neuron silently does."
            return choices, (note,), ()
    return choices, (), ()


def _braces(value: str, argument: bool) -> tuple[Choices, tuple[str, ...], tuple[Reading, ...]]:
    """Triton's string: every path that stands in it, and what its tools and its backend make of it."""
    check_size(value.count("{") + value.count("["))
    repaired, given = [], value
    if argument:
        try:
            given = next((v for k, v in triton.filled_in(value).items() if k.endswith("_choices")), "")
        except InvalidInput as error:
            repaired.append(f"{str(error)[:-1]}, as is done here.")
            given = value.partition("_choices:")[2]
        value = value.partition("_choices:")[2].replace("\\,", ",")
    if value.lstrip().startswith("["):
        try:
            choices = list(parse_literal(value))
        except (ValueError, TypeError):
            raise InvalidInput(UNREADABLE) from None
    else:
        pieces = re.findall(r"\{([^{}]*)", value)
        try:
            choices = [[int(rank) for rank in piece.split(",")] for piece in pieces if piece.strip()]
        except ValueError:
            raise InvalidInput(
                f"Every choice must be a list of ranks 0, 1, ..., but there is {quoted(value)}."
            ) from None
        if value.count("{") > value.count("}"):
            repaired.append("A brace was not closed. It was closed.")
        elif value.lstrip().startswith("{{"):
            repaired.append("Braces around the whole list are left out.")
    try:
        if (read := triton.vectors(given)) == choices:
            return choices, tuple(repaired), ()
        why = f"It reads {len(read)} of the {len(choices)} choices, and silently drops the others."
    except InvalidInput as error:
        why = str(error)
    return choices, tuple(repaired), (Reading(triton.TITLE, "another tree", why),)


def _readings(choices: Choices, tree: Tree) -> list[Reading]:
    """How every engine of trees reads a list as it stands, by the ports of their rules."""
    if not choices:
        return []
    rows, meant = len(choices) + 1, len({tuple(choice) for choice in choices}) + 1
    found = []
    for engine in ENGINES.values():
        for name, reader in engine.readers.items():
            try:
                one = _reading(name, partial(reader, choices, tree), tree)
            except Unknown:
                continue
            if rows > meant and name in engine.counting and one.reads == "the same":
                why = f"It verifies {rows} rows, of which {meant} differ: a choice that comes twice takes two."
                one = Reading(name, "another tree", why)
            found.append(one)
    return found


def _reading(engine: str, port: Callable[[], Tree], tree: Tree) -> Reading:
    try:
        read = port()
    except InvalidInput as error:
        return Reading(engine, "another tree", str(error))
    except (LookupError, ValueError, TypeError) as error:
        return Reading(engine, "nothing", f"It fails: {type(error).__name__}, {error}.")
    if read == tree:
        return Reading(engine, "the same", "")
    kept, all_of = len(set(read.paths) & set(tree.paths)) - 1, len(tree) - 1
    return Reading(
        engine, "another tree", f"It uses {len(read) - 1} choices, of which {kept} are among these {all_of}."
    )


def document(found: Diagnosis) -> Mapping[str, Any]:
    """The answer of ``treeopt import-tree``, JSON-ready."""
    return {
        "medusa_choices": found.tree.choices,
        "size": len(found.tree),
        "depth": found.tree.depth,
        "repaired": list(found.repaired),
        "engines": [vars(reading) for reading in found.readings],
    }
