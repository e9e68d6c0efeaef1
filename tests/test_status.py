"""treeopt status: what the run holds, what is stale or damaged, and the command that comes next."""

import json
import os
import shlex
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.runs import long_trace, some_bench, some_profile
from tests.helpers.steps import search
from treeopt.errors import InvalidInput
from treeopt.pipeline.importing import import_files
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.inputs import inputs_of
from treeopt.records.origins import Provenance
from treeopt.records.plan import PlannedEngine
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory, maker
from treeopt.report.status import status

from .conftest import invoke, treeopt
from .test_copied_plan import log_of
from .test_merge import calibration, shard


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> RunDirectory:
    """A calibration, a profile and a plan, in a folder that a shell must be told of with care."""
    run = RunDirectory(tmp_path_factory.mktemp("status") / "my run; $(touch x)")
    trace = long_trace(2)
    trace.save(run.trace)
    Calibration.from_trace(trace).save(run.calibration)
    some_profile([1, 4], depth=2, largest=8).save(run.profile)
    search(run, budget=8)
    return run


@pytest.fixture
def run(searched, tmp_path) -> RunDirectory:
    return RunDirectory(shutil.copytree(searched.path, tmp_path / searched.path.name))


def row(run: RunDirectory, name: str):
    return next(file for file in status(run).files if file.name == name)


def following(run: RunDirectory) -> list[str]:
    """The words of the next command, without --run and its folder."""
    words = shlex.split(status(run).next)
    assert words[0] == "treeopt"
    assert words[-2:] == ["--run", str(run.path)]
    return words[1:-2]


# Kinds of runs, and the commands that follow each other in them

COUNTS = "head,rank,hits,trials\n0,0,60,90\n1,0,40,90\n"
OPTIONS = {  # that make a command quick
    "calibrate": ("--num-prompts", 8, "--max-new-tokens", 8),
    "profile": ("--time-limit", 1, "--sizes", "1,4"),
    "bench": ("--num-prompts", 2, "--rounds", 1, "--max-new-tokens", 4),
}


def imported_run(run: RunDirectory, folder) -> None:
    (folder / "counts.csv").write_text(COUNTS)
    treeopt("import", folder / "counts.csv", "--run", run.path)


def server_run(run: RunDirectory, folder) -> None:
    """As tune leaves it: counts of an engine, two timed sizes and a plan for that engine."""
    meta = {"source": ENGINE_LOG, "drafter": {"kind": "eagle3"}, "survival": [0.8, 0.6]}
    Calibration(np.array([[80], [60]]), np.array([100, 80]), meta).save(run.calibration)
    timings = StepTiming(1, 0, 3, 2, (11.0,) * 5), StepTiming(1, 0, 1, 0, (10.0,) * 5)
    LatencyProfile(timings[:1], timings[1:], {"name": "vllm"}).save(run.profile)
    search(run, engine="vllm", batch_sizes=[1], measured_only=True)


def shipped_run(run: RunDirectory, folder) -> None:
    search(run, budget=8, calibration="vicuna-7b-medusa1")


def shard_run(run: RunDirectory, folder) -> None:
    for number, target in enumerate((run, RunDirectory(folder / "other")), 1):
        blocks, hashes, _ = calibration(1, 2)
        shard(blocks, hashes, f"{number}/2").save(target.trace)


def arms_run(run: RunDirectory, folder) -> None:
    (folder / "table.csv").write_text("k,concurrency,tokens per second\n0,1,50\n3,1,80\n")
    treeopt("import", folder / "table.csv", "--run", run.path)


KINDS = {  # what makes the run, and the commands until nothing is left to do
    "imported": (imported_run, ["profile", "search", "export", "report"]),
    "log": (lambda run, folder: log_of().save(run.requests), ["search", "export", "bench", "report"]),
    "server": (server_run, ["export", "bench", "report"]),
    "shipped": (shipped_run, ["export", "report"]),
    "shard": (shard_run, ["import"]),
    "arms": (arms_run, ["tune"]),
    "empty": (lambda run, folder: None, ["calibrate", "profile", "search", "bench", "report"]),
}


def follow(run: RunDirectory, words: list[str], folder) -> None:
    """Do what status says, with what a user would put for words in capitals."""
    (folder / "steps.csv").write_text("batch_size,size,step_ms\n1,1,10\n1,2,11\n1,4,12\n")
    if words[-2:] == ["--launch", "COMMAND"]:
        provenance = Provenance(engine={"name": "vllm"})
        replace(some_bench(), inputs=inputs_of(run.plan), provenance=provenance).save(run.bench_in("launched"))
    elif words[0] == "import":
        import_files(RunDirectory(folder / "whole"), [run.path, folder / "other"])
    else:
        engine = "vllm" if words[0] == "search" else "medusa"
        filled = [{"FILE": folder / "steps.csv", "ENGINE": engine}.get(word, word) for word in words]
        own = OPTIONS.get(words[0], ()) if "--from-csv" not in words else ()
        treeopt(*filled, *own, "--run", run.path)


