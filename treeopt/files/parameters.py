"""Parameters, declared once: the signature of a function or a dataclass says type, range and default, its docstring the text.

A command makes its options of them (`treeopt.cli.declared`), and what is called from Python is checked by them (`declared`).
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
from treeopt.files.writing import keeping

P = ParamSpec("P")
R = TypeVar("R")
ROW = re.compile(r"^ *(\w+(?:, \w+)*) +: +(.+)$")
REQUIRED = inspect.Parameter.empty
OUTPUTS = ("output", "picture", "folder")  # parameters that are files or folders to write
KINDS = (bool, int, float, str, Path)  # a parameter of several is the first of these that it may be


@dataclass(frozen=True)
class Range:
    """Numbers from ``least``, or above it, to ``most``; percent: a share that a command has in per cent."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    percent: bool = False

    def fault(self, value: float) -> str | None:
        """The rule that a number breaks; None for one of the range."""
        if math.isnan(value) or value < self.least or (self.above and value == self.least):
            return f"must be {'above' if self.above else 'at least'} {self.least:g}"
        return f"must be at most {self.most:,}" if value > self.most or value == math.inf else None


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, by its name.

    kind    : of one value
    many    : several may be given; mix: or a mapping, of batch sizes to shares
    choices : the words that there are; any where there are none
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
        """The rule that a given value breaks; None for one that fits."""
        numbers = {int: Integral, float: Real}.get(self.kind)
        if numbers and not self.many and not isinstance(value, numbers):
            return f"must be a {'whole ' * (self.kind is int)}number, but got {value!r}"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}, but got {value!r}"
        for number in () if self.range is None else value if self.many else (value,):
            if not isinstance(number, Real):
                return f"must be numbers, but got {number!r}"
            if self.range and (words := self.range.fault(float(number))):
                return f"{words}, but got {number}"
        return None

    def check(self, value: Any) -> None:
        """Raise InvalidInput, which names the parameter, for a value that does not fit."""
        if value is not None and (fault := self.fault(value)):
            raise InvalidInput(f"`{self.name}` {fault}.")


@cache
def parameters_of(source: Any) -> Mapping[str, Parameter]:
    """The parameters of a function, a dataclass or a TypedDict by name, those of ``**options: Unpack[...]`` among them."""
    texts, names = texts_of(source.__doc__ or ""), _Names(vars(sys.modules[source.__module__]))
    if isinstance(source, type) and hasattr(source, "__total__"):
        hints = {name: hint.__forward_arg__ for name, hint in source.__annotations__.items()}
        return {name: read(name, hint, names, text=texts.get(name, "")) for name, hint in hints.items()}
    found: dict[str, Parameter] = {}
    for parameter in inspect.signature(source).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            if rest := re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation)):
                shared, more = parameters_of(names[rest[1]]), texts_of(names[rest[1]].__doc__)
                found = {name: replace(one, text=one.text or more.get(name, "")) for name, one in found.items()}
                found |= shared
            continue
        one = read(parameter.name, parameter.annotation, names, parameter.default, texts.get(parameter.name, ""))
        many = one.many or parameter.kind is parameter.VAR_POSITIONAL
        found[one.name] = replace(one, many=many, is_keyword=parameter.kind is parameter.KEYWORD_ONLY)
    return found


def _lines(docstring: str) -> Iterator[tuple[list[str], str]]:
    """Each line of a docstring with the names of the table's row that it belongs to."""
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
    """The rows of a docstring's table by name; lines that stand deeper belong to the row above.

    >>> texts_of("Summary.\\n\\n    one : first\\n          and more\\n    two, three : others\\n\\n    Raises nothing.")
    {'one': 'first and more', 'two': 'others', 'three': 'others'}
    """
    found: dict[str, str] = {}
    for names, line in _lines(docstring):
        row = ROW.match(line)
        found |= {name: row[2] if row else f"{found[name]} {line.strip()}" for name in names}
    return found


def without_table(docstring: str, names: Sequence[str]) -> str:
    return "\n".join(line for of, line in _lines(docstring) if not of or not set(of) <= set(names)).strip()


class _Names(dict[str, Any]):
    """Names as annotations mean them; those that are imported for types alone are no kind of an option."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, type(name, (), {}))


def read(name: str, annotation: Any, names: _Names, default: Any = None, text: str = "") -> Parameter:
    """The parameter that an annotation declares, given as the source has it."""
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
    """The function with what it gets checked by its parameters; ``batch_size`` and ``batch_sizes`` are both understood.

    >>> from collections.abc import Sequence
    >>> @declared
    ... def timed(batch_sizes: Sequence[Count] = (1,)) -> object:
    ...     return batch_sizes
    >>> timed(batch_size=4), timed(batch_sizes=[1, 2])
    ((4,), [1, 2])
    """

    @wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        known = parameters_of(function)
        asked: dict[str, Any] = dict(given)
        for name, other in (("batch_size", "batch_sizes"), ("batch_sizes", "batch_size")):
            if name in asked and name not in known and other in known:
                if other in asked:
                    raise InvalidInput(f"`{name}` and `{other}` are one: leave one out.")
                asked[other] = asked.pop(name)
        asked |= {name: _fitting(known[name], value) for name, value in asked.items() if name in known}
        bound = inspect.signature(function).bind_partial(*args).arguments
        for name, value in (bound | asked).items():
            if name in known:
                known[name].check(value)
        with keeping(given_files(bound | asked)):
            return function(*args, **asked)

    return checked


def given_files(arguments: Mapping[str, Any]) -> Iterator[object]:
    for name, value in arguments.items():
        if name not in OUTPUTS:
            yield from value if isinstance(value, list | tuple) else (value,)


def _fitting(parameter: Parameter, value: Any) -> Any:
    """A single value as a sequence, or a sequence of one as the value, where the parameter is of that kind."""
    if parameter.many and isinstance(value, Integral | str | Path):
        return (value,)
    if parameter.name == "batch_size" and isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 1:
            raise InvalidInput(f"`batch_size` must be one number here, but got {list(value)}.")
        return value[0]
    return value
