"""Types of fields with their ranges, and the one check of records that come from a file.

A record's dataclass says in its field types what a file may hold. The types below have the numbers that most files hold;
other ranges stand where they are needed, as ``Annotated[int, Field(ge=1, le=256)]``.

`treeopt.files.storage.typed`  a dataclass, or any type, from JSON: every number is of its type already
checked                        a pydantic model from a row, whose cells may be texts
"""

import re
from collections.abc import Mapping
from functools import cache
from math import inf
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from treeopt.errors import InvalidInput

MOST = 2**53  # whole numbers that a float tells apart
M = TypeVar("M", bound=BaseModel)


def rule(words: str) -> WrapValidator:
    """Part of an annotated type: errors say ``words`` and what came; JSON's true and false are no numbers."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(repr(value) if isinstance(value, bool) else value)
        except ValidationError:
            context = {"rule": words, "came": repr(value)[:40]}
            raise PydanticCustomError("rule", "must be {rule}, but got {came}", context) from None

    return WrapValidator(check)


Count = Annotated[int, Field(ge=0, le=MOST), rule("a whole number of at least 0")]
Positive = Annotated[int, Field(ge=1, le=MOST), rule("a whole number of at least 1")]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False), rule("a number above 0")]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), rule("a number of at least 0")]
Share = Annotated[float, Field(ge=0, le=1), rule("a share from 0 to 1")]


def within(low: float, high: float = inf, /, **numbers: float | None) -> None:
    """Raise InvalidInput for a number outside a range, as of the least and the largest of an array; None may be anything.

    >>> within(0, 1, group=2)
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: group must be from 0 to 1, but is 2.
    """
    for name, number in numbers.items():
        if number is not None and not low <= number <= high:
            wanted = f"at least {low:.6g}" if high == inf else f"from {low:.6g} to {high:.6g}"
            raise InvalidInput(f"{name} must be {wanted}, but is {number:.6g}.")


def checked(model: type[M], record: Mapping[str, Any]) -> M:
    """The record as ``model``; keys that it does not know are ignored. Raises InvalidInput for the first wrong cell.

    >>> class Row(BaseModel):
    ...     size: Positive
    >>> checked(Row, {"size": "8"}).size
    8
    >>> checked(Row, {"size": "x"})
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: size must be a whole number of at least 1, but got 'x'.
    """
    try:
        return model.model_validate(record)
    except ValidationError as error:
        raise InvalidInput("{} {}.".format(*first_error(error))) from None


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """The pydantic adapter that checks values of a type, built once for each."""
    return TypeAdapter(kind)


def first_error(error: ValidationError) -> tuple[str, str]:
    """The place of the first error, and its reason without a full stop; both printable and short, whatever the file has."""
    first = error.errors(include_url=False, include_context=False)[0]
    reason = re.sub(r"^\w+ should", "must", first["msg"].removeprefix("Value error, "))
    missing = first["type"] == "missing"
    return _cut(".".join(map(str, first["loc"])), 80), "must be given, but is missing" if missing else _cut(reason, 300)


def _cut(text: str, most: int) -> str:
    line = "".join(c if c.isprintable() else "?" for c in text[: most + 1]).rstrip(".")
    return line if len(text) <= most else line[:most] + "..."
