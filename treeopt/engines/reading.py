"""Trees from files of every engine. Nothing is repaired, and no code of a file is run.

A file is JSON, YAML, Python or a launch command. It holds lists of choices, lists of children (Neuron's and Sequoia's), vLLM's
string of tuples, or a chain's length. Where it holds several trees, each is called by the place where it stands.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from treeopt.engines import neuron
from treeopt.errors import InvalidInput
from treeopt.files.bounds import loads, parse_literal, parse_python, parse_yaml
from treeopt.trees.tree import Tree

Choices = list[Any]  # of lists or tuples of ranks, or of anything else: a list of a user's
MOST_CHARS = 2**20  # of a tree's file
KEYS = ("medusa_choices", "hydra_choices", "tree_choices", "medusa_tree", "speculative_token_tree")
ROWS = ("beam_length", "speculative_num_draft_tokens")  # lengths that count the root, but for LMDeploy's
LENGTHS = (
    "num_speculative_tokens", "max_draft_len", "num_assistant_tokens", "prompt_lookup_num_tokens", "speculate",
    "speculative_num_steps", "spec_draft_n_max", "draft_max", "spec_ngram_simple_size_m", "speculative_dspark_block_size",
    "gen_num_per_cycle", *ROWS,
)  # fmt: skip
FLAG = re.compile(r"""--(\w[\w-]{2,40})[= ]{1,9}(?:'([^']*)'|"([^"]*)"|(\S+))""")
PLAIN = re.compile(r"(?:# For .*\n)?# No (?:tree|chain) pays")  # begins an export that does not speculate
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
    places, flags = list(_places(document)), list(_places(_flags(text)))
    trees = _trees(places, names) or _trees(flags, ()) or _lengths(places) or _lengths(flags)
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
        match statement:
            case (
                ast.AugAssign(target=ast.Name(id=name))
                | ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name))))
                | ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
            ) if names.get(name):  # the list is changed
                names[name] = CODE
            case (
                ast.Assign(targets=[ast.Name(id=name), *_], value=node)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as node)
            ):
                name = f"{name} (line {statement.lineno})" if names.get(name) else name
                names[name] = _value(node, names)
            case ast.Expr(value=node) | ast.Assign(value=node):
                value = _value(node, names)
                names[f"line {statement.lineno}"] = None if value is CODE else value
    found = {name: value for name, value in names.items() if value and isinstance(value, dict | list | tuple | str)}
    if not found:
        raise ValueError("it has nothing that could be a tree")
    return found


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression is as far as it is written down; `CODE` for a list of other lists; None for the rest."""
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {str(key.value): _value(value, names) for key, value in pairs if isinstance(key, ast.Constant)}
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[argument]) if name in COPIES:
            return _value(argument, names)
        case ast.List(elts=[ast.Dict() | ast.Call(), *_] as items):
            return [_value(item, names) for item in items]
    with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(node)
    outer = [*node.args, node.func] if isinstance(node, ast.Call) else list(ast.iter_child_nodes(node))
    inner = [part for child in outer for part in ast.walk(child)]
    if any(isinstance(part, ast.Name) and isinstance(names.get(part.id), list | str) for part in inner):
        return CODE
    if isinstance(node, ast.Call):
        return {word.arg: _value(word.value, names) for word in node.keywords if word.arg}
    is_list = isinstance(node, ast.List | ast.ListComp | ast.BinOp)
    return CODE if is_list and any(isinstance(part, ast.List | ast.Tuple) for part in inner) else None


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


def _flags(text: str) -> dict[str, dict[str, Any]]:
    """The flags of launch commands by line; JSON and numbers among them are read."""
    text, lines = re.sub(r"#.*", "", text), dict[str, dict[str, Any]]()
    number, place, counts_root = 1, 0, True
    for flag in FLAG.finditer(text):
        *before, here = text[place : flag.start()].split("\n")
        number, place = number + len(before), flag.start()
        counts_root = (counts_root or bool(before)) and "lmdeploy" not in here
        name, value = flag[1].replace("-", "_"), next(filter(None, flag.groups()[1:]), "")
        if not counts_root:
            name = name.replace("speculative_num_draft_tokens", "num_speculative_tokens")
        with suppress(ValueError):
            value = loads(value) if value[:1] == "{" or value.isdigit() else value
        lines.setdefault(f"line {number}", {})[name] = value
    return lines


def _lengths(places: Iterable[tuple[str, Any]]) -> dict[str, Choices]:
    """The chains whose length a configuration or a flag has."""
    lengths = {}
    for place, value in places:
        key = place.rpartition(".")[2].replace("-", "_")
        if key in LENGTHS and type(value) is int and value > 0:
            lengths[place] = Tree.chain(value - (key in ROWS)).choices
    return lengths
