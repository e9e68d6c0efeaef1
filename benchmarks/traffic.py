"""A synthetic trace as traffic makes it, of any number of states, and a profile to plan with it.

Answers have lognormal lengths, and a few make up much of the states. Tokens are easy or hard in runs: every head that
guesses a token finds it easy or hard, so that ranks of one state depend on one another and decoding jumps over the easy
runs. Later heads guess worse.

P states · S sequences · K heads · R ranks told apart
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import MISS, NO_TRIAL, End, RankTrace

HEADS, RANKS = 5, 32
MEDIAN, SPREAD, SHORTEST, LONGEST = 220, 0.8, 2, 2048  # tokens of an answer
EASY, HARD, FADING = (
    3.0,
    0.25,
    0.72,
)  # P(rank >= r) = (1 + r) ** -skill: of the first head, and what later ones keep of it
AT_ONCE = 2**22  # states that are drawn together


def traffic(states: int, *, seed: int = 0) -> RankTrace:
    """A trace of about so many states."""
    rng = np.random.default_rng(seed)
    lengths = np.rint(rng.lognormal(np.log(MEDIAN), SPREAD, states // 200 + 20)).clip(SHORTEST, LONGEST)
    lengths = lengths[: max(2, int(np.searchsorted(lengths.cumsum(), states)))].astype(np.int64)
    starts = np.concatenate([[0], lengths.cumsum()])
    ranks = np.empty((starts[-1], HEADS), dtype=np.int16)
    firsts = [*np.searchsorted(starts, np.arange(0, starts[-1], AT_ONCE)).tolist(), len(lengths)]
    for first, end in pairwise(firsts):
        ranks[starts[first] : starts[end]] = _ranks(rng, lengths[first:end])
    last = (ranks[:, 0] == NO_TRIAL)[starts[1:] - 1]
    assert last.all()
    return RankTrace(
        ranks,
        starts,
        tokens=rng.integers(0, 32_000, starts[-1], dtype=np.int32),
        prompt_tokens=rng.integers(20, 800, len(lengths), dtype=np.int32),
        end=np.full(len(lengths), End.LIMIT.value, dtype=np.uint8),
        meta={"top_k": RANKS, "drafter": {"kind": "medusa"}, "acceptance": {"rule": "greedy"}},
    )


def _ranks(rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
    """(P, K) ranks of some sequences."""
    states = int(lengths.sum())
    run = np.repeat(rng.random(states // 6 + 1), 6)[:states] + 0.3 * rng.standard_normal(states)
    skills = np.append(HARD + (EASY - HARD) * run.clip(0, 1), np.full(HEADS + 1, HARD))  # none behind the last token
    left = np.repeat(lengths.cumsum(), lengths) - np.arange(states)  # tokens from each state on
    found = np.empty((states, HEADS), dtype=np.int16)
    for k in range(HEADS):
        tail = rng.random(states) ** (-1 / (FADING**k * skills[k + 2 : k + 2 + states]))
        found[:, k] = np.where(tail < RANKS + 1, tail - 1, MISS)
        found[left < k + 2, k] = NO_TRIAL
    return found


def step_profile(batch_sizes: Sequence[int] = (1,), budget: int = 64) -> LatencyProfile:
    """Steps that take longer the more rows they verify, a little longer the deeper they draft, with noise."""
    rng, sizes = np.random.default_rng(0), [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    points, plain = [], []
    for batch_size in batch_sizes:
        for size in [s for s in sizes if s <= budget]:
            for depth in range(1, min(HEADS, size - 1) + 1):
                ms = 20 + 0.06 * batch_size * size + 0.2 * depth
                points.append(StepTiming(batch_size, 512, size, depth, tuple((ms * rng.normal(1, 0.01, 9)).tolist())))
        plain.append(
            StepTiming(batch_size, 512, 1, 0, tuple(((20 + 0.06 * batch_size) * rng.normal(1, 0.01, 9)).tolist()))
        )
    return LatencyProfile(tuple(points), tuple(plain), runtime={"name": "synthetic"})
