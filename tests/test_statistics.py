"""Error bars against processes whose truth is known."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from treeopt.growth.source import source_of
from treeopt.records.bootstrap import conversation_draws, drawn_rates, interval95, stderr
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.tree import Tree

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from simulated import searched

TOKENS, CHANCES = 40, (0.75, 0.35)  # of an answer; of a right guess in an easy and in a hard conversation
CHAIN = Tree.chain(2)


def expected_steps(shares: Sequence[float]) -> float:
    """Steps of one answer, by the shares that accept 0, 1, ... guesses, backwards from its end: a renewal process."""
    to_go = np.zeros(TOKENS + 1)
    for t in range(TOKENS - 2, -1, -1):
        to_go[t] = 1 + sum(p * to_go[t + 1 + min(a, TOKENS - 1 - t)] for a, p in enumerate(shares))
    return float(to_go[0])


TRUTH = (TOKENS - 1) / np.mean([expected_steps([1 - p, p * (1 - p), p**2]) for p in CHANCES])


def calibration(rng: np.random.Generator, conversations: int) -> RankTrace:
    """Conversations of either kind, half the guesses of two heads right or less, at every state alone."""
    chance = rng.choice(CHANCES, conversations)[:, None, None]
    ranks = np.where(rng.random((conversations, TOKENS, 2)) < chance, 0, -1).astype(np.int16)
    state, head = np.indices((TOKENS, 2))
    ranks[:, state + head + 2 > TOKENS] = NO_TRIAL
    return RankTrace(ranks.reshape(-1, 2), np.arange(conversations + 1) * TOKENS, meta={"top_k": 1})


def covered(conversations: int, trials: int) -> float:
    """Share of simulated calibrations whose interval has the truth in it."""
    rng, hits = np.random.default_rng(conversations), 0
    draws = conversation_draws(conversations)
    tokens = np.full(conversations, TOKENS - 1)
    for _ in range(trials):
        steps = source_of(calibration(rng, conversations)).rates(CHAIN).steps
        low, high = interval95(drawn_rates(tokens, steps, draws), conversations)
        hits += low <= TRUTH <= high
    return hits / trials


@pytest.mark.parametrize(
    ("conversations", "least", "most"), [(30, 0.90, 0.99), pytest.param(100, 0.93, 0.97, marks=pytest.mark.long)]
)
def test_intervals_cover_as_often_as_they_say(conversations, least, most):
    """1,000 trials scatter by 0.7 %: an interval that covers in 95 % fails with a chance of 0.3 %."""
    assert least <= covered(conversations, 1000) <= most


def test_the_replayed_rate_is_that_of_the_renewal_process():
    rates = source_of(calibration(np.random.default_rng(0), 4000)).rates(CHAIN)
    assert rates.tokens_per_step == pytest.approx(TRUTH, abs=4 * rates.estimate.stderr)


def test_the_standard_error_is_that_of_many_samples():
    rng = np.random.default_rng(1)
    samples = [source_of(calibration(rng, 60)).rates(CHAIN) for _ in range(200)]
    spread = np.std([s.tokens_per_step for s in samples])
    assert np.mean([s.estimate.stderr for s in samples]) == pytest.approx(spread, rel=0.2)  # 5 % scatter of the spread


def test_draws_are_shared_so_that_pairs_cancel():
    tokens, steps = np.array([10, 20, 30, 40]), np.array([[5, 9, 10, 30], [10, 18, 20, 60]])
    easy, hard = drawn_rates(tokens, steps, conversation_draws(4))
    assert easy / hard == pytest.approx(np.full(len(easy), 2.0))


def test_the_error_of_a_mean_is_the_textbook_one():
    values = np.random.default_rng(2).normal(size=200)
    means = drawn_rates(values, np.ones(200), conversation_draws(200, count=4000))
    assert stderr(means, 200) == pytest.approx(values.std(ddof=1) / np.sqrt(200), rel=0.06)


@pytest.mark.long
@pytest.mark.parametrize("has_jumps", [False, True])
def test_what_a_plan_says_of_its_choice_is_right_on_average(has_jumps):
    """40 searches on 60 conversations, timings with 5 % of noise, fixed seeds: the choice owes little to luck."""
    found = searched(40, 60, 0.05, has_jumps=has_jumps, slope=0.012)
    assert len(found.off) == 40
    assert abs(np.mean(found.off)) < 0.025
    assert np.mean(found.covered) >= 0.9
    assert np.sqrt(np.mean(np.square(found.steps_off))) < (0.95 if has_jumps else 0.6) * 0.05  # drawn to the others
