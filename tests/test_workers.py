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

from treeopt.errors import InvalidInput, TreeoptError
from treeopt.pipeline.session import session_of
from treeopt.records.options import Workers
from treeopt.runtime import cluster as workers
from treeopt.runtime.cluster import Cluster, attempt, check_address

from .conftest import treeopt

DRAFTED = ("calibrate", "--num-prompts", "24", "--max-new-tokens", "12", "--batch-size", "1", "--dtype", "float64")
CALIBRATE = (*DRAFTED, "--drafter", "ngram")  # which takes no time
TRAIN = ("train", "--kind", "medusa-1", "--heads", 2, "--steps", 1, "--num-prompts", 70, "--max-new-tokens", 6)

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'treeopt[ray]'")


class Here(Cluster):
    """Two workers in this process: blocks are done in any order, by what was pickled for each of them."""

    stops_after = 10**6

    def start(self, cpus=1):
        pass

    def call(self, function, *arguments):
        return pickle.loads(pickle.dumps(function(*pickle.loads(pickle.dumps(arguments)))))

    def do(self, work, say, blocks):
        two = [pickle.loads(pickle.dumps(work)).open() for _ in range(2)]
        for n, number in enumerate(random.Random(0).sample(blocks, len(blocks))):
            if n == self.stops_after:
                raise KeyboardInterrupt
            yield number, two[n % 2](number, say)


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
    treeopt(*CALIBRATE, "--run", tmp_path / "run", "--workers", 2)
    assert (tmp_path / "run" / "trace.npz").read_bytes() == undisturbed
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == [".lock", "calibration.json", "trace.npz"]


@pytest.mark.long
@pytest.mark.parametrize("again", [(), ("--workers", 1)], ids=["alone", "workers"])
def test_blocks_that_workers_left_continue_with_and_without_them(tmp_path, here, undisturbed, monkeypatch, again):
    """Blocks are finished in any order: one behind a gap is used too."""
    run = ("--run", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Here, "stops_after", 1)
        treeopt(*CALIBRATE, *run, "--workers", 2, code=130)
    done = [int(file.name[:6]) for file in (tmp_path / "run" / "calibrate.partial").glob("*.npz")]
    assert done not in ([], [0])
    treeopt(*CALIBRATE, *run, *again)
    assert (tmp_path / "run" / "trace.npz").read_bytes() == undisturbed


@pytest.mark.long
def test_heads_learn_from_the_same_answers(tmp_path, here):
    """The answers of workers are the journal of the command alone, which asks for none of them again."""
    treeopt(*TRAIN, "-o", tmp_path / "a", "--workers", 2)
    treeopt(*TRAIN, "-o", tmp_path / "b")
    (a,), (b,) = ((tmp_path / name / "training").glob("answers-*") for name in "ab")
    assert {file.name: file.read_bytes() for file in a.iterdir()} == {f.name: f.read_bytes() for f in b.iterdir()}
    assert "leave one out" in treeopt(*TRAIN, "-o", tmp_path / "c", "--workers", 1, "--responses", "answer", code=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--address", "auto"], "--address says how --workers work"),
        (["--workers", 1, "--gpus-per-worker", 1.5], "a share of one or a whole number"),
        (["--workers", 1, "--address", "127.0.0.1:1"], "nothing answers at 127.0.0.1:1: "),
        (["--workers", 1, "--address", "ray://head:10001"], "HOST:PORT of a cluster's head"),
    ],
)
def test_wrong_options_are_told_in_words(tmp_path, options, said):
    assert said in treeopt("calibrate", "--run", tmp_path / "run", *options, code=1)


def test_without_ray_the_one_command_that_gets_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = treeopt("calibrate", "--run", tmp_path / "run", "--workers", 1, code=1)
    assert "pip install 'treeopt[ray]'" in said


def test_a_session_that_is_loaded_here_and_rules_of_one_process_are_refused(here, tmp_path):
    with pytest.raises(InvalidInput, match="pass its name"), workers.cluster_of(Workers(workers=1)) as cluster:
        session_of(None, object(), cluster=cluster)
    options = ("--workers", 1, "--rule", "typical", "--run", tmp_path / "run")
    assert "leave --workers out" in treeopt("calibrate", *options, code=1)


def test_an_open_port_passes_and_a_name_that_nobody_has_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_address(f"127.0.0.1:{server.getsockname()[1]}")
    check_address("auto")
    with pytest.raises(InvalidInput, match=r"nothing answers at no-such-host\.invalid:1"):
        check_address("no-such-host.invalid:1")


def test_the_words_of_an_error_come_back_and_the_trace_does_not():
    """An error of the user's, a mistake of ours, another version."""
    from treeopt import __version__

    def refuses():
        raise InvalidInput("Five is no block.")

    _, error = attempt(1, __version__, refuses)
    assert isinstance(error, InvalidInput)
    assert str(error) == f"Five is no block (said by a worker on {socket.gethostname()})."
    _, error = attempt(1, __version__, np.zeros, -1)
    assert "failed: ValueError: negative dimensions" in str(error)
    assert "Traceback" not in str(error)
    assert type(error) is TreeoptError
    assert "need the same treeopt" in str(attempt(1, "0.0", print)[1])


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
            say(f"{number} is done")
            return str(number**2).encode()

        return block


@needs_ray
@pytest.mark.long
def test_a_pool_survives_a_killed_worker_and_says_why_it_cannot_go_on(tmp_path, capsys):
    """Blocks once each but for the killed worker's, notes, errors, a block that always kills, too few devices."""
    with Cluster(2) as cluster:
        cluster.start()
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import the tests
        notes: list[str] = []
        done = sorted(cluster.do(Squares(tmp_path), notes.append, [0, 1, 2, 3]))
        assert done == [(n, str(n**2).encode()) for n in range(4)]
        assert sorted(notes) == [f"{n} is done" for n in range(4)]
        assert len(list(tmp_path.glob("opened-*"))) >= 2
        with pytest.raises(InvalidInput, match=r"^Five is no block \(said by a worker on "):
            list(cluster.do(Squares(tmp_path), notes.append, [5]))
        with pytest.raises(TreeoptError, match="ended 4 times over the same block") as told:
            list(cluster.do(Squares(tmp_path), notes.append, [4]))
        assert "\n" not in str(told.value)
        assert cluster.call(len, [1, 2]) == 2
        with pytest.raises(InvalidInput, match=r"room for workers=2, each with CPU 1 and GPU 1000, but has room for 0"):
            Cluster(2, gpus=1000).start()
    assert capsys.readouterr().out == ""


@needs_ray
@pytest.mark.long
def test_the_bytes_are_the_same_where_a_worker_is_killed(tmp_path):
    """On a cluster of this machine, made for the command: two workers, of which one is killed over its block."""
    import psutil

    command = [sys.executable, "-m", "treeopt", *DRAFTED, "--run", "run", "--workers", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        journal, killed = tmp_path / "run" / "calibrate.partial", []
        while process.poll() is None and not killed:
            time.sleep(0.05)
            if list(journal.glob("*.npz")):
                children = psutil.Process(process.pid).children(recursive=True)
                killed = [child.pid for child in children if child.name().startswith("ray::Actor")]
                for pid in killed[:1]:
                    os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=500)
    assert killed
    assert process.returncode == 0, said
    assert "Traceback" not in said
    treeopt(*DRAFTED, "--run", tmp_path / "alone")
    assert (tmp_path / "run" / "trace.npz").read_bytes() == (tmp_path / "alone" / "trace.npz").read_bytes()
