"""Counts from the rounded rates by position that engines print in their logs.

rates : (K,)  survival by position
mean  :       tokens of a draft, the target's own included: 1 + accepted / D, two decimals
D     :       drafts, which are seldom printed; accepted and drafted tokens are
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from treeopt.engines.measured.survival import MOST_DRAFTS, Drafts
from treeopt.errors import InvalidInput

RATE, MEAN = 0.0005 + 1e-9, 0.005 + 1e-9  # by how much rounding moves them
CUT = "Rates are printed for the first positions of a draft only. Deeper ones were left out."


@dataclass(frozen=True)
class Printed:
    """A line of a log: rates by position, and the totals beside them.

    where      : the file and the line, for errors
    rates      : none for drafts of one token, whose mean says everything
    drafts     : their number, where it is printed
    rounding   : by how much rounding moves a rate
    may_be_cut : whether drafts may have more positions than rates are printed for
    """

    where: str
    rates: Sequence[float]
    accepted: int
    drafted: int
    mean: float
    drafts: int | None = None
    rounding: float = RATE
    may_be_cut: bool = False

    def counts(self) -> tuple[int, list[int]]:
        """The drafts, and those that reached each depth. Raises InvalidInput if no numbers print as this line.

        >>> Printed("x", [0.8, 0.6, 0.42], accepted=1820, drafted=3000, mean=2.82).counts()
        (1000, [800, 600, 420])
        """
        if not self.rates or max(self.rates) > 1 or any(a < b for a, b in pairwise(self.rates)):
            raise InvalidInput(
                f"{self.where} must have rates by position from 0 to 1 that never rise, but has {list(self.rates)}."
            )
        if not self.accepted <= self.drafted <= MOST_DRAFTS:
            raise InvalidInput(
                f"{self.where} must accept at most what was drafted, but has {self.accepted} of {self.drafted}."
            )
        # The printed number, that of full drafts, then those by the rates and by the mean.
        candidates = [self.drafts or math.ceil(self.drafted / len(self.rates))]
        if self.accepted and sum(self.rates) > 0 and self.drafts is None:
            candidates.append(round(self.accepted / sum(self.rates)))
        if self.accepted and self.mean > 1 and self.drafts is None:
            candidates.append(round(self.accepted / (self.mean - 1)))
        for drafts in candidates:
            if self._fits(drafts):
                return drafts, [round(rate * drafts) for rate in self.rates]
        raise InvalidInput(
            f"{self.where} must have rates by position that sum to the accepted tokens of a draft, but they sum to "
            f"{sum(self.rates):.3f}, and the mean length is {self.mean:g} with {self.accepted} accepted of {self.drafted}."
        )

    def _fits(self, drafts: int) -> bool:
        """Whether so many drafts print as the mean and as rates of that sum."""
        if not 0 < drafts <= self.drafted or abs(1 + self.accepted / drafts - self.mean) > MEAN:
            return False
        beyond = self.accepted / drafts - sum(self.rates)
        if self.may_be_cut and self.drafted > drafts * len(self.rates):
            return beyond >= -self.rounding * len(self.rates)
        return abs(beyond) <= self.rounding * len(self.rates)

    def is_cut(self, drafts: int) -> bool:
        """Whether guesses were accepted beyond the positions that are printed."""
        return self.accepted / drafts - sum(self.rates) > self.rounding * len(self.rates)


def one_token(where: str, accepted: int, drafted: int, mean: float) -> Drafts | None:
    """Drafts of one token, of which the mean says everything; None where drafts were longer.

    >>> one_token("x", 66, 88, 1.75).reached.tolist()
    [66]
    """
    if not 0 <= accepted <= drafted or not drafted or abs(1 + accepted / drafted - mean) > MEAN:
        return None
    return Drafts.of(drafted, [accepted], drafted, where)


def of_one_token(lines: Sequence[Printed]) -> list[Drafts]:
    """The drafts of lines that have only means, where these show that all drafts were of one token; else none."""
    groups = [one_token(line.where, line.accepted, line.drafted, line.mean) for line in lines if line.drafted]
    is_shown = any(line.accepted for line in lines) and None not in groups
    return [group for group in groups if group] if is_shown else []


def pooled(lines: Sequence[Printed], left_out: int = 0) -> tuple[list[Drafts], list[str]]:
    """The drafts of each line, and notes. ``left_out`` lines had no rates."""
    groups: list[Drafts] = []
    notes: list[str] = []
    for line in lines:
        drafts, reached = line.counts()
        if line.is_cut(drafts):
            notes.append(CUT)
        groups.append(Drafts.of(drafts, reached, line.drafted, line.where))
    if left_out:
        notes.append(f"{left_out} lines without rates by position were left out.")
    return groups, notes


def drafters_named(names: Iterable[str], kinds: Mapping[str, tuple[str, ...]], path: Path) -> tuple[str, ...]:
    """The kinds of drafter that the name in a log may mean; none if the name is missing or unknown."""
    different = sorted(set(names))
    if len(different) > 1:
        raise InvalidInput(f"{path} must be of one drafter, but has drafts of {', '.join(different)}.")
    return kinds.get(different[0], ()) if different else ()
