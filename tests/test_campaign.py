"""5,000 damaged files of runs of every kind, each read by a command: no traceback, no loss, 2 GB and 20 seconds at most.

``pytest -m slow tests/test_campaign.py`` takes an hour; ``-k "part07"`` is a part of it, always the same.
"""

import json
import random
import shutil
from functools import cache
from pathlib import Path

import pytest

from treeopt.errors import TreeoptError
from treeopt.files import npz

from .conftest import DATA, treeopt
from .helpers.engine_files import EVERYTHING
from .helpers.forked import MEGABYTES, OUTPUT, SECONDS, end, start
from .helpers.runs import make_run
from .test_damage import damage

PARTS, EACH = 50, 100
SMALL = ("--num-prompts", 4, "--max-new-tokens", 8)
TABLE = "head,rank,accuracy\n1,0,0.6\n1,1,0.2\n2,0,0.4\n2,1,0.1\n"
STEPS = "batch_size,size,step_ms\n1,1,10\n1,2,10.5\n1,8,12\n4,1,11\n4,2,11.5\n4,8,15\n"
ASKED = [[5, 6, 7, 8] * 4, [9, 10, 11, 12] * 4, [5, 6, 9, 10] * 4]
FILES = {
    "table.csv": TABLE,
    "steps.csv": STEPS,
    "tree.json": "[[0], [1], [0, 0]]",
    "log.jsonl": "".join(
        json.dumps({"prompt_token_ids": ids, "token_ids": ids[2:] + ids[:2], "session_id": i % 5, "begin_s": i}) + "\n"
        for i in range(30)
        for ids in ASKED
    ),
    "server.txt": EVERYTHING["vllm, one scrape"][1][0],
    "vllm.jsonl": EVERYTHING["vllm, responses"][1][0],
    "sglang.jsonl": EVERYTHING["sglang, aliases"][1][0],
    "arms.csv": (DATA / "vllm_sweep" / "summary.csv").read_text(),
}
READERS = (
    ("status",),
    ("show",),
    ("report",),
    ("plot", "tree", "throughput", "latency", "--format", "svg"),
    ("search", "--budget", 8),
    ("export", "--to", "tensorrt-llm"),
    ("export", "--to", "vllm"),
    ("compare", "treeopt-run"),
    ("compare", "treeopt-run", "other"),
    ("compare", "other", "treeopt-run"),
    ("score", "treeopt-run/plan.json"),
    ("score", "mc_sim_7b_63"),
)
MADE = {  # kind of run: the commands that make it, and those that read it besides
    "whole": ((), (("compare", "treeopt-run/trace.npz", "other"),)),
    "demo": ((), ()),
    "typical": ((("calibrate", *SMALL, "--rule", "typical"),), ()),
    "shard": (
        (("calibrate", *SMALL, "--batch-size", 1, "--shard", "1/1"),),
        (("import", "treeopt-run", "--run", "new"),),
    ),
    "log": (
        (("requests", "log.jsonl"), ("search", "--for", "vllm")),
        (("requests", "log.jsonl", "--run", "new"), ("search", "--for", "vllm"), ("search", "--for", "llama-cpp")),
    ),
    "arms": (
        (("import", "arms.csv"),),
        (
            ("tune",),
            ("tune", "arms.csv"),
            ("import", "arms.csv", "--run", "new"),
            ("compare", "arms.csv", "treeopt-run"),
        ),
    ),
    "server": (
        (("import", "server.txt"), ("profile", "--from-csv", "steps.csv"), ("search", "--budget", 8)),
        (("compare", "treeopt-run", "vllm.jsonl"), ("import", "sglang.jsonl", "--run", "new"), ("tune", "server.txt")),
    ),
    "imported": (
        (("import", "table.csv", "--trials", 100), ("profile", "--from-csv", "steps.csv"), ("search", "--budget", 8)),
        (
            ("import", "table.csv", "--trials", 100, "--run", "new"),
            ("profile", "--from-csv", "steps.csv", "--run", "new"),
            ("score", "tree.json"),
            ("import", "tree.json", "--output", "new.json"),
        ),
    ),
    "shipped": ((("search", "--calibration", "vicuna-7b-medusa1", "--budget", 8),), ()),
}


