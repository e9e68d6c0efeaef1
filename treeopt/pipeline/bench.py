"""Bench: real decoding with the chosen draft, beside plain decoding and others, by treeopt's decoder or another engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.notes import note
from treeopt.files.writing import discard
from treeopt.growth.probed import COVERAGE
from treeopt.growth.source import source_of
from treeopt.pipeline.calibrate import collect
from treeopt.pipeline.contest import contest
from treeopt.pipeline.entrants import engine_entrants, own_entrants
from treeopt.pipeline.logged import copied_entrants, prompts_of, some_requests, tried_drafts
from treeopt.records.benchmark import block_prompts
from treeopt.records.contender import Prompt
from treeopt.records.inputs import inputs_of, not_a_check, read_timed, timed_elsewhere
from treeopt.records.options import BenchOptions, CalibrateOptions
from treeopt.records.origins import Origin, check_same_origin
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.pools import RANKS_ALONE
from treeopt.records.rules import marked_rule, rule_of
from treeopt.records.rundir import RunDirectory
from treeopt.records.stale import stale_plan
from treeopt.records.trace import Answers
from treeopt.report.verdict import missing

if TYPE_CHECKING:
    from treeopt.records.benchmark import Benchmark
    from treeopt.runtime.prompts.sets import Conversation
    from treeopt.runtime.session import Session
    from treeopt.runtime.stepper import Stepper

ANSWERED_AT_ONCE = 16  # conversations whose later turns are asked for


def bench(run: RunDirectory, session: Session, options: BenchOptions) -> Benchmark:
    """Decode for real with every contender."""
    plan, engine, trees = run.read_plan(), options.engine, options.trees
    note(*stale_plan(run, plan))
    if run.requests.exists():
        if engine is None or trees:
            raise InvalidInput("A run of a log is proved by an `engine`, on its requests: pass one alone, no trees.")
        return _bench_log(run, session, plan, engine, options)
    trace = run.read_trace()
    most = options.max_new_tokens or trace.meta.get("max_new_tokens", 128)
    stepper = _opened(engine, session, most)
    probe = run.read_probe() if run.probe.exists() and engine is None else None
    calibrated, here = Origin.of((probe or trace).meta), Origin.of({"provenance": session.provenance()})
    planned = Origin(acceptance=Origin.of({"acceptance": plan.acceptance}).acceptance)
    for name, there in (("calibrated", calibrated.anywhere), ("planned", planned)):
        check_same_origin(there, here, f"What was {name} (there) and what is decoded (here)", run.status_says)
    of_probe = plan.objective == COVERAGE
    found = (probe or run.read_probe()) if of_probe else trace
    entry = _entry(run, plan, stepper, options.batch_size)
    source = source_of(found)
    if engine is None:
        entrants = own_entrants(plan, entry, source, session.drafter, trees)
    else:
        entrants = engine_entrants(run, plan, entry, source, stepper, trees)
    folder = run.partial(run.bench_in(engine).stem)
    conversations = held_out(run, session, trace, options.num_prompts or usual_prompts(block_prompts(entry.batch_size)))
    prompts = asked_prompts(session, conversations, most, folder)
    result = contest(
        stepper,
        entrants,
        prompts,
        batch_size=entry.batch_size,
        rounds=options.rounds,
        time_limit_s=options.time_limit_s,
        folder=folder,
        origin=session.provenance(seed=0),
    )
    skipped: Any = [vars(row) for row in session.prompts.skipped]
    result = replace(result, skipped=skipped or None, inputs=inputs_of(run.plan, run.probe if of_probe else run.trace))
    return _kept(run, plan, result, entry.batch_size, engine)


def _kept(run: RunDirectory, plan: Plan, result: Benchmark, batch_size: int, engine: str | None) -> Benchmark:
    """The benchmark of a plan on held-out prompts, as the run keeps it."""
    result, plain = replace(result, prompts="held out"), result.contender("plain")
    run.replace_bench(result, plan, batch_size, engine)
    discard(run.partial(run.bench_in(engine).stem))
    if plain.tokens_per_s is None:
        note(f"Nothing was timed, since {plain.compared} prompts never fill a batch. {missing(result)}")
    if where := timed_elsewhere(plan, read_timed(run, plan.inputs), result):
        note(not_a_check(where))
    return result


def _bench_log(run: RunDirectory, session: Session, plan: Plan, engine: str, options: BenchOptions) -> Benchmark:
    """Decode held-out requests of the run's log plainly, as planned and as usual."""
    own, context = str((plan.drafter or {}).get("id")).partition(":")[0], session.target.context
    if own != engine.partition("-")[0]:
        raise InvalidInput(
            f"`engine={engine}` has no drafter of the plan's, which is of {own}. Plan for it with: {run.command('search', '--for', engine)}"
        )
    wanted = options.num_prompts or usual_prompts(block_prompts(options.batch_size or 1))
    log = some_requests(run.read_requests(), wanted, options.max_new_tokens, context)
    if log.num_sequences < wanted:
        note(f"Only {log.num_sequences} held-out requests are left, fewer than the {wanted} asked for.")
    session = replace(session, limits={tuple(one.prompt): one.limit or 0 for one in log.requests()})
    stepper = _opened(engine, session, max(one.limit or 0 for one in log.requests()))
    entry = _entry(run, plan, stepper, options.batch_size)
    result = contest(
        stepper,
        copied_entrants(entry, tried_drafts(plan, entry, log), stepper),
        sorted(prompts_of(log), key=lambda prompt: prompt.cluster),
        batch_size=entry.batch_size,
        rounds=options.rounds,
        folder=run.partial(run.bench_in(engine).stem),
        origin=session.provenance(seed=0),
        time_limit_s=options.time_limit_s,
    )
    return _kept(run, plan, replace(result, inputs=inputs_of(run.plan, run.requests)), entry.batch_size, engine)


