"""Search: the best tree for each batch size, from what was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeopt.engines.base import Method
from treeopt.engines.plans import check_rule_of, instead_of
from treeopt.engines.registry import method_of, removal_notes, tree_method_of, with_engine
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files.options import with_given
from treeopt.latency.roofline import MEASURES as ANALYTICAL
from treeopt.pipeline.copied import search_copied
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.drafters import BLOCKS
from treeopt.records.inputs import Accuracies, broken, find_latencies, inputs_of, read_planned
from treeopt.records.options import SearchOptions, TreeLimits
from treeopt.records.origins import Origin, Provenance, check_same_origin, same_origin
from treeopt.records.plan import Plan, PlannedEngine
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.rules import rule_of
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import progress
from treeopt.report.verdict import timing_caveats
from treeopt.report.wording import count
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MAX_RANK

NO_LIMITS = TreeLimits()
ONE_BLOCK = (
    "A block of another length has other guesses, so only the length that was served is planned. To compare another: serve it, and "
    "import its counts in a run of its own."
)


def search_in_memory(
    calibration: RankTrace | Calibration | Probe | str | Path | None,
    profile: LatencyProfile | str | Path | None,
    *,
    run: str | Path | RunDirectory | None,
    default: str,
    options: SearchOptions,
    limits: TreeLimits,
) -> Plan:
    """The plan of a search in the run directory, or beside it on given results, which are laid out as files.

    Beside it the plan is kept only where ``run`` is said; ``default`` is the run where nothing is given.
    """
    given = {"calibration": calibration, "profile": profile}
    records = [one for one in given.values() if one is not None and not isinstance(one, str | Path)]
    named = {name: str(result) for name, result in given.items() if isinstance(result, str | Path)}
    if not records and (run is not None or calibration is None):
        directory = RunDirectory.of(run or default)
        with directory.writing():
            return search(directory, with_given(options, **named), limits)
    if calibration is None:
        named["calibration"] = str(read_planned(RunDirectory.of(run or default))[0])
    with RunDirectory.holding(*records) as directory:
        if "calibration" in named and "profile" not in named and profile is not None:
            named["profile"] = str(directory.profile)  # beside a calibration by name it must be named too
        plan = search(directory, with_given(options, **named), limits)
    if run is not None:
        kept = RunDirectory.of(run)
        with kept.writing():
            plan.save(kept.plan)
    return plan


def search(run: RunDirectory, options: SearchOptions, limits: TreeLimits = NO_LIMITS) -> Plan:
    """Choose the best tree per batch size from the run's trace, or from a calibration by path or name."""
    calibration, profile = options.calibration, options.profile
    if calibration is None and run.requests.exists():
        return _kept(run, search_copied(run, options, limits))
    options = with_engine(options)
    used, record = read_planned(run, calibration)
    if why := broken(record):
        raise InvalidInput(f"{why} Nothing is planned from {used}.")
    timed, latencies = find_latencies(run, profile, own=calibration is None) or (None, None)
    request, warnings = request_of(record, latencies, options, limits)
    if latencies is not None and timed is not None:
        warnings += checked_latencies(record, latencies, run, timed, request.sizes)
    elif run.profile.exists():
        warnings.append(f"Planned without latencies; to use the run's, pass `profile={run.profile}`.")
    with progress("Searching", None):
        plan = plan_trees(record, latencies, request)
        if request.engine and request.limits.shape == "chain" and request.dynamic is None and limits.shape is None:
            warnings += _left_out(plan, record, latencies, options, limits)
    inputs = inputs_of(*(file for file in (used, timed) if file))
    return _kept(run, replace(plan.with_warnings(warnings), inputs=inputs))


def _left_out(
    plan: Plan, record: Accuracies, latencies: LatencyProfile | None, options: SearchOptions, limits: TreeLimits
) -> list[str]:
    """What the trees would bring that an engine of chains does not take."""
    wanted = replace(options, engine=None, batch_sizes=plan.mix or [entry.batch_size for entry in plan.entries])
    request, _ = request_of(record, latencies, wanted, replace(limits, method=None))
    pairs = zip(plan_trees(record, latencies, request).entries, plan.entries, strict=True)
    better = [(best.chosen, taken.chosen) for best, taken in pairs if best.chosen.rate > taken.chosen.rate]
    trees = [instead_of(best, chain) for best, chain in better if best.size > best.depth + 1]
    return [f"{options.engine} takes chains only.", *trees] if trees else []


