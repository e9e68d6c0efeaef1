"""Bench in another runtime: chains decoded by an engine's own code, beside its own plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.writing import discard
from treeopt.growth.source import Source, source_of
from treeopt.pipeline.bench import fixed, given_trees, held_out, note_doubts, plain_and_chosen
from treeopt.pipeline.decoding import Decoding, decode
from treeopt.pipeline.threads import settle_threads
from treeopt.records.inputs import inputs_of, stale_plan
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.rules import check_rule, option_of, rule_of
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note
from treeopt.trees.shapes import chain
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.records.benchmark import Benchmark
    from treeopt.runtime.engines import Engine
    from treeopt.runtime.measure.bench import Entrant
    from treeopt.runtime.session import Session

OWN_SETTINGS = "defaults"  # the contender that decodes by the engine's own settings


def bench_in(
    run: RunDirectory,
    session: Session,
    engine: str,
    *,
    batch_size: int | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int | None = None,
    rounds: int = 1,
    trees: Sequence[str | Path] = (),
) -> Benchmark:
    """Decode held-out prompts in an engine: plain, with the plan's chain, and with others.

    trees : more chains, by file
    """
    from treeopt.runtime.engines import open_engine

    if rounds < 1:
        raise InvalidInput(f"--rounds must be at least 1, but got {rounds}.")
    plan, trace, rule = run.read_plan(), run.read_trace(), session.acceptance.record
    if rule_of(rule) != "greedy":
        raise Unsupported(
            f"--engine {engine} decodes greedily, but the plan is for {option_of(rule)}: leave --engine out."
        )
    check_rule(plan.acceptance, rule, "the plan holds", command=run.command("search"))
    entry = _entry(run, plan, engine, batch_size)
    most = max_new_tokens or trace.meta.get("max_new_tokens", 128)
    opened = open_engine(engine, session.target, session.drafter, session.setup(most).stop)
    for said in stale_plan(run, plan):
        note(said)
    settle_threads(run, session)
    decoding = Decoding(
        session,
        trace,
        _entrants(run, entry, source_of(trace), opened, trees),
        batch_size=1,
        rounds=rounds,
        max_new_tokens=most,
        folder=run.partial(f"bench-{engine}"),
        engine=opened,
    )
    for said in filter(None, (opened.about, opened.without_own)):
        note(said)
    result = decode(decoding, held_out(run, decoding, trace, num_prompts))
    result = replace(result, prompts="held out", inputs=inputs_of(run.plan, run.trace))
    note_doubts(run, plan, result)
    result.save(run.bench_in(engine))
    discard(decoding.folder)
    return result


def _entry(run: RunDirectory, plan: Plan, engine: str, batch_size: int | None) -> PlanEntry:
    """The plan's entry for batch size 1."""
    sizes = [entry.batch_size for entry in plan.entries]
    if batch_size not in (None, 1):
        raise Unsupported(f"--engine {engine} decodes one sequence at a time, but got --batch-size {batch_size}.")
    if 1 not in sizes:
        raise Unsupported(
            f"--engine {engine} decodes one sequence at a time, but the plan is for batch size "
            f"{', '.join(map(str, sizes))}. Plan for it with: {run.command('search', '--batch-size', 1)}"
        )
    return plan.entry(1)


def _entrants(
    run: RunDirectory, entry: PlanEntry, source: Source, engine: Engine, files: Sequence[str | Path]
) -> dict[str, Entrant]:
    """Plain decoding, the plan's chain, the shortest and the longest one, the engine's own settings, and files.

    Where the plan has a tree, its best chain stands behind plain decoding: it is judged in the tree's place.
    """
    from treeopt.runtime.measure.bench import Entrant

    entrants = plain_and_chosen(entry)
    best = entry.best_chain.depth if entry.best_chain else source.num_heads
    lengths = [1, source.num_heads]
    if chain(entry.tree):
        lengths = [length for length in sorted({*lengths, best}) if length != entry.depth]
    else:
        del entrants["chosen"]
        lengths = [best, *sorted({*lengths} - {best})]
        note(
            f"{engine.name} takes chains, but the plan has a tree. The plan's best chain, of {best}, is decoded "
            f"instead. To plan for it: {run.command('search', '--for', engine.name)}"
        )
    entrants |= {f"chain of {length}": fixed(source, Tree.chain(length)) for length in lengths}
    if engine.own_length is not None:
        entrants[OWN_SETTINGS] = Entrant(Tree.chain(engine.own_length), is_own=True)
    entrants |= given_trees(files, source, {*entrants, OWN_SETTINGS, "chosen"})
    found = {}
    for name, entrant in entrants.items():
        tree = entrant.tree or Tree.chain(0)
        if not isinstance(tree, Tree) or not chain(tree):
            raise Unsupported(
                f"{engine.name} takes chains of the likeliest guesses, but {name} is a tree of {len(tree)} rows, or "
                "has other guesses."
            )
        is_known = not entrant.is_own and tree.depth <= source.num_heads
        is_replayable = is_known and (not engine.about or len(tree) == 1)
        found[name] = (
            replace(entrant, is_replayable=is_replayable)
            if is_known
            else Entrant(entrant.tree, is_replayable=False, is_own=entrant.is_own)
        )
    return found
