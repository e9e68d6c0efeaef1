"""Search: the best tree for each batch size, from what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.export.engine import Method
from treeopt.files.provenance import Provenance
from treeopt.files.shell import shell_word
from treeopt.files.storage import to_json
from treeopt.files.writing import discard
from treeopt.latency.roofline import MEASURES as ANALYTICAL
from treeopt.pipeline.groups import searched_for_groups
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.expected import PlannedEngine
from treeopt.records.inputs import Accuracies, find_latencies, inputs_of, other_origins, read_planned, sampled
from treeopt.records.origins import OURS, elsewhere
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.rules import check_rule, rule_of
from treeopt.records.rundir import RunDirectory
from treeopt.records.served import RECORDED
from treeopt.report.terminal import note, progress
from treeopt.report.wording import count
from treeopt.trees.shapes import SHAPES, Limits
from treeopt.trees.tree import MAX_RANK

if TYPE_CHECKING:
    from treeopt.runtime.session import Session


@dataclass(frozen=True)
class SearchOptions:
    """What a search is asked for, by the names of the command's options. None: the engine's, or the default.

    batch_sizes : of the profile by default; with shares of the time one tree is chosen for all
    engine      : sets the limits to what it can take, by one ``method`` of its
    sample      : conversations to plan with
    for_groups  : one of `treeopt.planning.groups.MODES`
    """

    budget: int = 64
    batch_sizes: Sequence[int] | Mapping[int, float] | None = None
    max_rank: int | None = None
    max_depth: int | None = None
    shape: str | None = None
    engine: str | None = None
    method: str | None = None
    objective: str = "replay"
    context: int | None = None
    measured_only: bool = False
    sample: int | None = None
    for_groups: str = "shared"


def search(
    run: RunDirectory,
    options: SearchOptions,
    *,
    calibration: str | None = None,
    profile_path: str | None = None,
    session: Session | None = None,
    verify: int = 0,
) -> Plan:
    """Choose the best tree per batch size from the run's trace, or from a calibration by path or name.

    With ``verify`` the session decodes with so many of the best candidates, and the fastest is taken.
    """
    used, record = read_planned(run, calibration)
    record, sample = sampled(record, options.sample)
    if options.sample is not None and sample is None:
        note("There are no more conversations, so all are planned with.")
    timed, latencies = find_latencies(run, profile_path, own=calibration is None) or (None, None)
    if latencies is not None and timed is not None:
        check_same_model(record, latencies, run, timed)
    elif latencies is None and run.profile.exists():
        note(f"Planning without latencies; to use the run's, pass --profile {shell_word(run.profile)}.")
    if latencies is not None and (caution := upper_bound(latencies)):
        note(caution)
    request, warnings = request_of(options, record, latencies)
    if latencies is not None and timed is not None:
        check_batch_sizes(request.sizes, latencies, run, timed)
    if verify and options.for_groups == "minimax":
        raise InvalidInput(
            "--verify takes the fastest tree, which is not what --for-groups minimax chooses: leave one out."
        )
    if verify and session and latencies is not None:
        where = elsewhere(latencies.runtime, latencies.info.get("provenance") or {}, session.provenance().record())
        if where:
            raise InvalidInput(
                f"--verify decodes with treeopt itself, but the latencies were timed {where}: what is fastest here may "
                "not be fastest there. Leave --verify out."
            )
    with progress("Searching", None):
        plan = plan_trees(record, latencies, request)
        plan = searched_for_groups(run, plan, record, latencies, request, mode=options.for_groups)
    if verify:
        from treeopt.pipeline.verify import verified

        plan = verified(run, session, plan, record=record, latencies=latencies, request=request, count=verify)
    entries = tuple(replace(entry, warnings=[*entry.warnings, *warnings]) for entry in plan.entries)
    plan = replace(plan, entries=entries, inputs=inputs_of(*(file for file in (used, timed) if file)), sample=sample)
    plan = replace(plan, provenance=_provenance(run, plan))
    plan.save(run.plan)
    discard(run.partial("verify"))
    note_warnings(plan)
    return plan


def _said(plan: Plan) -> Any:
    """What a plan's file says, but for its provenance."""
    return json.loads(to_json(replace(plan, provenance=None).document()))


