"""No estimate depends on how much was measured: not on prompts, steps, or the trials that a head happened to get."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from treeopt.growth.grow import grow
from treeopt.growth.replay import replay
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import random_trace

BUDGET, CONVERSATIONS = 24, 20
LIMITS = Limits(BUDGET, max_depth=3, max_rank=5)
TREE = Tree.dense([3, 2, 1])
HEADS = ((0, 0, 0, 0, 1, 1, 2, -1), (0, 0, 0, 1, 1, 2, -1, -1), (0, 0, 1, 1, 2, -1, -1, -1))


def repeated(trace: RankTrace, times: int) -> RankTrace:
    """Longer answers of the same process: the states of each sequence so many times over, then its last one.

    Nothing is guessed across the seams, where decoding stops by anyway, so that all rates are the same.
    """
    longer = []
    for begin, end in itertools.pairwise(trace.starts):
        block = trace.ranks[begin:end].copy()
        state, head = np.indices(block.shape)
        block[state + head + 2 > len(block)] = -2
        longer.append(np.concatenate([*[block] * times, block[-1:]]))
    return RankTrace(np.concatenate(longer), np.cumsum([0, *map(len, longer)]), meta=trace.meta)


@cache
def measured(*, times: int = 1) -> RankTrace:
    rng = np.random.default_rng(4)
    return repeated(random_trace(rng, rng.integers(15, 40, CONVERSATIONS), heads=3, ranks=6), times)


@cache
def factorial(*, equal_trials: bool) -> RankTrace:
    """Every combination of three heads' ranks once in each conversation, so that heads are quite independent.

    With unequal trials heads do not guess where an earlier one missed, which no tree could use.
    """
    rng = np.random.default_rng(5)
    states = np.array(list(itertools.product(*HEADS)))
    missed = np.logical_or.accumulate(states == -1, axis=1)
    if not equal_trials:
        states[:, 1:][missed[:, :-1]] = -2
    sequence = [np.concatenate([rng.permutation(states), [[-2] * 3]]) for _ in range(CONVERSATIONS)]
    starts = np.arange(CONVERSATIONS + 1) * len(sequence[0])
    return RankTrace(np.concatenate(sequence), starts, meta={"top_k": 6})


def duplicated() -> RankTrace:
    """Every prompt three times."""
    known = replace(measured(), cluster=np.arange(CONVERSATIONS))
    return known.select(np.tile(np.arange(CONVERSATIONS), 3))


PAIRS = {
    "duplicated": lambda: (measured(), duplicated()),
    "doubled": lambda: (measured(), measured(times=2)),
    "unequal": lambda: (factorial(equal_trials=True), factorial(equal_trials=False)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_accuracies_families_and_replayed_rates_stay(pair):
    """Trees node by node, although the amount of data does differ."""
    before, after = PAIRS[pair]()
    counts, others = Calibration.from_trace(before), Calibration.from_trace(after)
    assert counts.trials.tolist() != others.trials.tolist()
    assert (counts.accept == others.accept).all()
    families, other_families = ([family.paths for family in grow(trace, LIMITS).families] for trace in (before, after))
    assert families == other_families
    assert replay(before, TREE).tokens_per_step == replay(after, TREE).tokens_per_step


def staircase() -> LatencyProfile:
    """A step of 10 ms and 1 ms for every 8 rows begun."""
    points = [StepTiming(1, 99, n, d, (10.0 - n // -8,) * 3) for n in range(2, BUDGET + 1) for d in range(1, min(n, 4))]
    return LatencyProfile(tuple(points), (StepTiming(1, 99, 1, 0, (11.0,) * 3),))


@pytest.mark.parametrize("pair", ["duplicated", "doubled", pytest.param("unequal", marks=pytest.mark.long)])
def test_the_chosen_size_stays(pair):
    before, after = (plan_trees(trace, staircase(), PlanRequest(LIMITS)).entries[0] for trace in PAIRS[pair]())
    assert 1 < before.draft.rows < BUDGET
    assert before.draft == after.draft
    assert before.chosen.tokens_per_step == pytest.approx(after.chosen.tokens_per_step)
