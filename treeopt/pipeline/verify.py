"""Verify: decode for real with the best candidates of a plan, and take the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treeopt.errors import InvalidInput
from treeopt.growth.source import Source, objective_for, source_of
from treeopt.pipeline.decoding import Decoding, decode, held_out_conversations
from treeopt.pipeline.entrants import PLAIN, Entrant
from treeopt.pipeline.threads import settle_threads
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.inputs import Accuracies
from treeopt.records.origins import elsewhere
from treeopt.records.plan import Plan, PlanEntry, Verified
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.trees.draft import Draft
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.runtime.session import Session

ROUNDS = 2


def check_decodes_here(session: Session, latencies: LatencyProfile | None) -> None:
    """Raise InvalidInput where latencies are of another runtime or machine than decodes to verify."""
    if latencies and (
        where := elsewhere(latencies.runtime, latencies.info.get("provenance") or {}, session.provenance().record())
    ):
        raise InvalidInput(
            f"`verify` decodes with treeopt itself, but the latencies were timed {where}: what is fastest here may "
            "not be fastest there. Leave `verify` out."
        )


def verified(
    run: RunDirectory,
    session: Session,
    plan: Plan,
    record: Accuracies,
    latencies: LatencyProfile | None,
    request: PlanRequest,
    count: int,
) -> Plan:
    """The plan with the fastest of its ``count`` best sizes, by real decoding, at every batch size."""
    source = source_of(record)
    if source.answers is not None and not source.is_exact:
        raise InvalidInput(
            "`verify` is for rules under which the text does not depend on the tree: leave it out, and check the "
            "plan with treeopt bench."
        )
    if latencies is None or request.mix is not None or source.answers is None:
        raise InvalidInput(
            "`verify` decodes for real, one batch size at a time: it needs the run's own trace, a profile, "
            "and batch sizes without shares."
        )
    settle_threads(run, session)
    proofs = {entry.batch_size: _proof(run, session, entry, source, request, count) for entry in plan.entries}
    take = {batch_size: proof.afresh.draft for batch_size, proof in proofs.items()}
    plan = plan_trees(record, latencies, request, take=take)
    return replace(plan, entries=tuple(replace(e, verified=proofs[e.batch_size]) for e in plan.entries))


def finalists(entry: PlanEntry, count: int) -> list[tuple[int, int]]:
    """(size, depth) of the ``count`` sizes with the best prediction, and of the chosen one's neighbours."""
    curve = {point.size: point for point in entry.curve if point.size > 1}
    best = sorted(curve.values(), key=lambda point: -point.rate)[:count]
    near = [curve[size] for size in (entry.chosen.size - 1, entry.chosen.size, entry.chosen.size + 1) if size in curve]
    return sorted({(point.size, point.depth) for point in (*best, *near)})


def regrown(source: Source, request: PlanRequest, sizes: Sequence[tuple[int, int]]) -> dict[str, Tree]:
    """The trees of a plan again, by (size, depth), under names that say both."""
    objective = objective_for(source, request.objective)
    families = {depth: source.grow(replace(request.limits, max_depth=depth), objective) for _, depth in sizes}
    return {f"{size} rows, depth {depth}": families[depth].tree(size) for size, depth in sizes}


def _proof(
    run: RunDirectory, session: Session, entry: PlanEntry, source: Source, request: PlanRequest, count: int
) -> Verified:
    """The fastest of the finalists by real decoding, and its speed measured afresh on other prompts.

    What won may have won by luck, so its speed in that contest is an overestimate and is not quoted.
    Neither half of the prompts was planned with.
    """
    answers = source.answers
    assert answers is not None
    drafts: dict[str, Draft] = {"plain": PLAIN, **regrown(source, request, finalists(entry, count))}
    others = [f for f in (entry.chosen, *entry.others.values()) if f.speedup and f.draft not in drafts.values()]
    drafts |= {f"{f.draft.kind} of {f.size} rows, depth {f.depth}": f.draft for f in others}
    conversations = held_out_conversations(run, session, answers, len(session.prompts.conversations))
    half = min(len(conversations) // 2, max(24, 10 * entry.batch_size))  # bench takes the first ones
    if half < 1:
        raise InvalidInput("`verify` needs at least 2 held-out prompts, one to choose by and one to measure on.")
    folder = run.partial("verify") / f"batch-size-{entry.batch_size}"
    first = Decoding(
        session,
        answers,
        {name: Entrant(draft) for name, draft in drafts.items()},
        batch_size=entry.batch_size,
        rounds=ROUNDS,
        max_new_tokens=answers.meta.get("max_new_tokens", 128),
        folder=folder / "contest",
    )
    contest = decode(first, conversations[-half:])
    ranking = [(ratio.value, name) for name in drafts if (ratio := contest.speedup(name)) is not None]
    if not ranking:
        raise InvalidInput("`verify` timed nothing: the held-out prompts never fill a batch of this size.")
    winner = max(ranking)[1]
    afresh = {name: first.entrants[name] for name in ("plain", winner)}
    proof = decode(replace(first, entrants=afresh, folder=folder / "afresh"), conversations[:half])
    return Verified(finalists=[contest.figure(name) for name in drafts], prompts=half, afresh=proof.figure(winner))
