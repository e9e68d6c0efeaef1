"""Types of fields with ranges, by which records of files are checked.

`treeopt.files.storage.typed`  makes a dataclass, or any type, of JSON
`checked`                      makes a pydantic model of a row, whose cells may be texts
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from treeopt.errors import InvalidInput

MOST = 2**53  # the largest whole number that a float tells from its neighbours
M = TypeVar("M", bound=BaseModel)


def rule(words: str) -> WrapValidator:
    """Part of an annotated type. Errors say ``words`` and the value; true and false are no numbers."""

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
Finite = Annotated[float, Field(allow_inf_nan=False), rule("a number")]
Share = Annotated[float, Field(ge=0, le=1), rule("a share from 0 to 1")]


def from_list(value: Any) -> Any:
    """A list as a tuple, for types of tuples within a record that is looked at before its fields are."""
    return tuple(value) if isinstance(value, list) else value


def checked(model: type[M], record: Mapping[str, Any]) -> M:
    """The record as a pydantic model. Raises InvalidInput for the first wrong cell; other keys are ignored.

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
    """The pydantic adapter of a type, which is built once."""
    return TypeAdapter(kind)


def first_error(error: ValidationError) -> tuple[str, str]:
    """The place of the first error, and its reason without a full stop. Both are printable and short."""
    first = error.errors(include_url=False, include_context=False)[0]
    reason = re.sub(r"^\w+ should", "must", first["msg"].removeprefix("Value error, "))
    if first["type"] == "missing":
        reason = "must be given, but is missing"
    return _cut(".".join(map(str, first["loc"])), 80), _cut(reason, 300)


def _cut(text: str, most: int) -> str:
    line = "".join(c if c.isprintable() else "?" for c in text[: most + 1]).rstrip(".")
    return line if len(text) <= most else line[:most] + "..."
