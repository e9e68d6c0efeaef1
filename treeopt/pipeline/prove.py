"""Bench: real decoding with the chosen tree, beside plain decoding and other trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt import library
from treeopt.console import note, progress
from treeopt.errors import InvalidInput
from treeopt.growth import MAX_RANK
from treeopt.journal import Journal, discard
from treeopt.pipeline.deliver import STALE, read_tree
from treeopt.pipeline.measure import collect, first_conversations
from treeopt.plan import Plan, PlanEntry
from treeopt.planner import crossfit, crossfit_accepted
from treeopt.replay import accepted_counts, replay
from treeopt.rundir import RunDirectory, digests
from treeopt.trace import RankTrace
from treeopt.tree import Tree

if TYPE_CHECKING:
    from treeopt.benchmark import Benchmark
    from treeopt.runtime.prompts import Conversation
    from treeopt.runtime.session import Session


def bench(
    run: RunDirectory,
    session: Session,
    *,
    batch_size: int | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    rounds: int = 2,
    trees: Sequence[Path] = (),
    on_trace: bool = False,
) -> Benchmark:
    """Decode for real with every contender; held-out prompts unless ``on_trace``."""
    from treeopt.runtime.bench import assemble, decode_contenders
    from treeopt.runtime.collect import turn_prompts
    from treeopt.runtime.memory import with_less_memory

    if rounds < 1:
        raise InvalidInput(f"--rounds must be at least 1, but got {rounds}.")
    plan, trace = run.read_plan(), run.read_trace()
    if run.is_stale(plan):
        note(STALE)
    entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
    check_same_kind(run, session, trace)
    contenders, predicted = _contenders(plan, entry, trace, session.heads.num_heads)
    for file in trees:
        if file.stem in contenders:
            raise InvalidInput(
                f"Contenders need names of their own, but {file.stem!r} is taken: rename {file}."
            )
        contenders[file.stem] = tree = read_tree(file)
        predicted[file.stem] = _predicted(trace, tree)
    # Ranks that the trace does not tell apart would be misses in replay, but decoding accepts them.
    top_k = max(trace.top_k, *(1 + max(tree.ranks) for tree in contenders.values() if tree))
    limit = max_new_tokens or trace.meta.get("max_new_tokens", 128)
    folder = run.partial("bench")
    reference = None
    if on_trace:
        conversations = _trace_conversations(session, trace)
        dtype = (trace.meta.get("provenance") or {}).get("dtype")
        same = dtype == session.provenance().dtype and limit == trace.meta.get("max_new_tokens")
        same &= not (trace.meta.get("answers") or {}).get("given")
        if same and top_k == trace.top_k:
            reference = trace
        else:
            note("The trace has another dtype, other limits or given answers: answering its prompts again.")
    else:
        hashes = trace.meta.get("prompt_sha256")
        if hashes is None:
            raise InvalidInput(
                f"Held-out prompts need to know those of the trace, but {run.trace} has no prompt_sha256."
            )
        wanted = num_prompts or max(24, 10 * entry.batch_size)
        held_out = replace(session, prompts=session.prompts.without(hashes))
        conversations = first_conversations(held_out, wanted)
    if reference is None:
        reference = collect(session, conversations, folder / "answers", max_new_tokens=limit, batch_size=16,
                            top_k=top_k, title="Plain answers of the bench prompts")  # fmt: skip
    prompts = turn_prompts(session.prompts, reference)
    known = {
        **session.provenance(seed=0).record(), "time": None, "command": None, "rounds": rounds,
        "trees": {name: tree.choices if tree else None for name, tree in contenders.items()},
        "prompts": [prompt.sha256 for prompt in prompts], "max_new_tokens": limit,
    }  # fmt: skip

    def attempt(rows: int) -> list[dict[str, Any]]:
        journal = Journal(folder / f"batch-size-{rows}", {**known, "batch_size": rows})
        total = len(prompts) * len(contenders) * rounds
        with progress(f"Decoding with {len(contenders)} contenders", total) as advance:
            return decode_contenders(
                session.target, session.heads, prompts, contenders, batch_size=rows,
                stop=session.stop(limit), rounds=rounds, finished=journal.documents(),
                keep=journal.append, progress=advance,
            )  # fmt: skip

    visits, rows = with_less_memory(attempt, entry.batch_size, note)
    result = assemble(
        visits, session.target, prompts, contenders, reference, batch_size=rows, predicted=predicted,
        predicted_accepted=_predicted_accepted(plan, entry, trace, contenders),
        info={"prompts": "trace" if on_trace else "held out", "max_new_tokens": limit,
              "loop_share": reference.loop_share(), "skipped": reference.meta.get("skipped", []),
              "inputs": digests(run.plan, run.trace), "provenance": session.provenance(seed=0).record()},
    )  # fmt: skip
    if result.contender("plain").tokens_per_s is None:
        note(
            f"Nothing was timed: {len(prompts)} answers never fill a batch of {rows}. Pass a larger --num-prompts."
        )
    result.save(run.bench)
    if len(plan.entries) > 1:  # the last run's is bench.json; each batch size keeps its own
        result.save(run.bench_of(entry.batch_size))
    discard(folder)
    return result


def check_same_kind(run: RunDirectory, session: Session, trace: RankTrace) -> None:
    """Raise InvalidInput where the trace is of other heads, or of another rule than bench decodes by."""
    drafter = trace.meta.get("drafter") or {}
    if drafter.get("sha256") not in (None, session.drafter["sha256"]):
        raise InvalidInput(
            f"The run's trace must be of the heads that bench decodes with, but {run.trace} is of "
            f"{drafter.get('id')}. Calibrate again, or use another --run."
        )
    acceptance = trace.meta.get("acceptance") or {}
    if acceptance.get("rule", "greedy") != "greedy":
        raise InvalidInput(
            f"Bench decodes greedily so far, but {run.trace} holds for {acceptance.get('rule')} at "
            f"temperature {acceptance.get('temperature')}: calibrate without --temperature to compare."
        )


def _trace_conversations(session: Session, trace: RankTrace) -> tuple[Conversation, ...]:
    known = {conversation.sha256: conversation for conversation in session.prompts.conversations}
    wanted = list(dict.fromkeys(trace.meta.get("prompt_sha256") or []))
    missing = [sha for sha in wanted if sha not in known]
    if missing or not wanted:
        raise InvalidInput(
            f"--prompts trace needs the prompts that the trace was measured on, but {len(missing)} of "
            f"{len(wanted)} are not in {session.prompts.name}."
        )
    return tuple(known[sha] for sha in wanted)


def _contenders(
    plan: Plan, entry: PlanEntry, trace: RankTrace, num_heads: int
) -> tuple[dict[str, Tree | None], dict[str, float | None]]:
    """Who is decoded, and the tokens per step that the calibration predicts for each.

    A fixed tree's replay on the calibration prompts is not in-sample; the grown ones are cross-fitted.
    """
    limits = {"budget": entry.size, "max_rank": MAX_RANK, "max_depth": num_heads, "gap_free": True}
    limits |= {name: value for name, value in (plan.constraint or {}).items() if name in limits}
    published = library.published_tree().cut(max_depth=num_heads)
    whole = crossfit(trace, objective=plan.objective or "replay", **limits)
    chain = Tree.chain((entry.best_chain or {}).get("depth", num_heads))
    trees: dict[str, Tree | None] = {
        "plain": None,
        "chosen": entry.tree if entry.size > 1 else None,
        "mc_sim_7b_63": published,
        "chain": chain,
        "budget": whole.family.tree(len(whole.family)),
    }
    return trees, {
        "plain": 1.0,
        "chosen": entry.tokens_per_step,
        "mc_sim_7b_63": _predicted(trace, published),
        "chain": _predicted(trace, chain),
        "budget": float(whole.tokens_per_step[-1]),
    }


def _predicted(trace: RankTrace, tree: Tree) -> float | None:
    """Tokens per step of a fixed tree on the trace; None where it has ranks that the trace lacks."""
    return None if max(tree.ranks) >= trace.top_k else replay(trace, tree).tokens_per_step


def _predicted_accepted(
    plan: Plan, entry: PlanEntry, trace: RankTrace, contenders: dict[str, Tree | None]
) -> dict[str, list[float]]:
    """Share of the calibration's steps that emit 0, 1, ... guesses; cross-fitted for the chosen tree."""
    shares: dict[str, list[float]] = {}
    for name, tree in contenders.items():
        if tree is not None and max(tree.ranks) < trace.top_k:
            counts = accepted_counts(trace, tree)
            if name == "chosen":
                limits = {"max_rank": MAX_RANK, "gap_free": True, **(plan.constraint or {})}
                limits |= {"budget": entry.size, "max_depth": entry.depth}
                counts = crossfit_accepted(trace, objective=plan.objective or "replay", **limits)
            shares[name] = (counts / max(counts.sum(), 1)).tolist()
    return shares
