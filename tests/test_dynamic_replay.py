"""Replay of dynamic and adaptive trees, and the rule of the latter, against plain loops and an independent optimiser."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from treeopt.growth import adaptive, replay
from treeopt.growth.adaptive import (
    LEAST,
    RIDGE,
    Promise,
    Rule,
    _alike,
    _together,
    claimed_shares,
    fit_promise,
    fit_rule,
    lengths_by_rows,
)
from treeopt.growth.dynamic import dynamic_rates, lengths_with
from treeopt.growth.replay import replay_dynamic
from treeopt.records.pools import NO_PLACE, Pools, columns_of, score_counts
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.runtime.drafters.levels import Pool, best_scores, promising_rows
from treeopt.runtime.measure.pools import true_places
from treeopt.trees.dynamic import MOST_ROWS, AdaptiveTree, DynamicLimits, DynamicTree, pool_size

from .test_dynamic_rule import Table, grown


def with_pools(rng, lengths, levels, topks, *, turns=1) -> RankTrace:
    """Random places: a deeper node's is never better than its parent's, nor is any better in a pool of more levels."""
    states = int(np.sum(lengths))
    places = np.full((states, len(topks), columns_of(levels).stop), NO_PLACE)
    for i, topk in enumerate(topks):
        steps = rng.geometric(0.35, (states, levels))
        later = rng.integers(0, 2, (states, levels, levels)) * (rng.random((states, 1, 1)) < 0.5)
        for s in range(1, levels + 1):
            here = (np.cumsum(steps, 1) - 1 + later[:, :s].sum(1).cumsum(1))[:, :s]
            here[here >= min(pool_size(s, topk), MOST_ROWS - 1)] = NO_PLACE
            here[:, :-1] = np.maximum(here[:, :-1], places[:, i, columns_of(s - 1)])
            places[:, i, columns_of(s)] = np.maximum.accumulate(here, axis=1)
    last = np.cumsum(lengths)
    left = np.repeat(last, lengths) - np.arange(states)
    for s in range(1, levels + 1):
        some = places[:, :, columns_of(s)]
        some[left < 2] = NO_PLACE
        some[np.broadcast_to((left[:, None] < 2 + np.arange(s))[:, None], some.shape)] = NO_PLACE
    scores = np.concatenate(
        [
            -np.sort(depth * rng.exponential(1.0, (states, count)), axis=1)
            for topk in topks
            for depth, count in enumerate(score_counts(levels, topk), 1)
        ],
        axis=1,
    )
    return RankTrace(
        np.where(left < 2, NO_TRIAL, 0)[:, None],
        np.concatenate([[0], last]),
        cluster=np.arange(len(lengths)) // turns,
        pool_places=places,
        pool_scores=scores,
        meta={"pools": {"levels": levels, "topks": list(topks)}},
    )


def slow_replay(trace, accepted) -> list[list[int]]:
    """(S,) the states at which each sequence takes a step that accepts so many guesses."""
    found = []
    for begin, end in zip(trace.starts[:-1].tolist(), trace.starts[1:].tolist(), strict=True):
        t, steps = begin, []
        while t < end - 1:
            steps.append(t)
            t += 1 + accepted[t]
        found.append(steps)
    return found


def slow_lengths(trace, levels, topk, rows) -> list[int]:
    found = []
    for places in trace.pools.places_in(levels, topk).tolist():
        accepted = 0
        while accepted < levels and places[accepted] + 1 < rows:  # the root is a row
            accepted += 1
        found.append(accepted)
    return found


@pytest.mark.parametrize("at_once", [2**26, 2**10], ids=["all at once", "in portions"])
def test_steps_of_every_setting_are_those_of_a_plain_loop(monkeypatch, at_once):
    monkeypatch.setattr(replay, "AT_ONCE", at_once)
    rng = np.random.default_rng(at_once)
    trace = with_pools(rng, [1, 2, 3, 300, 1, 290, *rng.integers(1, 50, 8).tolist(), 2], 4, (1, 3, 8), turns=3)
    places = trace.pool_places.copy()
    places[trace.starts[5] : trace.starts[6]] = NO_PLACE  # more steps in a row than a byte counts
    trace = replace(trace, pool_places=places)
    rates = dynamic_rates(trace, DynamicLimits(chains=True))
    assert rates.tokens.tolist() == [int((trace.lengths - 1)[trace.clusters == c].sum()) for c in range(5)]
    seen = {
        (tree.levels, tree.topk, tree.rows): steps.tolist()
        for tree, steps in zip(rates.trees, rates.steps, strict=True)
    }
    for topk in (1, 3, 8):
        for levels in range(1, 5):
            rows = list(range(2, min(pool_size(levels, topk) + 1, MOST_ROWS) + 1))
            found = replay_dynamic(trace, levels, topk, rows)
            for n, steps in zip(rows, found.tolist(), strict=True):
                lengths = slow_lengths(trace, levels, topk, n)
                assert lengths_with(trace, DynamicTree(levels, topk, n)).tolist() == lengths
                slow = [len(states) for states in slow_replay(trace, lengths)]
                assert steps == slow, (levels, topk, n)
                if n > levels:
                    assert seen.pop((levels, topk, n)) == np.bincount(trace.clusters, slow).tolist()
    assert not seen
    assert lengths_with(trace, DynamicTree(5, 3, 9)) is lengths_with(trace, DynamicTree(2, 2, 3)) is None


def test_claimed_shares_are_the_sums_of_the_best_scores_of_each_level():
    rng = np.random.default_rng(3)
    trace = with_pools(rng, [9, 4], 3, (1, 2, 6))
    coarse = Pools(3, (1, 2, 6), trace.pools.places, -np.floor(-2 * trace.pools.scores) / 2)
    for pools in (trace.pools, coarse):
        for topk in (1, 2, 6):
            for levels in (1, 2, 3):
                rows = [n for n in (1, 2, 3, 7, 30, 64) if n <= pool_size(levels, topk) + 1]
                claimed = claimed_shares(pools.level_scores(topk)[:levels], rows)
                for state in range(13):
                    kept = [
                        (-score, depth)
                        for depth, part in enumerate(pools.level_scores(topk)[:levels])
                        for score in sorted(part[state].tolist(), reverse=True)
                    ]
                    for g, n in enumerate(rows):
                        best = sorted(kept)[: n - 1]  # of equal scores those less deep
                        sums = [sum(np.exp(-s) for s, d in best if d == depth) for depth in range(levels)]
                        np.testing.assert_allclose(claimed[state, g], sums, rtol=1e-5)


def test_lengths_by_rows_are_those_of_each_number_of_rows():
    trace = with_pools(np.random.default_rng(5), [30, 8, 1], 4, (2, 4))
    rows = [1, 2, 5, 9, 16]
    found = lengths_by_rows(trace.pools, 3, 4, rows)
    assert found.T.tolist() == [slow_lengths(trace, 3, 4, n) for n in rows]


def simulated(rng, intercepts, slopes, states=6000, sizes=3):
    """Claims, and guesses accepted as often as the logistic functions of them say."""
    claimed = np.sort(rng.random((states, sizes, len(slopes))), axis=2)[..., ::-1]
    odds = np.array(intercepts) + np.array(slopes) * np.log(claimed / (1 - claimed))
    chance = np.minimum.accumulate(1 / (1 + np.exp(-odds)), axis=2)
    return claimed.astype(np.float32), (rng.random((states, sizes, 1)) < chance).sum(2).astype(np.uint8)


def penalised_loss(weights, share, hit):
    share = np.clip(share, LEAST, 1 - LEAST)
    odds = weights[0] + weights[1] * np.log(share / (1 - share))
    losses = np.logaddexp(0, odds) - hit * odds
    return losses.mean() + RIDGE / 2 * (weights[0] ** 2 + (weights[1] - 1) ** 2)


def optimum(share, hit):
    found = minimize(penalised_loss, [0.0, 1.0], (share, hit), method="BFGS", options={"gtol": 1e-9})
    return found.x


def test_the_fit_finds_the_intercepts_and_slopes_that_answers_were_made_with():
    intercepts, slopes = (0.4, -0.1, -0.6), (0.8, 0.8, 0.9)
    promise = fit_promise(*simulated(np.random.default_rng(0), intercepts, slopes))
    # The ridge pulls by less than 0.02, and the standard error is about 0.02: 0.1 is 4 of them.
    np.testing.assert_allclose(promise.intercepts, intercepts, atol=0.1)
    np.testing.assert_allclose(promise.slopes, slopes, atol=0.1)


HARD = {
    "claims of none that all come": (np.full(50, 1e-6), np.ones(50)),
    "claims of all that never come": (np.full(50, 1 - 1e-6), np.zeros(50)),
    "the less is claimed the more comes": (np.linspace(0.01, 0.99, 99), np.linspace(0.99, 0.01, 99) > 0.5),
    "one state": (np.array([0.999]), np.array([0.0])),
    "a wide claim that is wrong at both ends": (np.repeat([1e-4, 0.5, 1 - 1e-4], 40), np.repeat([1.0, 0.0, 0.0], 40)),
    "all as claimed, far apart": (np.repeat([1e-4, 1 - 1e-4], 40), np.repeat([0.0, 1.0], 40)),
}


@pytest.mark.parametrize("case", HARD)
def test_the_fit_is_the_optimum_of_hard_cases_too(case):
    share, hit = HARD[case]
    promise = fit_promise(share.astype(np.float32)[:, None, None], hit.astype(np.uint8)[:, None])
    share = share.astype(np.float32).astype(float)
    found, best = np.array([promise.intercepts[0], promise.slopes[0]]), optimum(share, hit)
    np.testing.assert_allclose(found, best, rtol=1e-3, atol=1e-3)


def test_the_fit_of_every_depth_is_that_of_another_optimiser():
    claimed, accepted = simulated(np.random.default_rng(1), (1.0, 0.0), (0.5, 1.4), states=500)
    claimed[::7, 0] = 0  # nothing of a depth among so few rows says nothing of it
    promise = fit_promise(claimed, accepted)
    for d in range(2):
        some = claimed[..., d] > 0
        best = optimum(claimed[..., d][some].astype(float), (accepted > d)[some])
        np.testing.assert_allclose((promise.intercepts[d], promise.slopes[d]), best, atol=1e-4)
    assert fit_promise(np.zeros((4, 2, 1), np.float32), np.zeros((4, 2), np.uint8)) == Promise((0.0,), (1.0,))


def slow_taken(rule, trace, promised, accepted, batch_size):
    """Tokens, steps, milliseconds and rows of every conversation, step by step with a queue."""
    taken = [[0.0] * 4 for _ in range(trace.clusters.max() + 1)]
    queue = [s for s in range(trace.num_sequences) if trace.lengths[s] > 1]
    live = []
    while queue or live:
        while queue and len(live) < batch_size:
            s = queue.pop(0)
            live.append((s, trace.starts[s]))
        worth = [sum(promised[t, g] for _, t in live) - rule.rate * rule.cost_ms[g] for g in range(len(rule.rows))]
        g = int(np.argmax(worth))
        going = []
        for s, t in live:
            then = min(t + 1 + int(accepted[t, g]), trace.starts[s + 1] - 1)
            values = (then - t, 1, rule.cost_ms[g] / len(live), rule.rows[g])
            taken[trace.clusters[s]] = [a + b for a, b in zip(taken[trace.clusters[s]], values, strict=True)]
            going += [(s, then)] if then < trace.starts[s + 1] - 1 else []
        live = going
    return np.array(taken).T


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 2.0])
def test_decoding_by_a_rule_is_a_plain_loop(rate):
    rng = np.random.default_rng(8)
    trace = with_pools(rng, [1, 7, 40, 2, *rng.integers(1, 50, 10).tolist(), 1], 3, (4,), turns=2)
    rows = [2, 4, 8, 16, 32]
    promise = Promise((0.1, -0.2, -0.3), (0.9, 0.8, 1.1))
    rule = Rule(3, 4, rows, np.array([2.0, 2.2, 2.9, 4.0, 7.0]), promise, rate)
    promised, accepted = rule.expected(trace)
    for batch_size in (1, 2, 3, 50):
        found = _together(rule, trace, promised, accepted, batch_size)
        slow = slow_taken(rule, trace, promised, accepted, batch_size)
        np.testing.assert_allclose([found.tokens, found.steps, found.ms, found.rows], slow)
        assert found.tokens_per_ms == pytest.approx(slow[0].sum() / slow[2].sum())
        if batch_size == 1:
            alone = _alike(rule, trace, promised, accepted, 1)
            np.testing.assert_allclose([alone.tokens, alone.steps, alone.ms, alone.rows], slow)
            steps = [len(states) for states in slow_replay(trace, rule.lengths(trace))]
            assert np.bincount(trace.clusters, steps).tolist() == slow[1].tolist()


LEVELS, TOPK, ROWS = 4, 3, (2, 4, 6, 10, 16, 24)
COST_MS = np.array([2.0, 2.1, 2.4, 3.0, 4.5, 6.5])


@pytest.fixture(scope="module")
def drafted() -> tuple[RankTrace, list[Pool]]:
    """A drafter that is right about its probabilities: texts are sampled from them."""
    rng = np.random.default_rng(11)
    pools, places, scores = [], [], []
    for first in range(0, 1000, 50):
        tables = [Table(10_000 + i) for i in range(first, first + 50)]
        pool = grown(tables, LEVELS, TOPK)
        labels = []
        for table in tables:
            path = ()
            for _ in range(LEVELS):
                path = (*path, int(rng.choice(len(table.logits(path)), p=table.probabilities(path))))
            labels.append(path)
        pools.append(pool)
        places.append(true_places(pool, torch.tensor(labels), LEVELS))
        scores.append(torch.cat(best_scores(pool, TOPK), 1))
    trace = RankTrace(
        np.zeros((1000, 1)),
        np.arange(0, 1001, 50),
        pool_places=torch.stack([torch.cat(places)], 1).numpy(),
        pool_scores=torch.cat(scores).numpy(),
        meta={"pools": {"levels": LEVELS, "topks": [TOPK]}},
    )
    return trace, pools


@pytest.mark.parametrize("batch_size", [1, 4])
def test_no_other_rate_brings_more_than_the_one_that_is_asked_for(batch_size):
    """Chains of a drafter that is right about its probabilities; 40,000 states, so that 0.5 % is above the noise."""
    rng, states, levels = np.random.default_rng(1), 40_000, 6
    scores = np.log(rng.beta(3, 1, (states, 1)) * rng.beta(8, 1, (states, levels))).cumsum(1).astype(np.float16)
    places = np.full((states, 1, columns_of(levels).stop), NO_PLACE)
    comes = rng.random((states, 1)) < np.exp(scores.astype(float))
    for s in range(1, levels + 1):
        places[:, 0, columns_of(s)] = np.where(comes[:, :s], np.arange(s), NO_PLACE)
    about = {"pools": {"levels": levels, "topks": [1]}}
    trace = RankTrace(
        np.zeros((states, 1)), np.arange(0, states + 1, 400), pool_places=places, pool_scores=scores, meta=about
    )
    rows, cost_ms = list(range(2, levels + 2)), np.array([2.0, 2.2, 2.5, 2.9, 3.4, 4.0]) * (1 + 0.2 * batch_size)
    rule = fit_rule(trace, rows, levels, 1, cost_ms, batch_size=batch_size)
    promised, accepted = rule.expected(trace)

    def reached(rate):
        other = Rule(levels, 1, rows, cost_ms, rule.promise, rate)
        return _alike(other, trace, promised, accepted, batch_size).tokens_per_ms

    assert rule.rate == pytest.approx(reached(rule.rate), rel=2e-3)
    others = [reached(rate) for rate in rule.rate * np.linspace(0.2, 4, 39)]
    assert max(others) <= 1.005 * reached(rule.rate)
    assert min(others) < 0.97 * reached(rule.rate)
    steps = replay_dynamic(trace, levels, 1, rows).sum(1)
    assert max((trace.lengths - 1).sum() * batch_size / steps / cost_ms) < 0.99 * reached(rule.rate)


def test_decoding_takes_the_rows_that_the_rule_takes_on_the_record(drafted):
    trace, pools = drafted
    rule = fit_rule(trace, list(ROWS), LEVELS, TOPK, COST_MS, batch_size=1)
    promised, _ = rule.expected(trace)
    parts = tuple(map(tuple, (rule.rows, rule.promise.intercepts, rule.promise.slopes, rule.cost_ms.tolist())))
    tree = AdaptiveTree(DynamicTree(LEVELS, TOPK, ROWS[-1]), *parts, rule.rate)
    alone = (promised - rule.rate * rule.cost_ms).argmax(1)
    taken = []
    for p, pool in enumerate(pools):
        for first, count in [*((i, 1) for i in range(20)), (20, 3), (23, 8), (31, 19)]:
            of = slice(first, first + count)
            some = Pool(pool.tokens[of], pool.parents[of], pool.scores[of], pool.depths)
            taken.append(promising_rows(some, tree))
            states = slice(50 * p + first, 50 * p + first + count)
            together = int((promised[states].sum(0) - rule.rate * rule.cost_ms).argmax())
            assert taken[-1] == ROWS[alone[states.start] if count == 1 else together]
    assert len(set(taken)) > 3
    lengths = [slow_lengths(trace, LEVELS, TOPK, ROWS[g])[state] for state, g in enumerate(alone[:40])]
    assert lengths_with(trace, tree)[:40].tolist() == lengths


def test_a_promise_of_many_states_is_that_of_each(monkeypatch, drafted):
    parts = drafted[0].pools.level_scores(TOPK)
    whole = claimed_shares(parts, ROWS)
    monkeypatch.setattr(adaptive, "AT_ONCE", 37)
    assert (claimed_shares(parts, ROWS) == whole).all()
