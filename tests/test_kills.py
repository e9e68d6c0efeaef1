"""Commands that are killed at any of their steps: nothing is half, nothing foreign is touched, the same command finishes."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from treeopt import demo
from treeopt.files import storage, writing
from treeopt.pipeline.train import TrainingJob, writing_heads
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import load_result, read_accuracies
from treeopt.records.rundir import RunDirectory

from .conftest import invoke, treeopt
from .helpers.forked import COUNT, OUTPUT, end, start

TWENTY = ("--num-prompts", 20, "--max-new-tokens", 8, "--batch-size", 1, "--dtype", "float64")
SMALL = ("--num-prompts", 4, "--max-new-tokens", 8)
TRAIN = ("train", *SMALL, "--batch-size", 2, "--heads", 2, "--steps", 3, "-o", "heads")
COMMANDS = {
    "calibrate": ("calibrate", "--overwrite", *TWENTY),
    "typical": ("calibrate", "--overwrite", *SMALL, "--rule", "typical"),
    "profile": ("profile", "--sizes", "1,4", "--time-limit", 1, "--batch-size", "1,2"),
    "from-csv": ("profile", "--from-csv", "steps.csv", "--overwrite"),
    "search": ("search", "--budget", 8),
    "bench": ("bench", "--num-prompts", 3, "--rounds", 1, "--max-new-tokens", 8, "--batch-size", 1),
    "export": ("export", "--to", "tensorrt-llm", "--batch-size", 1),
    "plot": ("plot", "tree", "--format", "svg"),
    "report": ("report",),
    "import": ("import", "table.csv", "--trials", 100, "--overwrite"),
    "convert": ("convert", str(demo.HEADS), "--to", "medusa-pt", "--output", "converted"),
    "train medusa-1": TRAIN,
    "train hydra": (*TRAIN, "--kind", "hydra"),
    "run": ("run", "--overwrite", *SMALL, "--budget", 8, "--time-limit", 1, "--bench-prompts", 2),
}
MEASURED = ("profile", "bench", "run")  # whose figures are the clock's
OF_THE_MOMENT = {"time", "command", "seconds", "inputs"}


def prepare(folder: Path, base: Path) -> None:
    """A folder with a run, and with files to import."""
    folder.mkdir()
    shutil.copytree(base, folder / "treeopt-run")
    (folder / "steps.csv").write_text("batch_size,size,step_ms\n1,1,10\n1,8,12\n")
    (folder / "table.csv").write_text("head,rank,accuracy\n1,0,0.6\n1,1,0.2\n2,0,0.4\n2,1,0.1\n")
    (folder / "tree.json").write_text("[[0], [1]]")
    (folder / "treeopt-run" / ".mine.tmp").write_text("mine")


def finish(folder: Path, command: tuple[object, ...]) -> None:
    ended = end(start(folder, command))
    assert ended.code == 0, (command, (folder / OUTPUT).read_text())


def results(folder: Path, name: str) -> dict[str, object]:
    """What a command left, without what depends on the moment."""

    def kept(value: object) -> object:
        if isinstance(value, dict):
            return {key: kept(part) for key, part in value.items() if key not in OF_THE_MOMENT}
        return [kept(part) for part in value] if isinstance(value, list) else value

    found: dict[str, object] = {}
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.name in (OUTPUT, COUNT):
            continue
        place = str(file.relative_to(folder))
        if name == "run" and ("export" in place or "figures" in place):
            continue  # which there are depends on the tree, and that on the clock
        measured = name in MEASURED and not place.endswith(("trace.npz", "calibration.json"))
        if measured or file.suffix in (".png", ".svg", ".html"):
            found[place] = "is there"
        elif file.suffix == ".json":
            found[place] = kept(json.loads(file.read_text()))
        elif file.suffix == ".npz":
            with np.load(file) as archive:
                found[place] = {name: archive[name].tolist() for name in archive.files if name != "meta"}
                found[place + " meta"] = kept(json.loads(str(archive["meta"]))) if "meta" in archive.files else None
        elif file.suffix == ".jsonl" and "training" in file.parts:
            found[place] = [kept(json.loads(line)) for line in file.read_text().splitlines()]
        else:
            found[place] = file.read_bytes()
    return found


def check_whole(folder: Path) -> None:
    """Nothing is half, the accuracies are of one origin, and what is not ours is there."""
    run = RunDirectory(folder / "treeopt-run")
    for file in run.path.glob("*.*"):
        if file.suffix in (".npz", ".json"):
            load_result(file)
    _, accuracies = read_accuracies(run)
    if run.trace.exists() and run.calibration.exists():
        assert Calibration.from_trace(accuracies).hits.tolist() == run.read_calibration().hits.tolist()
    for file in folder.rglob("*.json"):
        if not any(part.endswith(".tmp") for part in file.parts):
            storage.load_json(file)
    assert (run.path / ".mine.tmp").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_sixty_kills_over_all_commands(tmp_path, demo_run, name):
    """Four of each, two of the whole line: before an event of the file system, drawn at random, the last at a random time."""
    command, rng = COMMANDS[name], random.Random(name)
    prepare(tmp_path / "undisturbed", demo_run)
    begun = time.monotonic()
    finish(tmp_path / "undisturbed", command)
    seconds, events = time.monotonic() - begun, int((tmp_path / "undisturbed" / COUNT).read_text())
    expected, killed = results(tmp_path / "undisturbed", name), 0
    kills = 2 if name == "run" else 4
    for number in range(kills):
        folder = tmp_path / str(number)
        prepare(folder, demo_run)
        if number < kills - 1:
            ended = end(start(folder, command, die_at=rng.randint(1, events)))
        else:
            pid = start(folder, command)
            time.sleep(rng.uniform(0.1, 0.9) * seconds)
            os.kill(pid, signal.SIGKILL)
            ended = end(pid)
        killed += ended.code == -signal.SIGKILL
        check_whole(folder)
        finish(folder, command)
        check_whole(folder)
        assert not list(folder.rglob(".treeopt-*")), name
        assert results(folder, name) == expected, name
        shutil.rmtree(folder)
    print(f"{name}: {killed} kills among {events} events")
    assert killed >= kills - 1


class Killed(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize("moment", ["heads", pytest.param("record", marks=pytest.mark.long)])
def test_training_that_is_killed_while_it_writes_is_finished_by_the_same_command(tmp_path, monkeypatch, moment):
    """Between the heads and training.json; the weights are those of a run that nothing disturbed."""
    monkeypatch.chdir(tmp_path)
    treeopt(*TRAIN[:-1], "undisturbed")

    def killed(*arguments, **options):
        raise Killed

    owner, name = {"heads": (TrainingJob, "write_record"), "record": (storage, "write_json")}[moment]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, killed)
        with pytest.raises(Killed):
            treeopt(*TRAIN)
    assert Path("heads/medusa_lm_head.safetensors").exists()
    assert "Continuing after 3 steps." in invoke(*TRAIN).stderr
    one, two = (results(Path(folder), "train") for folder in ("undisturbed", "heads"))
    assert one == two
    assert treeopt(*TRAIN)  # and a run that is finished is trained anew


def test_a_folder_of_heads_has_one_writer_who_clears_up(tmp_path):
    folder, answers = tmp_path / "heads", tmp_path / "answers"
    answers.mkdir()
    left = []
    with writing_heads(folder, answers):
        assert "A folder of heads has one writer at a time" in treeopt(*TRAIN[:-1], folder, code=1)
        for place in (folder, folder / "training", answers, answers / "answers-1"):
            place.mkdir(parents=True, exist_ok=True)
            left.append(writing.temporary(place / "x"))
            left[-1].mkdir()
            (left[-1] / "half").write_text("half")
    foreign = answers / ".treeopt-0-12345678.tmp"
    foreign.write_text("another's")
    with writing_heads(folder, answers):
        assert not any(file.exists() for file in left)
        assert foreign.exists()
    with writing_heads(tmp_path / "nothing", None):
        pass
    assert not (tmp_path / "nothing").exists()
