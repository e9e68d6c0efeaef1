"""Counts from the rounded rates by position that engines print in their logs.

rates : (K,)  survival by position, three decimals
mean  :       tokens of a draft, the target's own included: 1 + accepted / D, two decimals
D     :       drafts, which are not printed; accepted and drafted tokens are
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from treeopt.engines.measured.survival import MOST_DRAFTS, Drafts, group_of
from treeopt.errors import InvalidInput, quoted

RATE, MEAN = 0.0005 + 1e-9, 0.005 + 1e-9  # by how much rounding moves them
NUMBER = re.compile(r"\s*\d{1,20}(?:\.\d{0,20})?\s*", re.ASCII)
CUT = "Rates are printed for the first positions of a draft only. Deeper ones were left out."
MOST_TRIED = 2000  # numbers of drafts that are tried around the printed mean's


@dataclass(frozen=True)
class Printed:
    """A line: rates by position, and the totals beside them."""

    rates: Sequence[float]
    accepted: int
    drafted: int
    mean: float
    drafts: int | None = None  # where they are printed
    may_be_cut: bool = False  # whether drafts may have more positions than rates are printed for

    def counts(self, where: str) -> tuple[int, list[int]]:
        """Drafts, and the drafts that reached each depth, that print as this line.

        >>> Printed([0.8, 0.6, 0.42], accepted=1820, drafted=3000, mean=2.82).counts("x")
        (1000, [800, 600, 420])
        """
        if not self.rates or max(self.rates) > 1 or any(a < b for a, b in pairwise(self.rates)):
            raise InvalidInput(
                f"{where} must have rates by position from 0 to 1 that never rise, but has {list(self.rates)}."
            )
        if not self.accepted <= self.drafted <= MOST_DRAFTS:
            raise InvalidInput(
                f"{where} must accept at most what was drafted, but has {self.accepted} of {self.drafted}."
            )
        fitting = None
        for drafts in filter(self._fits, self._numbers_of_drafts()):
            fitting = fitting or drafts
            # Rounding may move the sum, also of the right number, but seldom of few drafts.
            if self.drafted % drafts == 0 or sum(reached for reached, _, _ in self._bounds(drafts)) == self.accepted:
                return drafts, self._summing(drafts)
        if fitting is None:
            raise InvalidInput(
                f"{where} must have rates by position that sum to the accepted tokens of a draft, but they sum to "
                f"{sum(self.rates):.3f}, and the mean length is {self.mean:g} with {self.accepted} accepted of {self.drafted}."
            )
        return fitting, self._summing(fitting)

    def _bounds(self, drafts: int) -> list[tuple[int, int, int]]:
        """At each depth the likeliest count of drafts, and the fewest and the most that print as the rate."""
        rates = [(rate * drafts, (rate - RATE) * drafts, (rate + RATE) * drafts) for rate in self.rates]
        return [(round(n), max(math.ceil(low), 0), min(math.floor(high), drafts)) for n, low, high in rates]

    def _summing(self, drafts: int) -> list[int]:
        """Counts that print as the rates and, where positions are not cut, sum to the accepted tokens; they never rise."""
        bounds = self._bounds(drafts)
        reached = [likeliest for likeliest, _, _ in bounds]
        missing = self.accepted - sum(reached)
        for j in range(len(reached)) if missing > 0 else reversed(range(len(reached))):
            moved = min(max(reached[j] + missing, bounds[j][1]), bounds[j][2]) - reached[j]
            reached[j] += moved
            missing -= moved
        return reached

    def _numbers_of_drafts(self) -> Iterator[int]:
        """Candidates for the number of drafts: the printed one, those of equal lengths, then those near the printed mean."""
        if self.drafts is not None:
            yield self.drafts
            return
        deepest = sum(rate > 0 for rate in self.rates) if self.accepted else len(self.rates)
        for length in range(len(self.rates), max(deepest, 1) - 1, -1):
            if self.drafted % length == 0:
                yield self.drafted // length
        if self.accepted and self.mean > 1:
            middle = round(self.accepted / (self.mean - 1))
            around = range(middle - MOST_TRIED // 2, middle + MOST_TRIED // 2)
            yield from sorted(around, key=lambda drafts: abs(drafts - middle))
        elif self.drafted:
            yield -(-self.drafted // len(self.rates))

    def _fits(self, drafts: int) -> bool:
        if not 0 < drafts <= self.drafted or abs(1 + self.accepted / drafts - self.mean) > MEAN:
            return False
        _, fewest, most = zip(*self._bounds(drafts), strict=True)
        is_cut = self.may_be_cut and self.drafted > drafts * len(self.rates)
        fits = all(low <= high for low, high in zip(fewest, most, strict=True)) and sum(fewest) <= self.accepted
        return fits and (is_cut or self.accepted <= sum(most))


def pooled(lines: Sequence[tuple[str, Printed]], left_out: int = 0) -> tuple[list[Drafts], list[str]]:
    """The drafts of each line, and notes. ``lines`` has the place of each line, for errors."""
    groups: list[Drafts] = []
    notes: list[str] = []
    for where, line in lines:
        drafts, reached = line.counts(where)
        notes += [CUT] * (line.accepted > sum(reached))
        groups.append(group_of(drafts, reached, line.drafted, where))
    notes += [f"{left_out} lines without rates by position were left out."] * bool(left_out)
    return groups, notes


def drafters_named(names: Iterable[str], kinds: Mapping[str, tuple[str, ...]], path: Path) -> tuple[str, ...]:
    """Kinds of drafter that the name in a log may mean; empty if the name is missing or unknown."""
    found = sorted(set(names))
    if len(found) > 1:
        raise InvalidInput(f"{path} must be of one drafter, but has drafts of {', '.join(found)}.")
    return kinds.get(found[0], ()) if found else ()


def whole(digits: str) -> int:
    """The count of a log line; one above `MOST_DRAFTS` becomes the next above it, which `Printed.counts` refuses."""
    return min(int(digits[:20]), MOST_DRAFTS + 1)


def number(text: str, path: Path, needed: str) -> float:
    """A number of a log line; InvalidInput says what ``needed`` to be there."""
    if NUMBER.fullmatch(text):
        return float(text)
    raise InvalidInput(f"{path} must have {needed}, but has {quoted(text)}.")
