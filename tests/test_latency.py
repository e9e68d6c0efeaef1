"""Estimates between measured sizes, against staircases that are known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.latency.estimate import ANOTHER_TIME, StepCosts, between_of
from treeopt.latency.interpolation import Staircase
from treeopt.records.profile import LatencyProfile, StepTiming

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def stairs(rows):
    """A stair every 16 rows, and two bigger ones."""
    return 5.0 + 0.5 * np.ceil(rows / 16) + 2.0 * (rows > 64) + 3.0 * (rows > 128)


def profile(cost=stairs, *, batch_sizes=(1, 2, 4, 8), sizes=SIZES, offset=lambda b: 0.0) -> LatencyProfile:
    def timing(b, n, depth):
        return StepTiming(b, 100, n, depth, (float(cost(b * n) + offset(b)),))

    points = tuple(timing(b, n, min(n - 1, 4)) for b in batch_sizes for n in sizes)
    deep = tuple(timing(b, n, 4) for b in batch_sizes for n in sizes if n > 4)
    return LatencyProfile(points + deep, tuple(timing(b, 1, 0) for b in batch_sizes))


def test_the_staircase_of_other_batch_sizes_is_seen_between_measured_sizes():
    """At batch size 4 nothing between 16 and 24 was timed: the stair above 64 rows shows at batch size 1."""
    known = profile(sizes=(2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 65, 66, 80, 96))
    pooled = StepCosts(known, 4, 100).step(17, 4).ms
    straight = straight_ms(known)
    truth = stairs(68)
    assert abs(pooled - truth) < 0.1 * abs(straight - truth)


def straight_ms(known: LatencyProfile) -> float:
    """At batch size 4, 17 rows on the straight line from 16 to 24, or to the next size that was timed."""
    costs, larger = StepCosts(known, 4), min(p.size for p in known.points if p.size > 16)
    low, high = costs.ms([16, larger], [4, 4])
    return float(low + (high - low) / (larger - 16))


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_latencies_asked_for_together_are_those_of_each_alone(seed):
    """Against the definition, straight from the points: one batch size, whose staircase goes through all of them."""
    rng = np.random.default_rng(seed)
    measured = {(int(n), int(d)) for n, d in zip(rng.integers(2, 20, 12), rng.integers(1, 5, 12), strict=True) if n > d}
    ms = {key: float(10 + key[1] + rng.random()) for key in measured}
    points = tuple(StepTiming(1, 100, n, d, (ms[n, d],)) for n, d in sorted(measured))
    costs = StepCosts(LatencyProfile(points, (StepTiming(1, 100, 1, 0, (9.0,)),)), 1)
    asked = [(1, 0), *((n, d) for n in range(2, 21) for d in range(1, min(n, 6)))]
    together, stderr_ms = costs.latencies(*zip(*asked, strict=True))
    for (n, d), found, error in zip(asked, together, stderr_ms, strict=True):
        alone = costs.step(n, d)
        assert (alone is None) == np.isnan(found) == np.isnan(error)
        if n == 1:
            assert alone.ms == found == 9.0
            continue
        depths = sorted({depth for _, depth in measured if depth >= d})
        about = [[(m, depth) for m, at in measured if at == depth] for depth in depths]
        kept = [sizes for sizes in about if min(sizes)[0] <= n <= max(sizes)[0]]
        if alone is None:
            assert not kept
            continue
        assert (alone.ms, alone.stderr_ms) == (pytest.approx(found), pytest.approx(error))
        if kept:
            low, high = max(key for key in kept[0] if key[0] <= n), min(key for key in kept[0] if key[0] >= n)
            (exact,), (timed,), _ = costs.judged([n], [d])
            assert (exact, timed) == (low == high == (n, d), low == high)
            assert min(ms[low], ms[high]) - 1e-9 <= found <= max(ms[low], ms[high]) + 1e-9
        else:
            assert n == d + 1  # a chain between two others


def test_between_two_contexts_latencies_are_between_and_only_what_both_know():
    points = [StepTiming(1, 100, n, 2, (10.0 + n,)) for n in (4, 8)]
    points += [StepTiming(1, 500, n, 2, (14.0 + n,)) for n in (4, 6)]
    plain = StepTiming(1, 100, 1, 0, (9.0,)), StepTiming(1, 500, 1, 0, (13.0,))
    costs = StepCosts(LatencyProfile(tuple(points), plain), 1, 200)
    assert costs.ms([1, 4, 6, 8], [0, 2, 2, 2]) == pytest.approx([10.0, 15.0, 17.0, np.nan], nan_ok=True, rel=1e-5)
    assert (costs.plain.ms, costs.reach) == (10.0, (6, 2))


def test_what_a_row_costs_besides_is_no_stair():
    """Batch sizes that differ by a constant are one curve."""
    plain, offset = profile(), profile(offset=lambda b: 0.7 * b)
    rows = np.arange(8, 400, 8)
    stairs_of = [between_of(known).stairs for known in (plain, offset)]
    curves = [curve(rows) - curve(rows[:1]) for curve in stairs_of]
    assert curves[0] == pytest.approx(curves[1], abs=0.15)


TRUTHS = {
    "a line": (lambda rows: 4 + 0.08 * rows, False),
    "stairs": (lambda rows: 4 + 1.5 * np.ceil(rows / 64), True),
    "stairs and a line": (lambda rows: 4 + 0.5 * np.ceil(rows / 16) + 0.02 * rows, True),
}


def simulated(cost, noise: float, seed: int) -> LatencyProfile:
    """Four batch sizes on a machine with slow rounds, of which each tree's own turns scatter by ``noise``."""
    rng, rounds, points = np.random.default_rng(seed), tuple(range(20)), []
    for b in (1, 2, 4, 8):
        slow = rng.lognormal(0, 0.1, 20)
        for n, d in ((1, 0), (2, 1), (4, 3), *((n, 4) for n in (6, 8, 9, 16, 17, 24, 25, 32, 33, 48, 64))):
            ms = slow * cost(b * n) * rng.lognormal(0, noise, 20)
            points.append(StepTiming(b, 100, n, d, tuple(ms.tolist()), round=rounds))
    return LatencyProfile(tuple(p for p in points if p.size > 1), tuple(p for p in points if p.size == 1))


