"""Trees from files of every engine. Nothing is repaired, and no code of a file is run.

A file is JSON, YAML, Python or a launch command. It holds lists of choices, lists of children (Neuron's and Sequoia's), vLLM's
string of tuples, or a chain's length. Where it holds several trees, each is called by the place where it stands.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from treeopt.engines import neuron
from treeopt.engines.lists import Choices
from treeopt.errors import InvalidInput
from treeopt.files.bounds import loads, parse_literal, parse_python, parse_yaml
from treeopt.trees.tree import Tree

MOST_CHARS = 2**20  # of a tree's file
KEYS = ("medusa_choices", "hydra_choices", "tree_choices", "medusa_tree", "speculative_token_tree")
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
NEWLINE = "\n"
CODE = "made by code, which is not run"  # in place of a list
COPIES = ("str", "list", "tuple", "sorted", "dumps")  # functions that change nothing of a tree
NO_TREE = "The file must hold a tree: a list of choices, an object with 'medusa_choices', a plan, or an engine's configuration."


def tree_in(text: str, name: str = "") -> Tree:
    """The tree that a text holds; of several the one that is called ``name``, or whose name ends so.

    Raises InvalidInput where it holds none, several, one that code makes, or a list of something else.

    >>> tree_in("- [0]\\n- [1]\\n").choices, tree_in("vllm serve --tree-choices '[[0], [0, 0]]'").choices
    ([[0], [1]], [[0], [0, 0]])
    >>> tree_in("TREES = {'small': [(0,)], 'large': [(0,), (1,)]}", "large").choices
    [[0], [1]]
    """
    if PLAIN.match(text):
        return Tree.chain(0)
    if len(text) > MOST_CHARS:
        raise InvalidInput(f"A tree's file may have {MOST_CHARS:,} characters, but this one has {len(text):,}.")
    document, names = _document(text)
    places = list(_places(document))
    trees = _trees(places, names) or _flags(text) or _lengths(places) or _length_flags(text)
    if not trees:
        raise InvalidInput(_mask(value for _, value in places) or NO_TREE)
    meant = {place: tree for place, tree in trees.items() if not name or f".{place}".endswith(f".{name}")}
    different = list[Any]()
    for tree in meant.values():
        if tree not in different:
            different.append(tree)
    if len(different) != 1:
        known = ", ".join(f"{place} ({CODE})" if tree == CODE else place for place, tree in trees.items())
        raise InvalidInput(f"it must hold one tree, but has {len(trees)}, {known}: say which is meant by FILE:NAME.")
    if different == [CODE]:
        raise InvalidInput(f"its tree, {next(iter(meant))}, is {CODE}: write the list out.")
    return _checked(different[0])


def _checked(choices: Choices) -> Tree:
    """The tree of a list of choices. Raises InvalidInput for widths, for a mask, and for another list."""
    if choices and all(type(width) is int and width > 0 for width in choices):
        readings = [choices[1:], choices] if choices[0] == 1 else [choices]
        rows = " or ".join(f"{len(Tree.dense(widths))} rows" for widths in readings)
        raise InvalidInput(
            f"{choices} are widths of a dense tree ({rows}), not choices. The first form of Medusa wrote a 1 for the root before "
            "the widths, others begin with the first guess. Write the choices out: "
            f"{' or '.join(f'treeopt.Tree.dense({widths}).choices' for widths in readings)}."
        )
    if reason := _mask([choices]):
        raise InvalidInput(reason)
    return Tree.from_choices(choices)


def _mask(values: Iterable[Any]) -> str:
    """Why values hold an attention mask instead of a tree; empty if they do not."""
    for value in values:
        while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            value = value[0]
        rows = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else []
        if len(rows) < 2 or any(len(row) != len(rows) for row in rows):
            continue
        numbers = {number for row in rows for number in row if isinstance(number, int | float)}
        if numbers == {0, 1} or (max(numbers, default=1) == 0 and len(numbers) > 1):  # allowed, or added to scores
            return (
                f"it is an attention mask of {len(rows)} rows, and a mask is no list of choices: it says which rows descend from "
                "which, but not the ranks of their guesses. Pass the list that it was made of."
            )
    return ""


def _document(text: str) -> tuple[Any, Collection[str]]:
    """A text as JSON, Python or YAML, and the places of lists that the user wrote as trees, whatever they hold."""
    for read in (loads, _python, parse_yaml):
        try:
            document = read(text)
        except ValueError:
            continue
        if read is _python:
            return document, document.keys()
        return document, {""}
    return None, {""}


def _python(text: str) -> dict[str, Any]:
    """The values of a Python text by name, of others by line. Raises ValueError where none could be a tree."""
    names = dict[str, Any]()
    for statement in ast.walk(parse_python(text)):
        if not isinstance(statement, ast.stmt) or hasattr(statement, "body"):
            continue
        for node in ast.walk(statement):  # what may change a list
            is_item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
            is_call = isinstance(node, ast.Attribute) and not isinstance(statement, ast.Assign)
            base = getattr(node, "value", None) if is_item or is_call else None
            base = node.target if isinstance(node, ast.AugAssign) else base
            if isinstance(base, ast.Name) and names.get(base.id):
                names[base.id] = CODE
        target = next(iter(getattr(statement, "targets", [getattr(statement, "target", None)])), None)
        name = target.id if isinstance(target, ast.Name) else f"line {statement.lineno}"
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr) and statement.value is not None:
            name = f"{name} (line {statement.lineno})" if names.get(name) else name
            value = _value(statement.value, names)
            names[name] = None if value is CODE and isinstance(statement, ast.Expr) else value
    found = {name: value for name, value in names.items() if value and isinstance(value, dict | list | tuple | str)}
    if not found:
        raise ValueError("it has nothing that could be a tree")
    return found


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression is as far as it is written down; `CODE` for a list of other lists; None for the rest."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _value(value, names) for key, value in pairs if isinstance(key, ast.Constant)}
    function = getattr(node, "func", None)
    if (
        isinstance(node, ast.Call)
        and len(node.args) == 1
        and getattr(function, "attr", getattr(function, "id", "")) in COPIES
    ):
        return _value(node.args[0], names)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if isinstance(node, ast.List) and all(isinstance(item, ast.Dict | ast.Call) for item in node.elts):
        return [_value(item, names) for item in node.elts]
    arguments = [*node.args, node.func] if isinstance(node, ast.Call) else [node]
    inner = [part for argument in arguments for part in ast.walk(argument)]
    if any(isinstance(part, ast.Name) and isinstance(names.get(part.id), list | str) for part in inner):
        return CODE
    if isinstance(node, ast.Call):
        return {word.arg: _value(word.value, names) for word in node.keywords if word.arg}
    makes_list = isinstance(node, ast.List | ast.ListComp | ast.BinOp)
    return (
        CODE
        if makes_list and any(isinstance(part, ast.List | ast.Tuple) for part in inner if part is not node)
        else None
    )


def _places(value: Any, name: str = "", depth: int = 6) -> Iterator[tuple[str, Any]]:
    """Every value of a document with the keys that lead to it."""
    if isinstance(value, dict):
        value = _children(value) or value
    yield name, value
    items: Iterable[tuple[object, Any]] = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = enumerate(value, 1)
    for key, item in items if depth else ():
        yield from _places(item, f"{name}.{key}" if name else str(key), depth - 1)


def _trees(places: Sequence[tuple[str, Any]], names: Collection[str]) -> dict[str, Any]:
    """The lists of choices by place. A list that is under none of `KEYS` or ``names`` counts where it is a tree."""
    trees, widths = dict[str, Any](), dict[str, Any]()
    for place, value in places:
        parent, _, key = place.rpartition(".")
        is_meant = key in KEYS or place in names
        place = parent if parent and key in KEYS else place
        if isinstance(value, str) and is_meant and value != CODE:
            value = _literal(value)
        if value is CODE and is_meant:
            trees[place] = CODE
        elif not isinstance(value, list | tuple):
            continue
        elif all(isinstance(item, list | tuple) for item in value) and (is_meant or _is_tree(value)):
            trees[place] = [list(choice) for choice in value]
        elif is_meant and all(type(item) is int for item in value):
            widths[place] = list(value)
    return trees or widths


def _is_tree(choices: Sequence[Any]) -> bool:
    try:
        return bool(choices) and bool(Tree.from_choices(choices))
    except InvalidInput:
        return False


def _children(document: Mapping[str, Any]) -> Choices | None:
    """The choices of lists of children by node, as Neuron has them, or Sequoia's growmap; None for another object."""
    successors = document.get("Successors")
    if isinstance(successors, list):
        document = {str(node): children for node, children in enumerate(successors)}
    is_flat = all(
        isinstance(row, list) and not any(isinstance(child, list) for child in row) for row in document.values()
    )
    if not document or not is_flat or not all(str(key).isdigit() for key in document):
        return None
    try:
        tree = neuron.token_tree(document)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"A token tree must have lists of numbers: {error!s:.100}.") from None
    numbers = {*map(str, document), *(str(child) for children in document.values() for child in children)}
    if lost := len(numbers) - len(tree):
        raise InvalidInput(f"The root of a token tree must reach every node, but it does not reach {lost}.")
    return tree.choices


