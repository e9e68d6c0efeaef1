"""A user's own benchmark: its command with places for what is to be run, and its calls.

template  the command, with {size} {batch_size} {depth} {context} {tree} in it; size 1 is plain decoding
tree      a JSON file with the medusa_choices to run, an empty list for plain decoding
call      one run of the command and a block of the journal, so that a killed profile goes on behind it

Its last line of output is the answer: milliseconds per step, or a JSON object with step_ms (a number or a list)
or with tokens_per_s and tokens_per_step.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from treeopt.errors import InvalidInput, TreeoptError
from treeopt.files import writing
from treeopt.files.journal import Journal
from treeopt.files.rows import Amount, checked
from treeopt.files.shell import command_line
from treeopt.latency.rounds import FEWEST_ROUNDS, Round, is_enough
from treeopt.pipeline.profile.placement import Wanted
from treeopt.pipeline.profile.table import ms_of_speed
from treeopt.report.terminal import note, progress
from treeopt.trees.tree import Tree

PLACES = ("size", "batch_size", "depth", "context", "tree")


@dataclass(frozen=True)
class Template:
    """The words of a command, some with places for what is to be run."""

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Split as a shell does, without running one; InvalidInput for places that are not known.

        >>> Template.parse("bench.sh --nodes {size}").filled(size=8)
        ['bench.sh', '--nodes', '8']
        """
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise InvalidInput(f"--command must be a command as in a shell, but {text!r}: {error}.") from None
        places = {place for word in words for place in re.findall(r"\{(\w+)\}", word)}
        unknown = sorted(places - set(PLACES))
        if unknown:
            raise InvalidInput(
                f"--command has the places {', '.join(f'{{{place}}}' for place in PLACES)}, but got {{{unknown[0]}}}."
            )
        if not places & {"size", "tree"}:
            raise InvalidInput("--command must say what to run by {size} or {tree}, but it has neither.")
        return cls(words)

    def check(self, wanted: Wanted) -> None:
        """Raise InvalidInput unless the command can be told all that is wanted."""
        if self.has("context") and not wanted.contexts:
            raise InvalidInput("--command with {context} needs --context, the lengths to measure at.")
        if len(set(wanted.contexts)) > 1 and not self.has("context"):
            raise InvalidInput("--context with several lengths needs a place {context} in --command.")
        if len(set(wanted.batch_sizes)) > 1 and not self.has("batch_size"):
            raise InvalidInput("--batch-size with several needs a place {batch_size} in --command.")

    def has(self, place: str) -> bool:
        return any(f"{{{place}}}" in word for word in self.words)

    def filled(self, **values: object) -> list[str]:
        pattern = re.compile(r"\{(" + "|".join(PLACES) + r")\}")
        return [pattern.sub(lambda match: str(values[match[1]]), word) for word in self.words]


@dataclass(frozen=True)
class Calls:
    """Everything that is run at one batch size and context; plain decoding is the last."""

    template: Template
    batch_size: int
    context: int
    trees: Sequence[Tree]
    folder: Path  # of the tree files
    journal: Journal

    def rounds(self, time_limit_s: float, precision: float) -> list[Round]:
        """All rounds, those of an earlier run among them; every call is a block of the journal."""
        calls = self.journal.documents()
        count = len(self.trees) + 1
        for i, tree in enumerate((*self.trees, None)):
            writing.write_text(self._file(i), json.dumps(tree.choices if tree else []))
        title = f"Timing {len(self.trees)} trees by command, batch size {self.batch_size}"
        with progress(title, max(time_limit_s, 0.0)) as advance:
            advance(sum(call["seconds"] for call in calls))
            while True:
                rounds = self._whole(calls)
                if len(calls) % count == 0 and is_enough(
                    rounds, self.trees, self.batch_size, time_limit_s=time_limit_s, precision=precision
                ):
                    return rounds
                if len(calls) == count and (least_s := FEWEST_ROUNDS * rounds[0]["seconds"]) > time_limit_s:
                    note(
                        f"Each of {FEWEST_ROUNDS} rounds takes about {rounds[0]['seconds']:.0f} s at batch size "
                        f"{self.batch_size}: {least_s:.0f} s, more than the {max(time_limit_s, 0):.0f} s that --time-limit "
                        "leaves. Fewer --sizes take less."
                    )
                started = time.perf_counter()
                step_ms = self.call(self._order(len(calls) // count)[len(calls) % count])
                calls.append({"step_ms": step_ms, "seconds": time.perf_counter() - started})
                self.journal.append(calls[-1])
                advance(calls[-1]["seconds"])

    def call(self, i: int) -> list[float]:
        """Run the command for the i-th tree: its samples [ms]."""
        tree = self.trees[i] if i < len(self.trees) else None
        words = self.template.filled(
            size=len(tree) if tree else 1,
            depth=tree.depth if tree else 0,
            batch_size=self.batch_size,
            context=self.context,
            tree=self._file(i).resolve(),
        )
        shown = command_line(*words)
        try:
            done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise InvalidInput(f"--command must be a program, but {shown}: {error.strerror}.") from None
        if done.returncode:
            said = _last_line(done.stderr) or "nothing on stderr"
            raise InvalidInput(f"--command must exit with 0, but {shown} exited with {done.returncode}: {said}")
        try:
            return samples_of(_last_line(done.stdout), self.batch_size)
        except TreeoptError as error:
            raise InvalidInput(f"--command {shown}: {error}") from None

    def _file(self, i: int) -> Path:
        return self.folder / f"tree-{i if i < len(self.trees) else 'plain'}.json"

    def _order(self, number: int) -> list[int]:
        order: list[int] = np.random.default_rng([0, number]).permutation(len(self.trees) + 1).tolist()
        return order

    def _whole(self, calls: Sequence[dict[str, Any]]) -> list[Round]:
        """The rounds that are finished."""
        count = len(self.trees) + 1
        found = []
        for number in range(len(calls) // count):
            visited = calls[number * count : (number + 1) * count]
            points = [{"step_ms": visited[place]["step_ms"]} for place in np.argsort(self._order(number))]
            found.append({"seconds": sum(call["seconds"] for call in visited), "points": points})
        return found


class Speed(BaseModel):
    """An answer in tokens."""

    tokens_per_s: Amount
    tokens_per_step: Amount


class Step(BaseModel):
    """An answer in time."""

    step_ms: Amount


def samples_of(line: str, batch_size: int) -> list[float]:
    """The latencies [ms] that a last line of output gives.

    >>> samples_of('{"tokens_per_s": 250, "tokens_per_step": 2.5}', 1)
    [10.0]
    """
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and "step_ms" not in answer and "tokens_per_s" in answer:
        speed = checked(Speed, answer)
        return [ms_of_speed(batch_size, speed.tokens_per_s, speed.tokens_per_step)]
    found = answer.get("step_ms") if isinstance(answer, dict) else answer
    found = found if isinstance(answer, dict) and isinstance(found, list) else [found]
    if not found or not all(isinstance(ms, int | float) for ms in found):
        raise InvalidInput(
            "its last line must be milliseconds per step, or a JSON object with step_ms, or with tokens_per_s and "
            f"tokens_per_step, but it is {line[:80]!r}."
        )
    return [checked(Step, {"step_ms": ms}).step_ms for ms in found]


def _last_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""
