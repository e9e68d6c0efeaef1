"""Schedules of an engine whose drafter costs something where it guesses nothing."""

import numpy as np
import pytest

from treeopt.latency.costs import StepCosts
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.report.plan_table import schedule
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import FIXED, Cost

ACCURACY = Calibration(np.array([[6000, 0]]), np.array([10_000]))  # 1.6 tokens per step of a chain of 1
CHAIN = Limits(2, shape="chain")


def profile_of(step_ms, *, noise=0.0, seed=0, idle_ms=None):
    """A profile by batch size of a chain of 1, plain steps of 10 ms, and perhaps steps with a drafter that guesses nothing."""
    rng, plain, points = np.random.default_rng(seed), [], []
    for batch_size, ms in step_ms.items():
        times = lambda ms: tuple(ms * np.exp(noise * rng.standard_normal(8)))  # noqa: E731
        plain.append(StepTiming(batch_size, 128, 1, 0, times(10.0)))
        points.append(StepTiming(batch_size, 128, 2, 1, times(ms)))
        points += [StepTiming(batch_size, 128, 1, 0, times(idle_ms), as_it_comes=True)] if idle_ms else []
    return LatencyProfile(
        tuple(points), tuple(plain), runtime={"name": "vllm", "launches": 3} if idle_ms else {"name": "vllm"}
    )


def test_a_schedule_pays_for_its_drafter_where_it_guesses_nothing():
    """A server for one batch size alone is launched without a drafter."""
    profile = profile_of({1: 12.0, 8: 16.5, 32: 18.0}, idle_ms=11.0)
    plan = plan_trees(ACCURACY, profile, PlanRequest(CHAIN, (1, 8, 32)))
    assert [entry.draft.depth for entry in plan] == [1, 1, 0]
    assert [entry.chosen.speedup for entry in plan] == pytest.approx([1.6 / 1.2, 1.6 / 1.65, 1 / 1.1])
    said = "From batch size 8 on this is slower than an engine without the drafter: 0.97 times as fast at 8, 0.91 times as fast at 32"
    assert said in schedule(plan)
    alone = plan_trees(ACCURACY, profile, PlanRequest(CHAIN, (8,))).entries[0]
    assert (alone.speculates, alone.chosen.speedup) == (False, 1.0)


@pytest.mark.parametrize(("idle_ms", "least_ms"), [(8.0, 8.0), (11.0, 10.0), (None, 10.0)])
def test_no_step_with_guesses_is_shorter_than_one_without_by_either_engine(idle_ms, least_ms):
    costs = StepCosts(profile_of({1: 7.0}, idle_ms=idle_ms), 1)
    assert costs.ms([Cost(FIXED, 2, 1)]).tolist() == [least_ms]
