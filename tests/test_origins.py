"""What was measured elsewhere is kept, labelled, and not mixed unsaid with what is measured here; hints are commands that help."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest

from tests.helpers import steps
from treeopt import demo
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files.storage import typed
from treeopt.pipeline.calibrate import first_conversations
from treeopt.pipeline.export import export
from treeopt.pipeline.profile.outcome import check_can_join
from treeopt.pipeline.profile.untimed import profile_from_file
from treeopt.records.origins import Origin, Origins, Provenance, RuleRecord, same_origin
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rules import RULES
from treeopt.records.rundir import RunDirectory
from treeopt.records.stale import stale_plan

from .conftest import invoke, random_trace, treeopt
from .helpers.runs import some_profile
from .test_report import no_pictures  # noqa: F401  # a fixture

HERE = {"name": "treeopt", "version": "0.1.0"}
TABLE = "batch_size,context,size,depth,step_ms\n"


def rows(*batch_sizes: int, ms: float = 10.0) -> str:
    return "".join(f"{b},128,{n},{min(n - 1, 2)},{ms + 0.1 * n}\n" for b in batch_sizes for n in (1, 2, 4, 8))


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """A trace, and latencies of another engine at batch size 1."""
    run = RunDirectory(tmp_path / "my run")
    run.path.mkdir()
    trace = random_trace(np.random.default_rng(0), [20] * 12, 3, 4)
    made = {"model": "m", "dtype": "float32", "device": "cpu"}
    replace(trace, meta={**trace.meta, "provenance": made}).save(run.trace)
    (tmp_path / "steps.csv").write_text(TABLE + rows(1))
    profile_from_file(run, tmp_path / "steps.csv", runtime="vllm 0.11")
    return run


def search(run, *batch_sizes, **options):
    return steps.search(run, budget=8, batch_sizes=batch_sizes, **options)


# What belongs together

MEDUSA = {"kind": "medusa", "id": "heads", "sha256": "a" * 64, "num_heads": 4, "num_layers": 1}
MTP = {"kind": "mtp", "id": "mtp", "sha256": None, "num_heads": 5}
SAMPLED = {"rule": "sample-then-match", "temperature": 0.7, "top_p": None, "seed": 0}
GREEDY = {"rule": "greedy"}
ACCURACIES = {  # what a file notes, what another does, and what differs
    "path": ({"drafter": MEDUSA}, {"drafter": {**MEDUSA, "id": "another path"}}, None),
    "unknown weights": ({"drafter": MEDUSA}, {"drafter": {**MEDUSA, "sha256": None}}, None),
    "unknown": ({"drafter": MEDUSA, "acceptance": SAMPLED}, {}, None),
    "weights": ({"drafter": MEDUSA}, {"drafter": {**MEDUSA, "sha256": "b" * 64}}, "drafter sha256"),
    "kind": ({"drafter": MEDUSA}, {"drafter": {**MEDUSA, "kind": "hydra"}}, "drafter kind"),
    "heads": ({"drafter": MTP}, {"drafter": {**MTP, "num_heads": 9}}, "drafter num heads"),
    "name": ({"drafter": MTP}, {"drafter": {**MTP, "id": "ngram"}}, "drafter id"),
    "seed": ({"acceptance": SAMPLED}, {"acceptance": {**SAMPLED, "seed": 7}}, None),
    "any temperature": ({"acceptance": SAMPLED}, {"acceptance": {"rule": "sample-then-match"}}, None),
    "greedy": ({"acceptance": GREEDY}, {"acceptance": {**GREEDY, "temperature": 0.0}}, None),
    "rule": ({"acceptance": GREEDY}, {"acceptance": SAMPLED}, "acceptance rule"),
    "temperature": ({"acceptance": SAMPLED}, {"acceptance": {**SAMPLED, "temperature": 0.8}}, "acceptance temperature"),
    "top_p": ({"acceptance": SAMPLED}, {"acceptance": {**SAMPLED, "top_p": 0.9}}, "acceptance top p"),
    "dtype": ({"provenance": {"dtype": "float16"}}, {"provenance": {"dtype": "float32"}}, "dtype"),
    "machine": ({"provenance": {"machine": "A"}}, {"provenance": {"machine": "B"}}, None),
}


@pytest.mark.parametrize("name", ACCURACIES)
def test_same_origin_of_accuracies(name):
    """Two accuracies belong together unless they differ in something that both know; the difference is named."""
    first, other, difference = ACCURACIES[name]
    for there, here in ((first, other), (other, first)):
        found = same_origin(Origin.of(there), Origin.of(here))
        assert [line.split(" (")[0] for line in found] == ([difference] if difference else [])


def test_same_origin_of_latencies():
    """Steps of a drafter take as long with other weights; where they were timed counts, also beside another's accuracies."""
    known = {"drafter": MEDUSA, "provenance": {"machine": "A", "threads": 1}}
    timed = Origin.of_latencies(known, {"name": "vllm"})
    again = {"drafter": {**MEDUSA, "sha256": "b" * 64}, "provenance": {"machine": "B", "threads": 2}}
    assert same_origin(timed, Origin.of(again)) == []
    assert [line.split()[0] for line in same_origin(timed, Origin.of_latencies(again, {"name": "treeopt"}))] == [
        "machine",
        "threads",
        "runtime",
    ]
    assert same_origin(Origin(settings={"top_k": 4}), Origin(settings={})) == ["top k (4 there, None here)"]


