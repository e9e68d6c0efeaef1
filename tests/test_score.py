"""Scores of given trees: by hand, by oracle, and through the command."""

import json

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.engine_rows import export
from treeopt.files.places import shipped
from treeopt.growth.replay import replay
from treeopt.growth.score import score_tree
from treeopt.growth.source import source_of
from treeopt.pipeline.trees import read_tree
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import random_trace, treeopt, trees


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return Calibration.load(shipped("calibration")["vicuna-7b-medusa1"])


@pytest.fixture(scope="module")
def trace():
    return random_trace(np.random.default_rng(7), [60] * 40, heads=4, ranks=6)


def test_a_small_score_by_hand():
    calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    score = score_tree(calibration, Tree.from_choices([[0], [1], [1, 0]]))
    assert score.given.tokens_per_step == pytest.approx(1 + 0.6 + 0.2 + 0.2 * 0.4)
    assert score.best.draft.choices == [[0], [1], [0, 0]]
    assert score.best.tokens_per_step == pytest.approx(2.04)
    assert score.distance == pytest.approx(1 - 1.88 / 2.04)
    assert score.smallest.size == 4


@given(trees(depth=5, ranks=5))
def test_by_marginals_no_tree_beats_the_best(tree):
    calibration = Calibration.load(shipped("calibration")["vicuna-7b-medusa1"])
    assert score_tree(calibration, tree).distance >= -1e-12


def test_guesses_that_the_calibration_does_not_know_are_counted_as_never_accepted(calibration):
    score = score_tree(calibration, published_tree())
    assert score.unknown_nodes == 63 - 38
    assert score.notes[0].startswith("This calibration ends at rank 4 and depth 5. 25 of the 63 guesses")
    assert (
        score.given.tokens_per_step
        == score_tree(calibration, published_tree().cut(max_depth=5, max_rank=4)).given.tokens_per_step
    )


def test_guesses_without_a_head():
    """A tree deeper than the drafter has heads has guesses that cannot be made."""
    three = Calibration(np.full((3, 10), 10), np.full(3, 1000))
    assert (
        score_tree(three, published_tree())
        .notes[0]
        .startswith("2 of the 63 guesses cannot be made: the drafter makes 3 in a row")
    )


def test_a_lone_root_is_its_own_best(calibration, trace):
    for source in (calibration, trace):
        score = score_tree(source, Tree.chain(0))
        assert score.given.tokens_per_step == 1.0
        assert score.distance == 0.0


def test_from_a_trace_the_tree_is_replayed_and_the_best_is_held_out(trace):
    tree = Tree.dense([3, 2])
    score = score_tree(trace, tree)
    held_out = source_of(trace).crossfit(Limits(len(tree), max_depth=4, max_rank=9))
    assert score.given.tokens_per_step == replay(trace, tree).tokens_per_step
    assert score.best.tokens_per_step == held_out.tokens_per_step[-1]
    assert score.given.tokens_per_step.stderr > 0
    assert score.smallest.tokens_per_step >= score.given.tokens_per_step
    # Both trees see the same conversations, so their ratio is steadier than two rates apart.
    apart = [figure.tokens_per_step.stderr / figure.tokens_per_step for figure in (score.given, score.best)]
    assert 0 < score.distance.stderr < (1 - score.distance) * np.hypot(*apart)


def test_the_tree_that_the_search_grows_gets_its_held_out_figure(trace):
    family = source_of(trace).crossfit(Limits(9, max_depth=4, max_rank=9)).grown
    score = score_tree(trace, family.tree(9))
    assert score.distance == 0.0
    assert score.given.tokens_per_step == score.best.tokens_per_step
    assert "held-out" in score.notes[0]


def test_a_plans_own_tree_is_said_to_be_in_sample(trace, tmp_path):
    """A plan of depth 1 is no tree that the whole search grows, but it was grown on this trace."""
    run = tmp_path / "run"
    trace.save(run / "trace.npz")
    treeopt("search", "--run", run, "--max-depth", 1, "--budget", 5)
    document = json.loads(treeopt("score", run / "plan.json", "--run", run, "--json"))
    assert any("in-sample" in note for note in document["notes"])


def test_files_that_say_not_to_speculate_are_read_as_a_lone_root(calibration, tmp_path):
    plan = plan_trees(calibration, request=PlanRequest(Limits(1)))
    written = export("tensorrt-llm", plan.entries[0].tree)
    for file, text in written.files.items():
        (tmp_path / file).write_text(text)
        assert len(read_tree(tmp_path / file)) == 1, file
