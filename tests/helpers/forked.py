"""Commands in a copy of this process, which has loaded everything: killed at any of their steps, and bounded in memory and time."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from treeopt.cli import cli

EVENTS = ("replace", "rename", "fsync", "unlink", "mkdir", "rmdir", "fdopen")  # of os
OUTPUT, COUNT = "said", "events"  # files that a command leaves beside its own
MEGABYTES, SECONDS = 2000, 20


@dataclass(frozen=True)
class Ended:
    """How a command ended. A ``code`` below 0 is a signal."""

    code: int
    seconds: float
    megabytes: float


def start(folder: Path, command: tuple[object, ...], *, die_at: int = 0, is_bounded: bool = False) -> int:
    """The process of a command, a copy of this one; it kills itself before the given event, where it has so many."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        os.chdir(folder)
        if is_bounded:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEGABYTES * 2**20,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        seen = [0]
        for name in EVENTS:
            setattr(os, name, _counted(getattr(os, name), seen, die_at))
        result = CliRunner().invoke(cli, list(map(str, command)))
        is_traceback = result.exception is not None and not isinstance(result.exception, SystemExit)
        Path(folder, OUTPUT).write_text(f"{result.output}{result.exception!r}")
        Path(folder, COUNT).write_text(str(seen[0]))
        os._exit(99 if is_traceback else result.exit_code)
    finally:
        os._exit(98)


def end(pid: int) -> Ended:
    _, status, used = os.wait4(pid, 0)
    return Ended(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def _counted(function: Callable[..., object], seen: list[int], die_at: int) -> Callable[..., object]:
    def counted(*arguments: object, **options: object) -> object:
        seen[0] += 1
        if seen[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return counted
