"""Words of figures: a value with its error, a number with its noun, ranges of numbers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import isnan, nan

from treeopt.records.estimate import Estimate


def pm(number: float | None, digits: int = 2) -> str:
    """A number, and its standard error if it is an estimate that has one; an error of NaN is not known.

    >>> pm(Estimate(1.5, 0.02)), pm(Estimate(1.5, nan)), pm(1.5), pm(None)
    ('1.50 ±0.02', '1.50 ±?', '1.50', '–')
    """
    if number is None:
        return "–"
    error = number.stderr if isinstance(number, Estimate) else None
    return f"{number:.{digits}f}" + ("" if error is None else " ±?" if isnan(error) else f" ±{error:.{digits}f}")


def timed(estimate: Estimate | None, digits: int = 2) -> str:
    """A number that latencies are in, with its standard error also where it is not known."""
    if estimate is not None and estimate.stderr is None:
        estimate = replace(estimate, stderr=nan)
    return pm(estimate, digits)


def interval(estimate: float | None, digits: int = 2) -> str:
    """A number with its 95 % interval where that is known; a dash where the number is not.

    >>> interval(Estimate(1.25, low=1.1, high=1.4), 1), interval(1.25), interval(None)
    ('1.2 [1.1, 1.4]', '1.25', '–')
    """
    if estimate is None:
        return "–"
    low, high = estimate.ends if isinstance(estimate, Estimate) else (estimate, estimate)
    return f"{estimate:.{digits}f}" + (f" [{low:.{digits}f}, {high:.{digits}f}]" if low < high else "")


def per_cent(share: Estimate) -> Estimate:
    """A share with its errors in per cent."""
    return Estimate(100 * share, 100 * (share.stderr or 0.0), *(100 * end for end in share.ends))


def percent(ratio: float, less: str, more: str, *, digits: int = 0) -> str:
    """How far one rate is from another by their ratio: what it has less, or more, in per cent of the other.

    >>> percent(Estimate(0.48, 0.01), "behind", "ahead", digits=1), percent(1.5, "slower", "faster")
    ('52.0 ±1.0 % behind', '50 % faster')
    """
    error = ratio.stderr if isinstance(ratio, Estimate) else None
    apart = Estimate(100 * abs(ratio - 1), error and 100 * error)
    return f"{pm(apart, digits)} % {less if ratio <= 1 else more}"


def count(n: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "sequence"), count(4228, "state")
    ('1 sequence', '4,228 states')
    """
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, with those that follow each other as a range.

    >>> ranges([1, 2, 3, 7])
    '1–3, 7'
    """
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
