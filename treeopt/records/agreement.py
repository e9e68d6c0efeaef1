"""Whether the numbers of a file agree where some follow from others, at the precision that they are written with.

A number written as 1.8 stands for all that round to it, 1.75 to 1.85; counts are exact. What follows from rounded
numbers may be off by their shares together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from math import inf
from pathlib import Path

from treeopt.errors import InvalidInput

SUMS = 1e-6  # of a number: the same sum in another order, or in single precision


def agree(name: str, said: float | None, follows: float, why: str, *of: float | None) -> None:
    """Raise InvalidInput unless a number is what follows from others; one that is not said may be anything.

    why : how it follows, "tokens over steps"
    of  : those of the others that may be rounded

    >>> agree("tokens_per_step", 1.8, 902 / 500, "tokens over steps")
    >>> agree("tokens_per_step", 2.4, 902 / 500, "tokens over steps")
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: tokens_per_step must be 1.804 (tokens over steps), but is 2.4.
    """
    if said is None:
        return
    shares = SUMS + sum(rounding(number) / abs(number) for number in of if number)
    exact = isinstance(said, int) and isinstance(follows, int)
    if not abs(said - follows) <= (0 if exact else rounding(said) + shares * abs(follows)):
        raise InvalidInput(f"{name} must be {_digits(follows, said)} ({why}), but is {_digits(said, follows)}.")


def within(low: float, high: float = inf, /, **numbers: float | None) -> None:
    """Raise InvalidInput for a number outside a range; None may be anything.

    >>> within(0, 1, loop_share=1.5)
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: loop_share must be from 0 to 1, but is 1.5.
    """
    for name, number in numbers.items():
        if number is not None and not low - SUMS * abs(low) <= number <= high + SUMS * abs(high):
            wanted = f"at least {low:.6g}" if high == inf else f"from {low:.6g} to {high:.6g}"
            wanted = f"{low:.6g}" if f"{low:.6g}" == f"{high:.6g}" else wanted
            raise InvalidInput(f"{name} must be {wanted}, but is {number:.6g}.")


def shares(name: str, values: Sequence[float]) -> None:
    """Raise InvalidInput unless shares of a whole sum to 1; none at all may stand for unknown ones."""
    for value in values:
        within(0, 1, **{name: value})
    if values:
        slack = SUMS + sum(map(rounding, values))
        within(1 - slack, 1 + slack, **{f"the sum of {name}": sum(values)})


@contextmanager
def at_place(path: str | Path, where: str) -> Iterator[None]:
    """Errors within it name the file and the place."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{path} is not as it should be at {where}: {error}") from None


def rounding(number: float) -> float:
    """Half of the last digit that a number is written with; nothing for a count.

    >>> rounding(1.8), rounding(3)
    (0.05, 0.0)
    """
    if isinstance(number, int):
        return 0.0
    digits = Decimal(repr(float(number))).as_tuple().exponent
    return 0.5 * 10.0 ** min(int(digits), 0)


def _digits(number: float, other: float) -> str:
    """A number with as many digits as tell it from another."""
    return next((f"{number:.{n}g}" for n in (6, 9, 12) if f"{number:.{n}g}" != f"{other:.{n}g}"), repr(number))
