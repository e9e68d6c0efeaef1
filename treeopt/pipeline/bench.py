"""Bench: real decoding with the chosen tree, beside plain decoding and other trees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal, discard
from treeopt.growth.coverage import COVERAGE, guess_counts, replay_probe
from treeopt.growth.heldout import crossfit, crossfit_probe, rate_tree
from treeopt.growth.replay import accepted_counts
from treeopt.pipeline.calibrate import collect, first_conversations
from treeopt.pipeline.export import STALE, named_tree
from treeopt.records.benchmark import Predicted, Quality
from treeopt.records.inputs import changed, inputs_of
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.probe import Probe
from treeopt.records.rules import SAME_TEXT, check_drafter, check_rule
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.bench_table import PUBLISHED
from treeopt.report.terminal import note, progress
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.records.benchmark import Benchmark
    from treeopt.runtime.drafters.protocol import Drafter
    from treeopt.runtime.measure.ranks import Prompt
    from treeopt.runtime.prompts.sets import Conversation
    from treeopt.runtime.session import Session


def bench(
    run: RunDirectory,
    session: Session,
    *,
    batch_size: int | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    rounds: int = 2,
    trees: Sequence[str | Path] = (),
    on_trace: bool = False,
) -> Benchmark:
    """Decode for real with every contender; held-out prompts unless ``on_trace``."""
    if rounds < 1:
        raise InvalidInput(f"--rounds must be at least 1, but got {rounds}.")
    plan, trace = run.read_plan(), run.read_trace()
    measured, ours = run.read_probe() if run.probe.exists() else trace, session.acceptance.record
    check_rule(measured.meta.get("acceptance"), ours, "the run's calibration holds")
    check_rule(plan.acceptance, ours, "the plan holds", command="search")
    source = run.read_probe() if plan.objective == COVERAGE else trace
    if changed(run, plan.inputs, or_gone=True):
        note(STALE)
    entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
    contenders, predicted, accepted = _contenders(plan, entry, source, session.drafter)
    for file in trees:
        name = Path(file).stem
        if name in contenders:
            raise InvalidInput(f"Contenders need names of their own, but {name!r} is taken: rename {file}.")
        contenders[name] = tree = named_tree(str(file))
        predicted[name], accepted[name] = _fixed(source, tree)
    limit = max_new_tokens or trace.meta.get("max_new_tokens", 128)
    reference = None
    if on_trace:
        if num_prompts is not None:
            raise InvalidInput("--prompts trace decodes all prompts of the trace: leave out --num-prompts.")
        conversations = _trace_conversations(session, trace)
        dtype = (trace.meta.get("provenance") or {}).get("dtype")
        same = dtype == session.provenance().dtype and limit == trace.meta.get("max_new_tokens")
        same &= not (trace.meta.get("answers") or {}).get("given")
        seeds = [rule.get("seed") for rule in (trace.meta.get("acceptance") or {}, session.acceptance.record)]
        same &= plan.objective == COVERAGE or seeds[0] == seeds[1]
        if same and _ranks_needed(trace, contenders) == trace.top_k:
            reference = trace
        else:
            note("The trace has another dtype, other limits or given answers: answering its prompts again.")
    else:
        wanted = num_prompts or max(24, 10 * entry.batch_size)
        conversations = held_out_conversations(run, session, trace, wanted)
        if len(conversations) < wanted:
            note(f"Only {len(conversations)} held-out prompts are left, fewer than the {wanted} asked for.")
    result = decode(
        run,
        session,
        source,
        contenders,
        conversations,
        batch_size=entry.batch_size,
        rounds=rounds,
        folder=run.partial("bench"),
        max_new_tokens=limit,
        reference=reference,
        predicted=predicted,
        predicted_accepted=accepted,
    )
    result = replace(
        result,
        prompts="trace" if on_trace else "held out",
        inputs=inputs_of(run.plan, run.probe if isinstance(source, Probe) else run.trace),
    )
    if result.contender("plain").tokens_per_s is None:
        rows = result.contender("plain").batch_size
        note(
            f"Nothing was timed: {len(conversations)} prompts never fill a batch of {rows}. Pass a larger --num-prompts."
        )
    result.save(run.bench)
    if len(plan.entries) > 1:  # the last run's is bench.json; each batch size keeps its own
        result.save(run.bench_of(entry.batch_size))
    discard(run.partial("bench"))
    return result


def decode(
    run: RunDirectory,
    session: Session,
    source: RankTrace | Probe,
    contenders: Mapping[str, Tree | None],
    conversations: Sequence[Conversation],
    *,
    batch_size: int,
    rounds: int,
    folder: Path,
    max_new_tokens: int | None = None,
    reference: RankTrace | None = None,
    predicted: Mapping[str, Predicted] | None = None,
    predicted_accepted: Mapping[str, list[float]] | None = None,
) -> Benchmark:
    """Answers of all contenders to some conversations, block by block through journals in ``folder``.

    source     what the contenders were predicted from
    reference  the trace of the conversations' plain answers; they are answered where it is missing
    """
    from treeopt.runtime.acceptance.greedy import Greedy
    from treeopt.runtime.measure.bench import Contest, Entrant, decode_contenders
    from treeopt.runtime.measure.ranks import turn_prompts
    from treeopt.runtime.memory import with_less_memory

    check_drafter(source.meta.get("drafter"), session.drafter_record, "Bench decodes")
    check_rule(source.meta.get("acceptance"), session.acceptance.record, "the run's calibration holds")
    rule = session.acceptance.record["rule"]
    has_one_text = rule in SAME_TEXT
    limit = max_new_tokens or source.meta.get("max_new_tokens", 128)
    if reference is None:
        plainly = replace(session, given=False)
        if rule == "typical":
            plainly = replace(plainly, acceptance=Greedy())
        reference = collect(
            plainly,
            conversations,
            folder / "answers",
            max_new_tokens=limit,
            batch_size=16,
            top_k=_ranks_needed(source, contenders),
            title="Plain answers of the bench prompts",
        )
    prompts = turn_prompts(session.prompts, reference)
    known = {
        **session.provenance(seed=0).record(),
        "time": None,
        "command": None,
        "rounds": rounds,
        "trees": {name: tree.choices if tree else None for name, tree in contenders.items()},
        "prompts": [prompt.sha256 for prompt in prompts],
        "max_new_tokens": limit,
    }

    def attempt(rows: int) -> list[dict[str, Any]]:
        journal = Journal(folder / f"batch-size-{rows}", {**known, "batch_size": rows})
        total = len(prompts) * len(contenders) * rounds
        with progress(f"Decoding with {len(contenders)} contenders", total) as advance:
            return decode_contenders(
                session.setup(limit),
                prompts,
                contenders,
                batch_size=rows,
                rounds=rounds,
                journal=journal,
                progress=advance,
            )

    visits, rows = with_less_memory(attempt, batch_size, note)
    quality: dict[str, Quality] | None = None
    if not has_one_text:

        def judge(rows: int) -> dict[str, Quality]:
            return _quality(session, visits, contenders, prompts, reference, batch_size=rows)

        quality = with_less_memory(judge, rows, note)[0]
    known_rates, known_shares = predicted or {}, predicted_accepted or {}
    entrants = {
        name: Entrant(tree, known_rates.get(name, Predicted()), known_shares.get(name, []))
        for name, tree in contenders.items()
    }
    result = Contest(session.target, prompts, reference, rows, has_one_text).result(visits, entrants)
    return replace(
        result,
        quality=quality,
        max_new_tokens=limit,
        loop_share=reference.loop_share(),
        skipped=reference.meta.get("skipped", []),
        provenance=session.provenance(seed=0).record(),
    )


def held_out_conversations(
    run: RunDirectory, session: Session, trace: RankTrace, wanted: int
) -> tuple[Conversation, ...]:
    """The first of the session's conversations that the trace was not measured on."""
    hashes = trace.meta.get("prompt_sha256")
    if hashes is None:
        raise InvalidInput(f"Held-out prompts need to know those of the trace, but {run.trace} has no prompt_sha256.")
    return first_conversations(replace(session, prompts=session.prompts.without(hashes)), wanted)


