"""Counts from the rounded rates by position that engines print in their logs.

rates : (K,)  survival by position
mean  :       tokens of a draft, the target's own included: 1 + accepted / D, two decimals
D     :       drafts, which are seldom printed; accepted and drafted tokens are
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treeopt.engines.measured.survival import Drafts
from treeopt.errors import InvalidInput

RATE, MEAN = 0.0005 + 1e-9, 0.005 + 1e-9  # by how much rounding moves them
CUT = "Rates are printed for the first positions of a draft only. Deeper ones were left out."


@dataclass(frozen=True)
class Printed:
    """A line of a log: rates by position, and the totals beside them.

    where      : the file and the line, for errors
    rates      : none for drafts of one token, whose mean says everything
    drafts     : their number, where it is printed
    may_be_cut : whether drafts may have more positions than rates are printed for
    """

    where: str
    rates: Sequence[float]
    accepted: int
    drafted: int
    mean: float
    drafts: int | None = None
    may_be_cut: bool = False

    def counts(self) -> tuple[int, list[int]]:
        """The drafts, and those that reached each depth. Raises InvalidInput if no numbers print as this line.

        >>> Printed("x", [0.8, 0.6, 0.42], accepted=1820, drafted=3000, mean=2.82).counts()
        (1000, [800, 600, 420])
        """
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
            return beyond >= -RATE * len(self.rates)
        return abs(beyond) <= RATE * len(self.rates)

    def is_cut(self, drafts: int) -> bool:
        """Whether guesses were accepted beyond the positions that are printed."""
        return self.accepted / drafts - sum(self.rates) > RATE * len(self.rates)


def of_one_token(lines: Sequence[Printed]) -> list[Drafts]:
    """The drafts of lines without rates, if their means show that every draft had one token; else none.

    >>> of_one_token([Printed("x", [], accepted=66, drafted=88, mean=1.75)])[0].reached.tolist()
    [66]
    """
    drafting = [line for line in lines if line.drafted]
    if not any(line.accepted for line in drafting):
        return []
    if any(abs(1 + line.accepted / line.drafted - line.mean) > MEAN for line in drafting):
        return []
    return [Drafts.of(line.drafted, [line.accepted], line.drafted, line.where) for line in drafting]


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
