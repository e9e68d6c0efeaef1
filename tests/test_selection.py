"""The choice under noise, against the choice by the truth."""

import numpy as np
import pytest

from treeopt.files.places import shipped
from treeopt.growth.rates import Rates
from treeopt.growth.source import source_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.planning.select import select
from treeopt.planning.table import Candidate, Table
from treeopt.records.calibration import Calibration
from treeopt.records.estimate import NEGLIGIBLE
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import TreeSize
from treeopt.trees.shapes import Limits

ROUNDS, PER_ROUND = 12, 3
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)


@pytest.fixture(scope="module")
def trace() -> RankTrace:
    rng = np.random.default_rng(0)
    skill = rng.choice([0.35, 0.65], 120).repeat(50)[:, None] * 0.85 ** np.arange(3)
    ranks = np.minimum(rng.geometric(skill) - 1, 12).astype(np.int16)
    ranks[ranks == 12] = -1
    ranks[49::50] = -2
    return RankTrace(ranks, np.arange(0, 6001, 50), meta={"top_k": 12})


def truth(batch_size: int, size: int, depth: int) -> float:
    """Milliseconds: a stair every 16 rows, heads one after the other."""
    rows = batch_size * size
    return 4.0 + 0.02 * rows + 0.6 * np.ceil(rows / 16) + 0.08 * depth


def recorded(ms_of, *, rng=None, noise=0.05, batch_sizes=(1, 4)) -> LatencyProfile:
    """A profile as a machine would record it: every round slower or faster, a sample in twenty disturbed."""

    def timing(b, n, d, slow):
        ms = np.full((ROUNDS, PER_ROUND), ms_of(b, n, d))
        if rng is not None:
            ms = ms * slow[:, None] * rng.lognormal(0, noise, ms.shape)
            ms = ms * np.where(rng.random(ms.shape) < 0.05, 3.0, 1.0)
        numbers = tuple(np.repeat(np.arange(ROUNDS), PER_ROUND).tolist())
        return StepTiming(b, 100, n, d, tuple(ms.ravel().tolist()), round=numbers)

    points, plain = [], []
    for b in batch_sizes:
        slow = np.ones(ROUNDS) if rng is None else rng.lognormal(0, 0.15, ROUNDS)
        points += [timing(b, n, d, slow) for n in SIZES for d in (1, 2, 3) if d < n]
        plain.append(timing(b, 1, 0, slow))
    return LatencyProfile(tuple(points), tuple(plain))


def regrets(trace, trials: int, **noise) -> np.ndarray:
    """Throughput lost, by the truth, with the choice from each noisy recording of it."""
    exact = plan_trees(trace, recorded(truth), PlanRequest(Limits(32), batch_sizes=(1, 4)))
    best = [{point.size: point for point in entry.curve} for entry in exact.entries]
    found = []
    for seed in range(trials):
        plan = plan_trees(
            trace,
            recorded(truth, rng=np.random.default_rng(seed), **noise),
            PlanRequest(Limits(32), batch_sizes=(1, 4)),
        )
        for entry, curve in zip(plan.entries, best, strict=True):
            rate = 1e3 * entry.batch_size * entry.chosen.tokens_per_step
            cost = truth(entry.batch_size, entry.chosen.size, entry.chosen.depth)
            found.append(1 - rate / cost / max(point.tokens_per_s for point in curve.values()))
    return np.array(found)


@pytest.mark.parametrize("trials", [6, pytest.param(200, marks=pytest.mark.long)])
def test_the_choice_under_noise_is_nearly_the_best(trace, monkeypatch, trials):
    """The median loses nothing, the mean 0.35 %, one in twenty more than 2.1 %. The seeds are fixed: no false alarms."""
    monkeypatch.setattr("treeopt.growth.source.TraceSource.crossfit", _remembered())
    lost = regrets(trace, trials)
    assert np.median(lost) <= 0.001
    assert np.quantile(lost, 0.95) <= 0.025
    assert lost.mean() <= 0.005


def _remembered():
    """The cross-fit does not depend on the latencies: made once for each limit."""
    from treeopt.growth.source import TraceSource

    known, crossfit = {}, TraceSource.crossfit

    def once(source, limits):
        if limits not in known:
            known[limits] = crossfit(source, limits)
        return known[limits]

    return once


