"""Servers that are started here by the user's own command, each at a free port, and stopped with all that they started.

{options}  what a contender adds to the command: a word of its own becomes its words, inside a word they are quoted
{port}     the port at which the server is to listen on 127.0.0.1
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from treeopt.errors import InvalidInput, TreeoptError, Unsupported, quoted
from treeopt.files.shell import command_line, split_template
from treeopt.serving import keeper
from treeopt.serving.client import NoSuchPage, Server

PLACES = ("options", "port")
ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
HEALTHY_WITHIN_S = 900.0  # large models take minutes to load
STOPPED_WITHIN_S = keeper.GRACE_S + keeper.PORT_S + 10
POLL_S, MOST_POLL_S = 0.1, 5.0
SAID_LINES, SAID_BYTES = 3, 2**14  # of a log, in a message


@dataclass(frozen=True)
class Launcher:
    """A user's command as the words of a shell's line, run without one; assignments before it are its environment."""

    words: tuple[str, ...]
    within_s: float = HEALTHY_WITHIN_S
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, within_s: float = HEALTHY_WITHIN_S) -> Launcher:
        """Raises InvalidInput unless it has both places, and a program that there is."""
        words = list(split_template("launch", text, PLACES))
        environment = {}
        while words and ASSIGNED.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if missing := [place for place in PLACES if not any(f"{{{place}}}" in word for word in words)]:
            raise InvalidInput(f"`launch` must have {{options}} and {{port}} in it, but has no {{{missing[0]}}}.")
        return cls(tuple(words), within_s, environment)

    def filled(self, options: Sequence[str], port: int) -> list[str]:
        """The words of the command for these options.

        >>> launcher = Launcher.parse("sh -c 'exec serve {options}' --port={port}")
        >>> launcher.filled(["--config", "{a b}"], 80)
        ['sh', '-c', "exec serve --config '{a b}'", '--port=80']
        """
        found: list[str] = []
        for word in self.words:
            known = {"options": command_line(*options), "port": str(port)}
            filled = re.sub(r"\{(options|port)\}", lambda match, known=known: known[match[1]], word)  # type: ignore[misc]
            found += options if word == "{options}" else [filled]
        return found

    @contextmanager
    def launched(self, options: Sequence[str], log: Path) -> Iterator[str]:
        """The URL of the server, which is stopped in the end; Unsupported where it does not serve, or ends while it is used."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = self.filled(options, port)
        log.parent.mkdir(parents=True, exist_ok=True)
        told = {"words": words, "environment": {**os.environ, **self.environment}, "log": str(log), "port": port}
        kept = subprocess.Popen(
            [sys.executable, "-I", keeper.__file__, json.dumps({**told, "environment": None})],
            env=told["environment"],  # type: ignore[arg-type]
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            self._wait_until_healthy(url, kept, words, log)
            try:
                yield url
            except TreeoptError as error:
                if _ended(kept, 1.0):  # a moment later than it was seen at the socket
                    raise Unsupported(f"{_death(kept, words, log, 'while it was asked')}") from error
                raise
        finally:
            assert kept.stdin is not None
            with suppress(OSError):
                kept.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                kept.wait(STOPPED_WITHIN_S)