@pytest.mark.parametrize("kind", [*list(KINDS)[:-1], pytest.param("empty", marks=pytest.mark.long)])
def test_status_walk(kind, tmp_path):
    """From status to its next command and so on: no command is refused or comes twice, until nothing is left to do."""
    run, commands = RunDirectory(tmp_path / "run"), []
    KINDS[kind][0](run, tmp_path)
    while (command := status(run).next) is not None:
        words = shlex.split(command)[1:]
        assert words not in commands
        commands.append(words)
        if words[0] == "import":
            assert (words[1], words[-2:]) == (str(run.path), ["--run", "WHOLE"])
        else:
            assert words[-2:] == ["--run", str(run.path)]
            words = words[:-2]
        follow(run, words, tmp_path)
        if words[0] in ("import", "tune"):
            break
    names = [words[0] for words in commands]
    if kind == "empty":  # the clock says whether what was chosen pays here, and is exported
        names = [name for name in names if name != "export"]
    assert names == KINDS[kind][1]


@pytest.mark.parametrize("kind", ["imported", "log", "server", "shipped", "arms"])
def test_a_run_that_cannot_decode_is_sent_to_status(kind, tmp_path):
    """Neither bench nor the report send it to calibrate."""
    run = RunDirectory(tmp_path / "run")
    KINDS[kind][0](run, tmp_path)
    with pytest.raises(InvalidInput, match=r"trace.npz does not exist yet\. .*: treeopt status"):
        run.read_trace()
    if run.plan.exists():
        assert "calibrate" not in invoke("report", "--run", run.path).stderr


def test_each_step_is_followed_by_the_next(run, tmp_path):
    assert following(RunDirectory(tmp_path / "empty")) == ["calibrate"]
    assert not (tmp_path / "empty").exists()
    run.profile.rename(tmp_path / "profile.json")
    run.plan.rename(tmp_path / "plan.json")
    assert following(run)[0] == "profile"
    (tmp_path / "profile.json").rename(run.profile)
    assert following(run) == ["search"]
    (tmp_path / "plan.json").rename(run.plan)
    assert following(run) == ["export", "--to", "ENGINE"], "imported accuracies cannot be benched"
    treeopt("export", "--to", "medusa", "--batch-size", "1", "--run", run.path)
    assert following(run) == ["report"]
    treeopt("report", "--run", run.path)
    assert status(run).next is None
    assert "up to date" in status(run).why
    os.utime(run.plan, (2**31, 2**31))
    assert row(run, "report.html").state == row(run, "export/medusa").state == "stale"


def test_a_plan_of_shipped_files_wants_no_calibration(tmp_path):
    run = RunDirectory(tmp_path / "run")
    trace, profile = tmp_path / "other.npz", tmp_path / "other.json"
    long_trace(3).save(trace)
    some_profile((1,)).save(profile)
    search(run, budget=8, calibration=str(trace), profile=str(profile))
    assert "export" in following(run)


def test_what_was_made_from_something_else_is_stale(run, tmp_path):
    assert row(run, "plan.json").state == "up to date"
    treeopt("status", "--check", "--run", tmp_path / "empty", code=1)
    treeopt("status", "--check", "--run", run.path)
    some_profile([1, 4], depth=1).save(run.profile)
    assert (row(run, "plan.json").state, row(run, "plan.json").why) == ("stale", "profile.json changed since")
    assert following(run) == ["search"]
    treeopt("status", "--check", "--run", run.path, code=1)


def test_a_stale_export_is_named_and_a_plan_without_speculation_is_not_exported(run):
    for engine in ("medusa", "modelopt"):
        treeopt("export", "--to", engine, "--batch-size", "4", "--run", run.path)
    made = run.plan.stat().st_mtime
    for file in (run.export / "modelopt").rglob("*"):
        os.utime(file, (made - 9, made - 9))
    assert row(run, "export/medusa").state == "up to date"
    assert following(run) == ["export", "--to", "modelopt"]
    shutil.rmtree(run.export)
    dear = StepTiming(1, 512, 2, 1, (900.0,) * 3)
    LatencyProfile((dear,), (StepTiming(1, 512, 1, 0, (3.0,) * 3),)).save(run.profile)
    search(run, budget=2)
    assert following(run) == ["report"]


@pytest.mark.parametrize("name", ["calibration.json", "trace.npz", "profile.json", "plan.json", "bench.json"])
@pytest.mark.parametrize("damage", [b"{", "folder"])
def test_a_damaged_file_is_a_row_and_no_end(run, name, damage):
    file = run.path / name
    file.unlink(missing_ok=True)
    file.mkdir() if damage == "folder" else file.write_bytes(damage)
    found = row(run, name)
    assert (found.state, bool(found.why)) == ("damaged", True)
    assert following(run) == maker(name)
    assert name in treeopt("status", "--run", run.path)


