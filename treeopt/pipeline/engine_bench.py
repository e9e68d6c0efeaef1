"""Bench in another runtime: chains and dynamic trees decoded by an engine's own code, beside its own plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files.writing import discard
from treeopt.growth.source import Source, source_of
from treeopt.pipeline.bench import fixed, given_trees, held_out, note_doubts, plain_and_chosen, rivals
from treeopt.pipeline.decoding import Decoding, decode
from treeopt.pipeline.threads import settle_threads
from treeopt.records.inputs import inputs_of, stale_plan
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.rules import check_rule, option_of, rule_of
from treeopt.records.rundir import RunDirectory
from treeopt.records.served import setting_of
from treeopt.report.terminal import note
from treeopt.trees.dynamic import DynamicTree
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
    """Decode held-out prompts in an engine: plain, with the plan's chain or dynamic tree, and with others.

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
    most = max_new_tokens or trace.meta.get("max_new_tokens", 128)
    opened = open_engine(engine, session.target, session.drafter, session.setup(most).stop, note)
    entry = _entry(run, plan, opened, batch_size)
    for said in stale_plan(run, plan):
        note(said)
    settle_threads(run, session)
    decoding = Decoding(
        session,
        trace,
        _entrants(run, plan, entry, source_of(trace), opened, trees),
        batch_size=entry.batch_size,
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
    run.replace_bench(result, plan, entry.batch_size, engine)
    discard(decoding.folder)
    return result


def _entry(run: RunDirectory, plan: Plan, engine: Engine, batch_size: int | None) -> PlanEntry:
    """The plan's entry of that batch size, by default the first that the engine decodes at once."""
    sizes, most = [entry.batch_size for entry in plan.entries], engine.most_rows
    wanted = batch_size or next((size for size in sizes if size <= most), 1)
    together = "one sequence" if most == 1 else f"{most} sequences"
    if wanted > most:
        raise Unsupported(f"--engine {engine.name} decodes {together} at a time, but got --batch-size {wanted}.")
    if wanted not in sizes:
        raise Unsupported(
            f"--engine {engine.name} decodes {together} at a time, but the plan is for batch size "
            f"{', '.join(map(str, sizes))}. Plan for it with: {run.command('search', '--batch-size', wanted)}"
        )
    return plan.entry(wanted)


def _entrants(
    run: RunDirectory, plan: Plan, entry: PlanEntry, source: Source, engine: Engine, files: Sequence[str | Path]
) -> dict[str, Entrant]:
    """Plain decoding, what the plan comes to, the shortest and the longest chain, the engine's own settings, and files.

    What is judged stands behind plain decoding: the plan's chain; the dynamic tree that was planned for the engine; or the
    plan's best chain, where it has a fixed tree.
    """
    from treeopt.runtime.measure.bench import Entrant

    entrants = plain_and_chosen(entry)
    best = entry.best_chain.depth if entry.best_chain else source.num_heads
    lengths = [1, source.num_heads]
    drafted = {}
    if engine.takes_trees and entry.batch_size == 1:
        drafted = {name: one for name, one in rivals(entry).items() if name == "dynamic"}
    if drafted and _serves_dynamic(plan, entry, engine):
        entrants = {"plain": entrants["plain"], **drafted}
        lengths = sorted({*lengths, best})
    elif chain(entry.tree):
        lengths = [length for length in sorted({*lengths, best}) if length != entry.depth]
    else:
        del entrants["chosen"]
        lengths = [best, *sorted({*lengths} - {best})]
        note(
            f"{engine.name} takes chains, but the plan has a tree. The plan's best chain, of {best}, is decoded "
            f"instead. To plan for it: {run.command('search', '--for', engine.name)}"
        )
    entrants |= {f"chain of {length}": fixed(source, Tree.chain(length)) for length in lengths}
    entrants |= drafted
    if engine.own_length is not None:
        entrants[OWN_SETTINGS] = Entrant(Tree.chain(engine.own_length), is_own=True)
    entrants |= given_trees(files, source, {*entrants, OWN_SETTINGS, "chosen"})
    return {name: _checked(name, entrant, source, engine) for name, entrant in entrants.items()}


def _serves_dynamic(plan: Plan, entry: PlanEntry, engine: Engine) -> bool:
    """Whether the plan was made for the engine, and the engine's dynamic tree is the fastest that it found."""
    planned = plan.constraint.engine if plan.constraint else None
    made_for, figures = planned.name if planned else "", entry.dynamic
    if engine.name.split("-")[0] != made_for or figures is None or figures.topk == 1 or not figures.tokens_per_s:
        return False
    return setting_of(plan, entry) == figures.tree


def _checked(name: str, entrant: Entrant, source: Source, engine: Engine) -> Entrant:
    """A contender that the engine takes, and whether its steps can be replayed; Unsupported for another."""
    from treeopt.runtime.measure.bench import Entrant

    tree = entrant.tree or Tree.chain(0)
    if isinstance(tree, DynamicTree):
        return replace(entrant, is_replayable=not engine.about)
    if not isinstance(tree, Tree) or not chain(tree):
        raise Unsupported(
            f"{engine.name} takes chains of the likeliest guesses, but {name} is a tree of {len(tree)} rows, or "
            "has other guesses."
        )
    is_known = not entrant.is_own and tree.depth <= source.num_heads
    if not is_known:
        return Entrant(entrant.tree, is_replayable=False, is_own=entrant.is_own)
    return replace(entrant, is_replayable=not engine.about or len(tree) == 1)
