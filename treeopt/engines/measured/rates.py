"""Rates by position, which are rounded: in an engine's log beside totals of tokens, and without any counts.

engine's log  totals of an interval or a request beside its rates; the number of drafts is seldom printed
training log  {"test/0_acc": 0.7} of EAGLE's training (eagle/train/main.py): behind a wrong guess all deeper ones count as wrong

rates : (K,)  survival by position
mean  :       tokens of a draft, the target's own included: 1 + accepted / D, two decimals
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from treeopt.engines.measured.files import Measurement
from treeopt.engines.measured.requests import bodies
from treeopt.engines.measured.survival import CountedDrafts, Drafts
from treeopt.errors import InvalidInput

RATE, MEAN = 0.0005 + 1e-9, 0.005 + 1e-9  # by how much rounding moves them
CUT = "Rates are printed for the first positions of a draft only. Deeper ones were left out."
TRAINED = re.compile(r"(?:test|eval|val)/(\d{1,3})_acc[\"']?:?\s{1,40}([01]\.\d{1,20})", re.ASCII)
MEANINGS = {
    "survival": "that a guess was accepted with all before it, as engines print them",
    "conditional": "that a guess was accepted where all before it were",
    "marginal": "that a guess was right, whatever those before it were",
}
Meaning = Literal["survival", "conditional", "marginal"]
AS_MANY = 10_000  # drafts that stand for an unknown number


@dataclass(frozen=True)
class Printed:
    """A line of a log: rates by position, and the totals beside them.

    where      : the file and the line, for errors
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


@dataclass(frozen=True)
class PrintedRates:
    """Rates by position without counts.

    groups   : (K,) rates on each group of prompts, by name; "" for all prompts
    drafts   : number of drafts, where it is known
    drafters : kinds of drafter that the file's name for it may mean
    """

    groups: Mapping[str, Sequence[float]]
    path: Path
    drafts: int | None = None
    drafters: tuple[str, ...] = ()
    options: ClassVar = ("rates", "trials")  # of `measurement`

    def measurement(
        self, drafter: str | None = None, rates: Meaning | None = None, trials: int | None = None
    ) -> Measurement:
        """The calibration of a chain; groups count alike.

        rates  : what the rates are; by default survival, which never rises
        trials : number of drafts, if the file does not say it
        """
        if trials is not None and self.drafts is not None:
            raise InvalidInput(f"{self.path} says how many trials its shares rest on: leave `trials` out.")
        meaning, drafts = rates or "survival", trials or self.drafts
        groups = []
        for name, values in self.groups.items():
            survival = np.array(values) if meaning == "survival" else np.cumprod(values)
            if (np.diff(survival) > 0).any():
                raise InvalidInput(
                    f"{self.path} must have rates by position that never rise, as those {MEANINGS['survival']}, but has "
                    f"{list(values)}: say with `rates` if they are conditional or marginal."
                )
            reached = np.rint(survival * (drafts or AS_MANY)).astype(int).tolist()
            groups.append(replace(Drafts.of(drafts or AS_MANY, reached, None, self.path), group=name))
        notes = [f"The rates were taken as {meaning}: {MEANINGS[meaning]}."]
        if len(groups) > 1:
            notes.append(f"All {len(groups)} groups count alike.")
        counted = CountedDrafts(groups, self.path, notes, drafters=self.drafters, are_counted=drafts is not None)
        return counted.measurement(drafter)


def alone(rates: Sequence[Sequence[float]], path: Path, drafters: tuple[str, ...] = ()) -> PrintedRates:
    """Rates that were printed several times without counts: the mean of those with the most positions."""
    longest = max(map(len, rates))
    means = np.mean([some for some in rates if len(some) == longest], axis=0)
    return PrintedRates({"": means.tolist()}, path, drafters=drafters)


def is_rates(content: Any) -> bool:
    if isinstance(content, str):
        return TRAINED.search(content) is not None
    return any(re.fullmatch(r"(?:test|eval|val)/0_acc", str(name)) for body in bodies(content) for name in body)


def read_rates(content: Any, path: Path) -> PrintedRates:
    """The last rates of a training log."""
    text = content if isinstance(content, str) else repr(content)
    last = {int(depth): float(rate) for depth, rate in TRAINED.findall(text)}
    if not last or sorted(last) != list(range(len(last))):
        raise InvalidInput(f"{path} must have an accuracy for every depth from 0 on, but has {sorted(last)}.")
    return PrintedRates({"": [last[depth] for depth in sorted(last)]}, path)
