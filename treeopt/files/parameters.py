"""Parameters are declared once: a signature says type, range and default, and the docstring says the text.

A command makes its options of them (`treeopt.cli.declared`), and a call from Python is checked by them (`declared`).
A docstring's row is ``name : text``; what follows "; by default" says what an omitted parameter means.
"""

import builtins
import collections.abc
import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from treeopt.errors import InvalidInput

P = ParamSpec("P")
R = TypeVar("R")
ROW = re.compile(r"^ *(\w+(?:, \w+)*) +: +(.+)$")
REQUIRED = inspect.Parameter.empty
KINDS = (bool, int, float, str, Path)  # a parameter of several is the first of these that it may be


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``.

    above   : whether ``least`` itself is left out
    percent : whether a command takes the share in per cent
    """

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    percent: bool = False

    def fault(self, value: float) -> str | None:
        """The rule that a number breaks; None for a number of the range."""
        if math.isnan(value) or value < self.least or (self.above and value == self.least):
            return f"must be {'above' if self.above else 'at least'} {self.least:g}"
        return f"must be at most {self.most:,}" if value > self.most or value == math.inf else None


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function.

    kind    : type of one value
    many    : whether it takes a list of values
    mix     : whether it also takes a mapping of batch sizes to shares
    choices : the words that it takes; empty where it takes any
    """

    name: str
    kind: type
    default: Any = REQUIRED
    text: str = ""
    many: bool = False
    mix: bool = False
    choices: tuple[str, ...] = ()
    range: Range | None = None
    is_keyword: bool = True

    def fault(self, value: Any) -> str | None:
        """The rule that a value breaks; None for a value that fits."""
        if self.many and isinstance(value, Real | str | Path):
            return f"must be a list, but got {value!r}"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}, but got {value!r}"
        for number in value if self.many else (value,):
            if self.kind is int and not isinstance(number, Integral):
                return f"must be a whole number, but got {number!r}"
            if self.kind is float and not isinstance(number, Real):
                return f"must be a number, but got {number!r}"
            if self.range is not None and (rule := self.range.fault(float(number))):
                return f"{rule}, but got {number}"
        return None

    def check(self, value: Any) -> None:
        """Raise InvalidInput, which names the parameter, for a value that does not fit."""
        if value is not None and (fault := self.fault(value)):
            raise InvalidInput(f"`{self.name}` {fault}.")


@cache
def parameters_of(source: Any) -> Mapping[str, Parameter]:
    """Name to parameter of a function, a dataclass or a TypedDict.

    A function with ``**options: Unpack[Options]`` has the parameters of the TypedDict ``Options`` too.
    """
    texts, names = texts_of(source.__doc__ or ""), _Names(vars(sys.modules[source.__module__]))
    if isinstance(source, type) and hasattr(source, "__total__"):
        hints = {name: hint.__forward_arg__ for name, hint in source.__annotations__.items()}
        return {name: read(name, hint, names, text=texts.get(name, "")) for name, hint in hints.items()}
    parameters: dict[str, Parameter] = {}
    for item in inspect.signature(source).parameters.values():
        if item.kind is item.VAR_KEYWORD:
            if match := re.fullmatch(r"Unpack\[(\w+)\]", str(item.annotation)):
                options = names[match[1]]
                shared_texts = texts_of(options.__doc__)
                for name, parameter in parameters.items():
                    parameters[name] = replace(parameter, text=parameter.text or shared_texts.get(name, ""))
                parameters |= parameters_of(options)
            continue
        parameter = read(item.name, item.annotation, names, item.default, texts.get(item.name, ""))
        many = parameter.many or item.kind is item.VAR_POSITIONAL
        parameters[item.name] = replace(parameter, many=many, is_keyword=item.kind is item.KEYWORD_ONLY)
    return parameters


def _lines(docstring: str) -> Iterator[tuple[list[str], str]]:
    """Each line of a docstring, with the names of the table row that it belongs to."""
    names: list[str] = []
    column = 0
    for line in inspect.cleandoc(docstring).splitlines():
        indent = len(line) - len(line.lstrip())
        if row := ROW.match(line):
            names, column = row[1].split(", "), indent
        elif not line.strip() or indent <= column:
            names = []
        yield names, line


def texts_of(docstring: str) -> dict[str, str]:
    """Name to text of the rows of a docstring's table. A line that stands deeper belongs to the row above.

    >>> texts_of("Summary.\\n\\n    one : first\\n          and more\\n    two, three : others\\n\\n    Raises nothing.")
    {'one': 'first and more', 'two': 'others', 'three': 'others'}
    """
    texts: dict[str, str] = {}
    for names, line in _lines(docstring):
        row = ROW.match(line)
        for name in names:
            texts[name] = row[2] if row else f"{texts[name]} {line.strip()}"
    return texts


def without_table(docstring: str, names: Sequence[str]) -> str:
    """A docstring without the table rows of these names."""
    rows = _lines(docstring)
    return "\n".join(line for row_names, line in rows if not row_names or not set(row_names) <= set(names)).strip()


class _Names(dict[str, Any]):
    """The names of a module for its annotations. A name that is imported for types alone stands for an empty class."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, type(name, (), {}))


def read(name: str, annotation: Any, names: _Names, default: Any = None, text: str = "") -> Parameter:
    """The parameter that an annotation declares; the annotation may be its source text."""
    extras: list[Any] = []
    kinds: set[Any] = set()
    shapes: set[Any] = set()

    def walk(hint: Any) -> None:
        origin, parts = get_origin(hint), get_args(hint)
        if origin is Literal:
            extras.append(parts)
            kinds.add(str)
        elif origin is None:
            kinds.add(hint)
        else:
            extras.extend(hint.__metadata__ if origin is Annotated else ())
            shapes.update({origin} & {collections.abc.Sequence, collections.abc.Mapping, tuple})
            for part in parts if origin in (Union, types.UnionType) else parts[:1]:
                walk(part)

    walk(eval(annotation, {}, names) if isinstance(annotation, str) else annotation)
    return Parameter(
        name,
        next((kind for kind in KINDS if kind in kinds), object),
        default,
        text,
        many=bool(shapes),
        mix=collections.abc.Mapping in shapes,
        choices=next((extra for extra in extras if isinstance(extra, tuple)), ()),
        range=next((extra for extra in extras if isinstance(extra, Range)), None),
    )


def declared(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose arguments are checked by its parameters.

    >>> from collections.abc import Sequence
    >>> @declared
    ... def timed(batch_sizes: Sequence[Count] = (1,)) -> object:
    ...     return batch_sizes
    >>> timed(batch_sizes=[0])
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: batch_sizes must be at least 1, but got 0.
    """

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        parameters = parameters_of(function)
        arguments = inspect.signature(function).bind_partial(*args).arguments | options
        for name, value in arguments.items():
            if name in parameters:
                parameters[name].check(value)
        return function(*args, **options)

    return checked
