"""Which setting to serve at each concurrency, what ties with it, and the next run that is worth most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from treeopt.arms.model import Posterior

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


@dataclass(frozen=True)
class Decision:
    """The choice for one model, data set and concurrency; arms by their places in the posterior.

    chosen    : the fastest of the arms that were run; off where that was measured faster
    tied      : other arms that were run and that noise does not tell from it
    predicted : the fastest of the others, where it is likely faster than the chosen one
    next_run  : the run that is worth most; None where none is worth it
    """

    chosen: int
    tied: tuple[int, ...]
    predicted: Predicted | None
    next_run: NextRun | None


def decide(posterior: Posterior, cell: Sequence[int]) -> Decision | None:
    """The decision among the arms of one cell whose drafter is not broken; None where none of them was run.

    Where broken drafters alone were run it is off, by what is known of it.

    cell : places of its arms in the posterior
    """
    mean, arms = posterior.mean, posterior.arms
    tried = any(i in posterior.run for i in cell)
    cell = [i for i in cell if arms[i].drafter not in posterior.broken]
    run = [i for i in cell if i in posterior.run] or [i for i in cell if arms[i].k == 0 and tried]
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
    best = max(cell, key=lambda i: mean[i])
    predicted = Predicted(best, posterior.chance(best, chosen))
    following = max((next_run(posterior, i, run) for i in cell), key=lambda following: following.gain)
    return Decision(
        chosen,
        tied,
        predicted if predicted.chance >= LIKELY else None,
        following if following.gain >= LEAST_GAIN else None,
    )


def next_run(posterior: Posterior, i: int, run: Sequence[int]) -> NextRun:
    """What running arm i is worth (its knowledge gradient) where the arms ``run`` were run."""
    mean, covariance = posterior.mean, posterior.covariance
    choice = max(run, key=lambda j: mean[j])
    places = np.array([choice, *(j for j in run if j != choice), *([] if i in run else [i])])
    moved = covariance[places, i] / np.sqrt(covariance[i, i] + posterior.launch[i])
    after = mean[places, None] + moved[:, None] * OUTCOMES
    gain = after.max(axis=0).mean() - mean[choice]
    return NextRun(i, float(np.expm1(gain)), float((after.argmax(axis=0) != 0).mean()))
