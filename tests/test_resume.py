"""Runs that survive: signals, kills, a second writer, memory that runs out."""

import errno
import importlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch

from tests.helpers import steps
from treeopt.cli import INTERRUPTED
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files import npz, writing
from treeopt.files.journal import Journal
from treeopt.files.storage import document
from treeopt.files.writing import discard
from treeopt.latency.rounds import time_steps
from treeopt.pipeline.contest import Contest, interleaved
from treeopt.pipeline.entrants import Entrant
from treeopt.records.contender import Prompt
from treeopt.records.options import Source
from treeopt.records.rundir import RunDirectory
from treeopt.runtime.decode import Decoder
from treeopt.runtime.memory import with_less_memory
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import StepVisits
from treeopt.runtime.stop import StopRule
from treeopt.trees.tree import Tree

from .conftest import invoke, treeopt
from .test_merge import calibration, shard

CALIBRATE = ("calibrate", "--num-prompts", "32", "--max-new-tokens", "24", "--batch-size", "1")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(folder, *arguments):
    """A command that can be interrupted: shells start what runs in the background with SIGINT ignored."""
    return subprocess.Popen(
        [sys.executable, "-m", "treeopt", *arguments],
        cwd=folder,
        env=ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(folder, *arguments, code=0):
    process = start(folder, *arguments)
    _, said = process.communicate(timeout=300)
    assert process.returncode == code, said
    return said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The trace of a calibration that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(folder, *CALIBRATE)
    return (folder / "treeopt-run" / "trace.npz").read_bytes()


def kill_and_continue(folder, number, after_blocks, rng):
    """Kill a calibration some time after it wrote a block; what it said."""
    process = start(folder, *CALIBRATE)
    partial = folder / "treeopt-run" / "calibrate.partial"
    while process.poll() is None and len(list(partial.glob("0*.npz"))) < after_blocks:
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 0.1))
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


@pytest.mark.parametrize(
    "numbers", [pytest.param(numbers, marks=pytest.mark.long) for numbers in (SIGNALS[::2], *zip(SIGNALS))], ids=str
)
def test_a_killed_calibration_continues_to_the_same_bytes(tmp_path, undisturbed, numbers):
    """Killed once, or by one signal and continuing by another."""
    run = tmp_path / "treeopt-run"
    for blocks, number in enumerate(numbers, 1):
        code, said = kill_and_continue(tmp_path, number, blocks, random.Random(0))
        assert not (run / "trace.npz").exists()
        if number == signal.SIGKILL:
            assert code == -signal.SIGKILL
        else:
            assert code == 128 + number
            assert "The same treeopt calibrate command goes on" in said
            assert "Traceback" not in said
        for path in run.rglob("*.npz"):  # every file that is there is whole
            npz.read(path, ("ranks",))
    assert "Continuing after" in finish(tmp_path, *CALIBRATE)
    assert (run / "trace.npz").read_bytes() == undisturbed
    assert sorted(p.name for p in run.iterdir()) == [".lock", "calibration.json", "trace.npz"]


def test_a_run_directory_has_one_writer(tmp_path):
    search = ("search", "--calibration", "vicuna-7b-medusa1", "--run", tmp_path / "run")
    with RunDirectory(tmp_path / "run").writing():
        assert "one writer at a time" in treeopt(*search, code=1)
    treeopt(*search)