def test_a_stopped_measurement_is_continued(run):
    blocks = run.partial("profile") / "batch-size-1"
    blocks.mkdir(parents=True)
    for name in ("000000", "000001", "000002", "key"):
        (blocks / f"{name}.json").write_text("{}")
    found = row(run, "profile.partial")
    assert (found.state, found.why) == ("unfinished", "stopped after 3 blocks")
    assert following(run) == ["profile"]
    assert "same options" in status(run).why
    run.partial("drafters").mkdir()
    assert following(run) == ["run"]


def test_benchmarks_of_another_runtime_are_made_again_by_it(run, own_demo_run, tmp_path):
    file = run.bench_in("transformers")
    file.write_text("{")
    (run.path / "bench-notes.json").write_text("{")  # the user's
    assert [name.name for name in run.benches()] == [file.name]
    assert following(run) == ["bench", "--engine", "transformers"]
    run.bench_of(4).write_text("{")
    assert following(run) == ["bench", "--batch-size", "4"]
    own = RunDirectory(shutil.copytree(own_demo_run, tmp_path / "own"))
    engine = {"name": "transformers", "version": "5.0"}
    bench = some_bench()
    inputs = inputs_of(own.plan)
    for size in (1, 2):
        replace(bench, inputs=inputs).save(own.bench_of(size))
    replace(bench, inputs=inputs, provenance=Provenance(engine=engine)).save(own.bench_in("transformers"))
    assert row(own, "bench-transformers.json").holds.endswith("; by transformers 5.0")
    assert following(own)[0] == ("export" if own.read_plan().speculates else "report")
    replace(bench, inputs={"plan.json": "0" * 64}).save(own.bench_in("transformers"))
    assert following(own) == ["bench", "--engine", "transformers"]
    assert "bench-transformers.json is stale" in status(own).why
    own.bench_of(1).unlink()
    own.partial("bench-transformers").mkdir()
    assert following(own) == ["bench", "--engine", "transformers"]
    assert status(own).why.startswith("bench --engine transformers was stopped.")


def test_a_runtime_has_a_benchmark_for_each_batch_size(run):
    assert run.bench_of(4, "openvino").name == "bench-openvino-batch-size-4.json"
    run.bench_in("openvino").write_text("{")  # the last one, which is one of these
    for size in (1, 4):
        run.bench_of(size, "openvino").write_text("{")
    run.bench_in("openvino-int8").write_text("{")
    assert [file.name for file in run.engine_benches()] == [
        "bench-openvino-batch-size-1.json",
        "bench-openvino-batch-size-4.json",
        "bench-openvino-int8.json",
    ]
    assert maker("bench-openvino-batch-size-4.json") == ["bench", "--batch-size", "4", "--engine", "openvino"]
    assert maker("bench-tgi.json") == ["bench-tgi"]  # the user's


def test_it_says_of_what_and_by_which_command(own_demo_run):
    document = json.loads(treeopt("status", "--run", own_demo_run, "--json"))
    files = {file["name"]: file for file in document["files"]}
    assert files["calibration.json"]["command"].startswith("treeopt")
    assert "treeopt demo model" in files["trace.npz"]["of"]
    assert files["trace.npz"]["holds"].startswith("8 answers, ")
    assert files["profile.json"]["holds"].startswith("batch sizes 1, 2")
    assert files["plan.json"]["holds"].startswith("batch sizes 1, 2: ")
    assert document["next"].startswith("treeopt bench --batch-size 1 --run ")


def test_commands_name_what_the_run_knows(tmp_path):
    """The engine that was timed, or planned for, and a shipped calibration stand in the next command."""
    run = RunDirectory(tmp_path / "log")
    log_of().save(run.requests)
    assert following(run) == ["search", "--for", "ENGINE"]
    replace(some_profile((1,)), runtime={"name": "vLLM 0.26"}).save(run.profile)
    assert following(run) == ["search", "--for", "vllm"]
    shipped = RunDirectory(tmp_path / "shipped")
    treeopt("search", "--calibration", "vicuna-7b-medusa1", "--budget", "8", "--run", shipped.path)
    plan = replace(shipped.read_plan(), inputs={**shipped.read_plan().inputs, shipped.profile.name: "0" * 64})
    plan.save(shipped.plan)
    some_profile((1,)).save(shipped.profile)
    assert following(shipped) == ["search", "--calibration", "vicuna-7b-medusa1"]


def test_an_export_that_the_engine_would_refuse_is_not_named(run):
    """A plan of trees for an engine that takes them no more deep than so is not sent to export."""
    plan = run.read_plan()
    hydra = replace(plan.constraint, engine=PlannedEngine(name="hydra", method="hydra"))
    replace(plan, constraint=hydra, drafter={"kind": "medusa", "num_heads": 4}).save(run.plan)
    assert "export" not in following(run)
