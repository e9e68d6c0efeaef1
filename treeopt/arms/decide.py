"""Which setting to serve at each concurrency, what ties with it, and the next run that is worth most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from treeopt.arms.arm import OFF, Arm
from treeopt.arms.model import Posterior
from treeopt.records.estimate import Estimate

TIE_CHANCE, TIE_SHARE = 0.1, 0.02  # what ties: faster with at least this chance, or within this share
LIKELY = 0.6  # least chance that an arm that was not run is faster, with which it is named
LEAST_GAIN = 0.005  # of a run that is worth it, as a share of throughput
OUTCOMES = np.array([NormalDist().inv_cdf((i + 0.5) / 64) for i in range(64)])  # normal ones of equal chance


class Predicted(NamedTuple):
    """An arm that was not run, and the chance that it is faster than the chosen one."""

    arm: int
    chance: float


class NextRun(NamedTuple):
    """A run (again or for the first time) that may change a decision.

    gain   : share of throughput that it is expected to bring
    chance : that another arm is chosen after it
    """

    arm: int
    gain: float
    chance: float


@dataclass(frozen=True, eq=False)
class Choice:
    """What to serve for one model, data set and concurrency; arms by their places in the posterior.

    posterior    : what is known of all arms of the model
    cell         : arms that could be served
    chosen       : the fastest of the arms that were run; off where that was measured faster
    tied         : other arms that were run and that noise does not tell from it
    predicted    : the fastest of the others, where it is likely faster than the chosen one
    next_run     : the run that is worth most; None where none is worth it
    within_limit : whether the chosen arm keeps the limit on the time per token; None without a limit
    """

    posterior: Posterior
    cell: tuple[int, ...]
    chosen: int
    tied: tuple[int, ...]
    predicted: Predicted | None
    next_run: NextRun | None
    within_limit: bool | None = None

    @property
    def arm(self) -> Arm:
        """The chosen arm."""
        return self.posterior.arms[self.chosen]

    @property
    def throughput(self) -> Estimate:
        return self.posterior.throughput(self.chosen)

    @property
    def run(self) -> dict[tuple[str, int | None], int]:
        """The places of the settings that were run here."""
        return {self.posterior.arms[i].setting: i for i in self.cell if i in self.posterior.run}

    @property
    def over_off(self) -> Estimate | None:
        """How many times the throughput without speculation the chosen arm has; None where that was not run."""
        place = self.run.get((OFF, 0))
        return None if place is None else self.posterior.ratio(self.chosen, place)


def decide(posterior: Posterior, cell: Sequence[int], limit_ms: float | None = None) -> Choice | None:
    """The choice among the arms of one cell whose drafter is not broken; None where none of them was run.

    Where broken drafters alone were run it is off, if that was run at lower and at higher concurrencies.

    cell     : places of its arms in the posterior
    limit_ms : most milliseconds per token of the chosen arm, where any keeps it
    """
    mean, arms = posterior.mean, posterior.arms
    tried = any(i in posterior.run for i in cell)
    able = [i for i in cell if arms[i].drafter not in posterior.broken]
    run = [i for i in able if i in posterior.run]
    if tried and not run:
        run = [i for i in able if arms[i].k == 0 and _lies_between_runs(posterior, i)]
    if limit_ms is not None:
        fast = [i for i in able if posterior.token_ms(i) <= limit_ms]
        if fast_run := [i for i in run if i in fast]:
            able, run = fast, fast_run
    if not run:
        return None
    chosen = max(run, key=lambda i: mean[i])
    off = next((i for i in run if arms[i].k == 0), chosen)
    if (arms[chosen].tokens_per_s or 0) < (arms[off].tokens_per_s or 0):
        chosen = off
    tied = tuple(
        i
        for i in run
        if i != chosen and (posterior.chance(i, chosen) > TIE_CHANCE or mean[i] > mean[chosen] + log1p(-TIE_SHARE))
    )
    best = max(able, key=lambda i: mean[i])
    predicted = Predicted(best, posterior.chance(best, chosen))
    following = max((next_run(posterior, i, run) for i in able), key=lambda following: following.gain)
    return Choice(
        posterior,
        tuple(cell),
        chosen,
        tied,
        predicted if predicted.chance >= LIKELY else None,
        following if following.gain >= LEAST_GAIN else None,
        None if limit_ms is None else posterior.token_ms(chosen) <= limit_ms,
    )


def _lies_between_runs(posterior: Posterior, i: int) -> bool:
    """Whether the setting of an arm was run on its data set at lower and at higher concurrencies."""
    arm, others = posterior.arms[i], [posterior.arms[j] for j in posterior.run]
    loads = [other.concurrency for other in others if (other.setting, other.dataset) == (arm.setting, arm.dataset)]
    return bool(loads) and min(loads) <= arm.concurrency <= max(loads)


def next_run(posterior: Posterior, i: int, run: Sequence[int]) -> NextRun:
    """What running arm i is worth (its knowledge gradient) where the arms ``run`` were run."""
    mean, covariance = posterior.mean, posterior.covariance
    choice = max(run, key=lambda j: mean[j])
    places = np.array([choice, *(j for j in run if j != choice), *([] if i in run else [i])])
    moved = covariance[places, i] / np.sqrt(covariance[i, i] + posterior.launch[i])
    after = mean[places, None] + moved[:, None] * OUTCOMES
    gain = after.max(axis=0).mean() - mean[choice]
    return NextRun(i, float(np.expm1(gain)), float((after.argmax(axis=0) != 0).mean()))
