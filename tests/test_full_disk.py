"""Files that cannot be written: a full disk, a folder in a file's place. One sentence, exit 1, and what was there stays."""

import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from treeopt import demo
from treeopt.cli import cli
from treeopt.errors import InvalidInput
from treeopt.files import npz, writing
from treeopt.files.journal import Journal
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import read_accuracies
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace

from .conftest import treeopt
from .test_kills import prepare

MODEL = ("--num-prompts", 4, "--max-new-tokens", 8)
HEADS = ("train", *MODEL, "--batch-size", 2, "--heads", 2, "--steps", 2, "-o", "heads")
# A command and a file that it writes. Those that load no model:
LIGHT = (
    (("search", "--budget", 8), "treeopt-run/plan.json"),
    (("export", "--to", "tensorrt-llm", "--tree", "tree.json"), "treeopt-run/export/tensorrt-llm/llm_api_options.yml"),
    (("plot", "latency", "--format", "png"), "treeopt-run/figures/latency.png"),
    (("report",), "treeopt-run/report.html"),
    (("import", "table.csv", "--trials", 100, "--overwrite"), "treeopt-run/calibration.json"),
    (("profile", "--from-csv", "steps.csv", "--overwrite"), "treeopt-run/profile.json"),
    (("profile", "--analytical", "H100-SXM", "--model", "llama-7b", "--overwrite"), "treeopt-run/profile.json"),
    (("import", "tree.json", "--output", "out/tree.json"), "out/tree.json"),
)
QUICK = (LIGHT[1], *LIGHT[4:6], LIGHT[7])
HEAVY = (
    (("calibrate", *MODEL, "--overwrite"), ""),
    (("calibrate", *MODEL, "--overwrite", "--rule", "typical"), ""),
    (("profile", "--sizes", "1,4", "--time-limit", 1), ""),
    (("bench", "--num-prompts", 2, "--rounds", 1, "--max-new-tokens", 8, "--batch-size", 1), ""),
    (("run", *MODEL, "--overwrite", "--budget", 8, "--time-limit", 1, "--bench-prompts", 2), ""),
    *(((*HEADS, "--kind", kind), "") for kind in ("medusa-1", "hydra")),
    *((("convert", demo.HEADS, "--to", layout, "--output", "out"), "") for layout in ("neuron", "medusa-pt", "medusa")),
)


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """No file grows beyond so many bytes: the system refuses, as it does where a disk is full.

    Python writes no bytecode meanwhile: what it cuts short would break the imports of every later test.
    """
    before, writes = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture
def work(demo_run, tmp_path, monkeypatch) -> Path:
    """A folder with a run that has everything, and files to import."""
    prepare(tmp_path / "work", demo_run)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def refused(*arguments: object, codes: tuple[int, ...] = (1,)) -> str:
    """What a command says that cannot write: one sentence, no traceback."""
    result = CliRunner().invoke(cli, list(map(str, arguments)))
    assert isinstance(result.exception, SystemExit), (arguments, result.exception or result.output)
    assert result.exit_code in codes, (arguments, result.exit_code, result.output)
    return result.stderr


@pytest.mark.parametrize(
    ("commands", "after"),
    [
        (QUICK, 0),
        pytest.param(LIGHT[:-1], 700, marks=pytest.mark.long),
        *(pytest.param(LIGHT + HEAVY, n, marks=pytest.mark.slow) for n in (0, 3_000, 300_000, 3_000_000)),
    ],
    ids=["quick", "light", *(f"all-{n}" for n in (0, 3_000, 300_000, 3_000_000))],
)
def test_a_full_disk_is_one_sentence_and_what_was_there_stays(tmp_path, monkeypatch, demo_run, commands, after):
    """With space again a command does what it is for, as is seen for two sizes."""
    full = 0
    for number, (command, output) in enumerate(commands):
        folder = tmp_path / str(number)
        prepare(folder, demo_run)
        monkeypatch.chdir(folder)
        before = contents(folder)
        with full_disk(after):
            result = CliRunner().invoke(cli, list(map(str, command)))
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, result.exception)
        assert result.exit_code == 1 or (after > 700 and result.exit_code == 0), (command, result.output)
        if result.exit_code:
            full += 1
            said = result.stderr
            assert "Traceback" not in said
            assert re.search("(cannot be written|needs time).*\\.\n$", said), (command, said)
            if output:
                assert re.fullmatch(r"treeopt: .*\.\n", said.splitlines(keepends=True)[-1]), said
                assert str(Path(output).parent) in said
                assert after > 700 or "cannot be written: File too large." in said
            there = contents(folder)
            assert {name: there.get(name) for name in before} == before or command[0] == "run", command
            assert there == before or not output, command
            assert not list(folder.rglob(".treeopt-*")), command
            if after in (700, 3_000) and command[0] != "run":
                treeopt(*command)
        shutil.rmtree(folder)
    print(f"{full} of {len(commands)} commands were refused beyond {after} bytes")
    assert full > 5 or after != 3_000


