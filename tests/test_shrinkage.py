"""Back-off: how strong it is, and that it helps. Its chances are compared with their definition in test_scale."""

import numpy as np
import pytest

from treeopt.growth.objectives import grow_joint, grow_replay
from treeopt.growth.paths import Tally
from treeopt.growth.replay import replay
from treeopt.growth.shrinkage import NONE, Fit, Strengths, strengths_of
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits

from .conftest import random_trace


def fit_strengths(ranks, part, top, grid) -> Strengths:
    return Fit(Tally.of_ranks(ranks.astype(np.int16), part, top), grid).strengths(ranks.shape[1])


def test_strengths_find_out_whether_paths_matter():
    """Ranks that depend on nothing ask for strong shrinkage, ranks that repeat the one before for weak."""
    rng, n = np.random.default_rng(0), 6000
    alone = np.minimum(rng.geometric(0.5, (n, 3)) - 1, 4).astype(np.int16)
    alike = np.where(rng.random((n, 3)) < 0.8, alone[:, :1], alone).astype(np.int16)
    part, grid = np.arange(n) % 5, [1.0, 10.0, 100.0, 1e3, 1e4]
    assert fit_strengths(alone, part, 5, grid).previous >= 1e3
    assert fit_strengths(alike, part, 5, grid).previous <= 10


@pytest.mark.parametrize("objective", ["joint", "replay"])
def test_shrunk_trees_are_better_on_answers_not_seen(objective):
    """The trees of 128 rows from 12 answers, on 400 others; averaged over samples."""
    gains = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        chance = rng.choice([0.3, 0.6], 440).repeat(60)[:, None]
        ranks = np.minimum(rng.geometric(chance, (len(chance), 4)) - 1, 9).astype(np.int16)
        ranks[59::60] = -2
        whole = RankTrace(ranks, np.arange(0, len(ranks) + 1, 60), meta={"top_k": 10})
        train, test = whole.select(np.arange(12)), whole.select(np.arange(40, 440))
        grow = {"joint": grow_joint, "replay": grow_replay}[objective]
        strengths = strengths_of(train, 10)
        plain, shrunk = (grow(train, Limits(128), strengths=s).tree(128) for s in (NONE, strengths))
        gains.append(replay(test, shrunk).tokens_per_step / replay(test, plain).tokens_per_step - 1)
    assert np.mean(gains) > 0.004


def test_strengths_do_not_depend_on_how_often_a_conversation_is_repeated():
    rng = np.random.default_rng(3)
    trace = random_trace(rng, rng.integers(10, 30, 30), 3, 4)
    numbered = RankTrace(trace.ranks, trace.starts, cluster=np.arange(30), meta=trace.meta)
    once, twice = strengths_of(numbered, 4), strengths_of(numbered.select(np.tile(np.arange(30), 2)), 4)
    assert (twice.depth, twice.previous, twice.path) == pytest.approx(
        (2 * once.depth, 2 * once.previous, 2 * once.path)
    )


def test_a_single_conversation_has_plain_counts():
    trace = random_trace(np.random.default_rng(0), np.array([30]), 2, 3)
    assert strengths_of(trace, 3) == NONE


def test_two_heads_have_no_deeper_level_and_take_the_strength_above():
    """Otherwise the strongest of the grid would win by default, and replay would be joint."""
    rng = np.random.default_rng(0)
    ranks = np.minimum(rng.geometric(0.5, (3000, 2)) - 1, 4).astype(np.int16)
    found = fit_strengths(ranks, np.arange(3000) % 5, 5, [1.0, 100.0, 1e6])
    assert found.path == found.previous
    assert fit_strengths(ranks[:, :1], np.arange(3000) % 5, 5, [1.0, 1e6]) == NONE
