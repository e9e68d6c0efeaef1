"""Search: the best tree for each batch size, from what was measured, and its proof by real decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput
from treeopt.files.journal import discard
from treeopt.growth.objectives import grow
from treeopt.latency.roofline import MEASURES as ANALYTICAL
from treeopt.planning.planner import plan_trees
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import find_latencies, inputs_of, read_planned
from treeopt.records.plan import Decoded, DecodedAfresh, Plan, PlanEntry, Verified
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.rules import check_rule, same_drafter
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import note, progress
from treeopt.trees.shapes import SHAPES, Limits, check_shape
from treeopt.trees.tree import Tree

if TYPE_CHECKING:
    from treeopt.records.benchmark import Benchmark
    from treeopt.runtime.session import Session

VERIFY_ROUNDS = 2


def search(
    run: RunDirectory,
    *,
    batch_sizes: Sequence[int] | Mapping[int, float] | None = None,
    budget: int,
    max_rank: int | None = None,
    max_depth: int | None = None,
    shape: str | None = None,
    engine: str | None = None,
    method: str | None = None,
    objective: str = "replay",
    context: int | None = None,
    measured_only: bool = False,
    calibration: str | None = None,
    profile_path: str | None = None,
    acceptance: dict[str, Any] | None = None,
    session: Session | None = None,
    verify: int = 0,
) -> Plan:
    """Choose the best tree per batch size from the run's trace, or from a calibration by path or name.

    By default for all batch sizes of the profile. With ``verify`` the session decodes with so many of the best
    candidates, and the fastest is taken. ``engine`` (and its ``method``) sets the limits to what it can take.
    """
    used, source = read_planned(run, calibration)
    if acceptance is not None:
        measured = source.meta.get("acceptance")
        check_rule(measured or {"rule": "greedy"}, acceptance, f"{used} holds")
    timed, latencies = find_latencies(run, profile_path, own=calibration is None) or (None, None)
    if latencies is not None and profile_path is None:
        check_same_model(source, latencies, run)
    elif latencies is None and run.profile.exists():
        note(f"Planning without latencies; to use the run's, pass --profile {run.profile}.")
    if latencies is not None and (caution := upper_bound(latencies)):
        note(caution)
    if batch_sizes is None:
        batch_sizes = latencies.batch_sizes if latencies else (1,)
    limits: dict[str, Any] = {"budget": budget, "max_rank": max_rank, "max_depth": max_depth, "shape": shape}
    limits, warnings = within_engine(limits, source, engine, method, batch_sizes)
    options: dict[str, Any] = {
        **limits,
        "objective": objective,
        "context": context,
        "measured_only": measured_only,
        "inputs": inputs_of(*(file for file in (used, timed) if file)),
    }
    with progress("Searching", None):
        plan = plan_trees(source, latencies, batch_sizes=batch_sizes, **options)
    if verify:
        mixed = isinstance(batch_sizes, Mapping)
        if isinstance(source, Probe):
            raise InvalidInput(
                "--verify is for rules under which the text does not depend on the tree: leave it out, and check the "
                "plan with treeopt bench."
            )
        if session is None or latencies is None or mixed or not isinstance(source, RankTrace):
            raise InvalidInput(
                "--verify decodes for real, one batch size at a time: it needs the run's own trace, a profile, "
                "and batch sizes without shares."
            )
        proofs = {entry.batch_size: _verified(run, session, plan, entry, source, verify) for entry in plan.entries}
        take = {batch: (proof.size, proof.depth) for batch, proof in proofs.items()}
        plan = plan_trees(source, latencies, batch_sizes=batch_sizes, take=take, **options)
        proven = tuple(replace(entry, verified=proofs[entry.batch_size]) for entry in plan.entries)
        plan = replace(plan, entries=proven)
        discard(run.partial("verify"))
    entries = tuple(replace(entry, warnings=[*entry.warnings, *warnings]) for entry in plan.entries)
    plan = replace(plan, entries=entries)
    plan.save(run.plan)
    note_warnings(plan)
    return plan


def note_warnings(plan: Plan) -> None:
    """Each of the plan's warnings once, with the batch sizes that it is for."""
    for warning in dict.fromkeys(warning for entry in plan.entries for warning in entry.warnings):
        which = [str(entry.batch_size) for entry in plan.entries if warning in entry.warnings]
        note(warning if len(which) == len(plan.entries) else f"Batch size {', '.join(which)}: {warning}")


