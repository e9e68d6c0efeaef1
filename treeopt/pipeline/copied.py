"""Search over the settings of drafters that copy text: every setting is replayed on the run's log of requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import get_context

import numpy as np

from treeopt.engines.copied import KIND
from treeopt.engines.registry import ENGINES, engine_named
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.rates import Rates
from treeopt.latency.costs import StepCosts
from treeopt.planning.planner import costs_of, plan_text
from treeopt.planning.request import PlanRequest
from treeopt.planning.table import Candidate, Floats, mean_ms
from treeopt.records.inputs import find_latencies, inputs_of
from treeopt.records.options import SearchOptions, TreeLimits
from treeopt.records.plan import Plan, PlannedEngine
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import progress
from treeopt.report.verdict import timing_caveats
from treeopt.text.engines import KINDS, text_drafter
from treeopt.text.replay import State, replay
from treeopt.text.settings import Settings, drafters_of, sought, usual
from treeopt.trees.draft import CopiedText, Draft
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import BoolArray, IntArray

MOST_TRIED, FEWEST_TRIED, FINALISTS = 60, 12, 6  # settings of all drafters and of one; of each batch size
SOUGHT_TOKENS, JUDGED_TOKENS = 200_000, 500_000  # of the log's first answers, by which settings are sought and judged
IN_PROCESS = 50_000  # tokens below which processes of their own do not pay
MOST_PROCESSES = 4  # that replay at once, each in half a GB at most
NOTICEABLE = 0.005  # share of the tokens per step that what is kept from request to request changes before it is said
IN_SAMPLE = "There is a single conversation, so the figures are of the text that the settings were sought on: too high, and without an error."
Job = tuple[str, Settings, State, int | None]  # a drafter, its settings, what is kept, and how many requests
Replays = Callable[[Sequence[Job]], list[list[Candidate]]]  # what each job found on the two halves


def search_copied(run: RunDirectory, options: SearchOptions, trees: TreeLimits) -> Plan:
    """The best setting of an engine's drafters of text, or of all engines', for each batch size."""
    engine, batch_sizes = options.engine, options.batch_sizes
    if wrong := [name for name in trees.given if name != "method"]:
        raise InvalidInput(f"`{wrong[0]}` is for trees, and drafters that copy text have settings: leave it out.")
    if isinstance(batch_sizes, Mapping):
        raise InvalidInput("Drafters that copy text are planned for each batch size: leave the shares out.")
    log = run.read_requests()
    timed, latencies = find_latencies(run, options.profile, own=True) or (None, None)
    sizes = list(batch_sizes or (latencies.batch_sizes if latencies else (1,)))
    drafters = asked_drafters(engine, trees.method)
    named = PlannedEngine(name=engine_named(engine), method=KIND) if engine else None
    request = PlanRequest(Limits(options.budget), sizes, context=options.context, engine=named)
    costs = costs_of(latencies, request, log.usual_context)
    check_rows(costs)
    inputs = inputs_of(*(file for file in (run.requests, timed) if file))
    plan = planned(log, costs, request, drafters)
    return replace(plan, inputs=inputs).with_warnings(timing_caveats(latencies) if latencies else ())


def asked_drafters(engine: str | None, method: str | None) -> list[str]:
    """The drafters of an engine, or that of its ``method``; InvalidInput for an engine that has none."""
    engines = sorted({name.partition(":")[0] for name in drafters_of(None)})
    every = drafters_of(engine and engine_named(engine, [*ENGINES, *engines]))
    if not every:
        raise InvalidInput(
            f"No drafter of {engine} that copies text is replayed: search for one of {', '.join(engines)}."
        )
    names = [name for name in every if method in (None, name.partition(":")[2])]
    if not names:
        known = ", ".join(name.partition(":")[2] for name in every)
        raise InvalidInput(f"`method` of {engine} must be {known} to copy text, but got {method}.")
    return names


def check_rows(costs: Mapping[int, StepCosts]) -> None:
    """Raise OutOfRange for a batch size at which no step of two rows or more was timed."""
    for batch_size, cost in costs.items():
        if cost.reach[0] < 2:
            raise OutOfRange(
                f"Copied text takes steps of 2 rows or more, but at batch size {batch_size} the profile has plain steps alone: "
                "time larger sizes."
            )


def planned(log: RequestLog, costs: Mapping[int, StepCosts], request: PlanRequest, drafters: Sequence[str]) -> Plan:
    """The plan for a log; InvalidInput where the budget has no room for any setting,
    OutOfRange where too few rows were timed."""
    all_requests, log = log.num_sequences, first_answers(log, JUDGED_TOKENS)
    first, budget = first_answers(log, SOUGHT_TOKENS).num_sequences, request.limits.budget
    each = max(MOST_TRIED // len(drafters), FEWEST_TRIED)
    warnings, settings, usuals = list[str](), dict[str, list[Candidate]](), dict[str, Candidate]()
    with _replays(log) as replayed, progress("Searching", len(drafters) * (each + FINALISTS)) as advance:

        def value(name: str, tried: Sequence[Settings]) -> Floats:
            results = replayed([(name, options, "serial", first) for options in tried])
            return worth([sought_on for sought_on, _ in results], costs, request)

        for name in drafters:
            values = sought(name, partial(value, name), most=each)
            advance(each)
            finalists = {usual(name): None}
            for b in range(len(request.sizes)):
                finalists |= dict.fromkeys(sorted(values, key=lambda options: -values[options][b])[:FINALISTS])
            judged = [held_out for _, held_out in replayed([(name, options, "serial", None) for options in finalists])]
            settings[name] = [candidate for candidate in judged if candidate.size <= budget]
            if judged[0] in settings[name]:
                usuals[name] = judged[0]
            else:
                warnings.append(beyond(judged[0], budget))
            advance(FINALISTS)
        if not any(settings.values()):
            raise InvalidInput(
                f"`budget` has no room for a draft of {' or '.join(drafters)}: it must be larger than {budget}."
            )
        sought_on, judged_on = _parts(log)
        held_out = log.select(np.flatnonzero(judged_on[log.clusters]))
        warnings += [IN_SAMPLE] * bool((sought_on & judged_on).any())
        if log.num_sequences < all_requests:
            warnings.append(
                f"Replayed were the first {log.num_sequences:,} of {all_requests:,} requests, {JUDGED_TOKENS:,} tokens of answers."
            )
        plan = plan_text({name: some for name, some in settings.items() if some}, usuals, held_out, costs, request)
        brackets = _bracket(replayed, plan)
    entries = (replace(e, warnings=[*e.warnings, *warnings, *brackets.get(e.batch_size, [])]) for e in plan.entries)
    return replace(plan, entries=tuple(entries))


def worth(candidates: Sequence[Candidate], costs: Mapping[int, StepCosts], request: PlanRequest) -> Floats:
    """(n, G) what settings are worth at each batch size: log tokens per second, or per step where no latency is known.

    Of equal ones that with fewer rows is worth a little more; of what was not timed, or is beyond the budget, nothing.
    """
    rates = np.array([candidate.rates.tokens_per_step for candidate in candidates])
    rows = np.array([candidate.rows_per_step for candidate in candidates])
    ms = np.array([mean_ms(candidates, costs[b]) if costs else np.ones(len(rates)) for b in request.sizes])  # (G, n)
    values = np.log(rates / ms) - 1e-6 * rows
    fits = np.array([candidate.size <= request.limits.budget for candidate in candidates])
    return np.where(fits & ~np.isnan(ms), values, -np.inf).T


def beyond(usual: Candidate, budget: int) -> str:
    """A sentence on a usual setting that verifies more rows than are planned."""
    return (
        f"The usual setting of {usual.group} is not planned, since it verifies up to {usual.size} rows, beyond the budget of "
        f"{budget}: it emits {usual.rates.tokens_per_step:.2f} tokens per step with {usual.rows_per_step:.1f} rows."
    )


def first_answers(log: RequestLog, tokens: int) -> RequestLog:
    """The first requests of a log, whose answers together have so many tokens; all where they have fewer."""
    first = int(np.searchsorted(np.cumsum(log.answer_tokens), tokens)) + 1
    return log.select(np.arange(first)) if first < log.num_sequences else log


def halves(log: RequestLog) -> IntArray:
    """(C,) 0 for the conversations on which settings are sought, 1 for those that they are judged on; 2, both, for a single one.

    Conversations of a group are paired in order, and each half gets one of a pair. So the beginning of a log is divided as it
    is in the whole log. Raises InvalidInput where no answer has a second token, which is the first that is decoded in a step.

    >>> halves(RequestLog(np.zeros(12, int), np.arange(0, 13, 3), np.ones(4, int))).tolist()
    [1, 0, 1, 0]
    """
    decoded = np.unique(log.clusters[log.answer_tokens > 1]).tolist()
    if not decoded:
        raise InvalidInput("Some answers must have two tokens or more, since the first is the prompt's, but none has.")
    half, counts = np.zeros(log.num_conversations, np.int64), [0, 0]
    groups, waiting = log.conversation_groups() or [""] * len(half), dict[str, int]()  # the half of a group's next one
    for conversation, coin in zip(
        decoded, np.random.default_rng(0).integers(2, size=len(decoded)).tolist(), strict=True
    ):
        group = groups[conversation]
        if group in waiting:
            side = waiting.pop(group)
        else:
            side = coin if counts[0] == counts[1] else int(counts[1] < counts[0])
            waiting[group] = 1 - side
        counts[side] += 1
        half[conversation] = side if len(decoded) > 1 else 2
    return half


@contextmanager
def _replays(log: RequestLog) -> Iterator[Replays]:
    """What replays jobs, in several processes where that pays."""
    work = partial(tried_on, log, parts=_parts(log))
    if len(log.tokens) < IN_PROCESS:
        yield lambda jobs: [work(job) for job in jobs]
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(min(cores, MOST_PROCESSES), get_context("spawn")) as pool:
        yield lambda jobs: list(pool.map(work, jobs))


def _parts(log: RequestLog) -> list[BoolArray]:
    """(C,) each: the conversations that settings are sought on, and those that they are judged on."""
    half = halves(log)
    return [(half == number) | (half == 2) for number in (0, 1)]


def tried_on(log: RequestLog, job: Job, parts: Sequence[BoolArray]) -> list[Candidate]:
    """What a setting did on the conversations of each part, which are marked: (C,) each."""
    name, settings, state, first = job
    steps = replay(islice(log.requests(), first), lambda: text_drafter(name, dict(settings)), state=state)
    rows = int(steps.rows.max(initial=1))
    draft = CopiedText.of(name, dict(settings), rows, min(int(steps.drafted.max(initial=0)), rows - 1))
    conversations = np.repeat(log.clusters[: len(steps.starts) - 1], np.diff(steps.starts))
    candidates, count = list[Candidate](), log.num_conversations
    for part in parts:
        here = part[conversations]
        taken = np.bincount(conversations[here], minlength=count)[part]
        tokens = np.bincount(conversations[here], steps.emitted[here], count)[part].astype(np.int64)
        row_counts, accepted = (np.bincount(some[here], minlength=1) for some in (steps.rows, steps.accepted))
        rates = Rates(taken.astype(np.int64), tokens)
        candidates.append(Candidate(name, draft, rates, accepted=accepted, row_counts=row_counts))
    return candidates


def _bracket(replayed: Replays, plan: Plan) -> dict[int, list[str]]:
    """What the chosen settings reach where a server has kept nothing, beside what is planned, by batch size."""
    brackets: dict[Draft, list[str]] = {}
    chosen = {entry.draft: entry.chosen.tokens_per_step for entry in plan.entries if entry.speculates}
    for draft, rate in chosen.items():
        if not KINDS[draft.drafter].memory:
            continue
        settings = tuple(sorted(draft.options.items()))
        ((_, judged),) = replayed([(draft.drafter, settings, "cold", None)])
        cold = judged.rates.tokens_per_step
        if max(cold, rate) > (1 + NOTICEABLE) * min(cold, rate):
            brackets[draft] = [
                "This drafter keeps text from request to request, so tokens per step depend on what ran before: with nothing kept "
                f"{cold:.2f}; served one after the other {rate:.2f}. The plan is for requests served one after the other."
            ]
    return {entry.batch_size: brackets.get(entry.draft, []) for entry in plan.entries}