def _literal(text: str) -> Choices | None:
    """A list or a tuple of Python as a list; None for other text."""
    try:
        value = parse_literal(text)
    except ValueError:
        return None
    return list(value) if isinstance(value, list | tuple) else None


def _flags(text: str) -> dict[str, Choices]:
    """The lists behind flags of launch commands, by line."""
    lists = {f"line {text.count(NEWLINE, 0, flag.start()) + 1}": _literal(flag[2]) for flag in FLAG.finditer(text)}
    return {line: choices for line, choices in lists.items() if choices is not None}


def _lengths(places: Iterable[tuple[str, Any]]) -> dict[str, Choices]:
    """The chains whose length a configuration has."""
    lengths = {place: value for place, value in places if place.rpartition(".")[2] in LENGTHS}
    return {
        place: Tree.chain(length).choices for place, length in lengths.items() if type(length) is int and length > 0
    }


def _length_flags(text: str) -> dict[str, Choices]:
    """The chains whose length stands behind a flag of a launch command, by line."""
    lengths = dict[str, Choices]()
    for flag in LENGTH_FLAG.finditer(text):
        counts_root = flag[1] in ROWS and "lmdeploy" not in flag[0]
        line = f"line {text.count(NEWLINE, 0, flag.end()) + 1}"
        lengths[line] = Tree.chain(max(0, int(flag[2]) - counts_root)).choices
    if not lengths and (config := CONFIG.search(text)):
        places = list(_places(_document(config[1])[0]))
        return _trees(places, ()) or _lengths(places)
    return lengths