def asked_prompts(
    session: Session, conversations: Sequence[Conversation], max_new_tokens: int, folder: Path
) -> list[Prompt]:
    """The prompts of all turns; what follows a first turn has treeopt's own plain answers before it."""
    from treeopt.runtime.acceptance.rules import Greedy
    from treeopt.runtime.measure.ranks import turn_prompts

    prompts = [Prompt(tuple(c.first), c.sha256, c.group) for c in conversations if c.num_turns == 1]
    if chats := [c for c in conversations if c.num_turns > 1]:
        rule = Greedy() if session.acceptance.record["rule"] == "typical" else session.acceptance
        answers = collect(
            replace(session, given=False, acceptance=rule),
            chats,
            folder / "answers",
            CalibrateOptions(max_new_tokens=max_new_tokens, batch_size=ANSWERED_AT_ONCE),
            RANKS_ALONE,
            title="Plain answers of the bench prompts",
        )
        prompts += turn_prompts(session.prompts, answers)
    places = {conversation.sha256: place for place, conversation in enumerate(conversations)}
    clustered = [replace(prompt, cluster=places[prompt.id]) for prompt in prompts]
    return sorted(clustered, key=lambda prompt: prompt.cluster)


def _opened(engine: str | None, session: Session, max_new_tokens: int) -> Stepper:
    """treeopt's own decoder, or the engine of that name."""
    from treeopt.runtime.engines import open_stepper

    if engine is not None and rule_of(rule := session.acceptance.record) != "greedy":
        raise Unsupported(f"`engine={engine}` decodes greedily, but the plan is for {marked_rule(rule)}.")
    stepper = open_stepper(engine, session.setup(max_new_tokens), session.source.engine_python)
    note(stepper.about)
    return stepper


def _entry(run: RunDirectory, plan: Plan, engine: Stepper, batch_size: int | None) -> PlanEntry:
    """The plan's entry of that batch size, by default the first that is decoded at once."""
    if (most := engine.most_rows) is None:
        return plan.entries[0] if batch_size is None else plan.entry(batch_size)
    sizes = [entry.batch_size for entry in plan.entries]
    wanted = batch_size or next((size for size in sizes if size <= most), 1)
    together = f"`engine={engine.name}` decodes {'one sequence' if most == 1 else f'{most} sequences'} at a time, but"
    if wanted > most:
        raise Unsupported(f"{together} got `batch_size={wanted}`.")
    if wanted not in sizes:
        raise Unsupported(
            f"{together} the plan is for batch size {', '.join(map(str, sizes))}. Plan for it with: "
            f"{run.command('search', '--batch-size', wanted)}"
        )
    return plan.entry(wanted)


def held_out(run: RunDirectory, session: Session, trace: Answers, wanted: int) -> tuple[Conversation, ...]:
    """So many of the session's conversations that the trace was not measured on, drawn evenly from all of them.

    Where there are fewer, all of them, and a note.
    """
    hashes = trace.meta.get("prompt_sha256")
    if hashes is None:
        raise InvalidInput(f"Held-out prompts need to know those of the trace, but {run.trace} has no prompt_sha256.")
    if not (left := session.prompts.without(hashes).conversations):
        raise InvalidInput(
            f"`prompts` must leave some for bench, but all of {session.prompts.name} were calibrated on."
        )
    if len(left) < wanted:
        note(f"Only {len(left)} held-out prompts are left, fewer than the {wanted} asked for.")
    return evenly(left, wanted)


def usual_prompts(together: int) -> int:
    """Held-out prompts where nobody says how many: 64, or ten times as many as are decoded together."""
    return max(64, 10 * together)


def evenly(conversations: Sequence[Conversation], wanted: int) -> tuple[Conversation, ...]:
    """So many of the conversations, or all: of every group its share, to one, evenly spaced over the group's own order."""
    ordered, wanted = sorted(conversations, key=lambda one: one.group), min(wanted, len(conversations))
    return tuple(ordered[i * len(ordered) // wanted] for i in range(wanted))
