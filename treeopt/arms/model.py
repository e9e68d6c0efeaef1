"""Throughput of settings that were run and of those that were not, as one Gaussian.

A step without speculation takes plain(c) at c requests; one with k guesses plain(c) (1 + fixed(c) + k guess(c)), and emits
E(k) = 1 + a (1 - b^k) / (1 - b) tokens, so that log tokens/s = log c + log E(k) - log plain(c) - log(1 + fixed(c) + k guess(c)).
What such steps can be is drawn from `PRIOR`; mean and covariance of the draws, with a smooth process for what the form misses,
are the Gaussian, which is conditioned once on all figures. How far a table lies from the form is a property of its arms that
comes back when they are run again: it is no noise, and has a variance of its own.

n arms · P draws
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import erf, exp, log, sqrt
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from treeopt.arms.arm import Arm
from treeopt.records.calibration import LEAST_RIGHT
from treeopt.records.drafters import COPIES, kind_of_name
from treeopt.records.estimate import Z95, Estimate

Floats = NDArray[np.float64]
DRAWS = 2000
LEAST_VARIANCE = 1e-12  # of log throughput
MISFITS = (0.006, 0.0125, 0.025, 0.05, 0.1, 0.2)  # of an arm, weighted by evidence
LAUNCH, USUAL = 0.025, 4  # usual standard deviation between launches, and the repeats that it counts as
LEVEL, DATASET_LEVEL = 10.0, 1.0  # of log plain steps: free, and of a data set beside others
RATIO_LEVEL = 0.1  # of a cell's ratios
ADAPTIVE = 0.15  # of an engine that chooses lengths, beside the longest
PRIOR = {  # mean, and standard deviations: of all, of a drafter, of a data set
    "fixed": (np.log(0.12), 0.8, 0.6, 0.0),  # its logarithm, as are the following
    "fixed slope": (0.0, 0.15, 0.0, 0.0),  # by the binary logarithm of the concurrency
    "guess": (np.log(0.06), 0.8, 0.5, 0.0),
    "guess slope": (0.25, 0.2, 0.0, 0.0),
    "first": (0.85, 0.6, 0.5, 0.5),  # logit of a
    "next": (1.1, 0.8, 0.0, 0.0),  # logit of b
    "plain slope": (0.2, 0.2, 0.0, 0.1),  # of log plain, by the natural logarithm of the concurrency
    "knee": (4.0, 2.0, 0.0, 0.0),  # binary logarithm of the concurrency
    "bend": (-1.0, 0.8, 0.0, 0.0),  # logarithm of what the slope gains there, by the binary logarithm
}
# standard deviations of what the form misses, smooth in length or concurrency
DRAFTER_LENGTH, DATASET_LENGTH, DRAFTER_LOAD, DATASET_LOAD, LOAD = 0.07, 0.06, 0.05, 0.08, 0.04
LENGTH_SCALE, LOAD_SCALE = 0.8, 2.0  # in log(1 + k), in log2 c


@dataclass(frozen=True, eq=False)
class Posterior:
    """What is known of n arms.

    mean       : (n,) log tokens per second, of all requests together (a ratio's logarithm where the arm is one)
    covariance : (n, n) of what they are; noise of launches is not in it
    launch     : (n,) variances between launches
    """

    arms: tuple[Arm, ...]
    mean: Floats
    covariance: Floats
    launch: Floats

    @cached_property
    def run(self) -> frozenset[int]:
        """Places of the arms that have figures."""
        return frozenset(i for i, arm in enumerate(self.arms) if arm.tokens_per_s)

    @cached_property
    def broken(self) -> dict[str, str]:
        """Why each drafter is broken that is."""
        return broken(self.arms)

    def throughput(self, i: int) -> Estimate:
        """Tokens per second of arm i, in its own unit: as measured where it was run, else as a run would show it."""
        measured = self.arms[i].tokens_per_s
        if measured is None:
            return log_normal(self._log(i), self.covariance[i, i] + self.launch[i])
        return replace(log_normal(log(measured), self.covariance[i, i]), value=measured)

    def ratio(self, i: int, j: int) -> Estimate:
        """Throughput of arm i over that of arm j, of one cell."""
        return log_normal(self._log(i) - self._log(j), self.variance(i, j))

    def _log(self, i: int) -> float:
        arm = self.arms[i]
        return log(arm.tokens_per_s) if arm.tokens_per_s else float(self.mean[i] - _shared_log(arm))

    def token_ms(self, i: int) -> float:
        """Milliseconds per token of a request: the 99th percentile where it is known, else the mean, else by throughput."""
        arm = self.arms[i]
        requests = arm.concurrency if arm.unit == "all" else 1
        return arm.tpot_p99_ms or arm.tpot_ms or 1000 * requests / self.throughput(i)

    def chance(self, i: int, j: int) -> float:
        """How likely arm i is faster than arm j; 0.5 for an arm and itself."""
        deviation = sqrt(self.variance(i, j)) or 1e-9
        return 0.5 + 0.5 * erf((self.mean[i] - self.mean[j]) / deviation / sqrt(2))

    def variance(self, i: int, j: int) -> float:
        """Variance of the difference of their log throughput."""
        covariance = self.covariance
        return max(float(covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]), 0.0)


def broken(arms: Iterable[Arm]) -> dict[str, str]:
    """Why each drafter is broken, of which no arm has 0.05 of the first guesses accepted.

    One that copies text is not: the text may not repeat.

    >>> arms = [Arm(drafter=name, k=4, tokens_per_step=1.01) for name in ("EAGLE", "ngram-mod")]
    >>> broken([*arms, Arm(drafter="MTP", k=1, tokens_per_step=1.7)])
    {'EAGLE': '1.01 tokens per step with 4 guesses: nearly none is accepted'}
    """
    best: dict[str, Arm] = {}
    for arm in arms:
        if arm.k == 0 or not arm.emitted or kind_of_name(arm.drafter) in COPIES:
            continue
        if arm.drafter not in best or _first(arm) > _first(best[arm.drafter]):
            best[arm.drafter] = arm
    return {
        drafter: f"{arm.emitted:.2f} tokens per step with {arm.k or 'its'} guesses: nearly none is accepted"
        for drafter, arm in best.items()
        if _first(arm) < LEAST_RIGHT
    }


def _first(arm: Arm) -> float:
    """Share of its first guesses that is accepted, at most."""
    return arm.positions[0] if arm.positions else (arm.emitted or 1) - 1


def posterior_of(arms: Sequence[Arm], *, launch: float | None = None) -> Posterior:
    """What is known of all ``arms`` of one model by the figures of those that were run.

    arms   : each setting in each cell once; those without figures are predicted
    launch : usual standard deviation of log tokens per second between launches, which repeats correct
    """
    launches = launch_variances(arms, LAUNCH if launch is None else launch)
    run = [i for i, arm in enumerate(arms) if arm.tokens_per_s]
    mean, prior = _prior(arms)
    off = np.array([np.log(arms[i].tokens_per_s or 1) + _shared_log(arms[i]) for i in run]) - mean[run]
    errors = np.diag([launches[i] / arms[i].repeats for i in run])
    means, covariances, evidence = [], [], []
    for misfit in MISFITS:
        covariance = prior + misfit**2 * np.eye(len(arms))
        known = covariance[np.ix_(run, run)] + errors
        solved = np.linalg.solve(known, np.column_stack([covariance[run], off]))
        means.append(mean + covariance[run].T @ solved[:, -1])
        covariances.append(covariance - covariance[run].T @ solved[:, :-1])
        evidence.append(-0.5 * (off @ solved[:, -1] + np.linalg.slogdet(known)[1]))
    weights = np.exp(np.array(evidence) - max(evidence))
    weights /= weights.sum()
    middle = weights @ np.stack(means)
    apart = np.stack(means) - middle
    spread = np.tensordot(weights, np.stack(covariances), 1) + (weights[:, None] * apart).T @ apart
    np.fill_diagonal(spread, spread.diagonal().clip(LEAST_VARIANCE))  # figures without an error leave none but rounding
    return Posterior(tuple(arms), middle, spread, launches)


def launch_variances(arms: Sequence[Arm], launch: float = LAUNCH) -> Floats:
    """(n,) variances between launches: the usual one, by all repeats over it, and by an arm's own over those."""
    freedom = np.array([arm.repeats - 1 if arm.stderr is not None else 0 for arm in arms])
    own = np.array([(arm.stderr or 0) ** 2 * arm.repeats for arm in arms])
    shared = (USUAL * launch**2 + freedom @ own) / (USUAL + freedom.sum())
    alone = np.array([arm.stderr is not None and arm.repeats == 1 for arm in arms])
    return np.where(alone, own, (USUAL * shared + freedom * own) / (USUAL + freedom))


def log_normal(mean: float, variance: float) -> Estimate:
    """The median and the 95 % interval of what has a normal logarithm."""
    middle, half = exp(mean), exp(Z95 * sqrt(variance))
    return Estimate(middle, None, middle / half, middle * half)


def _shared_log(arm: Arm) -> float:
    """What the logarithm of its figure lacks to that of all requests together."""
    return float(np.log(arm.concurrency)) if arm.unit == "request" else 0.0


def _prior(arms: Sequence[Arm]) -> tuple[Floats, Floats]:
    """Mean (n,) and covariance (n, n) of the log throughput of the arms."""
    draws = {name: _drawn(name, arms) for name in PRIOR}
    absolute = np.array([arm.unit != "ratio" for arm in arms])
    logs = log_tokens(arms, draws) - log_plain(arms, draws) * absolute - log_cost(arms, draws)
    loads = absolute * np.log([arm.concurrency for arm in arms])
    return logs.mean(axis=0) + loads, np.atleast_2d(np.cov(logs, rowvar=False)) + _missed(arms)


def _drawn(name: str, arms: Sequence[Arm]) -> Floats:
    """(P, n) draws of one value of `PRIOR`, which other arms do not change."""
    mean, all_sd, drafter_sd, dataset_sd = PRIOR[name]
    shared = mean + all_sd * _normal(name)
    drafter = {label: drafter_sd * _normal(name, "drafter", label) for label in {arm.drafter for arm in arms}}
    dataset = {label: dataset_sd * _normal(name, "dataset", label) for label in {arm.dataset for arm in arms}}
    return np.stack([shared + drafter[arm.drafter] + dataset[arm.dataset] for arm in arms], axis=1)


def _normal(*names: str) -> Floats:
    return np.random.default_rng(crc32("\0".join(names).encode())).standard_normal(DRAWS)


def lengths_of(arms: Sequence[Arm]) -> Floats:
    """(n,) guesses per step; where the engine chooses, the most that any of the arms has."""
    longest = max((arm.k or 0 for arm in arms), default=0)
    return np.array([longest if arm.k is None else arm.k for arm in arms], dtype=np.float64)


def _doublings(arms: Sequence[Arm]) -> Floats:
    return np.log2([arm.concurrency for arm in arms])


def log_plain(arms: Sequence[Arm], values: Mapping[str, Floats]) -> Floats:
    """(P, n) logarithm of a step without speculation, by (P, n) values of `PRIOR`; its level is free."""
    doublings, knee = _doublings(arms), values["knee"]
    bend = np.logaddexp(0, doublings - knee) - np.logaddexp(0, -knee)
    return np.asarray(values["plain slope"] * doublings * np.log(2) + np.exp(values["bend"]) * bend)


def log_cost(arms: Sequence[Arm], values: Mapping[str, Floats]) -> Floats:
    """(P, n) logarithm of a step over one without speculation."""
    doublings, lengths = _doublings(arms), lengths_of(arms)
    fixed = np.exp(values["fixed"] + values["fixed slope"] * doublings)
    guess = np.exp(values["guess"] + values["guess slope"] * doublings)
    return np.asarray(np.log1p((lengths > 0) * fixed + lengths * guess))


def log_tokens(arms: Sequence[Arm], values: Mapping[str, Floats]) -> Floats:
    """(P, n) logarithm of the tokens of a step."""
    first, following = (1 / (1 + np.exp(-values[name])) for name in ("first", "next"))
    return np.asarray(np.log1p(first * (1 - following ** lengths_of(arms)) / (1 - following)))


def _missed(arms: Sequence[Arm]) -> Floats:
    """(n, n) covariance of log throughput that the form leaves open: levels, and what it misses smoothly."""
    drafter, dataset = _same([arm.drafter for arm in arms]), _same([arm.dataset for arm in arms])
    near_length, near_load = _near(np.log1p(lengths_of(arms)), LENGTH_SCALE), _near(_doublings(arms), LOAD_SCALE)
    speculates, chosen = (np.array([test(arm.k) for arm in arms]) for test in (lambda k: k != 0, lambda k: k is None))
    ratio = np.array([arm.unit == "ratio" for arm in arms])
    return np.asarray(
        LEVEL**2
        + RATIO_LEVEL**2 * np.outer(ratio, ratio) * _same([arm.cell for arm in arms])
        + DATASET_LEVEL**2 * dataset
        + (LOAD**2 + DATASET_LOAD**2 * dataset + DRAFTER_LOAD**2 * drafter) * near_load
        + (DRAFTER_LENGTH**2 * drafter + DATASET_LENGTH**2 * dataset) * near_length * np.outer(speculates, speculates)
        + ADAPTIVE**2 * np.outer(chosen, chosen) * drafter
    )


def _same(labels: Sequence[Hashable]) -> NDArray[np.bool_]:
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    codes = np.array([numbers[label] for label in labels])
    return np.asarray(codes[:, None] == codes)


def _near(values: Floats, scale: float) -> Floats:
    return np.asarray(np.exp(-0.5 * np.square((values[:, None] - values) / scale)))