def swap(path: Path, rng: random.Random) -> None:
    """Give a file the content of another."""
    others = [file for file in path.parent.rglob("*") if file.is_file() and file != path]
    shutil.copy(rng.choice(others), path)


def double(path: Path, rng: random.Random) -> None:
    """Repeat a line, which doubles a key of an object or a row of a table."""
    lines = path.read_bytes().splitlines(keepends=True) or [b"\n"]
    line = rng.randrange(len(lines))
    path.write_bytes(b"".join([*lines[: line + 1], lines[line].rstrip().rstrip(b",") + b",\n", *lines[line + 1 :]]))


def files_in(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def check_whole(file: Path) -> None:
    if file.suffix == ".json":
        json.loads(file.read_text())
    elif file.suffix == ".npz":
        npz.read(file, ())


@pytest.fixture(scope="module")
def runs(tmp_path_factory, demo_run):
    """A function that makes a folder with a run of a kind, once, and files to import."""
    base = tmp_path_factory.mktemp("runs")

    @cache
    def made(kind: str) -> Path:
        folder = base / kind
        folder.mkdir()
        for name, text in FILES.items():
            (folder / name).write_text(text)
        if kind == "demo":
            shutil.copytree(demo_run, folder / "treeopt-run")
        elif kind == "whole":
            make_run(folder / "treeopt-run")
        make_run(folder / "other")
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)
            for command in (*MADE[kind][0], ("report",) if kind == "whole" else ("status",)):
                treeopt(*command)  # what a command imports is there for its copies
        return folder

    return made


def faults_of(folder: Path, command: tuple[object, ...]) -> list[str]:
    """What a command does wrong in a folder with a damaged file."""
    before, ended = files_in(folder), end(start(folder, command, is_bounded=True))
    after, output = files_in(folder), folder / OUTPUT
    faults = [f"{file} is left" for file in after if file.name.startswith(".treeopt-")]
    faults += [f"{file} is lost" for file in before.keys() - after.keys()]
    if ended.code not in range(5):
        faults.append(
            f"it ends with {ended.code}: {output.read_text()[-1500:] if output.exists() else 'it was killed'}"
        )
    if ended.megabytes > MEGABYTES or ended.seconds > SECONDS:
        faults.append(f"it takes {ended.megabytes:.0f} MB and {ended.seconds:.0f} s")
    for file, content in after.items():
        if before.get(file) != content:
            try:
                check_whole(folder / file)
            except (ValueError, TreeoptError) as error:
                faults.append(f"{file} is written and damaged: {error}")
    return faults


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS), ids="part{:02}".format)
def test_a_damaged_file_of_a_run_is_no_traceback_and_no_loss(part, runs, tmp_path):
    found = []
    for number in range(part * EACH, (part + 1) * EACH):
        rng, folder = random.Random(number), tmp_path / str(number)
        kind = rng.choice(list(MADE))
        shutil.copytree(runs(kind), folder)
        names = {Path(str(word)).name for command in MADE[kind][1] for word in command}
        inputs = [folder / name for name in FILES if name in names]
        damaged = rng.choice([*(file for file in (folder / "treeopt-run").rglob("[!.]*.*") if file.is_file()), *inputs])
        rng.choice([damage, damage, damage, damage, swap, double])(damaged, rng)
        command = rng.choice([*READERS, *MADE[kind][1], *MADE[kind][1]])
        found += [f"{number} {kind} {damaged.name} {command}: {fault}" for fault in faults_of(folder, command)]
        shutil.rmtree(folder)
    assert not found, "\n".join(found)
