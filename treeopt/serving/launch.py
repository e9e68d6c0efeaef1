"""Servers that are started here by the user's own command, each at a free port, and stopped with all that they started.

{options}  what a contender adds to the command: a word of its own becomes its words, inside a word they are quoted
{port}     the port at which the server is to listen on 127.0.0.1
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from treeopt.errors import InvalidInput, TreeoptError, Unsupported, quoted
from treeopt.files.shell import command_line, split_template
from treeopt.serving import keeper
from treeopt.serving.client import NoSuchPage, Server, run_async

T = TypeVar("T")
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
    def parse(
        cls, text: str, within_s: float = HEALTHY_WITHIN_S, needed: Sequence[str] = ("options", "port")
    ) -> Launcher:
        """Raises InvalidInput unless it has the places that are needed."""
        words = list(split_template("launch", text, PLACES))
        assigned = list(takewhile(ASSIGNED.match, words))
        launcher = cls(tuple(words[len(assigned) :]), within_s).within(assigned)
        if missing := [place for place in needed if not launcher.has(place)]:
            raise InvalidInput(
                f"`launch` must have {' and '.join(f'{{{place}}}' for place in needed)} in it, but has no {{{missing[0]}}}."
            )
        return launcher

    def within(self, assignments: Sequence[str]) -> Launcher:
        """The command with more assignments before it."""
        named = {name: value for name, _, value in (word.partition("=") for word in assignments)}
        return replace(self, environment={**self.environment, **named})

    def has(self, place: str) -> bool:
        return any(f"{{{place}}}" in word for word in self.words)

    def filled(self, options: Sequence[str], port: int) -> list[str]:
        """The words of the command for these options.

        >>> launcher = Launcher.parse("sh -c 'exec serve {options}' --port={port}")
        >>> launcher.filled(["--config", "{a b}"], 80)
        ['sh', '-c', "exec serve --config '{a b}'", '--port=80']
        """
        words = list[str]()
        for word in self.words:
            filled = word.replace("{port}", str(port)).replace("{options}", command_line(*options))
            words += options if word == "{options}" else [filled]
        return words

    def visit(
        self, options: Sequence[str], log: Path, look: Callable[[Server], Awaitable[T]], model: str | None = None
    ) -> T:
        """What ``look`` gives of a server that is started for it, of this model where it serves several."""

        async def visit() -> T:
            async with Server(f"{url}?model={quote(model)}" if model else url) as server:
                return await look(server)

        with self.launched(options, log) as url:
            return run_async(visit)

    @contextmanager
    def launched(self, options: Sequence[str], log: Path) -> Iterator[str]:
        """The URL of the server, which is stopped in the end; Unsupported where it does not serve, or ends while it is used."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = self.filled(options, port)
        log.parent.mkdir(parents=True, exist_ok=True)
        told = {"words": words, "environment": self.environment, "log": str(log), "port": port}
        words_of_keeper, pipe = [sys.executable, keeper.__file__, json.dumps(told)], subprocess.PIPE
        kept = subprocess.Popen(words_of_keeper, stdin=pipe, stdout=pipe, start_new_session=True)
        url = f"http://127.0.0.1:{port}"
        try:
            self._wait_until_healthy(url, kept, words, log)
            try:
                yield url
            except TreeoptError as error:
                if _has_ended(kept, 1.0):  # which is known a moment later than that it does not answer
                    raise Unsupported(_death(kept, words, log)) from error
                raise
        finally:
            kept.stdin.close()  # type: ignore[union-attr]
            with suppress(subprocess.TimeoutExpired):
                kept.wait(STOPPED_WITHIN_S)
            kept.stdout.close()  # type: ignore[union-attr]

    def _wait_until_healthy(self, url: str, kept: subprocess.Popen[bytes], words: Sequence[str], log: Path) -> None:
        last, said, poll_s = time.monotonic() + self.within_s, "", POLL_S
        while (left := last - time.monotonic()) > 0:
            if _has_ended(kept, min(poll_s, left)):
                raise Unsupported(_death(kept, words, log))
            try:
                return run_async(partial(_check_health, url, min(left, MOST_POLL_S)))
            except TreeoptError as error:
                said, poll_s = str(error), min(1.2 * poll_s, MOST_POLL_S)
        raise Unsupported(
            f"`launch` must start a server that is healthy within {self.within_s:g} s, but {command_line(*words)} was not. "
            f"{said} {_end_of(log)}"
        )


async def _check_health(url: str, within_s: float) -> None:
    """Raise a TreeoptError unless the server says that it is healthy, and which model it serves."""
    async with Server(url) as server:
        server.within_s = within_s
        with suppress(NoSuchPage):
            await server.text("/health")
        await server.json("/v1/models")


def _has_ended(kept: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether the keeper has ended, as it does when the command has."""
    with suppress(subprocess.TimeoutExpired):
        kept.wait(within_s)
    return kept.returncode is not None


def _death(kept: subprocess.Popen[bytes], words: Sequence[str], log: Path) -> str:
    """A sentence on a command that ended by itself."""
    status, shown = kept.returncode, command_line(*words)
    if status == keeper.NOT_STARTED and (why := kept.stdout.read().decode(errors="replace")):  # type: ignore[union-attr]
        return f"`launch` must be a program, but {shown} cannot be started: {why}."
    how = f"with status {status}" if 0 <= status <= 128 else f"by signal {abs(status) % 128}"
    return f"`launch` must start a server that stays until it is stopped, but {shown} ended {how}. {_end_of(log)}"


def _end_of(log: Path) -> str:
    """The last lines of a log, and where the others are."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - SAID_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    if not lines:
        return f"Its log, {log}, is empty."
    return f"Its log ends with {', '.join(quoted(line.strip(), 200) for line in lines[-SAID_LINES:])}; more of it is in {log}."
