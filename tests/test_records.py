"""What was measured of one drafter, rule or seed does not pass for another; records alone, no model."""

import numpy as np
import pytest

from treeopt.errors import InvalidInput
from treeopt.pipeline.importing import import_file
from treeopt.pipeline.profile.earlier import with_earlier
from treeopt.pipeline.search import check_same_model
from treeopt.pipeline.session import resolve
from treeopt.records.inputs import changed, inputs_of
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rules import check_drafter, same_drafter
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.measure.traffic import weight_bytes
from treeopt.runtime.target import Target

from .conftest import tiny_model

MEDUSA = {"kind": "medusa", "id": "heads", "sha256": "a" * 64, "num_heads": 4, "num_layers": 1}
EXIT = {"kind": "early-exit", "id": "early-exit:1", "sha256": None, "num_heads": 5}
GREEDY = {"rule": "greedy", "temperature": 0.0}


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path)


def profile_of(drafter, acceptance=GREEDY, batch_size=1) -> LatencyProfile:
    timings = [StepTiming(batch_size, 100, size, depth, (ms,)) for size, depth, ms in ((2, 1, 3.0), (1, 0, 2.0))]
    provenance = {"model": "m", "drafter": drafter, "acceptance": acceptance}
    return LatencyProfile(
        (timings[0],), (timings[1],), {}, {"provenance": provenance, "drift": [], "precision": {"wanted": 0.02}}
    )


def trace_of(drafter, acceptance=GREEDY) -> RankTrace:
    meta = {"drafter": drafter, "acceptance": acceptance, "provenance": {"model": "m"}, "top_k": 4}
    return RankTrace(np.array([[0], [1], [-2]]), np.array([0, 3]), meta=meta)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({}, True),
        ({"sha256": "b" * 64}, False),
        ({"kind": "hydra"}, False),
        ({"num_heads": 5}, False),
        ({"id": "the same by another path"}, True),
        ({"sha256": None}, True),  # an older record
    ],
)
def test_drafters_are_told_apart_by_their_weights(other, same):
    assert same_drafter(MEDUSA, {**MEDUSA, **other}) is same
    assert same_drafter({**MEDUSA, **other}, MEDUSA) is same


def test_drafters_without_weights_are_told_apart_by_name():
    assert same_drafter(EXIT, dict(EXIT))
    assert not same_drafter(EXIT, {**EXIT, "id": "early-exit:4"})
    assert not same_drafter(EXIT, {**EXIT, "num_heads": 9})


def test_a_plan_takes_no_latencies_of_another_drafter_or_rule(run):
    check_same_model(trace_of(MEDUSA), profile_of({**MEDUSA, "sha256": "b" * 64}), run)  # trained again: costs alike
    for other in ({**MEDUSA, "kind": "hydra"}, {**MEDUSA, "num_layers": 2}, EXIT):
        with pytest.raises(InvalidInput, match="latencies of the drafter that was calibrated, id heads, kind medusa"):
            check_same_model(trace_of(MEDUSA), profile_of(other), run)
    sampled = {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "top_k": None, "seed": 0}
    with pytest.raises(InvalidInput, match="treeopt profile --acceptance greedy"):
        check_same_model(trace_of(MEDUSA), profile_of(MEDUSA, sampled), run)


def test_profiles_of_two_rules_are_not_joined(run):
    profile_of(MEDUSA).save(run.profile)
    assert with_earlier(run, profile_of(MEDUSA, batch_size=2)).batch_sizes == [1, 2]
    sampled = {"rule": "sample-then-match", "temperature": 0.7}
    assert with_earlier(run, profile_of(MEDUSA, sampled, batch_size=2)).batch_sizes == [2]


def test_bench_refuses_another_drafter_without_weights():
    check_drafter(trace_of(EXIT).meta["drafter"], EXIT, "Bench decodes")
    check_drafter(None, EXIT, "Bench decodes")
    with pytest.raises(InvalidInput, match="calibrated with, early-exit:4, but got early-exit:1"):
        check_drafter({**EXIT, "id": "early-exit:4"}, EXIT, "Bench decodes")


def test_an_import_replaces_the_probe_too(run, tmp_path):
    run.path.mkdir(exist_ok=True)
    run.probe.write_bytes(b"of earlier answers")
    (tmp_path / "rates.csv").write_text("head,rank,accuracy\n1,0,0.6\n1,1,0.1\n")
    with pytest.raises(InvalidInput, match=r"probe\.npz exists"):
        import_file(run, tmp_path / "rates.csv", trials=1000)
    import_file(run, tmp_path / "rates.csv", trials=1000, overwrite=True)
    assert not run.probe.exists()


def test_a_plan_whose_trace_is_gone_is_stale(run):
    trace_of(MEDUSA).save(run.trace)
    inputs = inputs_of(run.trace)
    assert not changed(run, inputs, or_gone=True)
    run.trace.unlink()
    assert changed(run, inputs, or_gone=True) == ["trace.npz"]
    assert not changed(run, inputs)


def test_a_draft_models_weights_are_counted():
    target = Target(tiny_model())
    assert (
        weight_bytes(target, DraftModel(Target(tiny_model(seed=1)), 37))["heads"]
        == weight_bytes(target, DraftModel(target, 37))["target"]
    )
    assert weight_bytes(target, DraftModel(target, 37))["heads"] == 0  # they are the target's own


def test_options_of_what_is_given_anew_are_not_taken_over(run):
    earlier = {
        "model": "m",
        "drafter": "ngram",
        "draft_depth": 3,
        "prompts": "p",
        "responses": "answer",
        "temperature": 0.7,
    }
    trace = trace_of(EXIT)
    trace.meta["source"] = earlier
    run.path.mkdir(exist_ok=True)
    trace.save(run.trace)
    assert resolve(run, {}) == earlier
    assert resolve(run, {"drafter": "x"}) == {
        k: v for k, v in {**earlier, "drafter": "x"}.items() if k != "draft_depth"
    }
    others = resolve(run, {"prompts": "q"})  # whose answers are sampled as the given ones were
    assert (others["acceptance"], others["temperature"]) == ("sample", 0.7)
    assert "responses" not in others
    assert resolve(run, {"responses": "r"}).keys().isdisjoint({"temperature", "acceptance"})
    assert "temperature" not in resolve(run, {"acceptance": "greedy"})