def _ranks_needed(source: RankTrace | Probe, contenders: Mapping[str, Tree | None]) -> int:
    """Ranks to tell apart: those beyond would be misses in replay, but decoding accepts them."""
    trees = [tree for tree in contenders.values() if tree]
    return max([source.meta.get("top_k") or 1, *(1 + tree.max_rank for tree in trees)])


def _quality(
    session: Session,
    visits: Sequence[dict[str, Any]],
    contenders: Iterable[str],
    prompts: Sequence[Prompt],
    reference: RankTrace,
    *,
    batch_size: int,
) -> dict[str, Quality]:
    """What the target thinks of every contender's texts, and how far they are from the plain ones."""
    from treeopt.runtime.measure.quality import measure_quality

    assert reference.tokens is not None
    plain = [answer.tolist() for answer in np.split(reference.tokens, reference.starts[1:-1])]
    clusters, found = [prompt.cluster for prompt in prompts], {}
    with progress("Judging the texts", None):
        for name in contenders:
            rows = [row for visit in visits if visit["round"] == 0 for row in visit["runs"][name]["rows"]]
            texts = [row["tokens"] for row in sorted(rows, key=lambda row: row["id"])]
            quality = measure_quality(
                session.target,
                [prompt.tokens for prompt in prompts],
                texts,
                plain,
                conversations=clusters,
                batch_size=batch_size,
            )
            found[name] = Quality(**quality)  # type: ignore[arg-type]  # one of the figures is a number of answers
    return found


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
    plan: Plan, entry: PlanEntry, source: RankTrace | Probe, drafter: Drafter
) -> tuple[dict[str, Tree | None], dict[str, Predicted], dict[str, list[float]]]:
    """Who is decoded, and what the calibration predicts for each: tokens per step in three ways, and the
    share of the steps that emit 0, 1, ... guesses.

    A fixed tree's replay on the calibration prompts is not in-sample; the grown ones are cross-fitted.
    """
    num_heads = drafter.num_heads
    limits = asdict(plan.limits(Limits(budget=entry.size, max_depth=num_heads)))
    published = published_tree().cut(max_depth=num_heads)
    if isinstance(source, Probe):
        whole = crossfit_probe(source, **limits)
    else:
        whole = crossfit(source, objective=plan.objective or "replay", **limits)
    most = len(whole.family)
    chain = Tree.chain(entry.best_chain.depth if entry.best_chain else num_heads)
    trees: dict[str, Tree | None] = {
        "plain": None,
        "chosen": entry.tree if entry.size > 1 else None,
        PUBLISHED: published,
        "chain": chain,
        "budget": whole.family.tree(most),
    }
    expected = entry.predicted
    predicted = {
        "plain": Predicted(product=1.0, joint=1.0, replayed=1.0, replayed_stderr=0.0),
        "chosen": Predicted(
            product=expected.product,
            joint=expected.joint,
            replayed=expected.replayed,
            replayed_stderr=entry.tokens_per_step_stderr,
        ),
        "budget": Predicted(**whole.rates(most).document()),
    }
    accepted = {"chosen": entry.accepted, "budget": whole.accepted(most, source).tolist()}
    for name, tree in ((PUBLISHED, published), ("chain", chain)):
        predicted[name], accepted[name] = _fixed(source, tree)
    if published.max_rank >= drafter.draft_vocab_size:  # of a draft model's chains, or very few tokens
        for found in (trees, predicted, accepted):
            del found[PUBLISHED]
    return trees, predicted, accepted


def _fixed(source: RankTrace | Probe, tree: Tree) -> tuple[Predicted, list[float]]:
    """Predictions of a tree that was not grown here; none where it has nodes that the source does not tell apart."""
    if isinstance(source, Probe):
        if not set(tree.paths) <= set(source.tree.paths):
            return Predicted(), []
        counts = guess_counts(source, tree.paths)
        rates = Predicted(replayed=replay_probe(source, tree).tokens_per_step)
    else:
        if tree.max_rank >= source.top_k:
            return Predicted(), []
        counts, rates = accepted_counts(source, tree.paths), Predicted(**rate_tree(source, tree).document())
    return rates, (counts / max(counts.sum(), 1)).tolist()
