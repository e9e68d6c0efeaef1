"""Profile by a user's own benchmark: a command that is run for every tree and for plain decoding, in rounds.

template  the command, with {size} {batch_size} {depth} {context} {tree} in it; size 1 is plain decoding
tree      a JSON file with the medusa_choices to run, an empty list for plain decoding
answer    the last line of output: milliseconds, or JSON with step_ms (a number or a list), or tokens_per_s and tokens_per_step
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from treeopt.errors import InvalidInput, TreeoptError
from treeopt.files import writing
from treeopt.files.fields import Amount, checked
from treeopt.files.journal import Journal
from treeopt.files.shell import command_line, split_template
from treeopt.growth.source import source_of
from treeopt.latency.rounds import Rounds, Visit, Visitor
from treeopt.pipeline.profile.outcome import check_can_join, finish
from treeopt.pipeline.profile.placement import (
    NUM_HEADS,
    Wanted,
    check_sizes,
    deepest_trees,
    timing_trees,
    tree_families,
)
from treeopt.pipeline.profile.timed import all_rounds, all_timings
from treeopt.pipeline.profile.untimed import UNKNOWN_CONTEXT, ms_of_speed
from treeopt.records.inputs import find_accuracies, inputs_of
from treeopt.records.origins import Runtime, provenance
from treeopt.records.profile import LatencyProfile, ProfileSetting
from treeopt.records.rundir import RunDirectory
from treeopt.trees.tree import Tree

PLACES = ("size", "batch_size", "depth", "context", "tree")


def profile_command(
    run: RunDirectory,
    command: str,
    *,
    calibration: str | None = None,
    num_heads: int | None = None,
    runtime: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> LatencyProfile:
    """Run ``command`` for trees of the wanted sizes until latencies are known; ``options`` are those of `Wanted`.

    At least three rounds, each with all trees of a setting and plain decoding in random order; more until every
    latency is known well enough or the time is up. Settings of the run's profile that the same command measured
    before are kept.
    """
    template, wanted = Template.parse(command), Wanted(**options)
    template.check(wanted)
    whose: Runtime = {"name": runtime or Path(template.words[0]).name, "command": command}
    made = provenance()
    check_can_join(run, whose, made, overwrite=overwrite)
    used, record = find_accuracies(run, calibration) or (None, None)
    source = source_of(record) if record else None
    families = tree_families(source, num_heads or (source.num_heads if source else NUM_HEADS), wanted.largest)
    check_sizes(wanted.sizes or (), families)
    found: dict[tuple[int, int | None], Rounds] = {}
    left_s, places = wanted.time_limit_s, wanted.settings(UNKNOWN_CONTEXT)
    for i, (batch_size, context) in enumerate(places):
        sizes = wanted.sizes_at(batch_size)
        if template.places & {"tree", "depth"}:
            trees = timing_trees(families, sizes, given=bool(wanted.sizes))
        else:
            trees = deepest_trees(families, sizes)
        asked = {"batch_size": batch_size, "context": context, "trees": [tree.choices for tree in trees]}
        key = {"command": command, **asked, "precision": wanted.precision, "time_limit_s": wanted.time_limit_s}
        folder = run.partial("profile") / f"command-batch-size-{batch_size}-context-{context}"
        calls = Calls(template, batch_size, context, trees, folder / "trees")
        rounds = calls.rounds(left_s / (len(places) - i), wanted.precision, Journal(folder, key))
        left_s, found[batch_size, context] = left_s - rounds.seconds, rounds
    points, plain = all_timings(found)
    settings = [ProfileSetting(batch_size=p.batch_size, context_tokens=p.context_tokens) for p in plain]
    info = {"measures": "step", "settings": settings, "provenance": made}
    info |= {"inputs": inputs_of(used) if used else {}}
    return finish(run, LatencyProfile(points, plain, whose, info), wanted.precision)


@dataclass(frozen=True)
class Template:
    """The words of a command, some with places for what is to be run."""

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Split as a shell does, without running one; InvalidInput for places that are not known."""
        found = cls(split_template("command", text, PLACES))
        if not found.places & {"size", "tree"}:
            raise InvalidInput("`command` must say what to run by {size} or {tree}, but it has neither.")
        return found

    @property
    def places(self) -> set[str]:
        return {place for word in self.words for place in re.findall(r"\{(\w+)\}", word)}

    def check(self, wanted: Wanted) -> None:
        """Raise InvalidInput unless the command can be told all that is wanted."""
        if "context" in self.places and not wanted.contexts:
            raise InvalidInput("`command` with {context} needs `contexts`, the lengths to measure at.")
        for name, several in (("context", wanted.contexts), ("batch_size", wanted.batch_sizes)):
            if len(set(several)) > 1 and name not in self.places:
                raise InvalidInput(f"Several of `{name}` need a place {{{name}}} in `command`.")

    def filled(self, **values: object) -> list[str]:
        pattern = re.compile(r"\{(" + "|".join(PLACES) + r")\}")
        return [pattern.sub(lambda match: str(values[match[1]]), word) for word in self.words]


