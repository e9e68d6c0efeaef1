"""treeopt status: what the run holds, what is stale or damaged, and the command that comes next."""

import json
import os
import shlex
import shutil
from dataclasses import replace

import pytest

from tests.helpers.runs import long_trace, some_bench, some_profile
from tests.helpers.steps import search
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import inputs_of
from treeopt.records.origins import Provenance
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory, maker
from treeopt.report.status import status

from .conftest import treeopt


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
    assert files["calibration.json"]["made"] == files["trace.npz"]["made"]
    assert "treeopt demo model" in files["trace.npz"]["of"]
    assert files["trace.npz"]["holds"].startswith("8 answers, ")
    assert files["profile.json"]["holds"].startswith("batch sizes 1, 2")
    assert files["plan.json"]["holds"].startswith("batch sizes 1, 2: ")
    assert document["next"].startswith("treeopt bench --batch-size 1 --run ")