def within_engine(
    limits: dict[str, Any],
    source: RankTrace | Probe | Calibration,
    engine: str | None,
    method: str | None,
    batch_sizes: Collection[int],
) -> tuple[dict[str, Any], list[str]]:
    """The given limits and an engine's together, as options of `plan_trees`; and what to warn of.

    Raises InvalidInput for an engine that cannot run the calibrated drafter, or a shape it cannot take.
    """
    given = {name: value for name, value in limits.items() if value is not None}
    if engine is None:
        if method is not None:
            raise InvalidInput("--method is one of an engine's: say which engine with --for.")
        return given, []
    from treeopt.export import check_rule_of, method_of

    meta = source.meta
    way = method_of(engine, (meta.get("drafter") or {}).get("kind"), method)
    warnings = check_rule_of(meta.get("acceptance"), way, engine)
    names = list(SHAPES)
    # Gaps are worth little where they are allowed, and a tree without them can go to every engine.
    wanted = given.get("shape", "sibling-closed" if way.shape == "any" else way.shape)
    check_shape(wanted)
    if names.index(wanted) < names.index(way.shape):
        raise InvalidInput(
            f"--shape must be {way.shape} or stricter for {engine}, but got {wanted}: leave --shape out."
        )
    most = {
        "max_rank": way.max_rank,
        "max_depth": way.max_depth,
        "budget": None if way.max_nodes is None else way.max_nodes + 1,
    }
    free = {name: given[name] for name in most if name in given}
    for name, limit in most.items():
        if limit is not None:
            given[name] = min(given.get(name, limit), limit)
    if given["budget"] < limits["budget"]:
        warnings.append(f"{engine} takes {way.max_nodes} choices at most: the budget is {given['budget']} rows.")
    if way.max_batch_size is not None and max(batch_sizes) > way.max_batch_size:
        warnings.append(
            f"{engine} decodes at most {way.max_batch_size} sequence at a time with {way.name}; larger batch sizes "
            "are plans for elsewhere."
        )
    return {**given, "shape": wanted, "engine": {"name": engine, "method": way.name}, "free": free}, warnings


def upper_bound(latencies: LatencyProfile) -> str | None:
    """Why the speedups are upper bounds; None where whole steps were measured.

    >>> from treeopt.records.profile import StepTiming
    >>> upper_bound(LatencyProfile((), (StepTiming(1, 1, 1, 0, (2.0,)),), info={"measures": "linear layers"}))
    'The profile measures linear layers alone: the speedups are upper bounds.'
    """
    measures = latencies.info.get("measures", "step")
    if measures == "step":
        return None
    if measures == ANALYTICAL:
        return (
            "Nothing was measured: the step latencies are computed, without scheduling, sampling and start of "
            "kernels, so the speedups are upper bounds. Measure with: treeopt profile"
        )
    return f"The profile measures {measures} alone: the speedups are upper bounds."


def finalists(entry: PlanEntry, count: int) -> list[tuple[int, int]]:
    """(size, depth) of the ``count`` sizes with the best prediction, and of the chosen one's neighbours."""
    curve = {point.size: point for point in entry.curve if point.size > 1}
    best = sorted(curve.values(), key=lambda point: -point.rate)[:count]
    near = [curve[size] for size in (entry.size - 1, entry.size, entry.size + 1) if size in curve]
    return sorted({(point.size, point.depth) for point in (*best, *near)})


