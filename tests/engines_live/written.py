"""Every word of an engine's that the exports write: programs, options, keys, values, names in Python.

They are taken from the written files themselves, so that a new option is looked up without anybody listing it.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import yaml

from tests.helpers.engine_rows import COPIED, chains, export
from treeopt.cli import cli
from treeopt.engines.base import Method, Written
from treeopt.engines.registry import ENGINES
from treeopt.errors import TreeoptError
from treeopt.records.plan import Ranges
from treeopt.records.rules import RULES
from treeopt.trees.draft import Draft, DynamicTree
from treeopt.trees.tree import Tree

TREE = Tree.from_choices([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
LENGTHS = (((1, None, 3),), ((1, 8, 3), (9, 32, 1), (33, None, 0)), ((1, None, 0),))
RULE = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 0, "epsilon": 0.3, "delta": 0.09}
PLACEHOLDERS = {"MODEL", "DRAFTER", "HEADS", "LAYER", "PROMPT", "QUESTIONS", "BUILT"}  # what a user puts in
CONFIG = "--speculative-config"  # of which vLLM's keys are
OPTION = re.compile(r"--?[a-zA-Z][\w-]*")
OWN = {option for command in cli.commands.values() for parameter in command.params for option in parameter.opts}


@dataclass(frozen=True, order=True)
class Word:
    """A word of an engine's: its kind, and what it belongs to: a program, an option, a file, a class."""

    kind: str
    text: str
    of: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.text.strip()}" + (f" of {self.of}" if self.of else "")


def words_of_engine(engine: str) -> dict[Word, set[str]]:
    """The words that the exports to an engine write, and the methods that write each, removed ones left out."""
    found: dict[Word, set[str]] = defaultdict(set)
    for method in ENGINES[engine].methods:
        if method.status == "live":
            for word in words_of_method(engine, method):
                found[word].add(method.name)
    return found


def words_of_method(engine: str, method: Method) -> set[Word]:
    """The words of all that a method writes for its drafters; for each it must write something."""
    exports = {drafter: list(written_by(engine, method, drafter)) for drafter in method.drafters}
    silent = [drafter for drafter, written in exports.items() if not written]
    assert not silent, f"{engine} {method.name} wrote nothing for {silent}"
    return {word for every in exports.values() for written in every for word in words_of(written)}


def written_by(engine: str, method: Method, drafter: str) -> Iterator[Written]:
    """What is written for every acceptance rule, and length or schedule, that the method takes."""
    drafts: list[Draft | Ranges[Draft]] = [chains(*lengths) for lengths in LENGTHS]
    if method.limits.copies:
        own = [draft for draft in COPIED[engine] if not draft.drafter.startswith("arctic")]  # a package of its own
        drafts = [*own, Tree.chain(0)]
    if method.limits.dynamic:
        drafts = [DynamicTree(5, 4, 16), DynamicTree(3, 1, 4), Tree.chain(0)]
    elif method.limits.shape != "chain":
        drafts = [TREE, Tree.chain(2), Tree.chain(0)]
    for rule, draft in product(RULES.values(), drafts):
        about = {"num_heads": 4, "drafter": drafter, "batch_size": 64, "acceptance": {"rule": rule, **RULE}}
        with suppress(TreeoptError):  # a method refuses what it cannot take
            yield export(engine, draft, method.name, **about)


def words_of(written: Written) -> Iterator[Word]:
    """The words of an export; those of a file by its ending."""
    own = {flag for name, text in written.files.items() if name.endswith(".py") for flag in argparse_flags(text)}
    for name, text in {**written.files, "command.sh": written.command}.items():
        if name.endswith(".sh"):
            words = _words_of_commands(text, written.files)
            yield from (word for word in words if word.text not in own and word.of not in own)
        elif name.endswith((".json", ".yml", ".yaml")):
            yield from _words_of_config(yaml.safe_load(text), name)  # JSON is YAML
        elif name.endswith(".py"):
            yield from _words_of_python(text)
        else:
            yield Word("file", name)
    yield from advised(" ".join(written.notes))