class Calls(Visitor):
    """The calls of a command at one batch size and context.

    folder : of the tree files
    """

    plain_visits, is_slow = 1, True

    def __init__(self, template: Template, batch_size: int, context: int, trees: Sequence[Tree], folder: Path) -> None:
        super().__init__(trees, batch_size)
        self.template, self.context = template, context
        self.drafts = [*trees, Tree.chain(0)]
        self.files = [folder / f"tree-{i}.json" for i in range(len(trees))] + [folder / "tree-plain.json"]

    def rounds(self, time_limit_s: float, precision: float, journal: Journal) -> Rounds:
        """All rounds, those of an earlier run among them; every call is a block of the journal."""
        for file, tree in zip(self.files, self.drafts, strict=True):
            writing.write_text(file, json.dumps(tree.choices))
        return all_rounds(self, (self.batch_size, self.context or None), time_limit_s, precision, journal)

    def visit(self, place: int, steps: tuple[int, int], number: int) -> Visit:
        """One run of the command; how many steps it takes is its own."""
        tree, started = self.drafts[place], time.perf_counter()
        values = {"size": len(tree), "depth": tree.depth, "batch_size": self.batch_size, "context": self.context}
        words = self.template.filled(**values, tree=self.files[place].resolve())
        shown = command_line(*words)
        try:
            done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise InvalidInput(f"`command` must be a program, but {shown}: {error.strerror}.") from None
        if done.returncode:
            said = _last_line(done.stderr) or "nothing on stderr"
            raise InvalidInput(f"`command` must exit with 0, but {shown} exited with {done.returncode}: {said}")
        try:
            step_ms = samples_of(_last_line(done.stdout), self.batch_size)
        except TreeoptError as error:
            raise InvalidInput(f"`command` {shown}: {error}") from None
        return Visit(place=place, seconds=time.perf_counter() - started, step_ms=step_ms)


class Speed(BaseModel):
    """An answer in tokens."""

    tokens_per_s: Amount
    tokens_per_step: Amount


class Step(BaseModel):
    """An answer in time."""

    step_ms: Amount


def samples_of(line: str, batch_size: int) -> list[float]:
    """The latencies [ms] that a last line of output gives."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and "step_ms" not in answer and "tokens_per_s" in answer:
        speed = checked(Speed, answer)
        return [ms_of_speed(batch_size, speed.tokens_per_s, speed.tokens_per_step)]
    said = answer.get("step_ms") if isinstance(answer, dict) else answer
    found = said if isinstance(said, list) and isinstance(answer, dict) else [said]
    if not found or not all(isinstance(ms, int | float) for ms in found):
        raise InvalidInput(f"its last line must be milliseconds per step, or JSON (--help), but it is {line[:80]!r}.")
    return [checked(Step, {"step_ms": ms}).step_ms for ms in found]


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