def test_sizes_of_one_stair_are_tied_and_others_are_not(trace):
    """Every 16 rows a stair: only the last sizes before it, which differ by what their tokens do."""
    exact = plan_trees(trace, recorded(truth), PlanRequest(Limits(32), batch_sizes=(1,))).entries[0]
    assert exact.chosen.size in exact.tied_sizes
    assert set(exact.tied_sizes) <= {14, 15, 16}


def test_a_mix_of_loads_has_one_tree_with_the_most_tokens(trace):
    profile = recorded(truth, batch_sizes=(1, 4, 8))
    mix = {1: 0.5, 4: 0.3, 8: 0.2}
    plan = plan_trees(trace, profile, PlanRequest(Limits(32), batch_sizes=mix))
    alone = plan_trees(trace, profile, PlanRequest(Limits(32), batch_sizes=tuple(mix)))
    assert len({entry.draft for entry in plan.entries}) == 1
    curves = [{point.size: point.tokens_per_s for point in entry.curve} for entry in alone.entries]
    totals = {n: sum(w * curve[n] for w, curve in zip(mix.values(), curves, strict=True)) for n in curves[0]}
    chosen = sum(w * entry.chosen.tokens_per_s for w, entry in zip(mix.values(), plan.entries, strict=True))
    assert chosen >= (1 - NEGLIGIBLE) * max(totals.values()) * 0.999


RECORDED = "demo--amd-epyc-2-cores-bfloat16"


def test_only_measured_sizes_of_the_shipped_profile_can_be_chosen():
    """Measured at one depth only: the way between others must not be asked for."""
    profile = LatencyProfile.load(shipped("profiles")[RECORDED])
    calibration = Calibration.load(shipped("calibration")["demo"])
    entry = plan_trees(calibration, profile, PlanRequest(Limits(20), batch_sizes=(4,), measured_only=True)).entries[0]
    timed = {(point.size, point.depth) for point in profile.points if point.batch_size == 4}
    assert {point.size for point in entry.curve} <= {1, *(size for size, _ in timed)}


def test_what_another_size_clearly_beats_is_not_tied_with_a_fastest_that_is_hardly_known():
    """Draws by hand: 1 row is surely slower than 4; 8 rows look fastest, but may be anything."""
    rng = np.random.default_rng(0)
    rates, noise = np.array([1.0, 1.5, 1.52]), np.array([0.02, 0.02, 0.6])
    draws = np.maximum(rates[:, None] + noise[:, None] * rng.standard_normal((3, 2000)), 0.01)
    ones = np.ones(3)
    c = Table(
        1,
        1,
        [Candidate("grown", TreeSize(size, depth), Rates.expected()) for size, depth in ((1, 0), (4, 2), (8, 3))],
        rates,
        draws,
        1e3 * ones,
        1e3 * np.ones((3, 2000)),
        ones == 1,
    )
    selection = select(c)
    assert (draws[0] > draws[2]).mean() > 0.1  # so it is not told from the fastest alone
    assert c.sizes[selection.tied].tolist() == [4, 8]
    assert c.sizes[selection.chosen] == 8


def test_of_sizes_as_good_the_smallest_that_was_timed_is_chosen_and_single_samples_have_no_errors(trace):
    """8 and 16 rows were timed; 14, on the line between, look faster than 16 by less than 0.5 %."""
    rates = source_of(trace).crossfit(Limits(16, max_depth=3)).tokens_per_step
    ends = 0.9 * rates[7], rates[15]  # milliseconds
    ends = ends[0] + 4 * (rates[13] / 1.002 - (ends[0] + 3 * ends[1]) / 4), ends[1]  # 14 rows, 0.2 % faster
    points = tuple(StepTiming(1, 100, n, 3, (ms,)) for n, ms in zip((8, 16), ends, strict=True))
    plan = plan_trees(trace, LatencyProfile(points, (StepTiming(1, 100, 1, 0, (1.2,)),)), PlanRequest(Limits(16)))
    chosen, curve = plan[1].chosen, {point.size: point.tokens_per_s for point in plan[1].curve}
    good = [size for size in curve if curve[size] >= (1 - NEGLIGIBLE) * max(curve.values())]
    assert min(good) < 16
    assert chosen.size == min(size for size in good if size in (8, 16))
    assert chosen.step_ms.stderr is chosen.speedup.stderr is chosen.speedup.low is None
    assert chosen.tokens_per_step.stderr > 0
