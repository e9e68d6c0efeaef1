"""Drafting by level: what its timings say, and what the file keeps of them."""

import json

import numpy as np
import pytest
from hypothesis import given

from treeopt.errors import InvalidInput
from treeopt.latency.estimate import StepCosts
from treeopt.records.profile import DraftTiming, LatencyProfile, StepTiming, draft_timings

from .conftest import trees


@given(trees(depth=3, ranks=3))
def test_expanding_nodes_are_those_with_children(tree):
    children = np.bincount(tree.parents[1:], minlength=len(tree))
    assert tree.expanding() == [int(((tree.depths == depth) & (children > 0)).sum()) for depth in range(tree.depth)]


def step(size, expanding, *, draft_ms, target_ms, step_ms):
    """Five rounds of a step with a tree, its parts timed one by one."""
    parts = {f"draft {level}": (ms,) * 5 for level, ms in enumerate(draft_ms)}
    return StepTiming(
        1,
        100,
        size,
        len(expanding),
        (step_ms,) * 5,
        round=tuple(range(5)),
        parts_ms={**parts, "target": (target_ms,) * 5},
        expanding=expanding,
    )


def test_parts_that_take_longer_than_their_step_are_scaled_to_it():
    """A synchronisation after each part made drafting look 1.5 times as dear as it is in the step."""
    stretched = step(7, (1, 3), draft_ms=(1.5, 3.0), target_ms=9.0, step_ms=9.0)
    assert [timing.ms for timing in draft_timings([stretched])] == [
        (pytest.approx(1.0),) * 5,
        (pytest.approx(2.0),) * 5,
    ]
    short = step(7, (1, 3), draft_ms=(1.0, 2.0), target_ms=3.0, step_ms=9.0)  # parts may leave something of it out
    assert [timing.ms for timing in draft_timings([short])] == [(1.0,) * 5, (2.0,) * 5]


def test_records_pool_levels_alike_and_leave_out_what_does_not_tell():
    one = StepTiming(
        1,
        9,
        4,
        2,
        (20.0,) * 4,
        round=(0, 0, 1, 1),
        parts_ms={"draft 0": (1.0, 2.0), "draft 1": (3.0, 4.0), "target": (9.0, 9.0)},
        expanding=(1, 1),
    )
    two = StepTiming(1, 9, 5, 2, (20.0,) * 2, parts_ms={"draft 0": (5.0,), "draft 1": (6.0,)}, expanding=(1, 2))
    mute = StepTiming(1, 9, 5, 2, (1.0,), parts_ms={"draft 0": (7.0,)})
    heads = StepTiming(1, 9, 5, 2, (1.0,), parts_ms={"draft": (7.0,)}, expanding=(1, 2))
    assert draft_timings([one, two, mute, heads]) == (
        DraftTiming(1, 0, 1, (1.0, 2.0, 5.0), 9, None),
        DraftTiming(1, 1, 1, (3.0, 4.0), 9, (0, 1)),
        DraftTiming(1, 1, 2, (6.0,), 9, None),
    )


def test_trees_alike_in_size_and_depth_cost_alike_whichever_of_their_nodes_expand():
    points = tuple(
        StepTiming(1, 100, 7, 2, (ms,) * 20, round=tuple(range(first, first + 20)), expanding=expanding)
        for ms, first, expanding in ((11.0, 0, (1, 3)), (7.0, 20, (1, 1)), (8.0, 40, (1, 2)))
    )
    plain = StepTiming(1, 100, 1, 0, (2.0,) * 60, round=tuple(range(60)))
    assert StepCosts(LatencyProfile(points, (plain,)), 1, 100).step(7, 2).ms == pytest.approx(8.0)


def test_draft_timings_survive_their_file(tmp_path):
    points = [step(7, (1, 3), draft_ms=(1.0, 2.0), target_ms=3.0, step_ms=9.0)]
    points += [step(5, (1, 2), draft_ms=(1.0, 1.5), target_ms=3.0, step_ms=8.0)]
    profile = LatencyProfile(tuple(points), (StepTiming(1, 100, 1, 0, (2.0,) * 5, round=tuple(range(5))),))
    assert [(d.level, d.expanding_nodes, len(d.ms)) for d in profile.draft] == [(0, 1, 10), (1, 2, 5), (1, 3, 5)]
    profile.save(tmp_path / "profile.json")
    loaded = LatencyProfile.load(tmp_path / "profile.json")
    assert (loaded.points, loaded.draft, loaded.info) == (profile.points, profile.draft, {})


def test_a_draft_record_by_hand_needs_four_keys_and_bad_ones_are_refused(tmp_path):
    path = tmp_path / "profile.json"
    points = [
        {"batch_size": 1, "context_tokens": c, "size": 4, "depth": 2, "step_ms": [9.0], "expanding": [1, 1]}
        for c in (5, 50)
    ]
    plain = [{"batch_size": 1, "context_tokens": c, "step_ms": [2.0]} for c in (5, 50)]
    draft = [
        {"batch_size": 1, "level": 0, "expanding_nodes": 1, "ms": [1.0]},
        {"batch_size": 1, "level": 1, "expanding_nodes": 3, "ms": [4.0]},
    ]
    document = {"schema": "treeopt.profile/1", "points": points, "autoregressive": plain, "draft": draft}
    path.write_text(json.dumps(document))
    profile = LatencyProfile.load(path)
    assert profile.draft == (DraftTiming(1, 0, 1, (1.0,)), DraftTiming(1, 1, 3, (4.0,)))
    assert StepCosts(profile, 1, 20).step(4, 2).ms == pytest.approx(9.0)
    for change, message in (
        ({"ms": []}, "samples"),
        ({"ms": [-1.0]}, "samples"),
        ({"level": -1}, "level >= 0"),
        ({"expanding_nodes": 0}, "expanding_nodes >= 1"),
        ({"expanding_nodes": 2}, "only the root expands"),
    ):
        path.write_text(json.dumps({**document, "draft": [{**draft[0], **change}]}))
        with pytest.raises(InvalidInput, match=message):
            LatencyProfile.load(path)
    for bad in ([1], [1, 3], [2, 1], [1, 0], [1, 1, 1]):
        path.write_text(json.dumps({**document, "points": [{**points[0], "expanding": bad}]}))
        with pytest.raises(InvalidInput, match="expanding must say for each of 2 levels"):
            LatencyProfile.load(path)
