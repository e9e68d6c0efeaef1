"""A function in a process of its own, bounded in memory and time: there runs what a model's author wrote.

The process is forked at the first call, in milliseconds, and ends when this one does.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import Any

from treeopt.errors import first_line

MOST_MEMORY = 2**29  # bytes beside those of the process that is forked
MOST_WORK = 5  # seconds of a core for a call
MOST_WAIT = 120  # seconds for a call, on a machine that is busy
EXCEEDED = f"it takes more than {MOST_WORK} seconds or {MOST_MEMORY // 2**20} MiB"


class Confined:
    """Calls of a function that takes a program and what else can be pickled, and returns a text.

    A call raises ValueError with the first line of what the function raised, or with `EXCEEDED`. A program that exceeded
    a limit once is not run again.
    """

    def __init__(self, function: Callable[..., str]) -> None:
        self._function, self._lock = function, Lock()
        self._exceeding = set[str]()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._owner = 0  # the process that forked

    def __call__(self, program: str, *arguments: Any) -> str:
        with self._lock:
            if program in self._exceeding:
                raise ValueError(EXCEEDED)
            if self._pipe is None or self._owner != os.getpid():
                self._pipe = self._start()
            try:
                self._pipe.send((program, *arguments))
                if not self._pipe.poll(MOST_WAIT):
                    raise EOFError
                text, fault = self._pipe.recv()
            except (EOFError, OSError):
                self._end()
                self._exceeding.add(program)
                raise ValueError(EXCEEDED) from None
            except BaseException:  # an interrupt: the answer to this call would be taken for the next one's
                self._end()
                raise
        if fault:
            raise ValueError(fault)
        return str(text)

    def _start(self) -> Connection:
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe()
        self._owner = os.getpid()
        self._process = fork.Process(target=_serve, args=(self._function, here, there), daemon=True)
        with warnings.catch_warnings():  # of other threads, which the forked process does not need
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        there.close()
        return here

    def _end(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def _serve(function: Callable[..., str], here: Connection, there: Connection) -> None:
    """Answer calls until the process that forked closes its end ``here``, or a limit is exceeded."""
    here.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(OSError):  # where there is no /proc, memory is not bounded
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MOST_MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    with suppress(EOFError, OSError, MemoryError):
        while True:
            arguments = there.recv()
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + MOST_WORK)
            try:
                answer = function(*arguments), ""
            except MemoryError:
                raise
            except Exception as error:  # a program may raise anything
                answer = "", first_line(error)
            there.send(answer)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
