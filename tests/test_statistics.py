"""Error bars against processes whose truth is known."""

from collections.abc import Sequence

import numpy as np
import pytest

from treeopt.growth.source import source_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.bootstrap import conversation_draws, drawn_rates, interval95, stderr
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .test_selection import recorded, truth

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
    ("conversations", "least"),
    [(30, 0.90), pytest.param(100, 0.93, marks=pytest.mark.long), pytest.param(300, 0.93, marks=pytest.mark.slow)],
)
def test_intervals_cover_as_often_as_they_say(conversations, least):
    """1,000 trials scatter by 0.7 %: an interval that covers in 95 % fails with a chance of 0.3 %."""
    assert least <= covered(conversations, 1000) <= (0.99 if conversations == 30 else 0.97)


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


HEADS, RANKS = 3, 8
# (heads, ranks) P(a head's candidate is right) in easy and in hard conversations
ACCEPT = [p * (1 - p) ** np.arange(RANKS) for p in np.multiply.outer((0.65, 0.35), 0.85 ** np.arange(HEADS))[..., None]]


def searched(rng: np.random.Generator) -> RankTrace:
    """60 conversations, easy or hard ones, whose heads guess independently."""
    chance = np.stack(ACCEPT)[rng.integers(0, 2, 60)]  # (60, heads, ranks)
    ranks = (rng.random((60, TOKENS, HEADS, 1)) > chance.cumsum(-1)[:, None]).sum(-1)
    ranks[ranks == RANKS] = -1
    state, head = np.indices((TOKENS, HEADS))
    ranks[:, state + head + 2 > TOKENS] = NO_TRIAL
    return RankTrace(ranks.reshape(-1, HEADS).astype(np.int16), np.arange(61) * TOKENS, meta={"top_k": RANKS})


def true_rate(tree: Tree) -> float:
    """Tokens per step of a tree in all conversations that there could be."""
    steps = []
    for accept in ACCEPT:
        reached = np.zeros(HEADS + 2)
        for path in tree.paths:
            reached[len(path)] += np.prod([accept[head, rank] for head, rank in enumerate(path)])
        steps.append(expected_steps(reached[:-1] - reached[1:]))
    return (TOKENS - 1) / float(np.mean(steps))


def level(batch_size: int, size: int, depth: int) -> float:
    """Milliseconds that rise as tokens per step do: all sizes are about as fast."""
    return 4.0 * size**0.17


@pytest.mark.parametrize(
    ("searches", "worst"),
    [pytest.param(40, 0.025, marks=pytest.mark.long), pytest.param(300, 0.025, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("ms_of", "noise"), [(truth, 0.05), (truth, 0.15), (level, 0.05)])
def test_what_a_plan_says_of_its_choice_is_right_on_average(searches, worst, ms_of, noise):
    """Searches on 60 conversations and noisy rounds: bias as a share, and coverage; the seeds are fixed.

    The mean of 300 scatters by 0.2 %. Where all sizes are as fast ("level") the choice is the luckiest of them.
    """
    off, hits = [], []
    for seed in range(searches):
        rng = np.random.default_rng([7, seed])
        profile = recorded(ms_of, rng=rng, noise=noise, batch_sizes=(1,))
        chosen = plan_trees(searched(rng), profile, PlanRequest(Limits(32)))[1].chosen
        rate = true_rate(chosen.draft)
        speedup = rate * ms_of(1, 1, 0) / ms_of(1, chosen.size, chosen.depth)
        off.append((chosen.tokens_per_step / rate - 1, chosen.speedup / speedup - 1))
        pairs = ((rate, chosen.tokens_per_step), (speedup, chosen.speedup))
        hits.append([found.low <= x <= found.high for x, found in pairs])
    bias, covered = np.mean(off, axis=0), np.mean(hits, axis=0)
    print(f"bias of tokens per step {bias[0]:+.3f}, of the speedup {bias[1]:+.3f}; covered {covered}")
    assert (np.abs(bias) < worst).all()
    assert (covered >= 0.93).all() or searches < 300
