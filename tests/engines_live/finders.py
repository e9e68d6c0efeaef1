"""What a source text defines, found without running it: options, values, fields, and the formats of log lines.

Every finder takes a text and gives the names in it, so that a name can be looked up there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache

Finder = Callable[[str], frozenset[str]]
PLACEHOLDER = re.compile(r"%%|%[-+ #0]*\d*(?:\.(?:\d+|\*))?(?:hh|h|ll|l|z)?([a-zA-Z])")


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def texts_in(node: ast.AST) -> Iterator[str]:
    """The string constants below a node."""
    return (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


@cache
def strings(text: str) -> frozenset[str]:
    """Every string constant but docstrings, and every field of a class in Python: the keys of what is written as JSON."""
    nodes = list(ast.walk(parsed(text)))
    docs = {n.value for n in nodes if isinstance(n, ast.Expr)}
    constants = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and n not in docs}
    return frozenset(constants) | {
        n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }


def switched_on(text: str) -> frozenset[str]:
    """Options of the form NAME=true, of every string constant."""
    return frozenset(f"{name}=true" for name in strings(text))


@cache
def argparse_flags(text: str) -> frozenset[str]:
    """The options of every ``add_argument``."""
    calls = (n for n in ast.walk(parsed(text)) if isinstance(n, ast.Call))
    return frozenset(
        option
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for argument in call.args
        for option in texts_in(argument)
        if option.startswith("-")
    )


def argparse_choices(flag: str) -> Finder:
    """The finder of an option's ``choices``."""

    @cache
    def found(text: str) -> frozenset[str]:
        calls = (n for n in ast.walk(parsed(text)) if isinstance(n, ast.Call))
        return frozenset(
            choice
            for call in calls
            if any(isinstance(a, ast.Constant) and a.value == flag for a in call.args)
            for keyword in call.keywords
            if keyword.arg == "choices"
            for choice in texts_in(keyword.value)
        )

    return found


def classes(text: str) -> dict[str, ast.ClassDef]:
    return {n.name: n for n in ast.walk(parsed(text)) if isinstance(n, ast.ClassDef)}


def fields_of(name: str) -> Finder:
    """The finder of a class's fields: annotated ones, assigned ones, properties, and attributes set on ``self``."""

    @cache
    def found(text: str) -> frozenset[str]:
        return frozenset(_fields(classes(text)[name]) if name in classes(text) else ())

    return found


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef) and any(getattr(d, "id", "") == "property" for d in inner.decorator_list):
            yield inner.name
        targets = [inner.target] if isinstance(inner, ast.AnnAssign) else getattr(inner, "targets", [])
        for target in targets:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                yield target.attr
            elif isinstance(target, ast.Name) and inner in node.body:
                yield target.id


@cache
def options_of_fields(text: str) -> frozenset[str]:
    """SGLang's options: the annotated fields of its classes, with hyphens, but those that its command line lacks."""
    found = {one for one in strings(text) if one.startswith("--")}
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            keywords = [n.arg for n in ast.walk(node.annotation) if isinstance(n, ast.keyword)]
            if "no_cli" not in keywords:
                found.add(f"--{node.target.id.replace('_', '-')}")
    return frozenset(found)


def parameters_of(name: str = "") -> Finder:
    """The finder of the parameters of functions, and of a class's ``__init__``, by the name of either; "" for all."""

    @cache
    def found(text: str) -> frozenset[str]:
        functions = [n for n in ast.walk(parsed(text)) if isinstance(n, ast.FunctionDef) and name in ("", n.name)]
        if name in classes(text):
            functions += [n for n in classes(text)[name].body if getattr(n, "name", "") == "__init__"]
        return frozenset(a.arg for f in functions for a in [*f.args.args, *f.args.kwonlyargs])

    return found


def always(name: str) -> Finder:
    """The finder of a name that stands for the file itself."""
    return lambda text: frozenset({name})


@cache
def attributes(text: str) -> frozenset[str]:
    """Every attribute that is read or set, and every option of argparse as its attribute."""
    options = {option.lstrip("-").replace("-", "_") for option in argparse_flags(text)}
    return frozenset(n.attr for n in ast.walk(parsed(text)) if isinstance(n, ast.Attribute)) | options


@cache
def imported(text: str) -> frozenset[str]:
    nodes = (n for n in ast.walk(parsed(text)) if isinstance(n, ast.Import | ast.ImportFrom))
    return frozenset(alias.asname or alias.name for node in nodes for alias in node.names)


@cache
def binary_strings(text: str) -> frozenset[str]:
    """The strings of a compiled library, read as text."""
    return frozenset(re.findall(r"(?<![ -~])[ -~]{4,200}(?=\0)", text))


@cache
def binary_names(text: str) -> frozenset[str]:
    """The names in the strings of a compiled library, those within a sentence too."""
    return frozenset(re.findall(r"[A-Za-z_]\w{3,80}", " ".join(re.findall(r"[ -~]{5,}", text))))