def _provenance(run: RunDirectory, plan: Plan) -> dict[str, Any]:
    """Of a search just done; where the run's plan says the same already, of that: its benchmarks stay its own."""
    try:
        earlier = run.read_plan() if run.plan.exists() else None
    except InvalidInput:  # damaged, and about to be replaced
        earlier = None
    if earlier and earlier.provenance and _said(earlier) == _said(plan):
        return earlier.provenance
    return {key: value for key, value in Provenance().record().items() if value is not None}


def note_warnings(plan: Plan) -> None:
    """Each of the plan's warnings once, with the batch sizes that it is for."""
    for warning in dict.fromkeys(warning for entry in plan.entries for warning in entry.warnings):
        which = [str(entry.batch_size) for entry in plan.entries if warning in entry.warnings]
        note(warning if len(which) == len(plan.entries) else f"Batch size {', '.join(which)}: {warning}")


def request_of(
    options: SearchOptions, record: Accuracies, latencies: LatencyProfile | None
) -> tuple[PlanRequest, list[str]]:
    """The request that options make, with limits that their engine can take too, and what to warn of.

    Raises InvalidInput for an engine that cannot run the calibrated drafter, a shape or a batch size it cannot take.
    """
    from treeopt.export.write import check_rule_of, standing

    engine = options.engine
    if engine is None and options.method is not None:
        raise InvalidInput("--method belongs to an engine: name the engine with --for.")
    way = None if engine is None else way_for(engine, options, record, latencies)
    limits = limits_of(options, way)
    batch_sizes, left_out = sizes_of(options, way, latencies)
    request = PlanRequest(limits, batch_sizes, options.objective, options.context, options.measured_only)
    if engine is None or way is None:
        return request, []
    warnings = [*check_rule_of(record.meta.get("acceptance"), way, engine), *standing(way, engine), *left_out]
    if limits.budget < options.budget:
        warnings.append(f"{engine} takes {way.max_nodes} choices at most: the budget is {limits.budget} rows.")
    timed = {p.batch_size for p in latencies.dynamic} if latencies else set()
    if way.dynamic and (bare := [str(size) for size in batch_sizes if size not in timed]):
        warnings.append(
            f"No dynamic trees were timed at batch size {', '.join(bare)}, so chains alone are compared there. To time some: "
            f"treeopt profile --batch-size {','.join(bare)} --overwrite"
        )
    most_rank = max(limits.max_rank, MAX_RANK) if options.max_rank is None else options.max_rank
    wider = Limits(options.budget, options.max_depth, most_rank, limits.shape)
    planned = PlannedEngine(name=engine, method=way.name)
    return replace(request, engine=planned, wider=wider, dynamic=way.dynamic_limits), warnings


def way_for(engine: str, options: SearchOptions, record: Accuracies, latencies: LatencyProfile | None) -> Method:
    """The engine's method that is planned for: the one named, that of its dynamic trees where they are known, or the usual.

    Raises InvalidInput for a method of dynamic trees where none are known.
    """
    from treeopt.export.write import method_of, tree_method_of

    kind = (record.meta.get("drafter") or {}).get("kind")
    way = method_of(engine, kind, options.method)
    has_pools = getattr(record, "pools", None) is not None
    if has_pools and latencies is not None and latencies.dynamic:
        sizes = latencies.batch_sizes if options.batch_sizes is None else options.batch_sizes
        trees = tree_method_of(engine, kind, rule_of(record.meta.get("acceptance")), sizes)
        return way if options.method or trees is None else trees
    if way.dynamic:
        lacking = "profile has no dynamic trees" if has_pools else "calibration has no pools of dynamic trees"
        raise InvalidInput(f"{engine} with {way.name} takes dynamic trees, but the {lacking}: {RECORDED}.")
    return way


def sizes_of(
    options: SearchOptions, way: Method | None, latencies: LatencyProfile | None
) -> tuple[Sequence[int] | Mapping[int, float], list[str]]:
    """The batch sizes to plan for, and which of the profile's are left out, since the engine's method decodes fewer.

    Raises InvalidInput where those were asked for, or the profile has no others.
    """
    given = options.batch_sizes
    sizes = given if given is not None else latencies.batch_sizes if latencies else (1,)
    most = None if way is None else way.max_batch_size
    left = [size for size in sizes if most is not None and size > most]
    if way is None or most is None or not left:
        return sizes, []
    what, which = f"{options.engine} with {way.name}", ", ".join(map(str, left))
    if given is not None:
        raise InvalidInput(
            f"--batch-size must be at most {most} for {what}, which decodes no more sequences at once, but got {which}."
        )
    if len(left) == len(sizes):
        raise InvalidInput(
            f"{what} decodes at most {count(most, 'sequence')} at once, but the profile has only {which}: add what is "
            f"missing with: treeopt profile --batch-size {most}"
        )
    said = f"{what} decodes at most {count(most, 'sequence')} at once. Left out of the profile's batch sizes: {which}."
    return [size for size in sizes if size not in left], [said]


