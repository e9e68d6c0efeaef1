"""Rows of somebody else's file, checked against a pydantic model: errors name the cell, its rule and what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from treeopt.errors import InvalidInput

MOST = 2**53  # whole numbers that a float tells apart
M = TypeVar("M", bound=BaseModel)


def rule(words: str) -> WrapValidator:
    """Of an annotated type: errors say ``words`` and what came; JSON's true and false are no numbers."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(repr(value) if isinstance(value, bool) else value)
        except ValidationError:
            context = {"rule": words, "came": repr(value)[:40]}
            raise PydanticCustomError("rule", "must be {rule}, but got {came}", context) from None

    return WrapValidator(check)


# Numbers as JSON or a cell has them.
Count = Annotated[int, Field(ge=0, le=MOST), rule("a whole number of at least 0")]
Positive = Annotated[int, Field(ge=1, le=MOST), rule("a whole number of at least 1")]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False), rule("a number above 0")]


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
        first = error.errors(include_url=False)[0]
        said = "must be given, but is missing" if first["type"] == "missing" else first["msg"]
        raise InvalidInput(f"{first['loc'][0]} {said}.") from None
