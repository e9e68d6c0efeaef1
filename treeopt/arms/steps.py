"""The step of a drafter taken apart: decoding without speculation, what drafting costs whatever its length, and each guess.

The step of a request is its tokens times the milliseconds of each: steps of k guesses take plain + fixed + k guess. Off and two
lengths and more tell the parts, by draws from the prior of the arms' model that are weighted by the measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, log, log2

import numpy as np

from treeopt.arms.arm import Arm
from treeopt.arms.model import PRIOR, Floats, Posterior, log_normal
from treeopt.records.estimate import Estimate

ROUNDS = 30
WIDTH = 1.5  # of the prior, beside that of the arms' model: measured steps speak
TOKENS_ERROR = 0.015  # of the logarithm of tokens per step that were counted in the run itself


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What a step of a drafter takes in one cell, in milliseconds; None where it cannot be told, and with ratios.

    served               : the drafter's fastest arm
    plain_ms             : a step without speculation
    fixed_ms             : of drafting, whatever its length
    per_guess_ms         : of each guess, with its verification
    step_ms              : of the served arm
    break_even_tokens    : tokens per step with which the served arm is as fast as off
    """

    served: Arm
    plain_ms: Estimate | None
    fixed_ms: Estimate | None
    per_guess_ms: Estimate | None
    step_ms: Estimate | None
    break_even_tokens: Estimate | None

    @property
    def hopeless(self) -> bool:
        """Whether a drafter that is always right would lose as well."""
        return bool(self.served.k and self.break_even_tokens and self.break_even_tokens > self.served.k + 1)


def step_parts(posterior: Posterior, cell: Sequence[int]) -> list[StepParts]:
    """The parts for each drafter of one cell (places of its arms) of which tokens per step and throughput are known."""
    arms = posterior.arms
    run = [i for i in cell if arms[i].tokens_per_s and arms[i].emitted]
    off = [i for i in run if arms[i].k == 0]
    drafters = dict.fromkeys(arms[i].drafter for i in run if arms[i].k != 0)
    return [_parts(posterior, off, [i for i in run if arms[i].drafter == drafter]) for drafter in drafters]


def _parts(posterior: Posterior, off: list[int], own: list[int]) -> StepParts:
    arms, every = posterior.arms, off + own
    served = max(own, key=lambda i: posterior.mean[i])
    by_request = all(arms[i].tpot_ms for i in every)
    steps = {i: _log_step(arms[i], by_request) for i in every}
    noise = {i: posterior.launch[i] / arms[i].repeats + TOKENS_ERROR**2 for i in every}
    known = [i for i in every if arms[i].k is not None]
    fixed = guess = None
    if len({arms[i].k for i in known} - {0}) > 1:
        fixed, guess = _fitted(
            [arms[i] for i in known], np.array([steps[i] for i in known]), np.array([noise[i] for i in known])
        )
    plain = break_even = None
    if off:
        plain = log_normal(steps[off[0]], noise[off[0]])
        break_even = log_normal(steps[served] - steps[off[0]], noise[served] + noise[off[0]])
    milliseconds = by_request or arms[served].unit != "ratio"
    return StepParts(
        served=arms[served],
        plain_ms=plain if milliseconds else None,
        fixed_ms=fixed if milliseconds and off else None,
        per_guess_ms=guess if milliseconds else None,
        step_ms=log_normal(steps[served], noise[served]) if milliseconds else None,
        break_even_tokens=break_even,
    )


def _log_step(arm: Arm, by_request: bool) -> float:
    """Logarithm of the milliseconds of a step; for a ratio, of plain steps."""
    if by_request:
        return log((arm.tpot_ms or 1) * (arm.emitted or 1))
    milliseconds = 1.0 if arm.unit == "ratio" else 1000.0 * (arm.concurrency if arm.unit == "all" else 1)
    return log(milliseconds / (arm.tokens_per_s or 1) * (arm.emitted or 1))


def _fitted(arms: Sequence[Arm], steps: Floats, noise: Floats) -> tuple[Estimate, Estimate]:
    """The fixed part and each guess, by the logarithms (m,) of measured steps and their variances (m,): MAP and Laplace."""
    lengths, doublings = np.array([arm.k for arm in arms], dtype=float), log2(arms[0].concurrency)
    counts = np.stack([np.ones(len(arms)), lengths > 0, lengths])  # (3, m) of plain, fixed and guess in each step
    means, errors = np.transpose([_at("fixed", doublings), _at("guess", doublings)])
    prior = np.diag([0.0, *errors**-2.0])
    logs = np.array([steps.min(), *means])  # of a plain step, and of the shares of it
    for _ in range(ROUNDS):  # of Gauss and Newton
        parts = np.exp([0.0, *logs[1:]])[:, None] * counts
        slopes = parts / parts.sum(axis=0)
        slopes[0] = 1
        precision = slopes / noise @ slopes.T + prior
        misses = slopes / noise @ (steps - logs[0] - np.log(parts.sum(axis=0))) - prior @ (logs - [0.0, *means])
        change = np.linalg.solve(precision, misses)
        logs += change / max(1.0, np.abs(change).max())
    covariance = np.linalg.inv(precision)
    fixed, guess = (
        log_normal(logs[0] + logs[i], covariance[0, 0] + covariance[i, i] + 2 * covariance[0, i]) for i in (1, 2)
    )
    return fixed, guess


def _at(name: str, doublings: float) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm of a share of `PRIOR` at a concurrency."""
    mean, *errors = PRIOR[name]
    slope, *slope_errors = PRIOR[f"{name} slope"]
    return mean + slope * doublings, WIDTH * hypot(*errors, doublings * slope_errors[0])
