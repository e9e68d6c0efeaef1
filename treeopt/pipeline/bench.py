"""Bench: real decoding with the chosen draft, beside plain decoding and others, by treeopt's decoder or another engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.writing import discard
from treeopt.growth.probed import COVERAGE
from treeopt.growth.source import source_of
from treeopt.pipeline.decoding import Decoding, decode, held_out_conversations, other_groups
from treeopt.pipeline.entrants import engine_entrants, own_entrants
from treeopt.pipeline.threads import settle_threads
from treeopt.records.inputs import inputs_of, not_a_check, stale_plan, timed_elsewhere
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.pools import Counts
from treeopt.records.rules import check_rule, marked_rule, rule_of
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import note

if TYPE_CHECKING:
    from treeopt.records.benchmark import Benchmark
    from treeopt.runtime.prompts.sets import Conversation
    from treeopt.runtime.session import Session
    from treeopt.runtime.stepper import Stepper


def bench(
    run: RunDirectory,
    session: Session,
    *,
    engine: str | None = None,
    batch_size: int | None = None,
    num_prompts: int | Literal["trace"] | None = None,
    max_new_tokens: int | None = None,
    rounds: int = 1,
    trees: Sequence[str | Path] = (),
) -> Benchmark:
    """Decode for real with every contender.

    engine      : another runtime that decodes; by default treeopt's own decoder does
    num_prompts : held-out prompts; "trace" takes all those that were calibrated on
    trees       : more contenders, by file or published name
    """
    on_trace = num_prompts == "trace"
    if rounds < 1:
        raise InvalidInput(f"`rounds` must be at least 1, but got {rounds}.")
    if on_trace and engine is not None:
        raise InvalidInput("`engine` decodes held-out prompts, but got `prompts=trace`.")
    plan, trace, rule = run.read_plan(), run.read_trace(), session.acceptance.record
    most = max_new_tokens or trace.meta.get("max_new_tokens", 128)
    opened = _opened(engine, session, most)
    probe = run.read_probe() if run.probe.exists() and engine is None else None
    measured = (probe or trace).meta.get("acceptance")
    check_rule(measured, rule, "the run's calibration holds", command=run.command("calibrate", "--overwrite"))
    check_rule(plan.acceptance, rule, "the plan holds", command=run.command("search"))
    of_probe = plan.objective == COVERAGE
    found = (probe or run.read_probe()) if of_probe else trace
    entry = _entry(run, plan, opened, batch_size)
    for said in stale_plan(run, plan):
        note(said)
    settle_threads(run, session)
    decoding = Decoding(
        session,
        found,
        own_entrants(plan, entry, source_of(found), session.drafter, trees)
        if opened is None
        else engine_entrants(run, plan, entry, source_of(found), opened, trees),
        batch_size=entry.batch_size,
        rounds=rounds,
        max_new_tokens=most,
        folder=run.partial("bench" if engine is None else f"bench-{engine}"),
        engine=opened,
    )
    reference = _plain_answers_of(trace, decoding, same_seed=not of_probe) if on_trace else None
    conversations = (
        _trace_conversations(session, trace) if num_prompts == "trace" else held_out(run, decoding, trace, num_prompts)
    )
    result = replace(
        decode(decoding, conversations, reference=reference),
        prompts="trace" if on_trace else "held out",
        inputs=inputs_of(run.plan, run.probe if of_probe else run.trace),
    )
    run.replace_bench(result, plan, entry.batch_size, engine)
    discard(decoding.folder)
    note_doubts(run, plan, result)
    return result


def _opened(engine: str | None, session: Session, max_new_tokens: int) -> Stepper | None:
    """The engine of that name; None for treeopt's own decoder, which is made for each number of rows."""
    from treeopt.runtime.engines import open_stepper

    if engine is None:
        return None
    if rule_of(rule := session.acceptance.record) != "greedy":
        raise Unsupported(
            f"`engine={engine}` decodes greedily, but the plan is for {marked_rule(rule)}: leave `engine` out."
        )
    opened = open_stepper(engine, session.setup(max_new_tokens), note)
    for said in filter(None, (opened.about, opened.without_own)):
        note(said)
    return opened


