"""Rates by position without counts: as engines print them, and as scripts of training and evaluation do.

training log         {"test/0_acc": 0.7} of EAGLE's training (eagle/train/main.py): behind a wrong guess all deeper ones count
                     as wrong
acceptance analysis  of speculators' parse_acceptance_lengths.py, with the sum of the drafted tokens
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from treeopt.engines.measured.files import Measurement, counted
from treeopt.engines.measured.requests import bodies
from treeopt.engines.measured.survival import CHAIN, greenwood, named_drafter, on_length
from treeopt.errors import InvalidInput
from treeopt.records.calibration import ENGINE_LOG
from treeopt.records.drafters import COUNTED

TRAINED = re.compile(r"(?:test|eval|val)/(\d{1,3})_acc", re.ASCII)
ANALYSIS = re.compile(r"per-position acceptance rates:\s*\[([\d.\s,]{1,4000})\]", re.ASCII)
DRAFTED = re.compile(r"Total drafted tokens: (\d{1,15})", re.ASCII)
MEANINGS = {
    "survival": "that a guess was accepted with all before it, as engines print them",
    "conditional": "that a guess was accepted where all before it were",
    "marginal": "that a guess was right, whatever those before it were",
}
Meaning = Literal["survival", "conditional", "marginal"]
NO_COUNTS = "The file has no counts, so errors are not known: pass the number of drafts as `trials`."
AS_MANY = 10**6  # drafts that stand for an unknown number


@dataclass(frozen=True)
class PrintedRates:
    """Rates by position without counts.

    values   : (K,) of all prompts · groups: the same of parts of them, by name
    drafts   : number of drafts, where it is known
    drafters : kinds of drafter that the file's name for it may mean
    """

    values: Sequence[float]
    path: Path
    notes: Sequence[str] = ()
    drafts: int | None = None
    drafters: tuple[str, ...] = ()
    groups: Mapping[str, Sequence[float]] = field(default_factory=dict)
    options: ClassVar = ("rates", "trials")  # of `measurement`

    def measurement(
        self, drafter: str | None = None, rates: Meaning | None = None, trials: int | None = None
    ) -> Measurement:
        """The calibration of a chain.

        rates  : what the rates are; by default survival, which never rises
        trials : number of drafts, if the file does not say it
        """
        rises = any(a < b for a, b in pairwise(self.values))
        if rates in (None, "survival") and rises:
            raise InvalidInput(
                f"{self.path} must have rates by position that never rise, as those {MEANINGS['survival']}, but has "
                f"{list(self.values)}: say with `rates` if they are conditional or marginal."
            )
        if trials is not None and self.drafts is not None:
            raise InvalidInput(f"{self.path} says how many trials its shares rest on: leave `trials` out.")
        drafter = named_drafter(self.drafters, drafter, self.path)
        meaning, drafts = rates or "survival", trials or self.drafts
        survival, of_groups = self._survival(self.values, meaning), dict[str, object]()
        hits, tries = _counts(survival, drafts)
        calibration = counted(np.array(hits)[:, None], tries, self.path)
        for name, values in self.groups.items():
            group_hits, group_tries = _counts(self._survival(values, meaning), drafts)
            of_groups[name] = {"hits": [[count] for count in group_hits], "trials": group_tries}
        errors = greenwood(np.array(tries), np.array(hits)).tolist() if drafts else None
        calibration.meta.update(
            source=ENGINE_LOG,
            drafts=drafts,
            draft_length=len(survival),
            draft_lengths={str(len(survival)): drafts or 0},
            ends_are_misses=False,
            survival=survival,
            survival_stderr=errors,
            survival_stderr_is_optimistic=True,
        )
        if of_groups:
            calibration.meta["groups"] = of_groups
        notes = [f"The rates were taken as {meaning}: {MEANINGS[meaning]}.", *self.notes]
        notes += [] if drafts else [NO_COUNTS]
        kind = COUNTED.get(drafter or "")
        notes += [kind.note] if kind and kind.note else []
        notes += [on_length({len(survival): 0}, len(survival)), CHAIN]
        return Measurement(calibration, tuple(notes), drafter=drafter)

    def _survival(self, values: Sequence[float], meaning: Meaning) -> list[float]:
        survival = np.array(values, dtype=float)
        chain: list[float] = (survival if meaning == "survival" else np.cumprod(survival)).tolist()
        return chain


def _counts(survival: Sequence[float], drafts: int | None) -> tuple[list[int], list[int]]:
    """Drafts that passed each depth, and that were tried there."""
    hits = [round(share * (drafts or AS_MANY)) for share in survival]
    return hits, [drafts or AS_MANY, *hits[:-1]]


def is_rates(content: Any) -> bool:
    if isinstance(content, str):
        return ANALYSIS.search(content) is not None
    return any(isinstance(name, str) and TRAINED.fullmatch(name) for body in bodies(content) for name in body)


def read_rates(content: Any, path: Path) -> PrintedRates:
    """The rates of an analysis, or the last ones of a training log."""
    if isinstance(content, str) and (analysis := ANALYSIS.search(content)):
        values = [float(text) for text in analysis[1].replace(",", " ").split()]
        drafted = DRAFTED.search(content)
        return PrintedRates(values, path, drafts=int(drafted[1]) // len(values) if drafted else None)
    last: dict[int, float] = {}
    for body in bodies(content):
        last |= {int(match[1]): value for name, value in body.items() if (match := TRAINED.fullmatch(str(name)))}
    if sorted(last) != list(range(len(last))):
        raise InvalidInput(f"{path} must have an accuracy for every depth from 0 on, but has {sorted(last)}.")
    return PrintedRates([last[depth] for depth in sorted(last)], path)
