"""Throughput of settings that were run and of those that were not, as one Gaussian.

A step without speculation takes plain(c) at c requests; one with k guesses plain(c) (1 + fixed(c) + k guess(c)), and emits
E(k) = 1 + a (1 - b^k) / (1 - b) tokens, so that log tokens/s = log c + log E(k) - log plain(c) - log(1 + fixed(c) + k guess(c)).
What such steps can be is drawn from `PRIOR`; mean and covariance of the draws, with a smooth process for what the form misses,
are the Gaussian, which is conditioned once on all figures. How far a table lies from the form is a property of its cells that
comes back when they are run again: it is no noise, and has a variance of its own.

n arms · P draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.arms.arm import OFF, Arm

Floats = NDArray[np.float64]
DRAWS, SEED = 2000, 0
MISFITS = (0.006, 0.0125, 0.025, 0.05, 0.1, 0.2)  # of a cell, weighted by evidence
LAUNCH = 0.025  # between launches, where a table has no repeats
LENGTH_NOISE = 0.05  # of the logarithm of tokens per step
LEVEL, DATASET_LEVEL = 10.0, 0.15  # of log plain steps: free, and of a data set beside others
ADAPTIVE = 0.15  # of an engine that chooses lengths, beside the longest
PRIOR = {  # mean, and standard deviations: of all, of a drafter, of a data set
    "fixed": (np.log(0.12), 0.8, 0.6, 0.0),
    "fixed slope": (0.0, 0.15, 0.0, 0.0),  # by the binary logarithm of the concurrency
    "guess": (np.log(0.06), 0.8, 0.5, 0.0),
    "guess slope": (0.25, 0.2, 0.0, 0.0),
    "first": (0.85, 0.6, 0.5, 0.5),  # logit of a
    "next": (1.1, 0.8, 0.0, 0.0),  # logit of b
    "plain slope": (0.2, 0.2, 0.0, 0.0),  # by the natural logarithm of the concurrency
    "knee": (4.0, 2.0, 0.0, 0.0),  # binary logarithm of the concurrency
    "bend": (-1.0, 0.8, 0.0, 0.0),  # logarithm of what the slope gains there, by the binary logarithm
}
# what the form misses: standard deviation, and which arms share it
SMOOTH = {"length": 0.05, "dataset length": 0.04, "drafter": 0.05, "concurrency": 0.04}
LENGTH_SCALE, CONCURRENCY_SCALE = 0.8, 2.0  # in log(1 + k), in log2 c


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)))


@dataclass(frozen=True, eq=False)
class Step:
    """Parts of the steps of n arms, P draws of each: (P, n) or (n,) arrays.

    plain : logarithm of a step without speculation, but for its level
    fixed, guess : share of it that drafting takes whatever its length, and each guess with its verification
    tokens : logarithm of the tokens of a step
    """

    plain: Floats
    fixed: Floats
    guess: Floats
    tokens: Floats
    lengths: Floats

    @property
    def cost(self) -> Floats:
        """Logarithm of a step over a plain one."""
        drafts = self.lengths > 0
        return np.asarray(np.log1p(drafts * self.fixed + self.lengths * self.guess))

    @property
    def throughput(self) -> Floats:
        return self.tokens - self.plain - self.cost


def lengths_of(arms: Sequence[Arm]) -> Floats:
    """(n,) guesses per step; of an engine that chooses, the longest that any arm has of that model."""
    longest = max((arm.k or 0 for arm in arms), default=0)
    return np.array([longest if arm.k is None else arm.k for arm in arms], dtype=np.float64)


def drawn_steps(arms: Sequence[Arm], rng: np.random.Generator, count: int = DRAWS) -> Step:
    """The parts of each arm's step, drawn from the prior."""

    def draw(name: str) -> Floats:
        mean, all_sd, drafter_sd, dataset_sd = PRIOR[name]
        values = mean + all_sd * rng.standard_normal((count, 1))
        for sd, labels in ((drafter_sd, [arm.drafter for arm in arms]), (dataset_sd, [arm.dataset for arm in arms])):
            if sd:
                names = sorted(set(labels))
                offsets = sd * rng.standard_normal((count, len(names)))
                values = values + offsets[:, [names.index(label) for label in labels]]
        return np.asarray(values)

    return steps_of(arms, {name: draw(name) for name in PRIOR})


def steps_of(arms: Sequence[Arm], values: dict[str, Floats]) -> Step:
    """The parts of each arm's step by the values of `PRIOR`, each (..., 1) or (..., n)."""
    doublings, lengths = np.log2([arm.concurrency for arm in arms]), lengths_of(arms)
    bend = np.exp(values["bend"]) * (
        np.logaddexp(0, doublings - values["knee"]) - np.logaddexp(0, -values["knee"])
    )
    plain = values["plain slope"] * doublings * np.log(2) + bend
    fixed = np.exp(values["fixed"] + values["fixed slope"] * doublings)
    guess = np.exp(values["guess"] + values["guess slope"] * doublings)
    first, following = _sigmoid(values["first"]), _sigmoid(values["next"])
    tokens = np.log1p(first * (1 - following**lengths) / (1 - following))
    return Step(plain, *np.broadcast_arrays(fixed, guess, tokens), lengths)


