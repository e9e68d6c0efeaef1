"""Trees from files of every engine: the choices as they stand there, whatever is wrong with them.

Read are lists in Python, JSON or YAML, objects with a list under one of `KEYS`, launch commands with one behind a
flag, Triton's braces, Neuron's lists of children, vLLM's string of tuples, and chain lengths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from treeopt.engines.base import Choices
from treeopt.engines.lists import the_list
from treeopt.errors import InvalidInput
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
# Triton's paths in braces: in config.pbtxt, as an argument of fill_template.py (with its other pairs), and alone.
PBTXT = re.compile(r'key:\s*"(?:medusa|eagle)_choices"\s*(?:,\s*)?value:\s*\{\s*string_value:\s*"([^"]*)"')
ARGUMENT = re.compile(r"((?:(?<![^'\"\s])[\w.]+:[^'\"\s]*,)?(?:medusa|eagle)_choices:\{[^'\"\n]*)")
BARE = re.compile(r"\A\s*(\{\s*(?:\{\s*)?-?\d[^\"]*)\Z")
PLAIN = re.compile(r"(?:# For .*\n)?# No (?:tree|chain) pays")  # begins files for serving without speculation


def read_choices(text: str) -> Choices | None:
    """The choices of a text; None where it is no file that an engine reads.

    >>> read_choices("- [0]\\n- [1]\\n"), read_choices("{0},{0, 1}"), read_choices("nothing")
    ([[0], [1]], [[0], [0, 1]], None)
    """
    if PLAIN.match(text):
        return []
    check_chars(text)
    for reader in (_document, _python, _flag, _braces, _length):
        found = reader(text)
        if found is not None:
            check_size(
                len(found), max((len(choice) for choice in found if isinstance(choice, list | tuple)), default=0)
            )
            return found
    return None


def check_chars(text: str) -> None:
    """InvalidInput for a text that is too long for a tree's file."""
    if len(text) > MOST_CHARS:
        raise InvalidInput(f"A tree's file may have {MOST_CHARS:,} characters, but this one has {len(text):,}.")


def _document(text: str) -> Choices | None:
    """JSON or YAML."""
    try:
        document = loads(text)
    except ValueError:
        try:
            document = parse_yaml(text)
        except ValueError:
            return None
        if isinstance(document, dict) and not all(isinstance(key, str) for key in document):
            return None  # braces are a mapping to YAML
    return in_document(document)


def in_document(document: Any) -> Choices | None:
    """The choices of a JSON or YAML document."""
    if isinstance(document, str) and document.startswith("["):
        return _literal(document)
    if isinstance(document, list):
        return document if all(isinstance(item, list) for item in document) else None
    if not isinstance(document, dict):
        return None
    if document and all(re.fullmatch(r"\d+", key) for key in document):
        return _children(document)
    for found in _values(document, KEYS):
        return _python(found) if isinstance(found, str) else in_document(found)
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


def _children(document: Mapping[str, Any]) -> Choices | None:
    """Neuron's lists of children by number."""
    from treeopt.engines.neuron import token_tree

    if not all(isinstance(row, list) for row in document.values()):
        return None
    try:
        return token_tree(document).choices
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"A token tree must have lists of numbers: {error!s:.100}.") from None


def _python(text: str) -> Choices | None:
    """A list in Python."""
    try:
        return the_list(text)
    except InvalidInput as error:
        if "keep one of them" in str(error):
            raise
        return None


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


def in_braces(text: str) -> tuple[str, bool] | None:
    """Triton's value, and whether it stands in an argument of fill_template.py; None where there is none."""
    for form in (PBTXT, ARGUMENT, BARE):
        if found := form.search(text):
            return found[1], form is ARGUMENT
    return None


def _braces(text: str) -> Choices | None:
    """Triton's paths in braces, as its backend reads them."""
    from treeopt.engines import triton

    found = in_braces(text)
    if found is None:
        return None
    value, argument = found
    check_size(value.count("{"))
    if argument:
        value = next(v for k, v in triton.filled_in(value).items() if k.endswith("_choices"))
    read = triton.vectors(value)
    if len(read) < value.count("{"):
        raise InvalidInput(
            f"Triton's backend would read {len(read)} of the {value.count('{')} paths in braces and drop the others: "
            "repair it with treeopt import-tree."
        )
    return list(read)


def _length(text: str) -> Choices | None:
    """A chain length behind a flag."""
    found = LENGTH_FLAG.search(text)
    if found is None:
        config = re.search(r"--speculative-config[= ]+'(.*?)'", text, re.S)
        return _document(config[1]) if config else None
    rows = found[1] in ROWS and "lmdeploy" not in found[0]
    return Tree.chain(max(0, int(found[2]) - rows)).choices