@pytest.mark.parametrize("commands", [QUICK[-3:], pytest.param(LIGHT, marks=pytest.mark.long)], ids=["quick", "light"])
def test_a_folder_in_a_files_place_is_one_sentence_and_what_was_there_stays(work, commands):
    for command, output in commands:
        file = work / output
        kept = file.read_bytes() if file.exists() else None
        file.unlink(missing_ok=True)
        file.mkdir(parents=True)
        (file / "mine").write_text("mine")
        before = contents(work)
        assert f"{output} cannot be written: there is a folder of that name." in refused(*command)
        assert contents(work) == before, command
        shutil.rmtree(file)
        if kept is not None:
            file.write_bytes(kept)


def test_a_file_in_a_folders_place_and_a_read_only_file(work, monkeypatch):
    shutil.rmtree("treeopt-run/figures", ignore_errors=True)
    Path("treeopt-run/figures").write_text("mine")
    Path("taken").write_text("mine")
    before = contents(work)
    assert "treeopt-run/figures/latency.png cannot be written" in refused("plot", "latency", "--format", "png")
    assert "taken cannot be written" in refused("search", "--calibration", "vicuna-7b-medusa1", "--run", "taken")
    assert "taken/x cannot be written" in refused("import", "tree.json", "--output", "taken/x")
    monkeypatch.setattr(writing.os, "access", lambda path, mode: Path(path).name != "plan.json")
    assert "treeopt-run/plan.json cannot be written: it is read-only." in refused("search", "--budget", 8)
    assert contents(work) == before


def test_an_import_leaves_two_files_of_one_origin_wherever_it_is_killed(tmp_path, monkeypatch):
    """Killed at each of its steps, what is there is all old or all new, or less of it; then the import finishes."""
    old, new = (
        RankTrace(np.array([[rank, 1], [1, -2], [-2, -2]]), np.array([0, 3]), meta={"top_k": 9}) for rank in (0, 1)
    )
    for with_trace in (True, False):
        for step in range(40):
            run = RunDirectory(tmp_path / f"{with_trace}-{step}")
            run.replace_accuracies(Calibration.from_trace(old), old)
            calls = []

            def killed(function, *arguments, calls=calls, step=step, **options):
                calls.append(function)
                if len(calls) > step:
                    raise KeyboardInterrupt
                return function(*arguments, **options)

            with monkeypatch.context() as patched:
                for owner, name in ((writing.os, "replace"), (Path, "unlink"), (writing.os, "fsync")):
                    function = getattr(owner, name)
                    patched.setattr(owner, name, lambda *a, f=function, **o: killed(f, *a, **o))
                with suppress(KeyboardInterrupt):
                    run.replace_accuracies(Calibration.from_trace(new), new if with_trace else None)
            found = read_accuracies(run)[1]
            hits = [
                (r if isinstance(r, Calibration) else Calibration.from_trace(r)).hits.tolist()
                for r in (found, *([run.read_calibration()] if run.calibration.exists() else []))
            ]
            assert all(one == hits[0] for one in hits)
            assert hits[0] in [Calibration.from_trace(trace).hits.tolist() for trace in (old, new)]
            if len(calls) <= step:
                assert hits[0] == Calibration.from_trace(new).hits.tolist()
                assert run.trace.exists() == with_trace
                break
        else:
            raise AssertionError("it has more steps")


def test_what_a_library_makes_of_a_full_disk_is_one_sentence(tmp_path):
    """torch's and numpy's archives, safetensors and a journal."""
    import torch

    from treeopt.runtime.checkpoints.save import write_tensors

    big = {"x": torch.zeros(10_000)}
    for write in (
        lambda: write_tensors(tmp_path / "x.pt", big),
        lambda: write_tensors(tmp_path / "x.safetensors", big),
        lambda: npz.write(tmp_path / "x.npz", {"x": np.random.default_rng(0).integers(0, 2**60, 1000)}),
        lambda: Journal(tmp_path / "x.partial", {"key": "x" * 100}),
    ):
        with full_disk(50), pytest.raises(InvalidInput, match=r"cannot be written: .*(File too large|os error 27)"):
            write()
    assert not [file for file in tmp_path.iterdir() if file.is_file()]


@pytest.mark.parametrize(
    "command",
    [("list",), *(pytest.param(("list", word), marks=pytest.mark.long) for word in ("engines", "--json"))],
    ids=str,
)
def test_an_output_that_is_full_or_closed_is_no_traceback(command):
    treeopt = [sys.executable, "-m", "treeopt", *command]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(treeopt, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "treeopt: The output cannot be written: No space left on device.\n")
    if command == ("list", "engines"):
        done = subprocess.Popen(treeopt, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done.stdout.close()
        assert done.stderr.read() == b""
        with Path("/dev/full").open("w") as full:
            assert subprocess.run(treeopt, stdout=full, stderr=full, check=False).returncode == 1
