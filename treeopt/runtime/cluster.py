"""Workers on a Ray cluster. No other module imports ray, and this one only where it is used.

The cluster is one that runs already, or one on this machine that is made for a command and ends with it. Its workers are
the actors of a pool: each opens the `Work` once, and blocks go one by one to whichever worker is free. The block of a
worker that dies is begun again by its successor. A finished block comes back as bytes.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from treeopt import __version__
from treeopt.errors import InvalidInput, TreeoptError, Unsupported, first_line
from treeopt.files.journal import Say
from treeopt.records.options import Workers

MOST_DEATHS = 3  # of workers over one block, before the block itself is taken for the reason
ANSWER_S = 10  # that a cluster has to answer a connection
START_S = "120"  # that a busy machine has to start a cluster of its own
EXIT = re.compile(r"Worker exit detail: (.*)")
DoBlock = Callable[[int, Say], bytes]  # a finished block by its number; says what is worth a note


class Work(Protocol):
    """A task for the workers of a pool, of plain values that are pickled."""

    def open(self) -> DoBlock:
        """Load what is needed, once for every worker."""


class Cluster(ExitStack):
    """The workers of a pool, from the first call to the end of the ``with`` block.

    number  : of workers
    gpus    : of each worker; without any it computes with ``cpus`` threads
    address : HOST:PORT of a running cluster, or auto; None is that of RAY_ADDRESS, else a cluster of this machine alone
    """

    def __init__(self, number: int, gpus: float = 0, address: str | None = None) -> None:
        super().__init__()
        self.number, self.gpus, self.address, self.cpus = number, gpus, address, 1

    def __enter__(self) -> Cluster:
        self.enter_context(redirect_stdout(sys.stderr))  # Ray prints on stdout what becomes of workers
        return self

    def start(self, cpus: int = 1) -> None:
        """Connect, or make a cluster, for workers of so many processors each.

        Raises InvalidInput or Unsupported in words where Ray would wait for ever: nothing at the address, too few devices.
        """
        self.cpus = cpus
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what matters comes back as an error
        if (address := self.address or os.environ.get("RAY_ADDRESS") or "local") != "local":
            check_address(address)
            told = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
            if told or (Path.home() / ".ray" / "auth_token").exists():  # without the mode Ray would wait for minutes
                os.environ.setdefault("RAY_AUTH_MODE", "token")
        try:
            import ray
        except ImportError:
            raise Unsupported("`workers` needs Ray. Install it with: pip install 'treeopt[ray]'") from None
        if not ray.is_initialized():
            options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "error"}
            if address == "local":
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                os.environ.setdefault("RAY_raylet_start_wait_time_s", START_S)
                options |= {"num_cpus": self.number * cpus, "include_dashboard": False}
            handler = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(**options)
            except Exception as error:  # it raises plain ones
                said = f"{first_line(error)}. A cluster with a token needs it here, and RAY_AUTH_MODE=token in the environment."
                own = f"A cluster of this machine cannot be started: {first_line(error)}."
                raise InvalidInput(own if address == "local" else said) from None
            finally:
                if handler is not None and signal.getsignal(signal.SIGTERM) != handler:
                    signal.signal(signal.SIGTERM, handler)
            self.callback(ray.shutdown)
        check_room(self.number, cpus, self.gpus, [node["Resources"] for node in ray.nodes() if node["Alive"]])

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function that runs where a worker will; a TreeoptError there is raised here."""
        import ray

        called = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus)(attempt)
        with _in_words():
            result, error = ray.get(called.remote(self.gpus, __version__, function, *arguments))
        if error is not None:
            raise error
        return result

    def do(self, work: Work, say: Say, blocks: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """The number and the content of every block when it is finished, in any order; what workers say is said again."""
        import ray
        from ray.util import ActorPool

        if len(blocks) < self.number:
            say(f"Only as many workers are used as blocks are left: {len(blocks)} of {self.number}.")
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": -1, "max_task_retries": MOST_DEATHS}
        start, kept = ray.remote(Actor).options(**options).remote, ray.put(work)
        with _in_words():
            pool = ActorPool([start(kept, self.gpus) for _ in range(min(self.number, len(blocks)))])
            for number, notes, (content, error) in pool.map_unordered(
                lambda actor, number: actor.do.remote(__version__, number), blocks
            ):
                if error is not None:
                    raise error
                for sentence in notes:
                    say(sentence)
                yield number, content


def cluster_of(options: Workers) -> AbstractContextManager[Cluster | None]:
    """The cluster that options ask for; None where they ask for no workers."""
    if options.workers is None:
        if options.given:
            raise InvalidInput(f"`{next(iter(options.given))}` says how `workers` work: say how many, or leave it out.")
        return nullcontext()
    gpus = options.gpus_per_worker or 0
    if gpus > 1 and gpus % 1:
        raise InvalidInput(f"`gpus_per_worker` must be a share of one or a whole number, but got {gpus}.")
    return Cluster(options.workers, gpus, options.address)


class Actor:
    """A worker of a pool, which keeps what the work has opened."""

    def __init__(self, work: Work, gpus: float) -> None:
        self._work, self._gpus = work, gpus
        self._do_block: DoBlock | None = None

    def do(self, version: str, number: int) -> tuple[int, list[str], tuple[bytes, TreeoptError | None]]:
        """A block by its number, with notes."""
        notes: list[str] = []
        return number, notes, attempt(self._gpus, version, self._block, number, notes.append)

    def _block(self, number: int, say: Say) -> bytes:
        if self._do_block is None:
            self._do_block = self._work.open()
        return self._do_block(number, say)


def attempt(
    gpus: float, version: str, function: Callable[..., Any], *arguments: Any
) -> tuple[Any, TreeoptError | None]:
    """On a worker: a result, or an error in words, so that it comes back without Ray's traces."""
    host = socket.gethostname()
    if version != __version__:
        return None, Unsupported(f"All hosts need the same treeopt, but {host} has {__version__}, not {version}.")
    if not gpus:  # it sees those of its host otherwise
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    kind = TreeoptError
    try:
        return function(*arguments), None
    except TreeoptError as error:
        kind, said = type(error), f"{str(error).rstrip('.')} (said by a worker on {host})."
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        said = f"A worker on {host} failed: {type(error).__name__}: {first_line(error)} ({place})."
    return None, kind(said.encode("utf-8", "backslashreplace").decode())


@contextmanager
def _in_words() -> Iterator[None]:
    """Say in words what Ray says of workers that ended without a word, or of code that they do not have."""
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        cause, detail = getattr(error, "cause", None), EXIT.search(str(error))
        said = first_line(cause or error) if detail is None or cause else detail[1].split(". ")[0].rstrip(".")
        raise TreeoptError(
            f"A worker ended {MOST_DEATHS + 1} times over the same block, or could not begin: {said}. Where memory is short, "
            "ask for fewer `workers` or a smaller `batch_size`. What was finished is kept, and the same command continues."
        ) from None


def check_address(address: str) -> None:
    """Raise InvalidInput where nothing answers at HOST:PORT; Ray itself would try for minutes."""
    if address in ("local", "auto"):
        return
    found = re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d{1,5})", address)
    if found is None:
        raise InvalidInput(
            f"`address` must be HOST:PORT of a cluster's head, or auto on one of its machines, but got {address!r}. "
            "From outside, submit the command as a job: ray job submit."
        )
    try:
        socket.create_connection((found[1], int(found[2])), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise InvalidInput(
            f"`address` must be that of a running cluster, but nothing answers at {address}: "
            f"{first_line(error)}. Start one with: ray start --head"
        ) from None


def check_room(number: int, cpus: int, gpus: float, nodes: Sequence[dict[str, float]]) -> None:
    """Raise InvalidInput where the machines of a cluster have no room for the workers: Ray would wait for more.

    >>> check_room(3, 1, 0.5, [{"CPU": 8, "GPU": 2}])
    >>> check_room(2, 1, 1, [{"CPU": 8, "GPU": 1}])
    Traceback (most recent call last):
    ...
    treeopt.errors.InvalidInput: The cluster must have room for workers=2, each with CPU 1 and GPU 1, but has room for 1. \
Ask for less, or start more machines first.
    """
    wanted = {name: count for name, count in (("CPU", cpus), ("GPU", gpus)) if count}
    room = sum(int(min(node.get(name, 0) / count for name, count in wanted.items()) + 1e-9) for node in nodes)
    if room < number:
        each = " and ".join(f"{name} {count:g}" for name, count in wanted.items())
        raise InvalidInput(
            f"The cluster must have room for `workers={number}`, each with {each}, but has room for {room}. Ask for less, or "
            "start more machines first."
        )
