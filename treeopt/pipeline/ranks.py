"""A command on several ranks: it is started once for each, and only the first writes the run and speaks.

The others work in a copy of the run directory, which is gone in the end: what a command finds there, decides and keeps is
so the same on all. Where one fails, all end: it says why, unless the first rank says the same.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from treeopt.errors import InvalidInput, TreeoptError
from treeopt.runtime.waiting import import_torch

SET_BY_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE_S = 3.0  # that a failed rank leaves the first one to say the same, and that others have to end by themselves
NOT_READ = ("figures", "export", "report.html", ".*")  # of a run directory, by steps that decode


def are_started() -> bool:
    """Whether this process is a rank, which torchrun or `launch` started."""
    return all(name in os.environ for name in SET_BY_TORCHRUN)


def launch(count: int) -> int:
    """Start this very command on so many ranks of this machine; the exit code, when all have ended.

    Where one ends without having done its work, the others are ended too.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "treeopt.cli", *sys.argv[1:]]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env={**os.environ, **shared, **own}))
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            time.sleep(0.05)
    except KeyboardInterrupt:
        pass  # in a terminal the ranks have it too
    except OSError:  # there is no room for a process more
        _end(started, at_once=True)
        raise
    code = min((found for process in started if (found := process.poll())), default=0)  # a signal before what it led to
    _end(started)
    killed = [rank for rank, process in enumerate(started, 1) if process.returncode == code < 0]
    if killed:
        sys.stderr.write(
            f"treeopt: process {killed[0]} of {count} was ended by signal {-code}, so the others were ended too. What was "
            "finished is kept; the same command continues.\n"
        )
        return 1
    return started[0].returncode or code


def _end(started: list[subprocess.Popen[bytes]], at_once: bool = False) -> None:
    """Let all end by themselves, then ask them to, then end them."""
    for last_word in (None, subprocess.Popen.terminate, subprocess.Popen.kill)[at_once:]:
        for process in started:
            if last_word and process.poll() is None:
                last_word(process)
        until = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in started) and time.monotonic() < until:
            time.sleep(0.05)


@contextmanager
def joined(count: int, folder: str) -> Iterator[str]:
    """Be one of so many ranks; the run directory to work in.

    Raises InvalidInput where another number was started, and TreeoptError where another rank has gone.
    """
    if int(os.environ["WORLD_SIZE"]) != count:
        raise InvalidInput(
            f"--tensor-parallel {count} needs as many processes, but {os.environ['WORLD_SIZE']} were started: "
            f"torchrun --nproc-per-node {count}, or leave torchrun out."
        )
    import_torch()
    from treeopt.runtime import ranks

    ranks.join()
    try:
        if os.environ["RANK"] == "0":
            ranks.wait()  # until the others have their copies
            yield folder
        else:
            with _silent_copy(folder) as copy:
                ranks.wait()
                yield copy
    except RuntimeError as error:
        if not ranks.is_of_ranks(error):
            raise
        raise TreeoptError(
            f"Another of the {count} processes has ended, so this one cannot go on. What was finished is kept; the same "
            "command continues."
        ) from None
    finally:
        ranks.leave()


@contextmanager
def _silent_copy(folder: str) -> Iterator[str]:
    """A copy of a run directory, for a rank that says nothing unless it alone fails."""
    from treeopt.runtime import ranks

    said = sys.stderr
    with TemporaryDirectory(prefix="treeopt-rank-") as place, open(os.devnull, "w", encoding="utf-8") as nowhere:
        copy = Path(place) / "run"
        if Path(folder).is_dir():
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*NOT_READ))
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            try:
                yield str(copy)
            except KeyboardInterrupt:
                sys.exit(1)
            except Exception as error:
                if ranks.is_of_ranks(error):
                    raise
                time.sleep(GRACE_S)  # the first rank, if it fails too, has ended this one by then
                if not isinstance(error, TreeoptError):
                    traceback.print_exc(file=said)
                said.write(f"treeopt: process {int(os.environ['RANK']) + 1}: {error}\n")
                sys.exit(1)
