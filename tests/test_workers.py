"""Workers: what they write is what a single process writes, whoever is killed; wrong inputs are told in words."""

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from treeopt import pipeline
from treeopt.errors import InvalidInput, TreeoptError, Unsupported
from treeopt.files.journal import Journal
from treeopt.files.remote import Mirror, opened
from treeopt.pipeline import workers
from treeopt.pipeline.workers import Place
from treeopt.runtime.cluster import Cluster, Workers, attempt, check_address, error_of

from .conftest import treeopt

CALIBRATE = ("calibrate", "--num-prompts", "24", "--max-new-tokens", "12", "--batch-size", "1", "--dtype", "float64")
TRAIN = ("train", "--kind", "medusa-1", "--heads", 2, "--steps", 1, "--num-prompts", 70, "--max-new-tokens", 6)
KEY = {"what": "a test"}

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'treeopt[ray]'")


class Here(Cluster):
    """Two workers in this process: blocks are done in any order, by what was pickled for each of them."""

    stops_after = 10**6

    def start(self, cpus=1):
        pass

    def call(self, function, *arguments):
        return pickle.loads(pickle.dumps(function(*pickle.loads(pickle.dumps(arguments)))))

    def do(self, work, blocks):
        two = [pickle.loads(pickle.dumps(work)).open() for _ in range(2)]
        for n, number in enumerate(random.Random(0).sample(blocks, len(blocks))):
            if n == self.stops_after:
                raise KeyboardInterrupt
            two[n % 2](number, print)
            yield number, []


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(workers, "Cluster", Here)
    return Here


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> bytes:
    """The trace of a single process, in which Ray cannot be imported."""
    run = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        treeopt(*CALIBRATE, "--run", run)
    return (run / "trace.npz").read_bytes()


def test_workers_write_the_bytes_of_a_single_process(tmp_path, here, undisturbed):
    """Into a journal on the disk, and through one at a URL, of which nothing is left."""
    urls = (), ("--journal", f"file://{tmp_path}/store")
    for name, journal in zip("ab", urls, strict=True):
        run = tmp_path / name
        treeopt(*CALIBRATE, "--run", run, "--engine", "ray", "--workers", 2, *journal)
        assert (run / "trace.npz").read_bytes() == undisturbed
        assert sorted(file.name for file in run.iterdir()) == [".lock", "calibration.json", "trace.npz"]
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize("url", [False, True])
def test_what_workers_left_continues_with_and_without_them(tmp_path, here, undisturbed, monkeypatch, url):
    """Blocks are finished in any order: one behind a gap is used too."""
    ray = ("--engine", "ray", "--workers", 2, *(["--journal", tmp_path / "store"] if url else []))
    with monkeypatch.context() as patch:
        patch.setattr(Here, "stops_after", 1)
        treeopt(*CALIBRATE, "--run", tmp_path / "run", *ray, code=130)
    done = [int(file.name[:6]) for file in (tmp_path / "run" / "calibrate.partial").glob("*.sha256")]
    assert done not in ([], [0])
    if url:  # the disk of the command is lost
        treeopt(*CALIBRATE, "--run", tmp_path / "other", *ray)
        assert (tmp_path / "other" / "trace.npz").read_bytes() == undisturbed
    treeopt(*CALIBRATE, "--run", tmp_path / "run")
    assert (tmp_path / "run" / "trace.npz").read_bytes() == undisturbed


def test_heads_learn_from_the_same_answers(tmp_path, here):
    """The answers of workers are the journal of the command alone, which asks for none of them again."""
    treeopt(*TRAIN, "-o", tmp_path / "a", "--engine", "ray", "--workers", 2)
    treeopt(*TRAIN, "-o", tmp_path / "b")
    (a,), (b,) = ((tmp_path / name / "training").glob("answers-*") for name in "ab")
    assert {file.name: file.read_bytes() for file in a.iterdir()} == {f.name: f.read_bytes() for f in b.iterdir()}
    assert "leave one out" in treeopt(*TRAIN, "-o", tmp_path / "c", "--engine", "ray", "--responses", "answer", code=1)