def _entry(run: RunDirectory, plan: Plan, engine: Stepper | None, batch_size: int | None) -> PlanEntry:
    """The plan's entry of that batch size, by default the first that is decoded at once."""
    sizes, most = [entry.batch_size for entry in plan.entries], engine.most_rows if engine else None
    if engine is None or most is None:
        return plan.entries[0] if batch_size is None else plan.entry(batch_size)
    wanted = batch_size or next((size for size in sizes if size <= most), 1)
    together = f"`engine={engine.name}` decodes {'one sequence' if most == 1 else f'{most} sequences'} at a time"
    if wanted > most:
        raise Unsupported(f"{together}, but got `batch_size={wanted}`.")
    if wanted not in sizes:
        raise Unsupported(
            f"{together}, but the plan is for batch size {', '.join(map(str, sizes))}. Plan for it with: "
            f"{run.command('search', '--batch-size', wanted)}"
        )
    return plan.entry(wanted)


def note_doubts(run: RunDirectory, plan: Plan, result: Benchmark) -> None:
    """Notes where nothing was timed, or the plan's latencies are of elsewhere."""
    plain = result.contender("plain")
    if plain.tokens_per_s is None:
        note(
            f"Nothing was timed: {plain.compared} prompts never fill a batch of {plain.batch_size}. Pass a larger "
            "`num_prompts`."
        )
    if where := timed_elsewhere(run, plan, result):
        note(not_a_check(where, result.engine))


def held_out(
    run: RunDirectory, decoding: Decoding, trace: RankTrace, num_prompts: int | None
) -> tuple[Conversation, ...]:
    """So many held-out conversations, by default enough for the batch size; a note where there are fewer."""
    wanted = num_prompts or max(24, 10 * decoding.batch_size)
    conversations = held_out_conversations(run, decoding.session, trace, wanted)
    if len(conversations) < wanted:
        note(f"Only {len(conversations)} held-out prompts are left, fewer than the {wanted} asked for.")
    groups = [conversation.group for conversation in conversations]
    if any(groups) and (names := trace.conversation_groups()) and (caution := other_groups(names, groups)):
        note(caution)
    return conversations


def _trace_conversations(session: Session, trace: RankTrace) -> tuple[Conversation, ...]:
    known = {conversation.sha256: conversation for conversation in session.prompts.conversations}
    wanted = list(dict.fromkeys(trace.meta.get("prompt_sha256") or []))
    missing = [sha for sha in wanted if sha not in known]
    if missing or not wanted:
        raise InvalidInput(
            f"`prompts=trace` needs the prompts that the trace was measured on, but {len(missing)} of "
            f"{len(wanted)} are not in {session.prompts.name}."
        )
    return tuple(known[sha] for sha in wanted)


def _plain_answers_of(trace: RankTrace, decoding: Decoding, *, same_seed: bool) -> RankTrace | None:
    """The trace itself, where its answers are those that plain decoding would give in this decoding.

    same_seed : whether the texts depend on the seed
    """
    meta, session = trace.meta, decoding.session
    seeds = [rule.get("seed") for rule in (meta.get("acceptance") or {}, decoding.rule)]
    if (
        (meta.get("provenance") or {}).get("dtype") == session.provenance().dtype
        and meta.get("max_new_tokens") == decoding.max_new_tokens
        and not (meta.get("answers") or {}).get("given")
        and (seeds[0] == seeds[1] or not same_seed)
        and decoding.counts.top_k == trace.top_k
        and _has_pools(trace, decoding.counts)
    ):
        return trace
    note(
        "The trace has another dtype, limits, seed, ranks or topk, or given answers, so its prompts are answered again."
    )
    return None


def _has_pools(trace: RankTrace, counts: Counts) -> bool:
    pools = trace.pools
    return not counts.topks or (
        pools is not None and set(counts.topks) <= set(pools.topks) and counts.levels <= pools.levels
    )