def argparse_flags(text: str) -> list[str]:
    """The options that a program adds to those of the engine."""
    return re.findall(r'add_argument\("(--?[\w-]+)"', text)


def advised(text: str) -> Iterator[Word]:
    """The options that a text tells people to use; treeopt's own left out."""
    return (Word("flag", option) for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", text) if option not in OWN)


def _words_of_commands(text: str, files: Mapping[str, str]) -> Iterator[Word]:
    for line in text.replace("\\\n", " ").splitlines():
        tokens = shlex.split(line, comments=True)
        while tokens and re.match(r"[A-Z0-9_]+=", tokens[0]):
            yield Word("variable", tokens.pop(0).partition("=")[0])
        split = [part for token in tokens for part in (token.split("=", 1) if OPTION.match(token) else [token])]
        first = next((i for i, token in enumerate(split) if OPTION.fullmatch(token) and token != "-m"), len(split))
        program = [t for t in split[:first] if t not in ("python", "-m") and not _is_own(t, files)]
        yield from (Word("program", token) for token in program)
        for token, value in pairwise([*split[first:], "--"]):
            if OPTION.fullmatch(token):
                yield Word("flag", token, " ".join(program))
                if value.startswith("{"):
                    yield from _words_of_config(json.loads(value), token)
                elif not OPTION.fullmatch(value) and not _is_own(value, files):
                    for one in value.split(",") if token == "--spec-type" else [value]:
                        yield Word("value", one, token)


def _is_own(token: str, files: Mapping[str, str]) -> bool:
    """Whether a token is no word of the engine's: a number, a file that is written, or what the user puts in."""
    return bool(re.fullmatch(r"-*[\d.]*", token)) or token in files or bool(PLACEHOLDERS & set(re.split(r"\W+", token)))


def _words_of_config(value: Any, of: str, key: str = "") -> Iterator[Word]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if not re.fullmatch(r"\d+", str(name)):
                yield Word("key", str(name), of)
            yield from _words_of_config(inner, of, str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _words_of_config(inner, of, key)
    elif isinstance(value, str) and not _is_own(value, {}):
        yield Word("value", value, key)


def _words_of_python(text: str) -> Iterator[Word]:
    """What is imported, called, passed by name, and read or set on a variable; all but the engine's left out."""
    nodes = list(ast.walk(ast.parse(text)))
    made: dict[str, str] = {}  # variable: what it was made by
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    foreign = set(dir(builtins))
    own = {option.lstrip("-") for option in argparse_flags(text)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                if (module or alias.name).partition(".")[0] in {*sys.stdlib_module_names, "torch"}:
                    foreign.add(alias.asname or alias.name)
                else:
                    yield Word("name", alias.name, module) if module else Word("module", alias.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names = [name for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            targets = [name.id for name in names if isinstance(name.ctx, ast.Store)]  # not those whose attribute is set
            made |= dict.fromkeys(targets, _name(node.value.func))
            if _root(node.value) in foreign and _name(node.value.func) != "parse_args":
                foreign.update(targets)
    for node in nodes:
        if isinstance(node, ast.Call) and (name := _name(node.func)) and _root(node.func) not in foreign:
            if isinstance(node.func, ast.Attribute):
                yield Word("method", name)
            for keyword in node.keywords:
                if keyword.arg:
                    yield Word("parameter", keyword.arg, name)
                    yield from _words_of_config(getattr(keyword.value, "value", None), "", keyword.arg)
        elif (
            isinstance(node, ast.Attribute)
            and node not in called
            and node.attr not in own
            and _maker(node, made, foreign)
        ):
            yield Word("attribute", node.attr, _maker(node, made, foreign))


def _maker(node: ast.Attribute, made: Mapping[str, str], foreign: set[str]) -> str:
    """What made the variable that an attribute is of; "" where nothing of the engine's did."""
    variable = getattr(node.value, "id", "")
    return "" if variable in foreign else made.get(variable, "")


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")
