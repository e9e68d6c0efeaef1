"""Bench of lengths: the user's own server is started with each number of guesses, until no further launch is worth it.

launch   one start of the server with one length, or with all where requests set it. It answers the same prompts at every number
         of clients, and is a repeat of an arm at each of these
rates    logarithms of tokens per second, by the launches of an arm
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from treeopt.arms.arm import OFF, Arm, Arms
from treeopt.arms.choices import decide_arms
from treeopt.arms.groups import merged
from treeopt.engines.registry import ENGINES
from treeopt.engines.speculation import Speculation
from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.fields import checked
from treeopt.files.journal import Journal
from treeopt.files.notes import note
from treeopt.files.shell import command_line, split_template
from treeopt.pipeline.bench import evenly, usual_prompts
from treeopt.pipeline.launched import HEEDED, asked_of, check_heeded, conversations_of, engine_of_server
from treeopt.pipeline.session import resolve
from treeopt.records.options import BenchOptions, Server, Source
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import progress
from treeopt.serving.client import Prompt
from treeopt.serving.client import Server as Client
from treeopt.serving.launch import Launcher
from treeopt.serving.visit import PLAIN, Visit, follows_requests, visited

PROBED = 4  # prompts that tell whether requests set the length
LOOPS = "Some answers end in a loop, where guesses are right more often than in other text."
NONE = (
    "`launch` must have the options of speculation that you serve with, whose length is set to each of `lengths`, but has none. "
    "Write them into the command; or put {options} in their place and them into `present`."
)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The lengths to run, 0 for no speculation, of a server that a command starts.

    engine : whose server it is; None for what the command says
    model  : the one to ask, where a router serves several
    """

    server: Server
    engine: str | None = None
    model: str | None = None

    @cached_property
    def launcher(self) -> Launcher:
        return Launcher.parse(str(self.server.launch), self.server.within_s, ["port"])

    @cached_property
    def served_by(self) -> str:
        """The engine; the command names it, if nobody does."""
        programs = {name: engine.options.program for name, engine in ENGINES.items() if engine.options}
        command = command_line(*self.launcher.words)
        named = [name for name, program in programs.items() if re.search(program, command)]
        return engine_of_server(self.engine or "".join(named[:1]), list(programs))

    @property
    def speculation(self) -> Speculation:
        """The options of the engine's server that speculate."""
        return ENGINES[self.served_by].options or Speculation()

    @cached_property
    def options(self) -> list[str]:
        """The words that speculate."""
        if self.server.present is not None:
            return list(split_template("present", self.server.present, ()))
        return self.speculation.split(self.launcher.words)[1]

    def started(self, length: int) -> tuple[Launcher, tuple[str, ...]]:
        """The command that serves with a length, and the words for its {options}."""
        words = self.launcher.words
        if length and not self.options:
            raise InvalidInput(NONE)
        if not self.launcher.has("options"):
            words = (*self.speculation.split(words)[0], "{options}")
        return replace(self.launcher, words=words), self.speculation.at(self.options, length)


def bench_lengths(run: RunDirectory, source: Source, options: BenchOptions, server: Server) -> Arms:
    """Launch every length once, in random order, then what is worth most; the run's arms are kept after every launch."""
    unheeded = {"batch_size": options.batch_size, "rounds": options.rounds, "trees": options.trees}
    check_heeded({**source.given, **unheeded}, {*HEEDED, "model"} - {"drafter"})
    sweep = Sweep(server=server, engine=options.engine, model=source.model)
    source = resolve(run, replace(source, model=None))
    conversations = evenly(conversations_of(source), options.num_prompts or usual_prompts(max(server.clients)))
    prompts, most = asked_of(conversations, source), options.max_new_tokens or 128
    for length in server.lengths:
        sweep.started(length)
    key = {"launch": server.launch, "present": server.present, "model": sweep.model, "clients": list(server.clients)}
    journal = Journal(run.path / "launches" / "journal", {**key, "prompts": prompts, "most": most})
    command = command_line(*sweep.started(0)[0].words)
    base = Arm(
        dataset=Path(str(source.prompts)).name,
        about={"engine": sweep.served_by, "output_tokens": str(most), "command": command},
        source=f"bench --launch {server.launch}",
    )
    left = set(server.lengths)
    with progress("Launching", None):
        while True:
            launches = journal.documents()
            arms = _arms(sweep, launches, base)
            if launches:
                _keep(run, arms)
            following = _next_length(sweep, arms, left)
            if following is None:
                note("No further launch is worth its time.")
                return arms
            lasted = [launch["seconds"] for launch in launches] or [0.0]
            if options.time_limit_s is not None and sum(lasted) + np.mean(lasted) > options.time_limit_s:
                note("The time is over: the same command with a larger `time_limit_s` goes on.")
                return arms
            try:
                journal.append(_launched(run, sweep, following, launches, prompts, most))
            except Unsupported as error:
                left.discard(following)
                if not left and not launches:
                    raise
                note(f"{following} guesses are left out from now on. {error}")