def crash(folder, *, run="run", where="run.plan"):
    """Die in the middle of a file."""
    code = (
        "import os\n"
        "from treeopt.records.rundir import RunDirectory\n"
        "from treeopt.files.writing import atomic_writer\n"
        f"run = RunDirectory({run!r})\n"
        f"with run.writing(), atomic_writer({where}) as stream:\n"
        "    stream.write(b'half'); stream.flush(); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=False)


@pytest.mark.parametrize(
    "where",
    ["run.plan", "run.figures / 'tree.png'", "run.export / 'e' / 'batch-size-1' / 'x'", "run.partial('p') / '0'"],
)
def test_a_crash_leaves_no_lock_and_no_half_written_files(tmp_path, where):
    crash(tmp_path, where=where)
    run = RunDirectory(tmp_path / "run")
    assert len(list(run.path.rglob(".treeopt-*.tmp"))) == 1
    assert not run.plan.exists()
    with run.writing():
        assert not list(run.path.rglob(".treeopt-*.tmp"))


@pytest.mark.parametrize("number", writing.WITHOUT_LOCKS, ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_written_to_with_a_note(tmp_path, monkeypatch, capsys, number):
    """A lock that was left over there does not matter, nor is another writer's temporary file taken for a killed one's."""

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    run = RunDirectory(tmp_path / "run")
    with run.writing():
        half = writing.temporary(run.plan)
        half.write_text("half")
    with run.writing():
        assert half.exists()
    with writing.folder_made_once(tmp_path / "made") as made:
        assert made is not None
    assert capsys.readouterr().err.count("run is on a file system without locks") == 1


def test_temporary_files_of_others_stay(tmp_path):
    """Those of a run that lies in another one's folder, of a writer that lives, and of other programs."""
    crash(tmp_path, run="run/figures")
    outer, inner = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run" / "figures")
    (nested,) = inner.path.glob(".treeopt-*.tmp")
    foreign = [tmp_path / "run" / name for name in (".somebody.tmp", ".plan.json.abc.tmp", "figures/.other.tmp")]
    for file in foreign:
        file.write_text("theirs")
    with RunDirectory(tmp_path / "run" / "export" / "alive").writing(), writing.atomic_writer(inner.path / "x") as one:
        one.write(b"1")
        one.flush()
        alive = set(inner.path.glob(".treeopt-*.tmp")) - {nested}
        with outer.writing():
            assert alive <= set(inner.path.iterdir())
            assert nested.exists()
    with inner.writing():
        assert not nested.exists()
    assert all(file.read_text() == "theirs" for file in foreign)
    assert (inner.path / "x").read_bytes() == b"1"


def test_a_journal_goes_at_once(tmp_path, monkeypatch):
    """Killed while it is deleted, it is there whole or not at all: half of it would be taken for the whole."""
    run = RunDirectory(tmp_path / "run")

    def killed(path):
        raise Killed

    with run.writing():
        Journal(run.partial("bench"), {}).append({"n": 0})
        monkeypatch.setattr(writing.shutil, "rmtree", killed)
        with pytest.raises(Killed):
            discard(run.partial("bench"))
        assert not run.partial("bench").exists()
        monkeypatch.undo()
    with run.writing():
        assert [file.name for file in run.path.iterdir()] == [".lock"]


def test_a_command_that_fails_leaves_no_empty_folder(tmp_path):
    with pytest.raises(InvalidInput), RunDirectory(tmp_path / "run").writing():
        raise InvalidInput("no plan")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", "[" * 5000, "[1]", '{"seed": 2}'])
def test_blocks_of_another_measurement_are_thrown_away(tmp_path, key):
    """Also those under a damaged key; a damaged block is one sentence."""
    for number in range(3):
        Journal(tmp_path, {"seed": 1}).append({"n": number})
    assert Journal(tmp_path, {"seed": 1}).documents() == [{"n": 0}, {"n": 1}, {"n": 2}]
    Journal(tmp_path, {"seed": 1}).block(2).write_bytes(b"[")
    with pytest.raises(InvalidInput, match=r"000002\.json is not valid JSON"):
        Journal(tmp_path, {"seed": 1}).documents()
    (tmp_path / "key.json").write_text(key)
    assert Journal(tmp_path, {"seed": 1}).documents() == []


@pytest.mark.parametrize(
    ("said", "error"),
    [("shapes do not match", RuntimeError), ("DefaultCPUAllocator: can't allocate memory", OutOfRange)],
)
@pytest.mark.long
def test_other_errors_are_not_taken_for_memory_and_one_row_is_the_least(said, error):
    def hungry(rows):
        raise RuntimeError(said)

    with pytest.raises(error, match=r"shapes|One row at a time"):
        with_less_memory(hungry, 4, lambda text: None)


class Killed(Exception):
    pass


class KilledJournal(Journal):
    """A journal whose process is killed after some blocks."""

    def __init__(self, folder, blocks):
        super().__init__(folder, {})
        self.blocks = blocks

    def append(self, document):
        super().append(document)
        if self.finished() == self.blocks:
            raise Killed


def test_a_killed_profile_keeps_its_rounds(tmp_path, target, heads):
    own = Decoder(Setup(target, heads, StopRule(frozenset(), 20, at_loops=False)))
    visits = StepVisits(own, [[1, 2, 3], [4, 5]], [Tree.chain(1), Tree.dense([2, 2])], 2)
    folder = tmp_path / "profile.partial"
    with pytest.raises(Killed):
        time_steps(visits, time_limit_s=0.0, journal=KilledJournal(folder, 3))
    journal = Journal(folder, {})
    _, *kept = journal.documents()  # behind what is planned
    found = time_steps(visits, time_limit_s=0.0, journal=journal)
    assert [asdict(visit) for round_ in found.rounds[:2] for visit in round_] == [
        visit for block in kept for visit in block["visits"]
    ]
    assert len(found.rounds) == len(journal.documents()) - 1 == 3  # the fewest
    ((points, plain),) = found.timings()
    assert [len(p.step_ms) for p in points] == [3, 3]  # the shortest visits
    assert len(plain.step_ms) == 9


def test_a_killed_benchmark_continues_behind_its_last_block(tmp_path, target, heads):
    prompts = [Prompt((1 + i, 2, 3), str(i), "", i) for i in range(5)]
    own = Decoder(Setup(target, heads, StopRule(target.eos_ids, 12)))
    match = Contest(own, {"plain": Entrant(), "tree": Entrant(Tree.dense([3, 2]))}, prompts)
    own.prepare([prompt.text for prompt in prompts], [Tree.dense([3, 2])], 1)
    folder = tmp_path / "bench.partial"
    with pytest.raises(Killed):
        interleaved(match, 2, KilledJournal(folder, 7), lambda *rest: None)
    kept = Journal(folder, {}).documents()
    blocks = interleaved(match, 2, Journal(folder, {}), lambda *rest: None)
    whole = interleaved(match, 2, Journal(tmp_path / "whole", {}), lambda *rest: None)
    for name in ("plain", "tree"):
        assert document(blocks[name][:7]) == [block for turns in kept for block in turns[name]]
        ours, theirs = ([(block.prompts, block.answers) for block in some[name]] for some in (blocks, whole))
        assert ours == theirs  # all but the times
        assert len(ours) == 10


@pytest.mark.long
def test_a_calibration_goes_on_with_half_the_batch(tmp_path, monkeypatch, capsys):
    """Memory runs out once, in the second block; the text of the answers does not change."""
    import treeopt.runtime.measure.ranks as module
    from treeopt.runtime.session import open_session

    session = open_session(Source(dtype="float64"))
    options = {"num_prompts": 12, "max_new_tokens": 6, "batch_size": 2}
    steps.calibrate(RunDirectory(tmp_path / "one"), session, **options)
    original, calls = module.collect_trace, []

    def hungry(*arguments, batch_size, **rest):
        calls.append(batch_size)
        if calls == [2, 2]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*arguments, batch_size=batch_size, **rest)

    monkeypatch.setattr(module, "collect_trace", hungry)
    steps.calibrate(RunDirectory(tmp_path / "two"), session, **options)
    assert calls == [2, 2, 1]
    one, two = (RunDirectory(tmp_path / name).read_trace() for name in ("one", "two"))
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.ranks, two.ranks)
    assert two.meta["batch_sizes"] == [1, 2]
    assert "Out of memory with 2 rows" in capsys.readouterr().err


def interrupted(monkeypatch, owner, name, *arguments, number=signal.SIGTERM, error=None):
    """What a command says that gets a signal in the middle of a function, which makes another error of it."""

    def stopped(*_, **__):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise (error or KeyboardInterrupt) from None

    before = signal.signal(number, signal.default_int_handler)  # it is ignored in what a shell starts in the background
    try:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, stopped)
            return treeopt(*arguments, code=128 + number)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_is_one_whatever_a_library_makes_of_it(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    blocks, hashes, _ = calibration(0, 2)
    for part in ("part-1", "part-2"):
        shard(blocks, hashes, f"{part[-1]}/2").save(tmp_path / part / "trace.npz")
    archive = ValueError("Can't close the ZIP file while there is an open writing handle on it.")
    unreadable = InvalidInput("x is not a readable file")
    for error in (None, archive, unreadable, RuntimeError("enforce fail"), OSError(28, "No space left on device")):
        said = interrupted(
            monkeypatch, npz.np, "savez_compressed", "import", "part-1", "part-2", number=number, error=error
        )
        assert said.splitlines()[-1] == INTERRUPTED.format("import").strip()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["part-1", "part-2"]


def test_an_interrupted_calibration_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("treeopt.pipeline.calibrate")
    options = ("calibrate", "--num-prompts", "2", "--max-new-tokens", "8")
    said = interrupted(monkeypatch, module, "join", *options)
    assert said.splitlines()[-1] == INTERRUPTED.format("calibrate").strip()
    assert "Continuing after 1 of 1 blocks" in invoke(*options).stderr
