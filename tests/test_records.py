"""What was measured of one drafter, rule or seed does not pass for another; records alone, no model."""

import json
import re

import numpy as np
import pytest

from treeopt.errors import InvalidInput
from treeopt.pipeline.importing import import_file
from treeopt.pipeline.profile.outcome import with_earlier
from treeopt.pipeline.search import check_same_model
from treeopt.pipeline.session import resolve
from treeopt.records.benchmark import Benchmark
from treeopt.records.inputs import changed, inputs_of
from treeopt.records.plan import Plan
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
    check_same_model(
        trace_of(MEDUSA), profile_of({**MEDUSA, "sha256": "b" * 64}), run, run.profile
    )  # trained again: costs alike
    for other in ({**MEDUSA, "kind": "hydra"}, {**MEDUSA, "num_layers": 2}, EXIT):
        with pytest.raises(InvalidInput, match="latencies of the drafter that was calibrated, id heads, kind medusa"):
            check_same_model(trace_of(MEDUSA), profile_of(other), run, run.profile)
    sampled = {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "top_k": None, "seed": 0}
    with pytest.raises(InvalidInput, match=r"treeopt profile --overwrite --run \S+ --acceptance greedy"):
        check_same_model(trace_of(MEDUSA), profile_of(MEDUSA, sampled), run, run.profile)


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


def test_options_of_a_trace_that_kept_its_model_as_it_was_given_are_taken(run, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    (run.path.parent / "m").mkdir()
    run.path.mkdir(exist_ok=True)
    trace = trace_of(EXIT)
    trace.meta["source"] = {"model": "m", "drafter": "ngram"}
    trace.save(run.trace)
    assert resolve(run, {"model": "m"}) == {"model": str(run.path.parent / "m"), "drafter": "ngram"}


def test_a_trace_that_cannot_be_read_stands_in_the_way_of_nothing_that_replaces_it(run, capsys):
    run.path.mkdir(exist_ok=True)
    run.trace.write_bytes(b"damaged")
    with pytest.raises(InvalidInput, match="not a readable"):
        resolve(run, {})
    assert resolve(run, {}, overwrite=True) == {}
    assert "It is replaced, and nothing is taken from it." in capsys.readouterr().err


# Plans and benchmarks, typed to the leaf

TIMED = {"tokens_per_step": 1.9, "tokens_per_s": 1520.0}
SPEEDUP = {"value": 1.5, "low": 1.4, "high": 1.6}
ENTRY = {
    "batch_size": 4,
    "context_tokens": 136,
    "size": 3,
    "depth": 2,
    "medusa_choices": [[0], [0, 0]],
    "step_ms": 5.0,
    "speedup": 1.5,
    **TIMED,
}
FULL_ENTRY = ENTRY | {
    "tokens_per_step_stderr": 0.01,
    "step_ms_stderr": 0.02,
    "tokens_per_s_stderr": 3.0,
    "speedup_stderr": 0.04,
    "growth_order": [[[0], 0.6], [[0, 0], 0.3], [[1], 0.1]],
    "predicted": {
        "product": 2.0,
        "joint": None,
        "replayed": 1.9,
        "replayed_stderr": 0.01,
        "sequences": 48,
        "conversations": 40,
        "steps": 900,
    },
    "interval95": {"tokens_per_step": [1.8, 2.0], "size": [3.0, 4.0]},
    "tied_sizes": [3, 4],
    "runner_up": {
        "size": 4,
        "depth": 2,
        "tokens_per_s": 1512.0,
        "behind": 0.005,
        "behind_stderr": 0.01,
        "prompts_to_separate": None,
    },
    "accepted": [0.4, 0.3, 0.3],
    "verified": {
        "size": 3,
        "depth": 2,
        "finalists": [{"name": "3 rows, depth 2", "size": 3, "speedup": SPEEDUP, **TIMED}],
        "prompts": 24,
        "afresh": {"name": "3 rows, depth 2", "size": 3, "speedup": None, "prompts": 24, **TIMED},
    },
    "best_chain": {"size": 2, "depth": 1, "step_ms": 5.0, **TIMED},
    "unconstrained": {"size": 5, "depth": 3, **TIMED},
    "warnings": ["beware"],
    "groups": {"code": {"tokens_per_step": 2.1, "tokens_per_step_stderr": 0.1, "speedup": None}},
    "curve": [
        {"size": 3, "depth": 2, "step_ms": 5.0, "tokens_per_s_stderr": 3.0, **TIMED},
        {"size": 4, "depth": 2, "step_ms": 5.03, "tokens_per_s_stderr": 3.0, **TIMED, "tokens_per_s": 1512.0},
    ],
}
PLAN = {
    "schema": "treeopt.plan/1",
    "entries": [FULL_ENTRY],
    "objective": "replay",
    "drafter": EXIT,
    "acceptance": {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "top_k": 50, "seed": 0},
    "constraint": {
        "budget": 64,
        "max_rank": 9,
        "shape": "sibling-closed",
        "max_depth": 4,
        "measured_only": False,
        "mix": {"4": 1.0},
        "engine": {"name": "tensorrt-llm", "method": "medusa"},
    },
    "runtime": {"name": "treeopt", "version": "0.1.0", "compiled": False},
    "inputs": {"trace.npz": "0" * 64},
    "schedule": [{"from": 1, "to": 8, "entry": 0, "loss": 0.01}, {"from": 9, "to": None, "entry": 0, "loss": None}],
}
CONTENDER = {
    "name": "chosen",
    "batch_size": 4,
    "size": 2,
    "medusa_choices": [[0]],
    "steps": 10,
    "passes": 11,
    "tokens": 15,
    "tokens_per_step": 1.5,
    "tokens_per_s": None,
    "identical": 0,
    "compared": 1,
}
FULL_CONTENDER = CONTENDER | {
    "decode_s": [0.5],
    "prefill_s": 0.1,
    "predicted": {"product": 1.6, "joint": 1.5, "replayed": 1.5, "replayed_stderr": None},
    "predicted_tokens_per_step": 1.5,
    "replayed_steps": 10,
    "replayed_tokens_per_step": 1.5,
    "accepted": [5, 5],
    "replayed_accepted": [5, 5],
    "predicted_accepted": [0.5, 0.5],
    "sequences": [
        {
            "id": "a",
            "steps": 10,
            "tokens": 16,
            "identical": False,
            "replayed_steps": 10,
            "group": "code",
            "first_difference": 3,
            "logit_gap": 0.01,
        }
    ],
    "blocks": [{"round": 0, "prompts": [0], "tokens": 15, "steps": 10, "decode_s": 0.5, "group": "code"}],
}
BENCH = {
    "schema": "treeopt.bench/1",
    "contenders": [FULL_CONTENDER],
    "dtype": "float32",
    "rounds": 1,
    "prompts": "held out",
    "inputs": {"plan.json": "0" * 64},
    "quality": {
        "chosen": {
            "log_likelihood_nats_per_token": -0.8,
            "log_likelihood_nats_per_token_stderr": 0.1,
            "difference_nats_per_token": -0.1,
            "difference_nats_per_token_stderr": 0.02,
            "changed_answers_share": 1.0,
            "changed_tokens_share": 0.6,
            "answers": 1,
            "tokens": 16,
            "reference_tokens": 15,
            "reference_log_likelihood_nats_per_token": -0.7,
            "reference_log_likelihood_nats_per_token_stderr": 0.1,
        }
    },
    "max_new_tokens": 128,
    "loop_share": 0.0,
    "skipped": [{"row": 7, "reason": "empty"}],
    "provenance": {"model": "m", "acceptance": GREEDY},
}


@pytest.mark.parametrize(("kind", "document"), [(Plan, PLAN), (Benchmark, BENCH)])
def test_a_saved_file_says_just_what_was_loaded(tmp_path, kind, document):
    file = tmp_path / "file.json"
    file.write_text(json.dumps(document))
    kind.load(file).save(file)
    assert json.loads(file.read_text()) == document


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (Plan, {"schema": "treeopt.plan/1", "entries": [ENTRY]}),
        (Benchmark, {"schema": "treeopt.bench/1", "contenders": [CONTENDER]}),
    ],
)
def test_a_hand_written_file_needs_only_the_keys_that_must_be(tmp_path, kind, document):
    file = tmp_path / "file.json"
    file.write_text(json.dumps({**document, "a key of tomorrow": 1}))
    first = kind.load(file)
    first.save(file)
    assert kind.load(file) == first
    assert "tomorrow" not in file.read_text()


