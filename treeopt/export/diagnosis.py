"""A tree from elsewhere: what was meant, what had to be repaired, and what each engine makes of the list as it stood.

Repaired is what has one repair: order, duplicates, a listed root, tuples, an unclosed brace, and lists of leaves,
whose parents are added. A parent that is missing beside others that are there has none, and is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treeopt.errors import InvalidInput, quoted
from treeopt.export import eagle1, hydra, modelopt, tensorrt_llm, triton
from treeopt.export.buffers import decoded, in_order, medusa_buffers
from treeopt.export.reading import Choices, check_chars, in_braces, read_choices
from treeopt.files.bounds import loads, parse_literal
from treeopt.trees.tree import Choice, Tree, check_size

UNREADABLE = "The file must hold a tree: a list of choices, an object with 'medusa_choices', a plan, or an engine's configuration."
RTP_LLM_DEPTH = 3


@dataclass(frozen=True)
class Reading:
    """What an engine makes of a list: reads is "the same", "another tree" or "nothing"."""

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
    """What every engine of trees makes of a list as it stands, by the ports of their rules."""
    if not choices:
        return []
    lists = [list(choice) if isinstance(choice, tuple) else choice for choice in choices]
    ports: dict[str, Callable[[], Tree]] = {
        "Medusa": lambda: decoded(medusa_buffers(_once(choices))),
        "Hydra": lambda: hydra.drafted(_once(decoded(medusa_buffers(_once(choices))).choices)),
        "EAGLE-1": lambda: _eagle(_once(lists)),
        "Neuron's token tree": lambda: by_counts(tree),
        "TensorRT-LLM, C++": lambda: _cpp(_once(lists)),
        "TensorRT-LLM, Python": lambda: tensorrt_llm.in_python(_once(lists)),
        triton.TITLE: lambda: _cpp(_once(lists)),
        "Model Optimizer": lambda: _modelopt(_once(lists)),
        "RTP-LLM's old path": lambda: Tree.from_choices([p for p in tree.paths[1:] if len(p) <= RTP_LLM_DEPTH]),
    }
    if any(not choice for choice in choices):  # what these make of a listed root is not known
        ports = {name: port for name, port in ports.items() if name != triton.TITLE and "TensorRT" not in name}
    found = [_reading(name, port, tree) for name, port in ports.items()]
    rows, meant = len(choices) + 1, len({tuple(choice) for choice in choices}) + 1
    if rows > meant:
        counting = ("Medusa", "TensorRT-LLM, C++", triton.TITLE, "Model Optimizer")
        why = f"It verifies {rows} rows, of which {meant} differ: a choice that comes twice takes two."
        found = [
            Reading(r.engine, "another tree", why) if r.engine in counting and r.reads == "the same" else r
            for r in found
        ]
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


def _once(choices: Choices) -> Choices:
    """The list without choices that come again; lists and tuples stay what they are."""
    return list({(type(choice), *choice): choice for choice in choices}.values())


def _eagle(choices: Choices) -> Tree:
    eagle1.drafting_levels(choices)
    return eagle1.verified(choices)


def _modelopt(choices: Choices) -> Tree:
    try:
        modelopt.total_nodes(choices)
    except InvalidInput as error:
        raise ValueError(str(error).rstrip(".")) from None
    return decoded(medusa_buffers(choices))


def _cpp(choices: Choices) -> Tree:
    orphans = sum(len(choice) > 1 and choice[:-1] not in choices for choice in choices)
    try:
        read = tensorrt_llm.in_cpp(choices, len(choices), tensorrt_llm.MOST_DEPTH)
    except InvalidInput as error:
        if str(error).startswith("TensorRT-LLM checks"):
            raise ValueError(str(error).rstrip(".")) from None
        if not orphans:
            raise
    if orphans:
        raise InvalidInput(f"{orphans} of them have no parent, and it silently puts these below the root.")
    return read


def by_counts(tree: Tree) -> Tree:
    """The tree of an engine that keeps how many children every node has, and not which.

    >>> by_counts(Tree.from_choices([[1], [1, 2]])).choices
    [[0], [0, 0]]
    """
    taken: dict[Choice, Choice] = {(): ()}
    children: dict[Choice, int] = {}
    for path in tree.paths[1:]:
        rank = children.get(path[:-1], 0)
        children[path[:-1]] = rank + 1
        taken[path] = (*taken[path[:-1]], rank)
    return Tree.from_choices(list(taken.values())[1:])


def document(found: Diagnosis) -> dict[str, Any]:
    """What ``treeopt import-tree`` says, JSON-ready."""
    return {
        "medusa_choices": found.tree.choices,
        "size": len(found.tree),
        "depth": found.tree.depth,
        "repaired": list(found.repaired),
        "engines": [vars(reading) for reading in found.readings],
    }