def _next_length(sweep: Sweep, arms: Arms, left: set[int]) -> int | None:
    """The length to launch: each once, the longest first where requests may set the others; then what is worth most.

    One is launched a second time in any case, since what a launch is worth depends on how far two of them differ.
    """
    tried = {arm.k for arm in arms.arms if arm.tokens_per_s}
    order = random.Random(0).sample(sorted(sweep.server.lengths), len(sweep.server.lengths))
    if sweep.speculation.parameter:
        order.sort(key=lambda length: length != max(sweep.server.lengths))
    if new := [length for length in order if length in left - tried]:
        return new[0]
    candidates = tuple(arm for arm in arms.arms if arm.k in left)
    if not candidates:
        return None
    decided = decide_arms(replace(arms, arms=candidates))
    if len(tried) > 1 and all(arm.repeats == 1 for arm in candidates):
        return decided.choices[0].arm.k
    if decided.next_run is None:
        return None
    choice, run = decided.next_run
    return choice.posterior.arms[run.arm].k


def _launched(
    run: RunDirectory, sweep: Sweep, length: int, launches: Sequence[Any], prompts: Sequence[Prompt], most: int
) -> dict[str, Any]:
    """What one more launch gives: its visits, and the seconds that it took."""
    number, lengths = len(launches), sorted({*sweep.server.lengths} - {0})
    parameter = sweep.speculation.parameter if length and len(lengths) > 1 else ""
    before = [{visit["name"] for visit in launch["visits"]} for launch in launches]
    if parameter and any(len(names) > 1 for names in before):
        length = lengths[-1]
    if length != max(lengths, default=0) or {str(length)} in before:
        parameter = ""

    async def look(client: Client) -> tuple[str, list[Visit]]:
        served, visits = [length], list[Visit]()
        if parameter and await follows_requests(client, prompts[:PROBED], parameter, lengths[0]):
            served = random.Random(number).sample(lengths, len(lengths))
        for k in served:
            client.body = {parameter: k} if len(served) > 1 else {}
            limits = [most] * len(prompts)
            for clients in sweep.server.clients:
                visits.append(await visited(client, _name(k), prompts, limits, clients=clients, length=k))
        return Path(await client.model()).name, visits

    began = time.monotonic()
    launcher, options = sweep.started(length)
    model, visits = launcher.visit(
        options, run.path / "launches" / f"{length}-guesses-{number + 1}.log", look, sweep.model
    )
    rates = [f"{visit.tokens_per_s:.1f} tokens/s with {visit.name} at {visit.batch_size}" for visit in visits]
    note(f"Launch {number + 1}: {', '.join(rates)}.")
    seconds = time.monotonic() - began
    return {"seconds": seconds, "model": model, "visits": [visit.model_dump() for visit in visits]}


def _arms(sweep: Sweep, launches: Sequence[Any], base: Arm) -> Arms:
    """Every length at every number of clients, with what its launches gave."""
    drafter, model = sweep.speculation.drafter(sweep.options), launches[0]["model"] if launches else ""
    visits = [checked(Visit, visit) for launch in launches for visit in launch["visits"]]
    arms = []
    for clients in sorted({*sweep.server.clients}):
        for k in sorted({*sweep.server.lengths}):
            arm = replace(base, model=model, k=k, concurrency=clients, drafter=drafter if k else OFF)
            answered = [visit for visit in visits if (visit.name, visit.batch_size) == (_name(k), clients)]
            arms += [_measured(arm, visit) for visit in answered] or [arm]
    return Arms(arms=tuple(merged(arms)), notes=(LOOPS,) if any(visit.loops for visit in visits) else ())


def _measured(arm: Arm, visit: Visit) -> Arm:
    """The arm with what one launch gave."""
    paces = [1e3 * answer.steps_s / answer.step_tokens for answer in visit.answers if answer.step_tokens]
    return replace(
        arm,
        tokens_per_s=visit.tokens_per_s,
        tpot_ms=float(np.mean(paces)) if paces else None,
        tpot_p99_ms=float(np.percentile(paces, 99)) if paces else None,
        tokens_per_step=visit.tokens_per_step if arm.k else None,
        positions=tuple(count / visit.drafts for count in visit.reached) if visit.drafts else (),
        prompts=len(visit.answers),
        seconds=visit.seconds,
    )


def _name(length: int) -> str:
    return str(length) if length else PLAIN


def _keep(run: RunDirectory, arms: Arms) -> None:
    """Write the run's arms; those of other sources stay."""
    old = Arms.load(run.arms) if run.arms.exists() else Arms(arms=())
    others = [arm for arm in old.arms if arm.source != arms.arms[0].source]
    notes = tuple(dict.fromkeys([*old.notes, *arms.notes]))
    replace(old, arms=(*others, *arms.arms), notes=notes).save(run.arms)