def _same(labels: Sequence[object]) -> NDArray[np.bool_]:
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    codes = np.array([numbers[label] for label in labels])
    return np.asarray(codes[:, None] == codes)


def _near(values: Floats, scale: float) -> Floats:
    return np.asarray(np.exp(-0.5 * np.square((values[:, None] - values) / scale)))


def residual(arms: Sequence[Arm]) -> Floats:
    """(n, n) covariance of what the form misses of log tokens/s, but for what each cell has of its own."""
    lengths, doublings = np.log1p(lengths_of(arms)), np.log2([arm.concurrency for arm in arms])
    drafter, dataset = _same([arm.drafter for arm in arms]), _same([arm.dataset for arm in arms])
    speculates = np.array([arm.k != 0 for arm in arms])
    both = speculates[:, None] & speculates
    near_length, near_load = _near(lengths, LENGTH_SCALE), _near(doublings, CONCURRENCY_SCALE)
    chosen = np.array([arm.k is None for arm in arms])
    return np.asarray(
        LEVEL**2
        + DATASET_LEVEL**2 * dataset
        + SMOOTH["concurrency"] ** 2 * near_load
        + SMOOTH["length"] ** 2 * both * drafter * near_length
        + SMOOTH["dataset length"] ** 2 * both * dataset * near_length
        + SMOOTH["drafter"] ** 2 * drafter * near_load
        + ADAPTIVE**2 * (chosen[:, None] & chosen) * drafter
    )


@dataclass(frozen=True, eq=False)
class Posterior:
    """Log tokens per second of n arms: mean (n,), and covariance (n, n) of what running them again would give, but for noise.

    launch : (n,) variance between launches
    """

    arms: tuple[Arm, ...]
    mean: Floats
    covariance: Floats
    launch: Floats


def posterior_of(arms: Sequence[Arm], *, launch: float = LAUNCH) -> Posterior:
    """What is known of all ``arms`` of one model by the figures of those that were run.

    arms : each setting in each cell once; those without figures are predicted
    """
    steps = drawn_steps(arms, np.random.default_rng(SEED))
    n, loads = len(arms), np.log([arm.concurrency for arm in arms])
    both = np.concatenate([steps.throughput, np.broadcast_to(steps.tokens, (DRAWS, n))], axis=1)
    mean = both.mean(axis=0)
    prior = np.cov(both, rowvar=False)
    mean[:n] += loads
    prior[:n, :n] += residual(arms)
    is_ratio = np.array([arm.is_ratio for arm in arms])
    if is_ratio.any():  # each cell has a level of its own
        prior[:n, :n] += LEVEL**2 * _same([(arm.dataset, arm.concurrency) for arm in arms]) * (is_ratio[:, None] & is_ratio)
    noise = np.array([launch**2 / arm.repeats if arm.stderr is None else arm.stderr**2 for arm in arms])
    run = [i for i, arm in enumerate(arms) if arm.tokens_per_s]
    lengths = [i for i, arm in enumerate(arms) if arm.tokens_per_step and arm.k]
    seen = np.array([*run, *(n + i for i in lengths)])
    values = np.log([*(arms[i].tokens_per_s for i in run), *(arms[i].tokens_per_step for i in lengths)])  # type: ignore[list-item]
    errors = np.array([*noise[run], *[LENGTH_NOISE**2] * len(lengths)])
    means, covariances, evidence = [], [], []
    for misfit in MISFITS:
        covariance = prior.copy()
        covariance[np.arange(n), np.arange(n)] += misfit**2
        known = covariance[np.ix_(seen, seen)] + np.diag(errors)
        gain = np.linalg.solve(known, covariance[seen][:, :n]).T
        off = values - mean[seen]
        means.append(mean[:n] + gain @ off)
        covariances.append(covariance[:n, :n] - gain @ covariance[seen][:, :n])
        evidence.append(-0.5 * (off @ np.linalg.solve(known, off) + np.linalg.slogdet(known)[1]))
    weights = np.exp(np.array(evidence) - max(evidence))
    weights /= weights.sum()
    middle = np.einsum("m,mn->n", weights, means)
    spread = sum(w * (c + np.outer(m - middle, m - middle)) for w, m, c in zip(weights, means, covariances, strict=True))
    return Posterior(tuple(arms), middle, np.asarray(spread), np.full(n, launch**2))