def limits_of(options: SearchOptions, way: Method | None) -> Limits:
    """The given limits and those of an engine's method together; InvalidInput for a shape that it cannot take."""
    # Gaps are worth little where they are allowed, and a tree without them can go to every engine.
    shape = options.shape or ("sibling-closed" if way is None or way.shape == "any" else way.shape)
    if way is None:
        return Limits(
            options.budget, options.max_depth, MAX_RANK if options.max_rank is None else options.max_rank, shape
        )
    names = list(SHAPES)
    if shape in names and names.index(shape) < names.index(way.shape):
        raise InvalidInput(
            f"--shape must be {way.shape} or stricter for {options.engine}, but got {shape}: leave --shape out."
        )

    def least(*limits: int | None) -> int | None:
        return min((limit for limit in limits if limit is not None), default=None)

    rows = None if way.max_nodes is None else way.max_nodes + 1
    max_rank = least(options.max_rank, way.max_rank)
    return Limits(
        least(options.budget, rows) or options.budget,
        least(options.max_depth, way.max_depth),
        MAX_RANK if max_rank is None else max_rank,
        shape,
    )


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
            "kernels, so the speedups are upper bounds. Measure the steps with treeopt profile."
        )
    return f"The profile measures {measures} alone: the speedups are upper bounds."


def check_same_model(record: Accuracies, profile: LatencyProfile, run: RunDirectory, file: Path) -> None:
    """Raise InvalidInput where the run's own profile is of another model, drafter or rule than was calibrated.

    Of a profile that was asked for by name, and of another number format or device, it is said.
    """
    info, theirs = record.meta, profile.info.get("provenance") or {}
    for what, mine, other in other_origins(record, profile):
        if file == run.profile and what in ("model", "drafter"):
            raise InvalidInput(
                f"A plan needs latencies of the {what} that was calibrated, {mine}, but {file} is of "
                f"{other}. Measure again with: {run.command('profile', '--overwrite')}"
            )
        note(
            f"{file} is of another {what} than was calibrated ({other}, not {mine}): the speedups are for that {what}."
        )
    if info.get("acceptance") and theirs.get("acceptance") and file == run.profile:
        check_rule(
            theirs["acceptance"], info["acceptance"], f"{file} holds", command=run.command("profile", "--overwrite")
        )
    kind = (info.get("drafter") or {}).get("kind")
    if profile.info.get("measures") == ANALYTICAL and kind not in (None, "medusa"):
        note(f"The latencies are computed for Medusa heads. Drafting with {kind} takes another time.")


def check_batch_sizes(wanted: Sequence[int], profile: LatencyProfile, run: RunDirectory, file: Path) -> None:
    """Raise OutOfRange for batch sizes that the profile does not have, with what adds them."""
    missing = sorted(set(wanted) - set(profile.batch_sizes))
    if not missing:
        return
    sizes, runtime = ",".join(map(str, missing)), profile.runtime
    roofline = profile.info.get("roofline") or {}
    source = next(iter(profile.info.get("inputs") or {}), "TABLE")
    if file != run.profile:
        remedy = "Plan for those, or pass another --profile."
    elif runtime.get("command"):
        told = run.command(
            "profile", "--command", runtime["command"], "--runtime", runtime.get("name"), "--batch-size", sizes
        )
        remedy = f"Add what is missing with: {told}"
    elif roofline:
        every = ",".join(map(str, sorted({*missing, *profile.batch_sizes})))
        device = (roofline.get("device") or {}).get("name")
        told = run.command("profile", "--analytical", device, "--model", source, "--batch-size", every)
        remedy = f"Compute them with: {told}"
    elif runtime.get("name") == OURS:
        remedy = f"Add what is missing with: {run.command('profile', '--batch-size', sizes)}"
    else:
        told = run.command("profile", "--from-csv", source, "--runtime", runtime.get("name") or "NAME")
        remedy = f"Time them there too, and add the table with: {told}"
    have = ", ".join(map(str, profile.batch_sizes))
    raise OutOfRange(f"The profile covers batch sizes {have}, but {sizes} was asked. {remedy}")
