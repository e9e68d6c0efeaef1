"""Options are fields of dataclasses: the name, type, default, range and text of each stand once.

The API takes the dataclasses (`treeopt.records.options`), commands make their options of the fields (`treeopt.cli.command`),
and journals and records keep `Options.given`. A wrong value is refused when a dataclass is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from treeopt.errors import InvalidInput

O = TypeVar("O", bound="Options")  # noqa: E741
KINDS = (bool, int, float, str, Path)  # an option of several types has the first of these


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its name.

    text      : what it means; what follows "; by default " says what an omitted option means
    flag      : the words on the command line, by default those of the name
    metavar   : what stands for the value in --help
    least     : the smallest number that it may be; above, the largest that is too small; most, the largest
    choices   : the words that it may be, by default those of a Literal type; empty for any
    percent   : whether the command line takes a share in per cent
    is_common : whether --help shows it; --help-all shows all
    kind      : type of a value
    many      : whether it takes several values; shares, whether also a mapping of values to shares
    """

    text: str
    flag: str = ""
    metavar: str | None = None
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    choices: Sequence[str] = ()
    percent: bool = False
    is_common: bool = False
    kind: type = str
    many: bool = False
    shares: bool = False
    default: Any = None

    def fault(self, value: Any) -> str | None:
        """The rule that a value breaks; None for a value that fits."""
        if self.many and isinstance(value, Real | str | Path):
            return f"must be a list, but got {value!r}"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}, but got {value!r}"
        for number in value if self.many else [value]:
            if self.kind not in (int, float):
                continue
            if fault := number_fault(number, self.kind, least=self.least, above=self.above, most=self.most):
                return fault
        return None


def number_fault(
    number: Any, kind: type, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> str | None:
    """The rule for a whole number, or for a finite one, that a value breaks, and the value; None for one that fits.

    >>> number_fault(0, int, least=1), number_fault(math.inf, float)
    ('must be at least 1, but got 0', 'must be a number, but got inf')
    """
    rule, is_number = None, isinstance(number, Real) and not isinstance(number, bool)
    is_whole = is_number and isinstance(number, Integral)
    if kind is int and not is_whole:
        rule = "must be a whole number"
    elif not is_whole and not (is_number and math.isfinite(number)):
        rule = "must be a number"
    elif number <= above:
        rule = f"must be above {above:g}"
    elif number < least:
        rule = f"must be at least {least:g}"
    elif number > most:
        rule = f"must be at most {most:,}"
    return rule and f"{rule}, but got {number!r}"


def option(text: str, default: Any = None, *, common: bool = False, **about: Any) -> Any:
    """The field of an option; ``about`` are fields of `Option`."""
    return field(default=default, metadata={"option": Option(text, is_common=common, default=default, **about)})


@dataclass(frozen=True)
class Options:
    """A dataclass of options. InvalidInput names the option whose value breaks a rule.

    heading : the title above its options in --help-all
    """

    heading: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for name, known in options_of(type(self)).items():
            value = getattr(self, name)
            if value is not None and (fault := known.fault(value)):
                raise InvalidInput(f"`{name}` {fault}.")

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON holds them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        defaults = {each.name: each.default for each in fields(self)}
        return {name: _plain(value) for name, value in values.items() if value != defaults[name]}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def with_given(options: O, **given: Any) -> O:
    """The options with those that are not None in place of their own."""
    return replace(options, **{name: value for name, value in given.items() if value is not None})


def _options_of(kind: Any) -> Mapping[str, Option]:
    """Name to option of the fields of a dataclass that are options."""
    hints = get_type_hints(kind)
    return {
        each.name: _typed(each.metadata["option"], hints[each.name])
        for each in fields(kind)
        if "option" in each.metadata
    }


options_of: Callable[[Any], Mapping[str, Option]] = cache(_options_of)


def _typed(known: Option, hint: Any) -> Option:
    """The option with what its type says."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    lists = [part for part in parts if get_origin(part) in (list, tuple, Sequence)]
    shares = any(get_origin(part) is Mapping for part in parts)
    kinds = {argument for part in lists for argument in get_args(part)} | set(parts)
    kind = next((kind for kind in KINDS if kind in kinds), str)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    return replace(known, kind=kind, many=bool(lists), shares=shares, choices=words or known.choices)