@cache
def names(text: str) -> frozenset[str]:
    """Classes and functions that a module defines."""
    return frozenset(n.name for n in ast.walk(parsed(text)) if isinstance(n, ast.ClassDef | ast.FunctionDef))


def literal(name: str) -> Finder:
    """The finder of the words of ``name = Literal[...]``, those of the literals in it too, or of a field of that name."""

    def words(text: str, of: str) -> Iterator[str]:
        for node in parsed(text).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == of:
                yield from texts_in(node.value)
                for inner in ast.walk(node.value):
                    if isinstance(inner, ast.Name) and inner.id != of:
                        yield from words(text, inner.id)

    @cache
    def found(text: str) -> frozenset[str]:
        fields = (n for n in ast.walk(parsed(text)) if isinstance(n, ast.AnnAssign))
        of_fields = {w for n in fields if getattr(n.target, "id", "") == name for w in texts_in(n.annotation)}
        return frozenset(words(text, name)) | of_fields

    return found


def console_scripts(text: str) -> frozenset[str]:
    """The commands of a pyproject.toml or entry_points.txt."""
    return frozenset(re.findall(r'^"?([\w.-]+)"?\s*=\s*"?[\w.]+:\w+', text, re.MULTILINE))


def cpp_strings(text: str) -> frozenset[str]:
    return frozenset(re.findall(r'"((?:[^"\\\n]|\\.)*)"', text))


@cache
def llama_flags(text: str) -> frozenset[str]:
    """The options that llama.cpp's server takes, without those that only say that they were removed."""
    found: set[str] = set()
    for block in text.split("add_opt(common_arg(")[1:]:
        taken = re.search(r"set_examples\(\{(.*?)\}\)", block)
        left = re.search(r"set_excludes\(\{(.*?)\}\)", block)
        ours = taken is None or re.search(r"LLAMA_EXAMPLE_(SERVER|COMMON)\b", taken[1])
        if "arg_removed(" not in block and ours and not (left and "LLAMA_EXAMPLE_SERVER" in left[1]):
            heads = re.match(r"(?:\s*\{[^{}]*\},)+", block)
            found |= cpp_strings(heads[0]) if heads else set()
    return frozenset(found)


def llama_spec_types(text: str) -> frozenset[str]:
    """The names that llama.cpp maps to its kinds of speculation."""
    return frozenset(re.findall(r'\{\s*"([\w-]+)",\s*COMMON_SPECULATIVE_TYPE_', text))


def cmake_targets(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"set\(TARGET\s+([\w-]+)\)", text))


# Formats of log lines.


def python_format(text: str, marker: str) -> str | None:
    """The string constant with a marker in it, a format with %."""
    return next((one for one in texts_in(parsed(text)) if marker in one and PLACEHOLDER.search(one)), None)


def cpp_format(text: str, marker: str) -> str | None:
    """The literal with a marker in it, its escapes read."""
    found = next((one for one in cpp_strings(text) if marker in one and PLACEHOLDER.search(one)), None)
    return found and found.encode().decode("unicode_escape")


def cpp_logged(text: str, marker: str) -> str | None:
    """The format with a marker that a macro prints, behind what the macro's definition puts before it."""
    inside = r'(?:[^"\\\n]|\\.)*'
    call = re.search(rf'\b([A-Z_]+)\(\*?\w+,\s*"({inside}{re.escape(marker)}{inside})"', text)
    head = re.search(rf'#define {call[1]}\(.*?"({inside})"\s+fmt\b', text) if call else None
    return (head[1] + call[2]).encode().decode("unicode_escape") if call and head else None


def cpp_sum(text: str, name: str) -> str | None:
    """What C++ assigns to a name as a sum of literals and variables, each of these as %s."""
    found = re.search(rf'\b{name} = ("[^;]*\+[^;]*);', text)
    parts = re.findall(r'"((?:[^"\\]|\\.)*)"|(\w[\w.()]*)', found[1]) if found else []
    return "".join(literal if literal or not variable else "%s" for literal, variable in parts) or None


def filled(pattern: str, values: Mapping[str, float | str]) -> str:
    """A format with numbers in it: each by the label that ends before it or begins after it, 0 where none does.

    >>> filled("accept = %0.2f (%5d of %d)\\n", {"accept = ": 0.5, "of ": 7})
    'accept = 0.50 (    0 of 7)\\n'
    """
    places = [p for p in PLACEHOLDER.finditer(pattern) if p[0] != "%%"]

    def value(i: int, place: re.Match[str]) -> float | str:
        before = pattern[places[i - 1].end() if i else 0 : place.start()]
        after = pattern[place.end() : places[i + 1].start() if i + 1 < len(places) else None]
        found = [v for label, v in values.items() if before.endswith(label)]
        found += [v for label, v in values.items() if after.startswith(label)]
        return found[0] if found else ("" if place[1] == "s" else 0)

    readable = PLACEHOLDER.sub(lambda p: re.sub(r"hh|h|ll|l|z|\.\*", "", p[0]), pattern)
    return readable % tuple(value(i, place) for i, place in enumerate(places))
