"""Bench: real decoding with the chosen tree, beside plain decoding and other trees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from treeopt.errors import InvalidInput
from treeopt.files.writing import discard
from treeopt.growth.coverage import COVERAGE
from treeopt.growth.source import Source, objective_for, source_of
from treeopt.pipeline.decoding import Decoding, decode, held_out_conversations, other_groups
from treeopt.pipeline.threads import settle_threads
from treeopt.pipeline.trees import named_tree
from treeopt.records.contender import Predicted
from treeopt.records.expected import AdaptiveFigures
from treeopt.records.inputs import inputs_of, not_a_check, stale_plan, timed_elsewhere
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.pools import Counts
from treeopt.records.rules import check_rule
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import note
from treeopt.report.verdict import PUBLISHED
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.records.benchmark import Benchmark
    from treeopt.runtime.drafters.protocol import Drafter
    from treeopt.runtime.measure.bench import Entrant
    from treeopt.runtime.prompts.sets import Conversation
    from treeopt.runtime.session import Session


def bench(
    run: RunDirectory,
    session: Session,
    *,
    batch_size: int | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    rounds: int = 1,
    trees: Sequence[str | Path] = (),
    on_trace: bool = False,
) -> Benchmark:
    """Decode for real with every contender; held-out prompts unless ``on_trace``.

    trees : more contenders, by file or published name
    """
    if rounds < 1:
        raise InvalidInput(f"--rounds must be at least 1, but got {rounds}.")
    if on_trace and num_prompts is not None:
        raise InvalidInput("--prompts trace decodes all prompts of the trace: leave out --num-prompts.")
    plan, trace = run.read_plan(), run.read_trace()
    probe = run.read_probe() if run.probe.exists() else None
    measured, rule = (probe or trace).meta.get("acceptance"), session.acceptance.record
    check_rule(measured, rule, "the run's calibration holds", command=run.command("calibrate", "--overwrite"))
    check_rule(plan.acceptance, rule, "the plan holds", command=run.command("search"))
    of_probe = plan.objective == COVERAGE
    source = (probe or run.read_probe()) if of_probe else trace
    for said in stale_plan(run, plan):
        note(said)
    settle_threads(run, session)
    entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
    decoding = Decoding(
        session,
        source,
        _entrants(plan, entry, source_of(source), session.drafter, trees),
        batch_size=entry.batch_size,
        rounds=rounds,
        max_new_tokens=max_new_tokens or trace.meta.get("max_new_tokens", 128),
        folder=run.partial("bench"),
    )
    reference = None
    if on_trace:
        conversations = _trace_conversations(session, trace)
        reference = _plain_answers_of(trace, decoding, same_seed=not of_probe)
    else:
        conversations = held_out(run, decoding, trace, num_prompts)
    result = replace(
        decode(decoding, conversations, reference=reference),
        prompts="trace" if on_trace else "held out",
        inputs=inputs_of(run.plan, run.probe if of_probe else run.trace),
    )
    note_doubts(run, plan, result)
    run.replace_bench(result, plan, entry.batch_size)
    discard(run.partial("bench"))
    return result


def note_doubts(run: RunDirectory, plan: Plan, result: Benchmark) -> None:
    """Notes where nothing was timed, or the plan's latencies are of elsewhere."""
    plain = result.contender("plain")
    if plain.tokens_per_s is None:
        note(
            f"Nothing was timed: {plain.compared} prompts never fill a batch of {plain.batch_size}. Pass a larger "
            "--num-prompts."
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
            f"--prompts trace needs the prompts that the trace was measured on, but {len(missing)} of "
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


def _entrants(
    plan: Plan, entry: PlanEntry, source: Source, drafter: Drafter, files: Sequence[str | Path]
) -> dict[str, Entrant]:
    """Who is decoded, and what the calibration predicts for each.

    A fixed tree's replay on the calibration prompts is not in-sample; the grown ones are cross-fitted.
    """
    from treeopt.runtime.measure.bench import Entrant

    num_heads = drafter.num_heads
    limits = plan.limits(Limits(entry.size, num_heads))
    whole = source.crossfit(limits, objective_for(source, plan.objective or "replay"))
    most = len(whole.family)
    entrants = plain_and_chosen(entry)
    published = published_tree().cut(max_depth=num_heads)
    if published.max_rank < drafter.draft_vocab_size:  # not of a draft model's chains, nor with very few tokens
        entrants[PUBLISHED] = fixed(source, published)
    entrants |= rivals(entry)
    entrants["chain"] = fixed(source, Tree.chain(entry.best_chain.depth if entry.best_chain else num_heads))
    accepted = source.held_out_shares(whole, most).tolist()
    entrants["budget"] = Entrant(whole.family.tree(most), Predicted(**whole.rates(most).document()), accepted)
    return {**entrants, **given_trees(files, source, entrants)}


def plain_and_chosen(entry: PlanEntry) -> dict[str, Entrant]:
    """Plain decoding and the plan's tree, with what the plan predicts."""
    from treeopt.runtime.measure.bench import Entrant

    expected = Predicted(
        product=entry.predicted.product,
        joint=entry.predicted.joint,
        replayed=entry.predicted.replayed,
        replayed_stderr=entry.tokens_per_step_stderr,
    )
    return {
        "plain": Entrant(None, Predicted(product=1.0, joint=1.0, replayed=1.0, replayed_stderr=0.0)),
        "chosen": Entrant(entry.tree if entry.size > 1 else None, expected, entry.accepted),
    }


def rivals(entry: PlanEntry) -> dict[str, Entrant]:
    """The dynamic and the adaptive tree of a plan, where it has them."""
    from treeopt.runtime.measure.bench import Entrant

    found = {}
    for name, figures in (("dynamic", entry.dynamic), ("adaptive", entry.adaptive)):
        if figures is not None:
            rate, error = figures.tokens_per_step, figures.tokens_per_step_stderr
            dynamic = figures.adaptive if isinstance(figures, AdaptiveFigures) else figures.tree
            tree = Tree.chain(figures.depth) if figures.topk == 1 else dynamic
            found[name] = Entrant(tree, Predicted(replayed=rate, replayed_stderr=error))
    return found


def given_trees(files: Sequence[str | Path], source: Source, taken: Collection[str]) -> dict[str, Entrant]:
    """More contenders, by file or published name; InvalidInput for a name that is taken."""
    found: dict[str, Entrant] = {}
    for file in files:
        name = Path(file).stem
        if name in (*taken, *found):
            raise InvalidInput(f"Contenders need names of their own, but {name!r} is taken: rename {file}.")
        found[name] = fixed(source, named_tree(str(file)))
    return found


def fixed(source: Source, tree: Tree) -> Entrant:
    """A tree that was not grown here; without predictions where it has nodes that the source does not tell apart."""
    from treeopt.runtime.measure.bench import Entrant

    if not source.knows(tree):
        return Entrant(tree)
    return Entrant(tree, Predicted(**source.rate(tree).document()), source.guess_shares(tree).tolist())
