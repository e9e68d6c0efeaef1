"""A process that starts a server and ends with it: whatever becomes of treeopt, nothing that the server started is left.

It is run by its path, so that it imports little, and is told in JSON what to start: the command, its further environment, the
log and the port. Its stdin is a pipe from treeopt, which ends when treeopt does, however that happens. Then, or when the
command ends, it terminates all descendants, kills those that stay, and waits until the port is free. On Linux descendants that
lose their parent become its own children, also those in sessions of their own, and the command is killed when the keeper is;
elsewhere descendants are known if they were seen before they lost their parent.

The log keeps the first and the last that the command prints.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
LOG_BYTES = 2**23  # of the beginning of a log, and at most as many of its end
GRACE_S = 10  # from being asked to end to being killed
PORT_S = 20  # that a port may stay taken when nobody is left
LOOK_S = 0.2
NOT_STARTED = 127


def main() -> int:
    """Run the command until it ends or stdin does; the exit status is the command's, 0 where it was stopped."""
    told = json.loads(sys.argv[1])
    adopts = _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ends as if stdin had
        signal.signal(number, lambda *_: os.dup2(os.open(os.devnull, os.O_RDONLY), 0))
    seen = set[psutil.Process]()
    ended: int | None = None
    try:
        command = subprocess.Popen(
            told["words"],
            env={**os.environ, **told["environment"]},
            start_new_session=True,
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        copying = threading.Thread(target=_copy, args=(command.stdout, told["log"]), daemon=True)
        copying.start()
        while (ended := command.poll()) is None and not _stdin_ended():
            seen |= set() if adopts else _descendants()
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", end="")
        return NOT_STARTED
    finally:
        _end(seen)
        _wait_for_port(told["port"])
    copying.join(LOOK_S)
    return 0 if ended is None else ended if ended >= 0 else 128 - ended


def _prctl(option: int, value: int) -> bool:
    """Whether the system has the option, and did it."""
    return sys.platform == "linux" and not ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _copy(output: IO[bytes], log: str) -> None:
    """Copy what a command prints into a file, which begins its second half anew where that is full."""
    with open(log, "wb", buffering=0) as file:
        while data := output.read1(2**16):  # type: ignore[attr-defined]
            if file.tell() > 2 * LOG_BYTES:
                file.seek(LOG_BYTES)
                file.truncate()
            file.write(data)


def _stdin_ended() -> bool:
    """Whether stdin is at its end; waits a little where it is not."""
    ready, _, _ = select.select([0], [], [], LOOK_S)
    return bool(ready) and not os.read(0, 1)


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _end(seen: set[psutil.Process]) -> None:
    """Terminate all descendants, and after a while kill them as long as there are some."""
    killed_from, asked = time.monotonic() + GRACE_S, set[psutil.Process]()
    while left := {one for one in _descendants() | seen if one.is_running()}:
        late = time.monotonic() > killed_from
        for one in left if late else left - asked:
            with suppress(psutil.Error):
                one.kill() if late else one.terminate()
        asked |= left
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _wait_for_port(port: int) -> None:
    last = time.monotonic() + PORT_S
    while time.monotonic() < last:
        with socket.socket() as tried, suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", port))
            tried.listen()
            return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
