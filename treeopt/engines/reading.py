"""Trees from files of every engine. Nothing is repaired.

A file may be a list in Python, JSON or YAML, an object with a list under one of `KEYS`, a launch command with a list behind a
flag, Neuron's lists of children, vLLM's string of tuples, or a chain's length in a configuration or a launch command.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from treeopt.engines import neuron
from treeopt.engines.lists import Choices, the_list
from treeopt.errors import InvalidInput
from treeopt.files.bounds import loads, parse_literal, parse_yaml
from treeopt.trees.tree import Tree

MOST_CHARS = 2**20  # of a tree's file
KEYS = ("medusa_choices", "hydra_choices", "tree_choices", "medusa_tree")
LENGTHS = ("num_speculative_tokens", "max_draft_len", "num_assistant_tokens", "prompt_lookup_num_tokens")
FLAG = re.compile(r"--(?:medusa|hydra|tree)[-_]choices[= ]+([\"'])(.*?)\1", re.S)
LENGTH_FLAG = re.compile(
    r"^[^#\n]*?--(speculate|speculative-num-steps|speculative-num-draft-tokens|spec-draft-n-max|draft-max"
    r"|spec-ngram-simple-size-m|speculative-dspark-block-size|gen_num_per_cycle|beam_length)[ =](\d{1,4})\b",
    re.M,
)
ROWS = ("beam_length", "speculative-num-draft-tokens")  # flags that count the root, but for LMDeploy's
CONFIG = re.compile(r"--speculative-config[= ]+'(.*?)'", re.S)  # vLLM's
PLAIN = re.compile(r"(?:# For .*\n)?# No (?:tree|chain) pays")  # begins an export that does not speculate


def tree_in(text: str) -> Tree:
    """The tree that a text holds. Raises InvalidInput where it holds none, several, or a list of something else.

    >>> tree_in("- [0]\\n- [1]\\n").choices, tree_in("vllm serve --tree-choices '[[0], [0, 0]]'").choices
    ([[0], [1]], [[0], [0, 0]])
    """
    if PLAIN.match(text):
        return Tree.chain(0)
    if len(text) > MOST_CHARS:
        raise InvalidInput(f"A tree's file may have {MOST_CHARS:,} characters, but this one has {len(text):,}.")
    document = _document(text)
    if isinstance(document, dict) and document and all(isinstance(key, str) and key.isdigit() for key in document):
        return _tree_of_children(document)
    choices = _choices_in(text, document)
    if choices is None:
        raise InvalidInput(
            "The file must hold a tree: a list of choices, an object with 'medusa_choices', a plan, or an engine's configuration."
        )
    return Tree.from_choices(choices)


def _choices_in(text: str, document: Any) -> Choices | None:
    """The choices of a text; None if it has none. ``document`` is the text as JSON or YAML."""
    choices = _in_document(document)
    if choices is None:
        choices = the_list(text)
    if choices is None:
        choices = _the_one(_literal(flag[2]) for flag in FLAG.finditer(text))
    return _length(text) if choices is None else choices


def _document(text: str) -> Any:
    """JSON or YAML; None where it is neither."""
    for read in (loads, parse_yaml):
        try:
            return read(text)
        except ValueError:
            pass
    return None


def _in_document(document: Any) -> Choices | None:
    if isinstance(document, str) and document.startswith("["):
        return _literal(document)
    if isinstance(document, list):
        return document if all(isinstance(item, list) for item in document) else None
    if not isinstance(document, dict):
        return None
    trees = [
        the_list(value) if isinstance(value, str) else _in_document(value) for value in _values_under(KEYS, document)
    ]
    token_trees = _values_under(("speculative_token_tree",), document)
    trees += [_literal(value) for value in token_trees if isinstance(value, str)]
    choices = _the_one(trees)
    if choices is not None:
        return choices
    lengths = [value for value in _values_under(LENGTHS, document) if type(value) is int and value > 0]
    return _the_one(Tree.chain(length).choices for length in lengths)


def _values_under(keys: tuple[str, ...], document: Mapping[str, Any], depth: int = 3) -> Iterator[Any]:
    """The values under these keys, of an object and of the objects in it down to a depth."""
    for key in keys:
        if key in document:
            yield document[key]
    for value in document.values() if depth else ():
        if isinstance(value, dict):
            yield from _values_under(keys, value, depth - 1)


def _the_one(trees: Iterable[Choices | None]) -> Choices | None:
    """The one tree that a file has, perhaps in several places. Raises InvalidInput where it has several."""
    different = list[Choices]()
    for choices in trees:
        if choices is not None and choices not in different:
            different.append(choices)
    if len(different) > 1:
        raise InvalidInput(f"it must hold one tree, but has {len(different)}: keep one of them.")
    return different[0] if different else None


def _tree_of_children(document: Mapping[str, list[Any]]) -> Tree:
    """The tree of Neuron's lists of children by number."""
    try:
        tree = neuron.token_tree(document)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"A token tree must have lists of numbers: {error!s:.100}.") from None
    numbers = {*document, *(str(child) for children in document.values() for child in children)}
    if lost := len(numbers) - len(tree):
        raise InvalidInput(
            f"The root of a token tree must reach every node, but it does not reach {lost}, which Neuron leaves out."
        )
    return tree


def _literal(text: str) -> Choices | None:
    """A list or a tuple of Python as a list; None for other text."""
    try:
        value = parse_literal(text)
    except ValueError:
        return None
    return list(value) if isinstance(value, list | tuple) else None


def _length(text: str) -> Choices | None:
    """The chain whose length stands behind a flag of a launch command."""
    lengths = []
    for flag in LENGTH_FLAG.finditer(text):
        counts_root = flag[1] in ROWS and "lmdeploy" not in flag[0]
        lengths.append(int(flag[2]) - counts_root)
    if lengths:
        return _the_one(Tree.chain(max(0, length)).choices for length in lengths)
    config = CONFIG.search(text)
    return _in_document(_document(config[1])) if config else None
