"""Rates by position without counts: as engines print them, and as scripts of training and evaluation do.

training log         {"test/0_acc": 0.7} of EAGLE's training (eagle/train/main.py): behind a wrong guess all deeper ones count
                     as wrong
acceptance analysis  of speculators' parse_acceptance_lengths.py, with the sum of the drafted tokens
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from treeopt.engines.measured.files import Measurement
from treeopt.engines.measured.requests import bodies
from treeopt.engines.measured.survival import CountedDrafts, Drafts
from treeopt.errors import InvalidInput

TRAINED = re.compile(r"(?:test|eval|val)/(\d{1,3})_acc[\"']?:?\s{1,40}([01]\.\d{1,20})", re.ASCII)
ANALYSIS = re.compile(r"per-position acceptance rates:\s*\[([\d.\s,]{1,4000})\]", re.ASCII)
DRAFTED = re.compile(r"Total drafted tokens: (\d{1,13})", re.ASCII)
MEANINGS = {
    "survival": "that a guess was accepted with all before it, as engines print them",
    "conditional": "that a guess was accepted where all before it were",
    "marginal": "that a guess was right, whatever those before it were",
}
Meaning = Literal["survival", "conditional", "marginal"]
AS_MANY = 10_000  # drafts that stand for an unknown number


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
        return bool(ANALYSIS.search(content) or TRAINED.search(content))
    return any(re.fullmatch(r"(?:test|eval|val)/0_acc", str(name)) for body in bodies(content) for name in body)


def read_rates(content: Any, path: Path) -> PrintedRates:
    """The rates of an analysis, or the last ones of a training log."""
    text = content if isinstance(content, str) else repr(content)
    if analysis := ANALYSIS.search(text):
        values = [float(number) for number in re.findall(r"\d\.?\d*", analysis[1])]
        drafted = DRAFTED.search(text)
        return PrintedRates({"": values}, path, drafts=int(drafted[1]) // len(values) if drafted else None)
    last = {int(depth): float(rate) for depth, rate in TRAINED.findall(text)}
    if not last or sorted(last) != list(range(len(last))):
        raise InvalidInput(f"{path} must have an accuracy for every depth from 0 on, but has {sorted(last)}.")
    return PrintedRates({"": [last[depth] for depth in sorted(last)]}, path)