def _kept(run: RunDirectory, plan: Plan) -> Plan:
    """The plan as the run keeps it from now on; the earlier one if it says the same, so that its benchmarks stay its own."""
    try:
        earlier = run.read_plan() if run.plan.exists() else None
    except InvalidInput:  # damaged, and about to be replaced
        earlier = None
    if earlier and earlier.provenance and earlier == replace(plan, provenance=earlier.provenance):
        plan = earlier
    else:
        plan = replace(plan, provenance=Provenance.here())
    plan.save(run.plan)
    return plan


def request_of(
    record: Accuracies, latencies: LatencyProfile | None, options: SearchOptions, trees: TreeLimits = NO_LIMITS
) -> tuple[PlanRequest, list[str]]:
    """The request of a search, within limits that the engine can take too, and warnings.

    Raises InvalidInput for an engine that cannot run the calibrated drafter, a shape or a batch size it cannot take.
    """
    engine, batch_sizes = options.engine, options.batch_sizes
    if engine is None and trees.method is not None:
        raise InvalidInput("`method` belongs to an engine: name the `engine`.")
    max_rank = MAX_RANK if trees.max_rank is None else trees.max_rank
    given = Limits(options.budget, trees.max_depth, max_rank, trees.shape or Limits.shape)
    sizes = batch_sizes if batch_sizes is not None else latencies.batch_sizes if latencies else (1,)
    served = served_blocks(record)
    if engine is None:
        request = PlanRequest(given, sizes, context=options.context, measured_only=trees.measured_only, lengths=served)
        return request, [ONE_BLOCK] if served else []
    way = way_for(engine, trees.method, sizes, record, latencies)
    limits = limits_for(engine, way, given, trees)
    kept, left_out = sizes_for(engine, way, sizes, asked=batch_sizes is not None)
    warnings = [*check_rule_of(record.meta.get("acceptance"), way), *removal_notes(way), *left_out]
    timed = {p.batch_size for p in latencies.dynamic} if latencies else set()
    if way.limits.dynamic and (bare := [str(size) for size in kept if size not in timed]):
        warnings.append(
            f"No dynamic trees were timed at batch size {', '.join(bare)}, so chains alone are compared there. To time some: "
            f"treeopt profile --batch-size {','.join(bare)} --overwrite"
        )
    if served:
        warnings.append(ONE_BLOCK)
    elif way.limits.only_chains and (record.meta.get("drafter") or {}).get("widest"):
        served = (record.num_heads,)
        warnings.append(
            f"{engine} takes the length as the width of the block, so chains that end before the block does were left out. To "
            "compare widths, calibrate each in a run of its own (`draft_depth`), and: treeopt compare"
        )
    request = PlanRequest(
        limits,
        kept,
        context=options.context,
        measured_only=trees.measured_only,
        engine=PlannedEngine(name=engine, method=way.name),
        lengths=served,
        **drafts_of(way),
    )
    return request, warnings


def served_blocks(record: Accuracies) -> tuple[int, ...]:
    """Lengths that an engine served of a drafter that guesses a block at once; empty for any other record."""
    kind = (record.meta.get("drafter") or {}).get("kind")
    if kind not in BLOCKS or record.meta.get("source") != ENGINE_LOG:
        return ()
    return tuple(map(int, record.meta.get("by_length") or {})) or (record.num_heads,)


def drafts_of(way: Method) -> dict[str, Any]:
    """The drafts that an engine's method takes, as options of a `PlanRequest`."""
    return {"takes": Limits.shape if way.limits.shape == "any" else way.limits.shape, "dynamic": way.limits.anew}