@pytest.mark.parametrize(
    ("kind", "change", "place"),
    [
        (
            Plan,
            {"entries": [{**ENTRY, "curve": [{"size": "x"}]}]},
            "entries.0.curve.0.size: Input should be a valid int",
        ),
        (Plan, {"entries": [{**ENTRY, "predicted": 3}]}, "entries.0.predicted"),
        (Plan, {"entries": [{**ENTRY, "verified": {}}]}, "entries.0.verified.size: Field required"),
        (Plan, {"entries": [{**ENTRY, "growth_order": [[[0]]]}]}, "entries.0.growth_order.0.1: Field required"),
        (Plan, {"drafter": {"num_heads": "four"}}, "drafter.num_heads: Input should be a valid integer"),
        (Plan, {"constraint": {"mix": [1]}}, "constraint.mix"),
        (Plan, {"schedule": [3]}, "schedule.0"),
        (Plan, {"schedule": [{"from": 2, "to": None, "entry": 0}]}, "ranges from 1 on that follow"),
        (Benchmark, {"contenders": [{**CONTENDER, "predicted": {"joint": "x"}}]}, "contenders.0.predicted.joint"),
        (Benchmark, {"quality": {"chosen": {"answers": 3}}}, "quality.chosen"),
    ],
)
def test_a_wrong_type_is_refused_by_its_place(tmp_path, kind, change, place):
    file = tmp_path / "file.json"
    file.write_text(json.dumps({**(PLAN if kind is Plan else BENCH), **change}))
    with pytest.raises(InvalidInput, match=f"file.json is not as it should be.*{re.escape(place)}"):
        kind.load(file)
