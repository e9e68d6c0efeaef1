"""Which setting to serve at each concurrency, what ties with it, and the next run that is worth most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from treeopt.arms.arm import Arm
from treeopt.arms.model import Floats, Posterior

TIE_CHANCE, TIE_SHARE = 0.1, 0.02  # what ties: better with at least this chance, or within this share
LEAST_VALUE = 0.005  # of a run, as a share of throughput
OUTCOMES = ndtri((np.arange(64) + 0.5) / 64)  # standard normal ones of equal chance


@dataclass(frozen=True)
class NextRun:
    """A run that may change a decision: the arm, the throughput that it is expected to gain, and how likely it changes the choice."""

    arm: Arm
    gain: float
    chance: float


@dataclass(frozen=True)
class Decision:
    """The choice for one model, data set and concurrency.

    chosen    : the fastest of the arms that were run
    tied      : arms that were run and that noise does not tell from it
    predicted : an arm that was not run and is likely better, with that chance; None where there is none
    next_run  : None where no run is worth it
    """

    chosen: int
    tied: tuple[int, ...]
    predicted: tuple[int, float] | None
    next_run: NextRun | None


def chance_of(posterior: Posterior, i: int, j: int) -> float:
    """How likely arm i is faster than arm j."""
    sd = _difference_sd(posterior, i, j)
    gap = posterior.mean[i] - posterior.mean[j]
    return float(ndtr(gap / sd)) if sd > 0 else float(gap > 0)


def _difference_sd(posterior: Posterior, i: int, j: int) -> float:
    c = posterior.covariance
    return float(np.sqrt(max(c[i, i] + c[j, j] - 2 * c[i, j], 0.0)))


def decide(posterior: Posterior, cell: Sequence[int]) -> Decision | None:
    """The decision among the arms of one cell; None where none of them was run.

    cell : their places in the posterior
    """
    mean = posterior.mean
    run = [i for i in cell if posterior.arms[i].tokens_per_s]
    if not run:
        return None
    chosen = max(run, key=lambda i: mean[i])
    tied = tuple(
        i
        for i in run
        if i != chosen
        and (chance_of(posterior, i, chosen) > TIE_CHANCE or mean[i] > mean[chosen] + np.log1p(-TIE_SHARE))
    )
    others = [i for i in cell if i not in run]
    best = max(others, key=lambda i: mean[i], default=chosen)
    predicted = (best, chance_of(posterior, best, chosen)) if mean[best] > mean[chosen] else None
    runs = [next_run(posterior, i, run) for i in cell]
    worth = max(runs, key=lambda run: run.gain)
    return Decision(chosen, tied, predicted, worth if worth.gain >= LEAST_VALUE else None)


def next_run(posterior: Posterior, i: int, run: Sequence[int]) -> NextRun:
    """What running arm i (again) is worth (the knowledge gradient) beside the arms ``run``."""
    mean, covariance = posterior.mean, posterior.covariance
    places = np.array([*run, *([] if i in run else [i])])
    spread = covariance[places, i] / np.sqrt(covariance[i, i] + posterior.launch[i])
    after: Floats = mean[places, None] + spread[:, None] * OUTCOMES
    best = max(mean[j] for j in run)
    choice = int(places[np.argmax(np.where(np.isin(places, run), mean[places], -np.inf))])
    changed = places[after.argmax(axis=0)] != choice
    return NextRun(posterior.arms[i], float(after.max(axis=0).mean() - best), float(changed.mean()))