def way_for(
    engine: str, method: str | None, sizes: Collection[int], record: Accuracies, latencies: LatencyProfile | None
) -> Method:
    """The engine's method that is planned for: the one named, that of its dynamic trees where they are known, or the usual."""
    kind = (record.meta.get("drafter") or {}).get("kind")
    way = method_of(engine, kind, method)
    has_pools = getattr(record, "pools", None) is not None
    if has_pools and latencies is not None and latencies.dynamic:
        trees = tree_method_of(engine, kind, rule_of(record.meta.get("acceptance")), sizes)
        return way if method or trees is None else trees
    if way.limits.dynamic:
        lacking = "profile has no dynamic trees" if has_pools else "calibration has no pools of dynamic trees"
        hint = "treeopt calibrate --topk 2,4,8, then treeopt profile, then search again"
        raise InvalidInput(f"{engine} with {way.name} takes dynamic trees, but the {lacking}: {hint}.")
    return way


def sizes_for(
    engine: str, way: Method, sizes: Sequence[int] | Mapping[int, float], *, asked: bool
) -> tuple[Sequence[int] | Mapping[int, float], list[str]]:
    """The batch sizes that the engine's method decodes, and which of the profile's are left out, in a sentence.

    asked : whether they were asked for, and are not the profile's
    """
    most = way.max_batch_size
    left = [size for size in sizes if most is not None and size > most]
    if most is None or not left:
        return sizes, []
    said = f"{engine} with {way.name} decodes at most {count(most, 'sequence')} at once"
    which = ", ".join(map(str, left))
    if asked:
        raise InvalidInput(f"{said}, but got `batch_size={which}`.")
    if len(left) == len(sizes):
        raise InvalidInput(f"{said}, but the profile has only {which}: treeopt profile --batch-size {most} adds it.")
    return [size for size in sizes if size not in left], [f"{said}. Left out of the profile's batch sizes: {which}."]


def limits_for(engine: str, way: Method, given: Limits, trees: TreeLimits) -> Limits:
    """The given limits and those of an engine's method together; rank and shape are the engine's by default."""
    if way.limits.copies:
        raise InvalidInput(
            f"{engine} with {way.name} runs drafters that copy text, which are planned for from requests: no tree goes there."
        )
    only_chains = way.limits.shape == "chain"
    if only_chains and trees.shape not in (None, "chain"):
        raise InvalidInput(f"`shape` must be chain for {engine}, but got {trees.shape}.")
    depths, ranks = (
        [n for n in pair if n is not None]
        for pair in ((given.max_depth, way.limits.max_depth), (trees.max_rank, way.limits.max_rank))
    )
    return Limits(
        given.budget, min(depths, default=None), min(ranks, default=MAX_RANK), "chain" if only_chains else given.shape
    )


def checked_latencies(
    record: Accuracies, profile: LatencyProfile, run: RunDirectory, file: Path, sizes: Sequence[int]
) -> list[str]:
    """What speaks against planning with a profile: noise, another number format or device, computed steps, or parts of steps.

    Raises InvalidInput for a run's own profile of another model, drafter or rule, OutOfRange for batch sizes it lacks.
    """
    notes = timing_caveats(profile)
    info, own = record.meta, file == run.profile
    measured, timed = Origin.of(info), Origin.of_latencies(profile.info, profile.runtime)
    if own:
        what = f"{file} (there) and what was calibrated (here)"
        check_same_origin(timed, measured.anywhere, what, f"Time steps again: {run.command('profile', '--overwrite')}")
    if differences := same_origin(timed, measured):
        notes.append(
            f"{file} (there) differs from what was calibrated (here) in {', '.join(differences)}: speedups are for there."
        )
    kind, measures = (info.get("drafter") or {}).get("kind"), profile.info.get("measures", "step")
    if measures == ANALYTICAL:
        drafts = ((profile.info.get("roofline") or {}).get("drafter") or {}).get("kind")
        other = "" if kind in (None, drafts) else f" for drafting with {drafts}, while {kind} takes another time"
        notes.append(
            f"Nothing was measured: the step latencies are computed{other}. The speedups are estimates: time steps to know."
        )
    elif profile.part:
        notes.append(f"The profile measures {profile.part} alone: the speedups are upper bounds.")
    if missing := sorted(set(sizes) - set(profile.batch_sizes)):
        have, lacking = (",".join(map(str, several)) for several in (profile.batch_sizes, missing))
        remedy = (
            "Measure them as the others were (treeopt profile)" if own else "Plan for those, or pass another `profile`"
        )
        raise OutOfRange(
            f"The profile covers batch sizes {have.replace(',', ', ')}, but {lacking} was asked. {remedy}."
        )
    return notes
