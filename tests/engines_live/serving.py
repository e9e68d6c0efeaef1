"""A server of an engine, started with a command in a folder and stopped at the end, and asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS_TO_START, SECONDS_TO_ANSWER = 120, 120


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], log: Path, port: int
) -> Iterator[str]:
    """The address of the server that the command starts at the port; what it prints goes to ``log``."""
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            wait_until_healthy(process, address, log)
            yield address
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    last = time.monotonic() + SECONDS_TO_START
    while process.poll() is None and time.monotonic() < last:
        try:
            fetched(f"{address}/health")
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the server did not start:\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")


def fetched(address: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(address, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=SECONDS_TO_ANSWER) as answer:
        return answer.read()
