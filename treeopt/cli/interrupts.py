"""Ctrl-C and SIGTERM: how a command learns of them, wherever they land."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer, get_ident
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
RETRY_S = 0.01


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt in the block for every signal. Yields the signals that came.

    Python swallows what is raised in a destructor, so a signal that lands there is sent again.
    """
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def swallowed(error: sys.UnraisableHookArgs) -> None:
        if not came or not isinstance(error.exc_value, KeyboardInterrupt):
            report(error)
            return
        timer = Timer(RETRY_S, send_again, (get_ident(),))
        timer.daemon = True
        timer.start()

    def send_again(thread: int) -> None:
        if sys.unraisablehook is swallowed:  # else the block has ended
            signal.pthread_kill(thread, came[0])

    report, sys.unraisablehook = sys.unraisablehook, swallowed
    before = {n: signal.signal(n, interrupt) for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield came
        if came:
            raise KeyboardInterrupt
    finally:
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, handler)
