"""Trees from files of every engine: what was meant, and what was repaired.

Read are lists in Python, JSON or YAML, objects with a list under one of `KEYS`, launch commands with one behind a
flag, Triton's braces, Neuron's lists of children, vLLM's string of tuples, and chain lengths.

Repaired is what has one repair: order, duplicates, a listed root, tuples, an unclosed brace, and lists of leaves,
whose parents are added. A parent that is missing beside others that are there has none, and is refused.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from treeopt.engines import neuron
from treeopt.engines.lists import Choices, in_order, the_list
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import loads, parse_literal, parse_yaml
from treeopt.trees.tree import Choice, Tree, check_size

MOST_CHARS = 2**20  # of a tree's file
KEYS = ("medusa_choices", "hydra_choices", "eagle_choices", "tree_choices", "medusa_tree")
LENGTHS = ("num_speculative_tokens", "max_draft_len", "num_assistant_tokens", "prompt_lookup_num_tokens")
FLAG = re.compile(r"--(?:medusa|hydra|eagle|tree)[-_]choices[= ]+([\"'])(.*?)\1", re.S)
LENGTH_FLAG = re.compile(
    r"^[^#\n]*?--(speculate|speculative-num-steps|speculative-num-draft-tokens|spec-draft-n-max|draft-max"
    r"|spec-ngram-simple-size-m|speculative-dspark-block-size|gen_num_per_cycle|beam_length)[ =](\d{1,4})\b",
    re.M,
)
ROWS = ("beam_length", "speculative-num-draft-tokens")  # count the root, LMDeploy's excepted
# Triton's paths in braces: in config.pbtxt, as an argument of fill_template.py, and alone.
PBTXT = re.compile(r'key:\s*"(?:medusa|eagle)_choices"\s*(?:,\s*)?value:\s*\{\s*string_value:\s*"([^"]*)"')
ARGUMENT = re.compile(r"(?:medusa|eagle)_choices:(\{[^'\"\n]*)")
BARE = re.compile(r"\A\s*(\{\s*(?:\{\s*)?-?\d[^\"]*)\Z")
PLAIN = re.compile(r"(?:# For .*\n)?# No (?:tree|chain) pays")  # begins files for serving without speculation
NO_RANKS = "Every choice must be a list of ranks 0, 1, ..., but there is {}."
UNREADABLE = "The file must hold a tree: a list of choices, an object with 'medusa_choices', a plan, or an engine's configuration."
Listed = tuple[Choices, tuple[str, ...]]  # the choices that a text means, and what was repaired in its syntax


def read_choices(text: str) -> Choices | None:
    """The choices of a text as they stand there; None where it is no file that an engine reads.

    >>> read_choices("- [0]\\n- [1]\\n"), read_choices("{0},{0, 1}"), read_choices("nothing")
    ([[0], [1]], [[0], [0, 1]], None)
    """
    choices, repaired = _listed(text) or (None, ())
    if repaired:
        raise InvalidInput(f"{''.join(repaired)} Repair it with treeopt import-tree.")
    return choices


def diagnose(text: str) -> tuple[Tree, tuple[str, ...]]:
    """The tree of a text, and what was repaired; InvalidInput where it is none, or where no repair is obvious.

    >>> tree, repaired = diagnose("[[1, 0], [0]]")
    >>> tree.choices, repaired
    ([[0], [1], [1, 0]], ('The list has only leaves: 1 parent was added.',))
    """
    found = _listed(text)
    if found is None:
        raise InvalidInput(UNREADABLE)
    tree, more = repair(found[0])
    return tree, (*found[1], *more)


def repair(choices: Choices) -> tuple[Tree, tuple[str, ...]]:
    """The tree that a list means, and what had to be repaired.

    >>> repair([(0,), (0,), ()])[1]
    ('The root was listed. It is left out.', 'Choices that came twice are kept once: [0].')
    """
    for choice in choices:
        if not (isinstance(choice, list | tuple) and all(type(rank) is int and rank >= 0 for rank in choice)):
            raise InvalidInput(NO_RANKS.format(quoted(choice)))
    repaired = ["Lists and tuples were mixed. All are lists now."] * (len(set(map(type, choices))) > 1)
    times = Counter(tuple(choice) for choice in choices)
    if times.pop((), 0):
        repaired.append("The root was listed. It is left out.")
    if twice := [quoted(list(path)) for path in times if times[path] > 1]:
        more = f" and {len(twice) - 3} more" if len(twice) > 3 else ""
        repaired.append(f"Choices that came twice are kept once: {', '.join(twice[:3])}{more}.")
    added: dict[Choice, None] = {}
    for path in times:
        added |= {path[:depth]: None for depth in range(1, len(path)) if path[:depth] not in times}
    if added and any(path[:depth] in times for path in times for depth in range(1, len(path))):
        orphan = next(path for path in times if len(path) > 1 and path[:-1] not in times)
        raise InvalidInput(
            f"Every choice needs its parent in the list, but {quoted(list(orphan))} lacks {quoted(list(orphan[:-1]))} where "
            "others have theirs: add it, or leave the choice out. Engines fail on it, or silently take another tree."
        )
    if added:
        repaired.append(
            f"The list has only leaves: {len(added)} {'parents were' if len(added) > 1 else 'parent was'} added."
        )
    elif in_order(times) != list(times):
        repaired.append("The choices were in another order. That makes no difference to the engines.")
    return Tree.from_choices([*times, *added]), tuple(repaired)


def _listed(text: str) -> Listed | None:
    """What a text means; None where it is no file that an engine reads."""
    if PLAIN.match(text):
        return [], ()
    if len(text) > MOST_CHARS:
        raise InvalidInput(f"A tree's file may have {MOST_CHARS:,} characters, but this one has {len(text):,}.")
    for form in (PBTXT, ARGUMENT, BARE):
        if found := form.search(text):
            return _braces(found[1].replace("\\,", ","))
    document = _document(text)
    if isinstance(document, dict) and all(isinstance(row, list) for row in document.values()) and "0" in document:
        return _children(document)
    for read in (partial(in_document, document), partial(the_list, text), partial(_flag, text), partial(_length, text)):
        choices = read()
        if choices is not None:
            check_size(len(choices), max((len(one) for one in choices if isinstance(one, list | tuple)), default=0))
            return choices, ()
    return None


def _document(text: str) -> Any:
    """JSON or YAML; None where it is neither."""
    for read in (loads, parse_yaml):
        try:
            return read(text)
        except ValueError:
            pass
    return None


def in_document(document: Any) -> Choices | None:
    """The choices of a JSON or YAML document."""
    if isinstance(document, str) and document.startswith("["):
        return _literal(document)
    if isinstance(document, list):
        return document if all(isinstance(item, list) for item in document) else None
    if not isinstance(document, dict):
        return None
    if document and all(isinstance(key, str) and key.isdigit() for key in document):
        raise InvalidInput("A token tree must give the root, 0, at least one child, and all nodes lists of numbers.")
    for found in _values(document, KEYS):
        return the_list(found) if isinstance(found, str) else in_document(found)
    for found in _values(document, ("speculative_token_tree",)):
        return _literal(found) if isinstance(found, str) else None
    for found in _values(document, LENGTHS):
        return Tree.chain(found).choices if type(found) is int and found > 0 else None
    return None


def _values(document: Mapping[str, Any], keys: tuple[str, ...], depth: int = 3) -> Iterator[Any]:
    """Values under one of the keys, in the document or in objects of it."""
    for key in keys:
        if key in document:
            yield document[key]
    for value in document.values() if depth else ():
        if isinstance(value, dict):
            yield from _values(value, keys, depth - 1)


def _children(document: Mapping[str, list[Any]]) -> Listed:
    """Neuron's lists of children by number."""
    try:
        choices = neuron.token_tree(document).choices
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"A token tree must have lists of numbers: {error!s:.100}.") from None
    lost = len({*document, *(str(child) for row in document.values() for child in row)}) - 1 - len(choices)
    note = f"{lost} nodes that the root does not reach are left out, as Neuron silently does."
    return choices, (note,) * (lost > 0)


