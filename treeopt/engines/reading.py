"""Trees from files of every engine, as they stand there: nothing is repaired.

Read are lists in Python, JSON or YAML, objects with a list under one of `KEYS`, launch commands with one behind a
flag, Triton's braces, Neuron's lists of children, vLLM's string of tuples, and chain lengths.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from treeopt.engines import neuron
from treeopt.engines.lists import Choices, the_list
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import loads, parse_literal, parse_yaml
from treeopt.trees.tree import Tree, check_size

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
UNREADABLE = "The file must hold a tree: a list of choices, an object with 'medusa_choices', a plan, or an engine's configuration."


def tree_in(text: str) -> Tree:
    """The tree that a text holds. Raises InvalidInput where it holds none, or a list of something else.

    >>> tree_in("- [0]\\n- [1]\\n").choices, tree_in("{0},{0, 1},{0, 0}").choices
    ([[0], [1]], [[0], [0, 0], [0, 1]])
    """
    choices = _choices_in(text)
    if choices is None:
        raise InvalidInput(UNREADABLE)
    if other := _other_kind(choices):
        raise InvalidInput(f"it must hold a list of choices, but holds {other}.")
    return Tree.from_choices(choices)


def _other_kind(items: Choices) -> str:
    """What a list holds instead of choices, in words; empty if it may be choices."""
    rows = [row for row in items if isinstance(row, list | tuple)]
    if len(rows) < len(items):
        return ""
    values = {value for row in rows for value in row if isinstance(value, int | float)}
    if len(rows) > 1 and len(values) <= 2 and {len(row) for row in rows} == {len(rows)}:
        return f"a square matrix of {len(rows)} rows, as an attention mask is, which does not say the ranks of guesses"
    if any(len(row) == 0 for row in rows):
        return "empty lists, as lists of children by number have; the root, [], is never listed among choices"
    paths = set(map(repr, map(list, rows)))
    deep = [row for row in rows if len(row) > 1]
    if deep and not any(repr(list(row[:-1])) in paths for row in deep):
        return "lists of leaves, edges or children: among choices every guess is listed, not only those at the ends of paths"
    return ""


def _choices_in(text: str) -> Choices | None:
    """The choices of a text, unrepaired; None if no engine reads such a file."""
    if PLAIN.match(text):
        return []
    if len(text) > MOST_CHARS:
        raise InvalidInput(f"A tree's file may have {MOST_CHARS:,} characters, but this one has {len(text):,}.")
    for form in (PBTXT, ARGUMENT, BARE):
        if found := form.search(text):
            return _braces(found[1].replace("\\,", ","))
    document = _document(text)
    if isinstance(document, dict) and document and all(isinstance(key, str) and key.isdigit() for key in document):
        return _children(document)
    for read in (partial(in_document, document), partial(the_list, text), partial(_flag, text), partial(_length, text)):
        choices = read()
        if choices is not None:
            return choices
    return None


def _the_one(trees: Iterable[Choices | None]) -> Choices | None:
    """The one tree that a file has, perhaps in several places; InvalidInput where it has several."""
    found = list[Choices]()
    for choices in trees:
        if choices is not None and choices not in found:
            found.append(choices)
    if len(found) > 1:
        raise InvalidInput(f"it must hold one tree, but has {len(found)}: keep one of them.")
    return found[0] if found else None


def _document(text: str) -> Any:
    """JSON or YAML; None where it is neither."""
    for read in (loads, parse_yaml):
        try:
            return read(text)
        except ValueError:
            pass
    return None


def in_document(document: Any) -> Choices | None:
    if isinstance(document, str) and document.startswith("["):
        return _literal(document)
    if isinstance(document, list):
        return document if all(isinstance(item, list) for item in document) else None
    if not isinstance(document, dict):
        return None
    listed = (the_list(found) if isinstance(found, str) else in_document(found) for found in _values(document, KEYS))
    tuples = (_literal(found) for found in _values(document, ("speculative_token_tree",)) if isinstance(found, str))
    trees = _the_one([*listed, *tuples])
    lengths = (Tree.chain(n).choices for n in _values(document, LENGTHS) if type(n) is int and n > 0)
    return _the_one(lengths) if trees is None else trees


def _values(document: Mapping[str, Any], keys: tuple[str, ...], depth: int = 3) -> Iterator[Any]:
    for key in keys:
        if key in document:
            yield document[key]
    for value in document.values() if depth else ():
        if isinstance(value, dict):
            yield from _values(value, keys, depth - 1)


def _children(document: Mapping[str, list[Any]]) -> Choices:
    try:
        choices = neuron.token_tree(document).choices
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"A token tree must have lists of numbers: {error!s:.100}.") from None
    lost = len({*document, *(str(child) for row in document.values() for child in row)}) - 1 - len(choices)
    if lost > 0:
        raise InvalidInput(
            f"The root of a token tree must reach every node, but it does not reach {lost}, which Neuron leaves out."
        )
    return choices


def _literal(text: str) -> Choices | None:
    try:
        found = parse_literal(text)
    except ValueError:
        return None
    return list(found) if isinstance(found, list | tuple) else None


def _flag(text: str) -> Choices | None:
    """The list behind the flags of a launch command."""
    return _the_one(_literal(found[2]) for found in FLAG.finditer(text))


def _length(text: str) -> Choices | None:
    """The chain length behind the flags of a launch command."""
    lengths = [
        int(found[2]) - (found[1] in ROWS and "lmdeploy" not in found[0]) for found in LENGTH_FLAG.finditer(text)
    ]
    if lengths:
        return _the_one(Tree.chain(max(0, length)).choices for length in lengths)
    config = re.search(r"--speculative-config[= ]+'(.*?)'", text, re.S)
    return in_document(_document(config[1])) if config else None


def _braces(value: str) -> Choices:
    """Every path that stands in Triton's string."""
    check_size(value.count("{") + value.count("["))
    try:
        if value.lstrip().startswith("["):
            return list(parse_literal(value))
        if value.count("{") != value.count("}"):
            raise ValueError
        pieces = re.findall(r"\{([^{}]*)", value)
        return [[int(rank) for rank in piece.split(",")] for piece in pieces if piece.strip()]
    except (ValueError, TypeError):
        raise InvalidInput(f"Braces must hold ranks 0, 1, ... and be closed, but there is {quoted(value)}.") from None