@pytest.fixture
def sent(tmp_path):
    """A journal of one block, and a copy of it at a URL."""
    journal, mirror = Journal(tmp_path / "journal", KEY, ".npz"), Mirror(f"file://{tmp_path}/store", KEY)
    mirror.take()
    journal.block(7).write_bytes(b"block")
    journal.finish(7)
    mirror.send(journal, 7)
    return journal, mirror


def test_a_block_comes_back_from_a_url_unless_it_was_damaged(tmp_path, sent):
    _, mirror = sent
    assert mirror.finished() == {7}
    journal = Journal(tmp_path / "other", KEY, ".npz")
    assert mirror.fetch(journal, 7)
    assert journal.block(7).read_bytes() == b"block"
    Path(mirror.folder, "000007.npz").write_bytes(b"blocK")
    assert not mirror.fetch(Journal(tmp_path / "third", KEY, ".npz"), 7)
    assert Mirror(f"file://{tmp_path}/store", {"what": "else"}).folder != mirror.folder


def test_of_two_commands_on_one_journal_the_earlier_one_stops(tmp_path, sent):
    _, first = sent
    first.check()
    second = Mirror(f"file://{tmp_path}/store", KEY)
    second.take()
    second.check()
    with pytest.raises(InvalidInput, match=f"another one took .*process {os.getpid()}.*this one stops"):
        first.check()
    second.remove()
    with pytest.raises(InvalidInput, match="it has ended since"):
        first.check()


def test_a_place_that_cannot_be_used_is_told_in_words(tmp_path, monkeypatch):
    import fsspec

    fsspec.register_implementation("absent", "no_such_package.Files", errtxt="Install absentfs to access Absent")
    with pytest.raises(Unsupported, match=r"absent://bucket needs a package .*Install absentfs"):
        opened("absent://me:secret@bucket")
    with pytest.raises(InvalidInput, match="memory:// is the memory of one process"):
        opened("memory://folder")
    with pytest.raises(InvalidInput, match="must be a folder or an fsspec URL, but nothing://x: "):
        opened("nothing://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"--journal file://.*/file cannot be written: "):
        Mirror(f"file://{tmp_path}/file", KEY).take()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", 2], "--workers says how --engine ray works"),
        (["--journal", "s3://a/b"], "--journal says how --engine ray works"),
        (["--engine", "ray", "--gpus-per-worker", 1.5], "a share of one or a whole number"),
        (["--engine", "ray", "--journal", "memory://a"], "the memory of one process"),
        (["--engine", "ray", "--address", "127.0.0.1:1"], "nothing answers at 127.0.0.1:1: "),
        (["--engine", "ray", "--address", "ray://head:10001"], "HOST:PORT of a cluster's head"),
    ],
)
def test_wrong_options_are_told_in_words(tmp_path, options, said):
    assert said in treeopt("calibrate", "--run", tmp_path / "run", *options, code=1)


def test_without_ray_the_one_command_that_gets_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = treeopt("calibrate", "--run", tmp_path / "run", "--engine", "ray", code=1)
    assert "pip install 'treeopt[ray]'" in said


def test_a_session_that_is_loaded_here_and_rules_of_one_process_are_refused(here, tmp_path):
    with pytest.raises(InvalidInput, match=r"at least 1, .* but got 0"), pipeline.cluster_of("ray", workers=0):
        pass
    with pytest.raises(InvalidInput, match="pass its name"), pipeline.cluster_of("ray") as cluster:
        pipeline.session_of(None, object(), {}, cluster=cluster)
    options = ("--engine", "ray", "--acceptance", "typical", "--run", tmp_path / "run")
    assert "leave --engine out" in treeopt("calibrate", *options, code=1)


def test_an_open_port_passes_and_a_name_that_nobody_has_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_address(f"127.0.0.1:{server.getsockname()[1]}")
    check_address("auto")
    with pytest.raises(InvalidInput, match=r"nothing answers at no-such-host\.invalid:1"):
        check_address("no-such-host.invalid:1")


