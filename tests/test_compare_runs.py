"""Runs of the demo model compared: two of one drafter, and of several."""

import json
import shutil
from dataclasses import replace

import pytest

import treeopt
from treeopt.files.places import distinct, folder_name
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace

from .conftest import invoke
from .test_hostile_names import NAMES


@pytest.fixture
def two(demo_run, tmp_path):
    """The demo's run, and one that says it is of Hydra heads."""
    for name in ("medusa", "hydra"):
        shutil.copytree(demo_run, tmp_path / name)
    run = treeopt.RunDirectory(tmp_path / "hydra")
    trace = run.read_trace()
    other = {"drafter": {"kind": "hydra", "id": "hydra"}}
    replace(trace, meta={**trace.meta, **other}).save(run.trace)
    return tmp_path / "medusa", tmp_path / "hydra"


def test_a_run_is_as_good_as_itself(demo_run):
    found = invoke("compare", demo_run, demo_run)
    assert "keep it" in " ".join(found.stdout.split())
    assert "in-sample" in found.stderr
    by_plan = invoke("compare", demo_run / "plan.json", demo_run / "trace.npz", "--batch-size", 2, "--json")
    document = json.loads(by_plan.stdout)
    assert [one["served"]["batch_size"] for one in document["losses"]] == [2]


def test_a_plan_alone_is_judged_without_its_trace(demo_run, tmp_path):
    shutil.copy(demo_run / "plan.json", tmp_path)
    found = invoke("compare", tmp_path / "plan.json", demo_run, "--json")
    assert json.loads(found.stdout)["keep"]
    assert "plan whose trace" in invoke("compare", demo_run, tmp_path / "plan.json", code=1).stderr


def test_drafters_have_a_table(two, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = invoke("compare", *two)
    assert " ".join(found.stdout.split()).startswith("Batch size 1: ")  # which is the fastest depends on the machine
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert "Predicted, not decoded" in found.stderr
    document = json.loads(invoke("compare", *two, "--json", "--batch-size", 2).stdout)
    entry = Plan.load(two[0] / "plan.json").entry(2)
    assert [(one["drafter"], one["figure"]["step_ms"]["value"]) for one in document["settings"]] == [
        ("medusa", entry.chosen.step_ms),
        ("hydra", entry.chosen.step_ms),
    ]
    assert document["settings"][0]["figure"]["speedup"]["value"] == entry.chosen.speedup


def test_drafters_of_other_machines_are_not_compared(two):
    run = treeopt.RunDirectory(two[1])
    profile = run.read_profile()
    info = {**profile.info, "provenance": {**profile.info["provenance"], "dtype": "bfloat16"}}
    LatencyProfile(profile.points, profile.autoregressive, info=info).save(run.profile)
    assert "differ in dtype" in invoke("compare", *two, code=1).stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_s_name_is_harmless(name):
    found = folder_name(name)
    assert found == "unnamed" or (found.isascii() and set(found) <= set(found.replace("/", "")))
    assert found not in ("", ".", "..")
    assert not found.startswith(("-", "."))
    assert len(found) <= 64
    assert len(set(distinct([found, found, f"{found}-2"]))) == 3


@pytest.mark.long
def test_several_drafters_are_run_and_go_on_where_they_were_stopped(tmp_path):
    """ngram is finished before; a second call measures nothing again."""
    words = ("run", "--run", tmp_path, "--drafter", "ngram,medusa", "--num-prompts", 8, "--max-new-tokens", 12,
             "--bench-prompts", 2, "--time-limit", 3, "--budget", 4)  # fmt: skip
    document = json.loads(invoke(*words, "--json").stdout)
    assert {one["drafter"] for one in document["settings"]} == {"ngram", "medusa"}
    assert all(one["is_measured"] for one in document["settings"])
    again = json.loads(invoke("compare", tmp_path / "ngram", tmp_path / "medusa", "--json").stdout)
    assert again["settings"] == document["settings"]
    assert RankTrace.load(tmp_path / "medusa" / "trace.npz").num_sequences == 8
    assert "each drafter once" in invoke(*words[:4], "medusa,medusa", code=1).stderr