@pytest.mark.parametrize("noise", [0.001, 0.03, 0.08])
@pytest.mark.parametrize("truth", TRUTHS)
def test_the_way_is_found_and_what_was_not_timed_is_covered(truth, noise):
    """The truth at sizes that were not timed, ten profiles. Half the gap of what was left out: covered at least as often.

    Where the noise hides the stairs either way is right. 14 sizes of a batch size share an error or two, so that 560
    count as about 80: below 90 % by chance in 0.2 % of the cases.
    """
    cost, is_stairs = TRUTHS[truth]
    sizes, hits, followed = np.array([n for n in range(7, 64, 4) if n not in (9, 16, 17, 25, 33)]), [], []
    for seed in range(10):
        known = simulated(cost, noise, seed)
        followed.append(between_of(known).is_stairs)
        for b in (1, 2, 4, 8):
            ms, stderr_ms = StepCosts(known, b, as_measured=True).latencies(sizes, np.full(len(sizes), 4))
            hits += (np.abs(ms - [cost(b * n) for n in sizes]) <= 1.96 * stderr_ms).tolist()
    assert np.mean(hits) >= 0.9
    if noise < 0.05:
        assert abs(np.mean(followed) - is_stairs) <= 0.3


def test_the_staircase_without_a_measurement_is_that_of_the_others():
    """Computed from the whole one, against a fit of its own."""
    rng, rows = np.random.default_rng(0), np.array([2, 4, 8, 16, 32, 4, 8, 16, 32, 64, 12])
    batch, ms = [1] * 5 + [2] * 6, 5 + 0.1 * rows + rng.random(11)
    whole, within = Staircase(rows=rows, offsets=[batch], step_ms=ms), np.arange(4, 33)
    for i in range(len(rows)):
        kept = np.arange(len(rows)) != i
        alone = Staircase(
            rows=rows[kept], offsets=[[b for b, k in zip(batch, kept, strict=True) if k]], step_ms=ms[kept]
        )
        found = whole.without(i)(within)
        assert found - found[0] == pytest.approx(alone(within) - alone(within[:1]), abs=0.02)


def test_a_profile_of_few_timed_sizes_knows_little_of_those_between():
    """Nothing can be left out of two: a latency lies anywhere between them. What was timed has its own error alone."""
    points = tuple(StepTiming(1, 100, n, 2, (ms,) * 3) for n, ms in ((4, 5.0), (16, 8.0)))
    costs = StepCosts(LatencyProfile(points, (StepTiming(1, 100, 1, 0, (4.0,) * 3),)), 1)
    assert costs.step(10, 2).stderr_ms == pytest.approx(np.hypot(3, 0.65) / np.sqrt(12))
    assert costs.step(16, 2).stderr_ms == 0
    assert costs.step(16, 1).stderr_ms > 0  # as deep a tree was not timed


