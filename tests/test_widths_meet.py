"""Where records, latencies and plans of several widths meet: what fits is compared, what does not is said or refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files.storage import to_json
from treeopt.growth.drift import shifts
from treeopt.pipeline.compare import Side, compare_groups, compare_sides
from treeopt.pipeline.profile.outcome import check_can_join, with_earlier
from treeopt.planning.planner import plan_trees
from treeopt.planning.regret import plan_losses
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, Timings
from treeopt.records.rundir import RunDirectory
from treeopt.report.tables import calibration_table
from treeopt.trees.shapes import Limits

from .test_widths import several, timed


def each_at(profile, batch_size):
    """The points and plain steps of a profile at a batch size."""
    return [tuple(p for p in some if p.batch_size == batch_size) for some in (profile.points, profile.autoregressive)]


def test_without_its_latencies_a_width_is_left_out_with_a_word_and_not_priced_as_another():
    trace, alone = several(np.random.default_rng(0))
    latencies, each = timed(np.random.default_rng(0), (4, 7))
    partly = replace(latencies, narrower={**latencies.narrower, 2: Timings(*each_at(each[4], 1))})
    for some in (latencies, partly):  # not timed at all, or not at every batch size
        plan = plan_trees(trace, some, PlanRequest(Limits(16), (1, 8)))
        plans = {width: plan_trees(alone[width], each[width], PlanRequest(Limits(16), (1, 8))) for width in (4, 7)}
        assert plan.widths == {width: [e.chosen for e in one.entries] for width, one in plans.items()}
        for entry, own in zip(plan.entries, plans[plan.width].entries, strict=True):
            assert entry.warnings[:-1] == own.warnings
            assert re.fullmatch(
                "The profile has no steps at batch size 1, 8 with a block of 2 guesses, so .* left out. To time it: "
                "treeopt profile --batch-size 1,8 --overwrite",
                entry.warnings[-1],
            )
    assert 2 in plan_trees(trace, partly, PlanRequest(Limits(16), (1,))).widths
    with pytest.raises(OutOfRange, match="no steps with a block of 2 guesses: treeopt profile --overwrite"):
        plan_losses(plan_trees(alone[2]), trace, latencies)  # a plan of that width
    engine, _ = timed(np.random.default_rng(0), (7,), runtime="vllm")  # times what it decodes, whatever it is told
    assert plan_trees(trace, engine).width in (2, 4, 7)


def test_traffic_is_compared_at_the_plans_width():
    rng = np.random.default_rng(2)
    (trace, alone), (later, later_alone) = several(rng), several(rng)
    plan, four = plan_trees(alone[4], None, PlanRequest(Limits(8))), replace(later_alone[4], meta={"top_k": 4})
    sides = [Side("B", later), Side("B", four)]
    found, same = (compare_sides(Side("A", trace, plan), side, None, 8, 0.005) for side in sides)
    assert (found.shifts, found.losses) == (same.shifts, same.losses)
    assert len(found.shifts) == 4
    assert found.shifts == tuple(shifts(alone[4], later_alone[4]))
    said = "Blocks of 4 guesses alone are compared, as the plan's are: search again to compare widths."
    assert said in found.notes
    assert said not in same.notes
    with pytest.raises(InvalidInput, match="of a block of 3 guesses it has not"):
        compare_sides(
            Side("A", None, replace(plan_trees(alone[2]), drafter={"num_heads": 3})), Side("B", later), None, 8, 0.005
        )


def test_groups_are_compared_at_the_plans_width_with_a_word():
    trace, alone = several(np.random.default_rng(0), lengths=(30,) * 12)
    both = [
        replace(one, group=np.arange(12, dtype=np.int16) % 2, meta={**one.meta, "group_names": ["a", "b"]})
        for one in (trace, alone[4])
    ]
    plan = plan_trees(alone[4], None, PlanRequest(Limits(8)))
    found, same = (compare_groups(Side("A", one, plan)) for one in both)
    assert found.groups == same.groups
    assert (found.notes, same.notes) == (
        ("Blocks of 4 guesses alone are compared: groups that gain by another width do not show.",),
        (),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda plan: plan["drafter"].update(num_heads=3),
            "may be as deep as num_heads of the drafter, 3, but one is 4 deep",
        ),
        (lambda plan: plan.update(widths={"2": [], "7": []}), r"for one of its widths, \[2, 7\], but is for 4"),
        (
            lambda plan: plan.update(widths={"4": [], "2": [plan["entries"][0]["chosen"]]}),
            "may be as deep as num_heads of the drafter, 2, but one is 4 deep",
        ),
        (lambda plan: plan["entries"][0]["chosen"].update(draft={"length": 5, "threshold": 0.5}), "but one is 5 deep"),
    ],
)
def test_a_plan_of_other_widths_than_its_drafters_is_refused(change, said, tmp_path):
    _, alone = several(np.random.default_rng(0))
    plan = plan_trees(alone[4], None, PlanRequest(Limits(5, shape="chain")))
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["entries"][0]["chosen"]["draft"]["medusa_choices"][-1] == [0] * 4
    change(document)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=rf"^.*plan.json is not as it should be.*{said}.*\.$"):
        Plan.load(tmp_path / "plan.json")


def test_plain_steps_of_narrower_blocks_are_read_without_size_and_depth(tmp_path):
    latencies, _ = timed(np.random.default_rng(0), (2, 7))
    document = json.loads(to_json(latencies.document()))
    for one in document["narrower"]["2"]["autoregressive"]:
        del one["size"], one["depth"]
    (tmp_path / "profile.json").write_text(json.dumps(document))
    assert vars(LatencyProfile.load(tmp_path / "profile.json").at(2, 7)) == vars(latencies.at(2, 7))


@pytest.mark.parametrize(
    "change",
    [
        *(lambda own, value=value: value for value in (7, [], "2", {"2": 7}, {"2": {}}, {"2": None})),
        *(lambda own, key=key: {key: own} for key in ("x", "0", "-2", "2.5")),
        *(lambda own, key=key: {"2": {**own, key: [7, *own[key]]}} for key in ("points", "autoregressive")),
        lambda own: {"2": {**own, "autoregressive": own["autoregressive"][:1]}},
    ],
)
def test_damage_to_what_was_timed_of_a_width_is_refused(change, tmp_path):
    latencies, _ = timed(np.random.default_rng(0), (2, 7))
    document = json.loads(to_json(latencies.document()))
    document["narrower"] = change(document["narrower"]["2"])
    (tmp_path / "profile.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=r"^(?!.*\n).*profile.json is not as it should be.*\.$"):
        LatencyProfile.load(tmp_path / "profile.json")


def test_profiles_of_other_widths_are_not_joined(tmp_path):
    run, (latencies, each) = RunDirectory(tmp_path), timed(np.random.default_rng(0), (2, 4, 7))
    latencies.save(run.profile)
    check_can_join(run, latencies.runtime, {"narrower": [2, 4]}, overwrite=False)
    with pytest.raises(InvalidInput, match="narrower"):
        check_can_join(run, latencies.runtime, {}, overwrite=False)
    for narrower in ([], [2], [2, 3]):
        said = re.escape(f"narrower ([2, 4] there, {narrower} here)")
        with pytest.raises(InvalidInput, match=said):
            check_can_join(run, latencies.runtime, {"narrower": narrower}, overwrite=False)
    later = replace(each[7], **dict(zip(("points", "autoregressive"), each_at(each[7], 8), strict=True)))
    assert with_earlier(run, later) == later
    both = with_earlier(run, replace(later, narrower=latencies.narrower))
    assert (both.batch_sizes, [*both.narrower]) == ([1, 8], [2, 4])


@pytest.mark.parametrize(
    "counts", [([[1]], [1]), ([], []), ([[], []], [1, 1]), ([[9], [1]], [1, 1]), ([[1], [1, 2]], [9, 9])], ids=str
)
def test_damage_to_the_counts_of_a_width_is_refused(counts, tmp_path):
    Calibration.from_trace(several(np.random.default_rng(0))[0]).save(file := tmp_path / "calibration.json")
    calibration_table(Calibration.load(file))
    document = json.loads(file.read_text())
    document["narrower"]["2"] = dict(zip(("hits", "trials"), counts, strict=True))
    file.write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=r"calibration\.json is not"):
        Calibration.load(file)