# Nothing measured elsewhere is lost


def test_timing_steps_here_does_not_replace_latencies_of_another_runtime(run):
    before = run.profile.read_bytes()
    with pytest.raises(InvalidInput, match=r"runtime \('vllm 0.11' there, 'treeopt' here\).*overwrite.*treeopt status"):
        check_can_join(run, HERE, Provenance.here(), overwrite=False)
    check_can_join(run, HERE, Provenance.here(), overwrite=True)
    assert run.profile.read_bytes() == before


def test_versions_are_no_other_measurement_and_what_differs_is_named_by_its_key(run):
    ours = LatencyProfile((), (StepTiming(1, 128, 1, 0, (1.0,)),), HERE)
    made = replace(Provenance.here(), drafter={"kind": "medusa", "sha256": "a"}, threads=1)
    replace(ours, info={"provenance": {**made.record, "versions": {"torch": "1"}}}).save(run.profile)
    check_can_join(run, {**HERE, "version": "0.2.0", "attention": None}, made, overwrite=False)
    other = replace(made, drafter={"kind": "hydra", "sha256": "b"}, threads=2)
    says = r"differ in drafter kind \('medusa' there, 'hydra' here\), threads \(1 there, 2 here\), attention \(None there, 'eager' here\)\."
    with pytest.raises(InvalidInput, match=says):
        check_can_join(run, {**HERE, "attention": "eager"}, other, overwrite=False)


def test_a_sample_of_a_large_file_is_not_said_to_be_all_of_it(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["treeopt.pipeline.calibrate"], "MOST_DRAWN", 8)
    session = SimpleNamespace(prompts=SimpleNamespace(conversations=tuple(range(8)), name="x"))
    assert len(first_conversations(session, 100)) == 6
    assert "Calibrating on 6 of 8 prompts, 8 of a file at most; the rest" in capsys.readouterr().err


def test_a_converted_checkpoint_has_no_lock_in_it(tmp_path):
    treeopt("convert", demo.HEADS, "--to", "medusa-pt", "--output", tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "medusa_lm_head.pt"]


def test_another_batch_size_is_added_by_profile(run, monkeypatch):
    with pytest.raises(OutOfRange, match=r"covers batch sizes 1, but 16 was asked\. Measure them .*treeopt profile"):
        search(run, 1, 16)
    monkeypatch.chdir(run.path.parent)
    table = Path("steps.csv")
    table.write_text(table.read_text() + rows(16))
    assert invoke("profile", "--from-csv", table, "--runtime", "vllm 0.11", "--run", run.path).exit_code == 0
    assert run.read_profile().batch_sizes == [1, 16]
    assert {entry.batch_size for entry in search(run, 1, 16)} == {1, 16}


def test_other_latencies_of_the_same_setting_are_not_replaced_unasked(run):
    table = run.path.parent / "again.csv"
    table.write_text(TABLE + rows(1, ms=20.0))
    with pytest.raises(InvalidInput, match="other latencies at batch size 1 and context 128"):
        profile_from_file(run, table, runtime="vllm 0.11")
    profile_from_file(run, table, runtime="vllm 0.11", overwrite=True)
    assert run.read_profile().autoregressive[0].step_ms == (20.1,)


def test_every_hint_names_the_run(tmp_path):
    run = RunDirectory(tmp_path / "my run; rm x")
    for read in (run.read_trace, run.read_profile, run.read_plan):
        with pytest.raises(InvalidInput, match="run") as raised:
            read()
        assert shlex.split(str(raised.value).rpartition("with: ")[2])[-1] == str(run.path)


# What is of different origins is not mixed unsaid


def session(**origin):
    return SimpleNamespace(provenance=lambda: replace(Provenance.here(), **origin))