def noisy(seed: int, slow_from: int, *, rounds: int = 30) -> tuple[StepTiming, StepTiming]:
    """A tree of 1.5 plain steps on a machine that becomes half as fast, with an interruption now and then."""
    rng = np.random.default_rng(seed)
    number = np.repeat(np.arange(rounds), 4)
    slow = np.where(number >= slow_from, 2.0, 1.0)

    def samples(ms):
        hit = np.where(rng.random(len(number)) < 0.05, 5.0, 1.0)
        return tuple((ms * slow * hit * rng.lognormal(0, 0.03, len(number))).tolist())

    rounds_of = tuple(number.tolist())
    return (
        StepTiming(1, 100, 8, 2, samples(3.0), round=rounds_of),
        StepTiming(1, 100, 1, 0, samples(2.0), round=rounds_of),
    )


@pytest.mark.parametrize("slow_from", [10, 20, 30])
def test_drift_and_interruptions_do_not_reach_the_ratio(slow_from):
    ratios = []
    for seed in range(20):
        point, plain = noisy(seed, slow_from)
        known = LatencyProfile((point,), (plain,))
        ratios.append(StepCosts(known, 1, 100).step(8, 2).ms / StepCosts(known, 1, 100).plain.ms)
    assert np.mean(ratios) == pytest.approx(1.5, rel=0.01)
    assert np.std(ratios) < 0.02


def test_standard_errors_are_the_scatter_of_latencies():
    """With rounds that are slow or fast as a whole, as machines are."""
    steps, plains = [], []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        slow, number = rng.lognormal(0, 0.1, 20), np.repeat(np.arange(20), 4)
        timed = [tuple((ms * slow[number] * rng.lognormal(0, 0.03, 80)).tolist()) for ms in (3.0, 2.0)]
        rounds = tuple(number.tolist())
        known = LatencyProfile(
            (StepTiming(1, 100, 8, 2, timed[0], round=rounds),), (StepTiming(1, 100, 1, 0, timed[1], round=rounds),)
        )
        steps.append(StepCosts(known, 1, 100).step(8, 2))
        plains.append(StepCosts(known, 1, 100).plain)
    for found in (steps, plains):
        scatter = np.std([latency.ms for latency in found])
        assert np.mean([latency.stderr_ms for latency in found]) == pytest.approx(scatter, rel=0.25)


def test_draws_scatter_as_the_standard_errors_say():
    point, plain = noisy(1, 30)
    known = LatencyProfile((point,), (plain,))
    draws = StepCosts(known, 1).draws_ms([8, 1], [2, 0], 2000, np.random.default_rng(0))
    assert np.median(draws[0]) == pytest.approx(StepCosts(known, 1, 100).step(8, 2).ms, rel=0.02)
    assert draws[1].std() == pytest.approx(StepCosts(known, 1, 100).plain.stderr_ms, rel=0.6)


def test_no_tree_costs_less_than_a_plain_step():
    known = profile(lambda rows: 3.0 + rows / 100, batch_sizes=(1,))
    low = tuple(replace(p, step_ms=tuple(0.9 * ms for ms in p.step_ms)) for p in known.points)  # in one round: no error
    quick = LatencyProfile(low, known.autoregressive)
    costs, raw = StepCosts(quick, 1), StepCosts(quick, 1, as_measured=True)
    sizes, depths = [1, 4, 8, 64], [0, 4, 4, 4]
    assert raw.ms(sizes, depths)[2] < raw.plain.ms
    assert costs.below_plain
    assert not StepCosts(known, 1).below_plain
    assert costs.ms(sizes, depths) == pytest.approx(np.maximum(raw.ms(sizes, depths), raw.plain.ms), nan_ok=True)
    draws = costs.draws_ms(sizes, depths, 500, np.random.default_rng(0))
    known_draws = draws[~np.isnan(draws).any(1)]
    assert (known_draws.mean(axis=1) >= draws[0].mean() * (1 - 1e-3)).all()
    assert costs.latencies([8], [4])[1] >= costs.plain.stderr_ms


