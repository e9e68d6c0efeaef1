"""Drafting by level: the nodes that expand, and what the file says of them."""

import json

import numpy as np
import pytest
from hypothesis import given

from treeopt.errors import InvalidInput
from treeopt.latency.estimate import StepCosts
from treeopt.records.profile import LatencyProfile, StepTiming

from .conftest import trees


@given(trees(depth=3, ranks=3))
def test_expanding_nodes_are_those_with_children(tree):
    children = np.bincount(tree.parents[1:], minlength=len(tree))
    assert tree.expanding() == [int(((tree.depths == depth) & (children > 0)).sum()) for depth in range(tree.depth)]


def test_trees_alike_in_size_and_depth_cost_alike_whichever_of_their_nodes_expand():
    points = tuple(
        StepTiming(1, 100, 7, 2, (ms,) * 20, round=tuple(range(first, first + 20)), expanding=expanding)
        for ms, first, expanding in ((11.0, 0, (1, 3)), (7.0, 20, (1, 1)), (8.0, 40, (1, 2)))
    )
    plain = StepTiming(1, 100, 1, 0, (2.0,) * 60, round=tuple(range(60)))
    assert StepCosts(LatencyProfile(points, (plain,)), 1, 100).step(7, 2).ms == pytest.approx(8.0)


def test_expanding_nodes_that_no_tree_has_are_refused_and_draft_of_earlier_files_is_not_kept(tmp_path):
    path = tmp_path / "profile.json"
    point = {"batch_size": 1, "context_tokens": 5, "size": 4, "depth": 2, "step_ms": [9.0], "expanding": [1, 1]}
    plain = {"batch_size": 1, "context_tokens": 5, "step_ms": [2.0]}
    draft = [{"batch_size": 1, "level": 0, "expanding_nodes": 1, "ms": [1.0]}]
    document = {"schema": "treeopt.profile/1", "points": [point], "autoregressive": plain, "draft": draft}
    path.write_text(json.dumps(document))
    assert "draft" not in LatencyProfile.load(path).document()
    for bad in ([1], [1, 3], [2, 1], [1, 0], [1, 1, 1]):
        path.write_text(json.dumps({**document, "points": [{**point, "expanding": bad}]}))
        with pytest.raises(InvalidInput, match="expanding must say for each of 2 levels"):
            LatencyProfile.load(path)