def _verified(
    run: RunDirectory, session: Session, plan: Plan, entry: PlanEntry, trace: RankTrace, count: int
) -> Verified:
    """The fastest of the finalists by real decoding, and its speed measured afresh on other prompts.

    What won may have won by luck, so its speed in that contest is an overestimate and is not quoted.
    Neither half of the prompts was calibrated on.
    """
    from treeopt.pipeline.decoding import Decoding, decode, held_out_conversations
    from treeopt.runtime.measure.bench import Entrant

    limits = plan.limits(Limits())
    trees: dict[str, Tree | None] = {"plain": None}
    for size, depth in finalists(entry, count):
        family = grow(trace, objective=plan.objective or "replay", **asdict(replace(limits, max_depth=depth)))
        trees[f"{size} rows, depth {depth}"] = family.tree(size)
    conversations = held_out_conversations(run, session, trace, len(session.prompts.conversations))
    half = min(len(conversations) // 2, max(24, 10 * entry.batch_size))  # bench takes the first ones
    if half < 1:
        raise InvalidInput("--verify needs at least 2 held-out prompts, one to choose by and one to measure on.")
    folder = run.partial("verify") / f"batch-size-{entry.batch_size}"
    first = Decoding(
        session,
        trace,
        {name: Entrant(tree) for name, tree in trees.items()},
        batch_size=entry.batch_size,
        rounds=VERIFY_ROUNDS,
        max_new_tokens=trace.meta.get("max_new_tokens", 128),
        folder=folder / "contest",
    )
    contest = decode(first, conversations[-half:])
    ranking = [(ratio.value, name) for name in trees if (ratio := contest.speedup(name)) is not None]
    if not ranking:
        raise InvalidInput("--verify timed nothing: the held-out prompts never fill a batch of this size.")
    winner = max(ranking)[1]
    tree = trees[winner]
    afresh = {name: first.entrants[name] for name in ("plain", winner)}
    proof = decode(replace(first, entrants=afresh, folder=folder / "afresh"), conversations[:half])
    return Verified(
        size=len(tree) if tree else 1,
        depth=tree.depth if tree else 0,
        finalists=[Decoded(**_result(contest, name)) for name in trees],
        prompts=half,
        afresh=DecodedAfresh(**_result(proof, winner), prompts=half),
    )


def _result(bench: Benchmark, name: str) -> dict[str, Any]:
    contender = bench.contender(name)
    return {
        "name": name,
        "size": contender.size,
        "tokens_per_step": contender.tokens_per_step,
        "tokens_per_s": contender.tokens_per_s,
        "speedup": bench.speedup(name),
    }


def check_same_model(source: RankTrace | Probe | Calibration, profile: LatencyProfile, run: RunDirectory) -> None:
    """Raise InvalidInput where the run's own profile is of another model, drafter or rule than was calibrated.

    Drafters that differ in their weights only cost the same.
    """
    info = source.meta
    ours, theirs = ((record.get("provenance") or {}) for record in (info, profile.info))
    drafter, timed = info.get("drafter") or {}, theirs.get("drafter") or {}
    differs: list[tuple[str, Any, Any]] = [("model", ours.get("model"), theirs.get("model"))]
    if not same_drafter(drafter, timed, weights=False):
        keys = ("id", "kind", "num_heads", "num_layers")
        names = [", ".join(f"{key} {one[key]}" for key in keys if one.get(key)) for one in (drafter, timed)]
        differs.append(("drafter", names[0], names[1]))
    for what, mine, other in differs:
        if mine and other and mine != other:
            raise InvalidInput(
                f"A plan needs latencies of the {what} that was calibrated, {mine}, but {run.profile} is of "
                f"{other}. Measure again with: treeopt profile"
            )
    if info.get("acceptance") and theirs.get("acceptance"):
        check_rule(theirs["acceptance"], info["acceptance"], f"{run.profile} holds", command="profile")
    if profile.info.get("measures") == ANALYTICAL and drafter.get("kind") not in (None, "medusa"):
        note(f"The latencies are computed with Medusa heads; drafting with {drafter['kind']} costs otherwise.")