def test_the_words_of_an_error_come_back_and_the_trace_does_not(tmp_path):
    """A disk that is full, a run directory that the host does not have, a mistake of ours, another version."""
    from treeopt import __version__

    place = Place(tmp_path, tmp_path / "calibrate.partial", KEY)
    _, kind, said = attempt(1, __version__, place.keep, 0, print)
    assert isinstance(error_of(kind, said), InvalidInput)
    assert "must share the disk of the run" in said
    (tmp_path / "calibrate.partial").mkdir()
    (tmp_path / "calibrate.partial" / "key.json").write_text('{"what": "another measurement"}')
    (tmp_path / "calibrate.partial" / "000000.npz").touch()
    assert "is not that of the command" in attempt(1, __version__, place.keep, 0, print)[2]
    assert (tmp_path / "calibrate.partial" / "000000.npz").exists()
    place.journal()
    full = Path("/dev/full")
    if full.exists():
        _, kind, said = attempt(
            1, __version__, place.keep, 0, lambda file: file.symlink_to(full) or full.write_text("a")
        )
        assert "No space left on device" in said
        assert socket.gethostname() in said
    _, kind, said = attempt(1, __version__, np.zeros, -1)
    assert "failed: ValueError: negative dimensions" in said
    assert "Traceback" not in said
    assert type(error_of(kind, said)) is TreeoptError
    assert "need the same treeopt" in attempt(1, "0.0", print)[2]


@dataclass(frozen=True)
class Squares:
    """Blocks that are squares. A worker is killed over block 3 once, and over 4 always; 5 is refused."""

    folder: Path

    def open(self):
        (self.folder / f"opened-{os.getpid()}").touch()

        def block(number, say):
            if number == 4 or (number == 3 and not (self.folder / "killed").exists()):
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 5:
                raise InvalidInput("Five is no block.")
            (self.folder / f"{number}").write_text(str(number**2))
            say(f"{number} is done")

        return block


@needs_ray
def test_a_pool_survives_a_killed_worker_and_says_why_it_cannot_go_on(tmp_path, capsys):
    """Blocks once each but for the killed worker's, notes, errors, a block that always kills, too few devices."""
    with Cluster(Workers(2)) as cluster:
        cluster.start()
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import the tests
        done = dict(cluster.do(Squares(tmp_path), [0, 1, 2, 3]))
        assert done == {n: [f"{n} is done"] for n in range(4)}
        assert [(tmp_path / f"{n}").read_text() for n in range(4)] == ["0", "1", "4", "9"]
        assert len(list(tmp_path.glob("opened-*"))) >= 2
        with pytest.raises(InvalidInput, match=r"^Five is no block \(said by a worker on "):
            list(cluster.do(Squares(tmp_path), [5]))
        with pytest.raises(TreeoptError, match="ended 4 times over the same block") as told:
            list(cluster.do(Squares(tmp_path), [4]))
        assert "\n" not in str(told.value)
        assert cluster.call(len, [1, 2]) == 2
        with pytest.raises(
            InvalidInput, match=r"room for --workers 2, each with 1 CPU and 1000 GPUs, but has room for 0"
        ):
            Cluster(Workers(2, gpus=1000)).start()
    assert capsys.readouterr().out == ""


@needs_ray
@pytest.mark.long
def test_the_bytes_are_the_same_where_a_worker_is_killed(tmp_path, undisturbed):
    """On a cluster of this machine, made for the command: two workers, of which one is killed over its block."""
    import psutil

    command = [sys.executable, "-m", "treeopt.cli", *CALIBRATE, "--run", "run", "--engine", "ray", "--workers", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        journal, killed = tmp_path / "run" / "calibrate.partial", []
        while process.poll() is None and not killed:
            time.sleep(0.05)
            if list(journal.glob("*.sha256")):
                children = psutil.Process(process.pid).children(recursive=True)
                killed = [child.pid for child in children if child.name().startswith("ray::MapWorker")]
                for pid in killed[:1]:
                    os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=500)
    assert killed
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert (tmp_path / "run" / "trace.npz").read_bytes() == undisturbed
