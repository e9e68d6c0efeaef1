"""Step costs against laws that are known."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.latency.costs import MOST_FITTED, StepCosts
from treeopt.latency.surface import BENDS, BUILDING, FITTED, STAIRS, Surface
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.trees.draft import OVER_MARGINALS, topk_family
from treeopt.trees.tree import FIXED, Cost

SIZES = (6, 8, 9, 16, 17, 24, 25, 32, 33, 48, 64)
PLAIN = Cost(FIXED, 1, 0)


def fixed(*trees: tuple[int, int]) -> list[Cost]:
    return [Cost(FIXED, rows, depth) for rows, depth in trees]


def timing(rows: int, depth: int, *step_ms: float, **about) -> StepTiming:
    return StepTiming(1, 100, rows, depth, step_ms, **about)


def by_rounds(rows: int, depth: int, step_ms, **about) -> StepTiming:
    return timing(rows, depth, *map(float, step_ms), round=tuple(range(len(step_ms))), **about)


def profile(*timings: StepTiming) -> LatencyProfile:
    return LatencyProfile(tuple(t for t in timings if t.size > 1), tuple(t for t in timings if t.size == 1))


def drawn(costs: StepCosts, steps: list[Cost], count: int = 2000) -> np.ndarray:
    return costs.draws_ms(steps, count, np.random.default_rng(0))


@given(st.integers(0, 10**6))
@settings(max_examples=10)
def test_timings_without_noise_are_kept_and_each_cost_is_the_same_alone(seed):
    rng = np.random.default_rng(seed)
    trees = {(int(n), int(d)) for n, d in zip(rng.integers(2, 20, 12), rng.integers(1, 5, 12), strict=True) if n > d}
    ms = {tree: float(10 + tree[1] + rng.random()) for tree in trees}
    costs = StepCosts(profile(timing(1, 0, 9.0), *(timing(*tree, ms[tree]) for tree in sorted(trees))), 1)
    np.testing.assert_allclose(costs.ms(fixed(*ms)), list(ms.values()), rtol=1e-4)
    asked = fixed((1, 0), *((n, d) for n in range(2, 21) for d in range(1, min(n, 6))))
    np.testing.assert_allclose(costs.ms(asked)[::5], [costs.ms([cost])[0] for cost in asked[::5]], rtol=1e-9)
    most = [max(numbers) for numbers in zip(*trees, strict=True)]
    unknown = [cost.rows > most[0] or cost.depth > most[1] for cost in asked]
    assert np.isnan(costs.ms(asked))[unknown].all()


def test_computed_latencies_of_every_size_are_kept_and_have_no_error():
    """More of them than a surface is drawn through; the covariance of steps without error could not be factored."""
    trees = [(rows, depth) for rows in range(2, 90) for depth in range(1, 5) if depth < rows]
    ms = [4 + np.ceil(rows / 16) + 0.1 * depth for rows, depth in trees]
    known = profile(timing(1, 0, 4.0), *(timing(*tree, step) for tree, step in zip(trees, ms, strict=True)))
    costs = StepCosts(known, 1)
    assert len(trees) > MOST_FITTED
    np.testing.assert_allclose(costs.ms(fixed(*trees)), ms)
    np.testing.assert_allclose(drawn(costs, fixed(*trees), 50), np.repeat(np.array(ms)[:, None], 50, 1))


ANEW = [Cost("topk 2", 8, 2), Cost("topk 2", 12, 2), Cost("topk 4", 12, 2)]


@pytest.mark.parametrize("anew", [[], ANEW], ids=["fixed", "anew"])
def test_the_surface_is_the_conditional_mean_of_its_process(anew):
    """Against the textbook: the joint normal of timings and an untimed step, for each choice of sizes; weights by density."""
    from scipy.stats import multivariate_normal

    costs, logs = [*fixed((2, 1), (4, 2), (9, 2), (16, 2)), *anew], np.log([1.2, 1.3, 1.5, 2.0, 1.6, 1.9, 1.8])
    n, asked = len(costs), [*fixed((6, 2), (9, 2)), *([Cost("topk 4", 8, 2)] if anew else [])]
    logs, noise = logs[:n], np.diag([0.01, 0.02, 0.01, 0.03, 0.02, 0.02, 0.02][:n]) ** 2
    surface = Surface(costs, logs, noise)
    trend = np.log(surface._columns([*costs, *asked])[:, :FITTED] @ surface.slopes)
    kernels, means, covariances, weights = surface._kernels([*costs, *asked], [*costs, *asked]), [], [], []
    for sizes in product(BUILDING, BENDS, STAIRS):
        joint = kernels[0] + sum(size**2 * kernel for size, kernel in zip(sizes, kernels[1:], strict=True))
        seen = joint[:n, :n] + noise
        weights.append(multivariate_normal(trend[:n], seen).pdf(logs))
        gain = joint[n:, :n] @ np.linalg.inv(seen)
        means.append(trend[n:] + gain @ (logs - trend[:n]))
        covariances.append(joint[n:, n:] - gain @ joint[:n, n:])
    shares = np.array(weights) / sum(weights)
    mean = shares @ means
    spread = sum(w * (c + np.outer(m - mean, m - mean)) for w, c, m in zip(shares, covariances, means, strict=True))
    np.testing.assert_allclose(surface.estimates(asked), mean, atol=4e-4)
    np.testing.assert_allclose(surface.covariance(asked), spread, atol=4e-5)


TRUTHS = {
    "line": lambda rows: 4 + 0.08 * rows,
    "stairs": lambda rows: 4 + 1.5 * np.ceil(rows / 16),
    "stairs-and-line": lambda rows: 4 + 0.5 * np.ceil(rows / 16) + 0.02 * rows,
}


@pytest.mark.parametrize("noise", [0.001, pytest.param(0.03, marks=pytest.mark.long), 0.08])
@pytest.mark.parametrize("truth", TRUTHS)
def test_the_truth_is_covered_where_nothing_was_timed(truth, noise):
    """20 profiles of a machine with slow rounds; sizes of one profile err together, so 280 count as about 60."""
    cost, hits, off = TRUTHS[truth], [], []
    asked = [n for n in range(7, 64, 4) if n not in SIZES]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        slow = rng.lognormal(0, 0.1, 20)
        trees = ((1, 0), (2, 1), (4, 3), *((n, 4) for n in SIZES))
        known = profile(*(by_rounds(n, d, slow * cost(n) * rng.lognormal(0, noise, 20)) for n, d in trees))
        costs = StepCosts(known, 1)
        draws = drawn(costs, [PLAIN, *fixed(*((n, 4) for n in asked))], 1000)
        low, high = np.quantile(draws[1:] / draws[0], [0.025, 0.975], axis=1)
        true = np.array([cost(n) for n in asked]) / cost(1)
        hits += ((low <= true) & (true <= high)).tolist()
        off += np.log(costs.ms(fixed(*((n, 4) for n in asked))) / costs.plain.ms / true).tolist()
    assert np.mean(hits) >= 0.9
    assert np.sqrt(np.mean(np.square(off))) < 0.05 + noise / 2


def test_between_two_contexts_latencies_are_between():
    points = [StepTiming(1, context, n, 1, (ms,)) for context, ms in ((100, 5.0), (300, 9.0)) for n in (2, 4)]
    plain = [StepTiming(1, context, 1, 0, (ms,)) for context, ms in ((100, 4.0), (300, 6.0))]
    known = LatencyProfile(tuple(points), tuple(plain))
    assert StepCosts(known, 1, 200).ms(fixed((1, 0), (2, 1))).round(3).tolist() == [5.0, 7.0]
    assert [StepCosts(known, 1, context).context_tokens for context in (None, 50, 1000)] == [100, 100, 300]


def noisy(seed: int, slow_from: int) -> list[StepTiming]:
    """A tree of 1.5 plain steps on a machine that becomes half as fast, with an interruption now and then."""
    rng, number = np.random.default_rng(seed), np.repeat(np.arange(30), 4)
    hit = np.where(rng.random((2, len(number))) < 0.05, 5.0, 1.0) * rng.lognormal(0, 0.03, (2, len(number)))
    samples = np.array([[3.0], [2.0]]) * np.where(number >= slow_from, 2.0, 1.0) * hit
    trees, rounds = ((8, 2), (1, 0)), tuple(number.tolist())
    return [timing(*tree, *ms, round=rounds) for tree, ms in zip(trees, samples.tolist(), strict=True)]


def test_drift_and_interruptions_do_not_reach_the_ratio():
    ratios = []
    for seed in range(20):
        costs = StepCosts(profile(*noisy(seed, slow_from=5 + seed)), 1)
        ratios.append(costs.ms(fixed((8, 2)))[0] / costs.plain.ms)
    assert np.mean(ratios) == pytest.approx(1.5, rel=0.01)
    assert np.std(ratios) < 0.02


def test_draws_scatter_as_estimates_do():
    """With rounds that are slow or fast as a whole, as machines are."""
    steps, spreads, tree = [], [], fixed((1, 0), (8, 2))
    for seed in range(100):
        rng = np.random.default_rng(seed)
        slow, number = rng.lognormal(0, 0.1, 20), np.repeat(np.arange(20), 4)
        timed = [
            timing(n, d, *(ms * slow[number] * rng.lognormal(0, 0.03, 80)).tolist(), round=tuple(number.tolist()))
            for n, d, ms in ((1, 0, 2.0), (8, 2, 3.0))
        ]
        costs = StepCosts(profile(*timed), 1)
        steps.append(costs.ms(tree))
        spreads.append(drawn(costs, tree, 300).std(1))
    assert np.mean(spreads, axis=0) == pytest.approx(np.std(steps, axis=0), rel=0.25)


def test_what_errs_together_cancels_between_trees():
    """Plain visits err by 10 % each, trees of their block with them: trees are compared without it."""
    rng = np.random.default_rng(0)
    plain = rng.lognormal(0, 0.1, 30)
    known = profile(by_rounds(1, 0, 2 * plain), *(by_rounds(n, 1, np.full(30, 3.0 + n / 10)) for n in (2, 3, 4, 6)))
    one, two, five = drawn(StepCosts(known, 1), fixed((1, 0), (2, 1), (6, 1)))
    assert (two / one).std() / (two / one).mean() > 1.5 * (two / five).std() / (two / five).mean()


def test_no_tree_costs_less_than_a_plain_step():
    costs = StepCosts(profile(timing(1, 0, 3.0), *(timing(n, 1, 2.7 + n / 100) for n in (4, 8, 64))), 1)
    steps = fixed((1, 0), (4, 1), (8, 1), (64, 1))
    assert costs.ms(steps) == pytest.approx([3.0, 3.0, 3.0, 3.34], rel=1e-3)
    draws = drawn(costs, steps)
    assert (draws.mean(1) >= 3.0 * (1 - 1e-3)).all()


def test_a_step_that_is_shown_to_be_faster_than_a_plain_one_is_taken_as_it_was_timed():
    """An engine whose kernels for one row are its worst was taken to cost as much, 13 % more than it did."""

    def timed(size, ms, spread):
        return by_rounds(size, size - 1, [ms * (1 + spread * (-1) ** n) for n in range(size % 3, size % 3 + 20)])

    plain, chain_1 = timed(1, 24.0, 0.02), timed(2, 30.0, 0.02)
    costs = StepCosts(profile(plain, chain_1, timed(5, 22.0, 0.02)), 1)
    assert costs.is_faster
    assert costs.ms(fixed((5, 4)))[0] == pytest.approx(22.0, rel=0.01)
    noise = StepCosts(profile(plain, chain_1, timed(5, 23.5, 0.2)), 1)
    assert not noise.is_faster
    assert noise.ms(fixed((5, 4)))[0] >= noise.plain.ms


def test_a_raised_latency_keeps_its_noise_on_both_sides():
    """It was cut off at the plain step: a tree that may cost more was as good as sure to cost as much."""
    rng = np.random.default_rng(0)
    plain, step = (by_rounds(n, n // 2, ms * rng.lognormal(0, 0.05, 30)) for n, ms in ((1, 2.0), (3, 1.9)))
    costs = StepCosts(profile(plain, step), 1)
    assert costs.ms(fixed((3, 1))) == costs.plain.ms
    tree, alone = drawn(costs, fixed((3, 1), (1, 0)))
    assert 0.25 < (tree < alone).mean() < 0.75


def test_a_point_without_a_plain_step_is_refused():
    with pytest.raises(InvalidInput, match="plain timing beside it, but batch size 2"):
        LatencyProfile((StepTiming(2, 100, 8, 2, (1.0,)),), (StepTiming(1, 100, 1, 0, (1.0,)),))


def test_where_chains_alone_were_timed_other_trees_have_no_cost():
    costs = StepCosts(profile(timing(1, 0, 3.0), timing(4, 3, 4.0), timing(6, 5, 5.0)), 1)
    ms = costs.ms(fixed((5, 4), (5, 3), (7, 6)))
    assert ms[0] == pytest.approx(4.5, rel=0.01)
    assert np.isnan(ms[1:]).all()
    assert costs.was_timed(fixed((4, 3), (5, 4))).tolist() == [True, False]


def test_a_family_costs_what_fixed_trees_do_and_its_own_drafting():
    """Rows .05, levels .1 and, for a dynamic tree of topk 4, .2 and .15 a level: found from two timings of it."""

    def truth(cost: Cost) -> float:
        own = 0.2 + 0.15 * (cost.depth - 1) if cost.family == topk_family(4) else 0.0
        return 2 * (1.1 + 0.05 * (cost.rows - 1) + 0.1 * cost.depth + own)

    trees = fixed((1, 0), (2, 1), (4, 1), (8, 2), (8, 4), (16, 4), (32, 1), (32, 4))
    timings = [timing(cost.rows, cost.depth, truth(cost) if cost.rows > 1 else 2.0) for cost in trees]
    dynamic = [Cost(topk_family(4), 12, 2), Cost(topk_family(4), 12, 4)]
    timings += [timing(cost.rows, cost.depth, truth(cost), topk=4) for cost in dynamic]
    costs, asked = StepCosts(profile(*timings), 1), [Cost(topk_family(4), 24, 3), Cost(topk_family(4), 6, 2)]
    assert costs.ms(asked) == pytest.approx([truth(cost) for cost in asked], rel=0.02)
    unknown = [Cost(topk_family(2), 12, 2), Cost(OVER_MARGINALS, 12, 2), Cost(topk_family(4), 12, 5)]
    assert np.isnan(costs.ms(unknown)).all()


def test_trees_alike_in_size_and_depth_cost_alike():
    points = tuple(
        StepTiming(1, 100, 7, 2, (ms,) * 20, round=tuple(range(first, first + 20)))
        for ms, first in ((11.0, 0), (7.0, 20), (8.0, 40))
    )
    plain = StepTiming(1, 100, 1, 0, (2.0,) * 60, round=tuple(range(60)))
    assert StepCosts(LatencyProfile(points, (plain,)), 1, 100).ms(fixed((7, 2)))[0] == pytest.approx(8.0, rel=1e-3)
