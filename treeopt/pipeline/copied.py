"""Search over the settings of drafters that copy text: every setting is replayed on the run's log of requests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from treeopt.engines.copied import EXPORTED, KIND
from treeopt.errors import InvalidInput
from treeopt.files.places import distinct, folder_name
from treeopt.planning.copied import Tried, costs_of, plan_copied, worth
from treeopt.planning.request import PlanRequest
from treeopt.records.inputs import find_latencies, inputs_of
from treeopt.records.plan import Plan, PlannedEngine
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note, progress
from treeopt.text.engines import text_drafter
from treeopt.text.replay import State, replay
from treeopt.text.settings import Settings, drafters_of, sought, usual
from treeopt.trees.draft import CopiedText
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import BoolArray, IntArray

MOST_TRIED, FEWEST_TRIED, FINALISTS = 60, 12, 6  # settings of all drafters and of one; of each batch size
SOUGHT_TOKENS = 200_000  # of answers, the first of the log, on which settings are sought
IN_PROCESS = 50_000  # tokens below which processes of their own do not pay
NOTICEABLE = 0.005  # share of the tokens per step that what is kept from request to request changes before it is said
IN_SAMPLE = "There is a single conversation, so the figures are of the text that the settings were sought on: too high, and without an error."
UNUSED = {"shape": None, "max_rank": None, "max_depth": None, "objective": "replay", "measured_only": False, "sample": None, "verify": 0}  # fmt: skip
Job = tuple[str, Settings, State, int | None]  # a drafter, its settings, what is kept, and how many requests
_WORKERS_LOG: list[RequestLog] = []  # of a process that replays


def search_copied(
    run: RunDirectory,
    *,
    profile: str | None = None,
    engine: str | None = None,
    method: str | None = None,
    batch_sizes: Sequence[int] | Mapping[int, float] | None = None,
    for_groups: str = "shared",
    budget: int = Limits().budget,
    context: int | None = None,
    **options: Any,
) -> Plan:
    """The best setting of an engine's drafters of text, or of all engines', for each batch size; options as of `search`."""
    check_options(options, batch_sizes, for_groups)
    log = run.read_requests()
    timed, latencies = find_latencies(run, profile, own=True) or (None, None)
    sizes = list(batch_sizes or (latencies.batch_sizes if latencies else (1,)))
    drafters = asked_drafters(engine, method)
    named = PlannedEngine(name=EXPORTED.get(engine, engine), method=KIND) if engine else None
    usual_tokens = int(np.mean(log.prompt_tokens + log.answer_tokens / 2))
    request = PlanRequest(Limits(budget), sizes, context=context or usual_tokens, engine=named)
    inputs = inputs_of(*(file for file in (run.requests, timed) if file))
    plan = replace(planned(run.requests, log, latencies, request, drafters), inputs=inputs)
    if for_groups == "own":
        _plan_groups(run, log, latencies, request, drafters)
    return plan


def check_options(options: Mapping[str, Any], batch_sizes: object, for_groups: str) -> None:
    """Raise InvalidInput for options that are not for drafters that copy text."""
    if wrong := [name for name, value in options.items() if value != UNUSED[name]]:
        raise InvalidInput(f"`{wrong[0]}` is for trees, and drafters that copy text have settings: leave it out.")
    if isinstance(batch_sizes, Mapping):
        raise InvalidInput("Drafters that copy text are planned for each batch size: leave the shares out.")
    if for_groups not in ("own", "shared"):
        raise InvalidInput(f"`for_groups` must be shared or own, but got {for_groups}.")


def asked_drafters(engine: str | None, method: str | None) -> list[str]:
    """The drafters of an engine, or that of its ``method``; InvalidInput for an engine that has none."""
    every = drafters_of(engine) or drafters_of(next((own for own, said in EXPORTED.items() if said == engine), engine))
    engines = sorted({name.partition(":")[0] for name in drafters_of(None)})
    if not every:
        raise InvalidInput(f"Engines that copy text are {', '.join(engines)}, but got {engine}.")
    names = [name for name in every if method in (None, name.partition(":")[2])]
    if not names:
        known = ", ".join(name.partition(":")[2] for name in every)
        raise InvalidInput(f"`method` of {engine} must be {known} to copy text, but got {method}.")
    return names


def planned(
    file: Path, log: RequestLog, latencies: LatencyProfile | None, request: PlanRequest, drafters: Sequence[str]
) -> Plan:
    """The plan for a log that is in a file."""
    state: State = "overlapped" if log.has_times else "serial"
    tokens = np.cumsum(log.answer_tokens)
    first = int(np.searchsorted(tokens, SOUGHT_TOKENS)) + 1
    each = max(MOST_TRIED // len(drafters), FEWEST_TRIED)
    with _replays(file, log) as many, progress("Searching", len(drafters) * (each + FINALISTS)) as advance:
        tried: dict[str, list[Tried]] = {}
        for name in drafters:
            value = partial(_values, many, name, state, first, latencies, request)
            found = sought(name, value, most=each)
            advance(each)
            best = [sorted(found, key=lambda s: -found[s][b])[:FINALISTS] for b in range(len(request.sizes))]
            wanted = dict.fromkeys([usual(name), *(one for some in best for one in some)])
            done = [held for _, held in many([(name, one, state, None) for one in wanted])]
            tried[name] = [one for one in done if one.draft.rows <= request.limits.budget] or done[:1]
            advance(FINALISTS)
        half = halves(log)
        held_out = log.select(np.flatnonzero(half[log.clusters] > 0))
        plan = plan_copied(tried, held_out, latencies, request, [IN_SAMPLE] * bool((half == 2).any()))
        said = _bracket(many, plan, state)
    entries = (replace(e, warnings=[*e.warnings, *said.get(e.batch_size, [])]) for e in plan.entries)
    return replace(plan, entries=tuple(entries))


def halves(log: RequestLog) -> IntArray:
    """(C,) 0 for the conversations on which settings are sought, 1 for those that they are judged on; 2, both, for a single one.

    Raises InvalidInput where no answer has a second token, which is the first that is decoded in a step.

    >>> halves(RequestLog(np.zeros(12, int), np.arange(0, 13, 3), np.ones(4, int))).tolist()
    [1, 0, 0, 1]
    """
    found, some = np.zeros(log.num_conversations, np.int64), np.unique(log.clusters[log.answer_tokens > 1])
    if not len(some):
        raise InvalidInput("Some answers must have two tokens or more, since the first is the prompt's, but none has.")
    found[np.random.default_rng(0).permutation(some)[1::2]] = 1
    if len(some) == 1:
        found[some] = 2
    return found


def _values(
    many: Any,
    name: str,
    state: State,
    first: int,
    latencies: LatencyProfile | None,
    request: PlanRequest,
    settings: Sequence[Settings],
) -> Any:
    """(n, B) what settings are worth on the first half."""
    sought_on = [own for own, _ in many([(name, one, state, first) for one in settings])]
    return worth(sought_on, costs_of(latencies, request, max(one.draft.rows for one in sought_on)), request.sizes)


@contextmanager
def _replays(file: Path, log: RequestLog) -> Iterator[Any]:
    """A function from jobs to what each found on the two halves; in several processes where that pays."""
    if len(log.tokens) < IN_PROCESS:
        yield lambda jobs: [_tried(log, job) for job in jobs]
        return
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(workers, get_context("spawn"), _load, (file,)) as pool:
        yield lambda jobs: list(pool.map(_job, jobs))


def _load(file: Path) -> None:
    _WORKERS_LOG[:] = [RequestLog.load(file)]


def _job(job: Job) -> tuple[Tried, Tried]:
    return _tried(_WORKERS_LOG[0], job)


def _tried(log: RequestLog, job: Job) -> tuple[Tried, Tried]:
    """What a setting did on the conversations of each half."""
    half = halves(log)
    sought_on, held_out = tried_on(log, job, [(half == number) | (half == 2) for number in (0, 1)])
    return sought_on, held_out


def tried_on(log: RequestLog, job: Job, parts: Sequence[BoolArray]) -> list[Tried]:
    """What a setting did on the conversations of each part, which are marked: (C,) each."""
    name, settings, state, first = job
    found = replay(islice(log.requests(), first), lambda: text_drafter(name, dict(settings)), state=state)
    rows = int(found.rows.max(initial=1))
    draft = CopiedText.of(name, dict(settings), rows, min(int(found.drafted.max(initial=0)), rows - 1))
    own = np.repeat(log.clusters[: len(found.starts) - 1], np.diff(found.starts))
    each, count = [], log.num_conversations
    for of in parts:
        here = of[own]
        steps, tokens = (
            np.bincount(own[here], some, count)[of].astype(np.int64) for some in (None, found.emitted[here])
        )
        row_counts, accepted = (np.bincount(some[here], minlength=1) for some in (found.rows, found.accepted))
        each.append(Tried(draft, steps, tokens, row_counts, accepted, settings == usual(name)))
    return each


def _bracket(many: Any, plan: Plan, state: State) -> dict[int, list[str]]:
    """What the chosen settings reach where a server has kept nothing, and where it served the log in order, by batch size."""
    known: dict[CopiedText, list[str]] = {}
    for draft in {e.draft for e in plan.entries if e.speculates}:
        assert isinstance(draft, CopiedText)
        states: Iterable[State] = dict.fromkeys(("cold", "serial", state))
        jobs = [(draft.drafter, draft.settings, one, None) for one in states]
        rates = {job[2]: held.candidate.rates.tokens_per_step for job, (_, held) in zip(jobs, many(jobs), strict=True)}
        if max(rates.values()) > (1 + NOTICEABLE) * min(rates.values()):
            means = {
                "cold": "with nothing kept from request to request",
                "serial": "served one after the other",
                "overlapped": "as they overlapped",
            }
            each = "; ".join(f"{means[one]} {rate:.2f}" for one, rate in rates.items())
            known[draft] = [
                f"This drafter keeps text from request to request, so tokens per step depend on what ran before: {each}. "
                f"The plan is for requests {means[state]}."
            ]
    return {e.batch_size: known.get(e.draft, []) for e in plan.entries}  # type: ignore[call-overload]


def _plan_groups(
    run: RunDirectory, log: RequestLog, latencies: LatencyProfile | None, request: PlanRequest, drafters: Sequence[str]
) -> None:
    """Write a run directory with log, latencies and plan for each group; InvalidInput where groups are not known."""
    if not log.group_names or log.group is None:
        raise InvalidInput(
            "`for_groups=own` needs a log with groups: treeopt calibrate --from-logs LOG --group-by COLUMN"
        )
    for number, folder in enumerate(distinct([folder_name(name) for name in log.group_names])):
        which = np.flatnonzero(log.group == number)
        if not len(which):
            continue
        own = RunDirectory(run.path / "groups" / folder)
        with own.writing():
            part = log.select(which)
            own.replace_requests(part)
            own.profile.unlink(missing_ok=True)  # of a search before
            if latencies is not None:
                latencies.save(own.profile)
            files = inputs_of(own.requests, *([own.profile] if latencies else []))
            replace(planned(own.requests, part, latencies, request, drafters), inputs=files).save(own.plan)
        note(f"The plan of the group {log.group_names[number]} is in {own.path}.")