def _literal(text: str) -> Choices | None:
    try:
        found = parse_literal(text)
    except ValueError:
        return None
    return list(found) if isinstance(found, list | tuple) else None


def _flag(text: str) -> Choices | None:
    """A list behind a flag of a launch command."""
    found = FLAG.search(text)
    return _literal(found[2]) if found else None


def _length(text: str) -> Choices | None:
    """A chain length behind a flag."""
    found = LENGTH_FLAG.search(text)
    if found is None:
        config = re.search(r"--speculative-config[= ]+'(.*?)'", text, re.S)
        return in_document(_document(config[1])) if config else None
    rows = found[1] in ROWS and "lmdeploy" not in found[0]
    return Tree.chain(max(0, int(found[2]) - rows)).choices


def _braces(value: str) -> Listed:
    """Every path that stands in Triton's string."""
    check_size(value.count("{") + value.count("["))
    try:
        if value.lstrip().startswith("["):
            choices = list(parse_literal(value))
        else:
            pieces = re.findall(r"\{([^{}]*)", value)
            choices = [[int(rank) for rank in piece.split(",")] for piece in pieces if piece.strip()]
    except (ValueError, TypeError):
        raise InvalidInput(NO_RANKS.format(quoted(value))) from None
    if value.count("{") > value.count("}"):
        return choices, ("A brace was not closed. It was closed.",)
    return choices, ("Braces around the whole list are left out.",) * value.lstrip().startswith("{{")