def test_a_step_that_is_shown_to_be_faster_than_a_plain_one_is_taken_as_it_was_timed():
    """An engine whose kernels for one row are its worst was taken to cost as much, 13 % more than it did."""

    def timed(size, ms, spread):
        samples = tuple(ms * (1 + spread * (-1) ** n) for n in range(size % 3, size % 3 + 20))
        return StepTiming(1, 128, size, size - 1, samples, round=tuple(range(20)))

    plain, chain_1, chain_4 = timed(1, 24.0, 0.02), timed(2, 30.0, 0.02), timed(5, 22.0, 0.02)
    costs, raw = (
        StepCosts(LatencyProfile((chain_1, chain_4), (plain,)), 1, as_measured=some) for some in (False, True)
    )
    assert costs.is_faster
    assert not costs.below_plain
    assert costs.ms([2, 5], [1, 4]).tolist() == raw.ms([2, 5], [1, 4]).tolist()
    noise = StepCosts(LatencyProfile((chain_1, timed(5, 23.5, 0.2)), (plain,)), 1)
    assert not noise.is_faster
    assert noise.ms([5], [4]) == [noise.plain.ms]


def test_a_raised_latency_keeps_its_noise_on_both_sides():
    """It was cut off at the plain step: a tree that may cost more was as good as sure to cost as much."""
    rng, rounds = np.random.default_rng(0), tuple(range(30))
    plain, step = (tuple((ms * rng.lognormal(0, 0.05, 30)).tolist()) for ms in (2.0, 1.9))
    known = LatencyProfile(
        (StepTiming(1, 100, 4, 1, step, round=rounds),), (StepTiming(1, 100, 1, 0, plain, round=rounds),)
    )
    costs = StepCosts(known, 1)
    assert costs.ms([4], [1]) == costs.plain.ms
    tree, alone = costs.draws_ms([4, 1], [1, 0], 2000, np.random.default_rng(0))
    assert 0.25 < (tree < alone).mean() < 0.75


def test_a_point_without_a_plain_step_is_refused():
    with pytest.raises(InvalidInput, match="plain timing beside it, but batch size 2"):
        LatencyProfile((StepTiming(2, 100, 8, 2, (1.0,)),), (StepTiming(1, 100, 1, 0, (1.0,)),))


def test_a_chain_between_two_timed_chains_costs_between_them():
    points = (StepTiming(1, 128, 4, 3, (4.0,)), StepTiming(1, 128, 6, 5, (5.0,)))
    profile = LatencyProfile(points, (StepTiming(1, 128, 1, 0, (3.0,)),))
    assert StepCosts(profile, 1, 128).step(5, 4).ms == pytest.approx(4.5)
    assert not StepCosts(profile, 1, 128).judged([5], [4])[0, 0]
    assert StepCosts(profile, 1, 128).step(5, 3) is None  # a tree of three more nodes is no chain
    assert StepCosts(profile, 1, 128).step(7, 6) is None


def test_speedups_are_no_surer_than_another_time_leaves_them():
    """Timings without noise: all trees share an error against the plain step, so that they are compared without it."""
    steps = {size: (float(ms),) * 20 for size, ms in ((1, 4), (4, 5), (9, 6))}
    point = {n: StepTiming(1, 64, n, min(n - 1, 2), ms, round=tuple(range(20))) for n, ms in steps.items()}
    costs = StepCosts(LatencyProfile((point[4], point[9]), (point[1],)), 1)
    plain, four, nine = costs.draws_ms([1, 4, 9], [0, 2, 2], 4000, np.random.default_rng(0))
    assert (four / plain).std() / (four / plain).mean() == pytest.approx(ANOTHER_TIME, rel=0.1)
    np.testing.assert_allclose(nine / four, 6 / 5)


def test_trees_alike_in_size_and_depth_cost_alike_whichever_of_their_nodes_expand():
    points = tuple(
        StepTiming(1, 100, 7, 2, (ms,) * 20, round=tuple(range(first, first + 20)), expanding=expanding)
        for ms, first, expanding in ((11.0, 0, (1, 3)), (7.0, 20, (1, 1)), (8.0, 40, (1, 2)))
    )
    plain = StepTiming(1, 100, 1, 0, (2.0,) * 60, round=tuple(range(60)))
    assert StepCosts(LatencyProfile(points, (plain,)), 1, 100).step(7, 2).ms == pytest.approx(8.0)