def profile_from(run, runtime=None, **origin):
    """Another origin of the run's profile."""
    profile = run.read_profile()
    info = {**profile.info, "provenance": {**profile.info["provenance"], **origin}}
    replace(profile, runtime=runtime or profile.runtime, info=info).save(run.profile)


@pytest.mark.parametrize(("what", "other"), [("dtype", "bfloat16"), ("device", "cuda:0"), ("model", "another")])
def test_a_profile_of_another_origin_is_said_or_refused(run, what, other):
    profile_from(run, **{what: other})
    if what == "model":
        with pytest.raises(
            InvalidInput,
            match=r"differ in model \('another' there, 'm' here\)\. Time steps again: treeopt profile --overwrite",
        ):
            search(run, 1)
    else:
        search(run, 1)
    notes = search(run, 1, profile=str(run.profile.rename(run.path / "theirs.json"))).notes
    said = f"theirs.json (there) differs from what was calibrated (here) in {what} ('{other}' there"
    assert any(said in note for note in notes)


# What was made from other files than are there now is said to be


def test_a_plan_is_stale_by_what_changed_and_by_what_is_gone(run):
    search(run, 1)
    plan = run.read_plan()
    assert stale_plan(run, plan) == []
    some_profile((1,)).save(run.profile)
    (said,) = stale_plan(run, plan)
    assert said.startswith("plan.json was made from another profile.json than the one here now.")
    assert shlex.split(said.rpartition("with: ")[2]) == ["treeopt", "search", "--run", str(run.path)]
    run.profile.unlink()
    assert "made from profile.json, which is not here any more" in stale_plan(run, plan)[0]


@pytest.mark.parametrize("command", [("show",), ("report",)])
def test_what_people_look_at_says_what_is_stale(run, command, monkeypatch):
    monkeypatch.setattr("treeopt.report.page.pictures", lambda *rest, **options: [])
    search(run, 1)
    assert "was made from" not in invoke(*command, "--run", run.path).stderr
    some_profile((1,)).save(run.profile)
    assert "plan.json was made from another profile.json" in invoke(*command, "--run", run.path).stderr


def test_nothing_is_exported_from_a_stale_plan_unasked(run):
    search(run, 1)
    fresh = export(run, "medusa")[1].files
    some_profile((1,)).save(run.profile)
    said = treeopt("export", "--to", "modelopt", "--run", run.path, code=1)
    assert "unless --anyway is given. plan.json was made from another profile.json" in said
    assert not (run.export / "modelopt").exists()
    assert export(run, "medusa", anyway=True)[1].files == fresh
    assert "was made from another" in invoke("export", "--to", "medusa", "--anyway", "--run", run.path).stderr


@pytest.mark.long
def test_calibrate_keeps_another_measurement(own_demo_run):
    run = RunDirectory(own_demo_run)
    before = run.trace.read_bytes()
    calibrate = ("calibrate", "--run", run.path, "--max-new-tokens", 24, "--num-prompts")
    said = treeopt(*calibrate, 5, code=1)
    assert "do not belong together: they differ in prompts" in said
    run.trace.unlink()
    assert "a calibration replaces it only" in treeopt(*calibrate, 5, code=1)
    assert not run.trace.exists()
    arguments = (*calibrate, 8, "--dtype", "float64")
    treeopt(*arguments, "--overwrite")
    assert run.trace.read_bytes() == before
    treeopt(*arguments)  # the very same
    assert run.trace.read_bytes() == before


# An unknown rule would be taken for greedy decoding.
WRONG = {"rule": "speculative", "temperature": float("inf"), "top_p": 1.5, "top_k": 0, "epsilon": -0.1,
         "delta": float("nan")}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG.items())
def test_an_acceptance_rule_that_cannot_be_is_refused_by_its_key(key, value):
    record = {"rule": "typical", "temperature": 0.7, "top_p": None, "top_k": None, "epsilon": 0.09, "delta": 0.3}
    typed(Origins, {"acceptance": record}, "plan.json")
    with pytest.raises(InvalidInput, match=rf"plan\.json .* at acceptance\.{key}: "):
        typed(Origins, {"acceptance": {**record, key: value}}, "plan.json")
    for answers in (3, [], {"given": "no"}):
        with pytest.raises(InvalidInput, match=r"trace\.npz .* at answers"):
            typed(Origins, {"answers": answers}, "trace.npz")


def test_every_rule_that_records_have_is_known():
    (names,) = (get_args(kind) for kind in get_args(get_type_hints(RuleRecord)["rule"]) if get_args(kind))
    assert set(names) == set(RULES.values())
