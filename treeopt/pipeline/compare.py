"""Compare: is a plan still right for other traffic, would groups gain by plans of their own, which drafter is fastest.

A side of a comparison is a run directory, a file of one, a result in memory, or what a serving engine counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from treeopt.arms.gate import arms_gate, counts_gate
from treeopt.arms.model import LAUNCH
from treeopt.arms.tuned import read_arms
from treeopt.engines.imports import kind_of_file, read_measurement
from treeopt.engines.measured.survival import CHAIN, OPTIMISTIC
from treeopt.engines.plans import planned_method
from treeopt.errors import InvalidInput
from treeopt.files import places, storage
from treeopt.growth.source import Source, source_of
from treeopt.pipeline.drafters import compare_drafters
from treeopt.pipeline.search import drafts_of, request_of, served_blocks
from treeopt.planning.compared import Compared, Comparison, GroupsCompared
from treeopt.planning.planner import plan_trees
from treeopt.planning.regret import group_losses, plan_losses
from treeopt.planning.request import REQUEST, PlanRequest
from treeopt.records.benchmark import Benchmark
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.drafters import COUNTED
from treeopt.records.inputs import Accuracies, Result, broken, load_result, read_grown_on, read_planned, read_timed
from treeopt.records.options import CompareOptions, SearchOptions, TreeLimits
from treeopt.records.origins import Origin, check_same_origin, same_origin
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.records.stale import stale_plan
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import progress

PLAN_TOLERANCE, GATE_TOLERANCE = 0.5, 5.0  # per cent that may be lost by a plan, and between two measurements
OF_PLANS = (CHAIN, OPTIMISTIC, "Survival was measured")  # notes that a comparison of what was served does not need
Given = str | Path | RunDirectory | Result


@dataclass(frozen=True)
class Side:
    """What is compared: accuracies, the plan that was made from them and the latencies, as far as they are there.

    sha256 : of the file with the accuracies
    """

    name: str
    record: Accuracies | None = None
    plan: Plan | None = None
    profile: LatencyProfile | None = None
    sha256: str = ""
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> Source | None:
        return source_of(self.record) if self.record is not None else None

    @property
    def counts(self) -> Calibration | None:
        """What an engine counted, where that is all; None where there are a plan or latencies, or another record."""
        is_counted = self.meta.get("source") == ENGINE_LOG and self.plan is None and self.profile is None
        return self.source.calibration if is_counted and self.source else None

    @property
    def meta(self) -> Mapping[str, Any]:
        if self.record is not None:
            return self.record.meta
        return {"drafter": self.plan.drafter, "acceptance": self.plan.acceptance} if self.plan else {}

    @property
    def origin(self) -> Origin:
        """The model, the drafter and the kind of rule, which the other side must have too."""
        origin = Origin.of(self.meta).anywhere
        rule = {key: origin.acceptance[key] for key in origin.acceptance if key == "rule"}
        return replace(origin, revision=None, acceptance=rule)


def compare(
    first: Given, *others: Given, profile: LatencyProfile | str | Path | None = None, options: CompareOptions
) -> Comparison:
    """Two sources; the groups of one; or run directories of several drafters. See `treeopt.compare`."""
    batch_size, budget, noise, tolerance = options.batch_size, options.budget, options.noise, options.tolerance
    kinds = [kind_of(given) for given in (first, *others)]
    if isinstance(profile, str | Path):
        profile = LatencyProfile.load(places.find_shipped("profiles", str(profile)))
    share, gate_share = (
        (usual if tolerance is None else tolerance) / 100 for usual in (PLAN_TOLERANCE, GATE_TOLERANCE)
    )
    if others and kinds[0] == "arms":
        before, *after = (
            given.path if isinstance(given, RunDirectory) else Path(str(given)) for given in (first, *others)
        )
        arms = read_arms([before])
        for path, what in zip(after, kinds[1:], strict=True):
            if what != "arms":
                raise InvalidInput(f"{before} has settings that were run, but {path} has none.")
        launch = LAUNCH if noise is None else noise / 100
        return arms_gate((before.name, after[-1].name), arms, read_arms(after), gate_share, launch)
    if noise is not None:
        raise InvalidInput(
            "`noise` is between launches of settings that were run, and none are compared: leave it out."
        )
    if others and {*kinds} == {"run"}:
        runs = [RunDirectory.of(cast(str | Path | RunDirectory, given)) for given in (first, *others)]
        drafters = [Origin(drafter=_side_of_run(run).origin.drafter) for run in runs]
        if any(same_origin(drafters[0], other) for other in drafters[1:]):
            if profile is not None:
                raise InvalidInput("Drafters are compared by the latencies of their own runs: leave `profile` out.")
            return compare_drafters(runs, batch_size=batch_size)
    a = side_of([first])
    if a.plan is not None and a.plan.copies:
        raise InvalidInput(
            f"{a.name} has a plan of copied text, and no logs are compared: search for the other log anew."
        )
    a = replace(a, profile=profile or a.profile)
    if not others:
        return compare_groups(a, batch_size, budget, share)
    kind = (a.meta.get("drafter") or {}).get("kind")
    b = side_of(list(others), drafter=kind if kind in COUNTED else None)
    if a.counts is not None and b.counts is not None:
        check_alike(a, b)
        gate = counts_gate((a.name, b.name), a.counts, b.counts, gate_share)
        notes = [note for note in (*a.notes, *b.notes) if not note.startswith(OF_PLANS)]
        return replace(gate, notes=(*gate.notes, *dict.fromkeys(notes)))
    return compare_sides(a, b, batch_size, budget, share)


def compare_sides(a: Side, b: Side, batch_size: int | None, budget: int, tolerance: float) -> Compared:
    """How B differs from A, and what A's plan loses there."""
    if b.record is None:
        raise InvalidInput(f"{b.name} must have accuracies, but is a plan whose trace is not at hand: pass that.")
    latencies = a.profile or b.profile
    with progress("Comparing", None):
        plan = planned(a, latencies, batch_size, budget)
        check_alike(a, b)
        request = replace(taken_by_engine(plan), lengths=served_blocks(b.record))
        losses = plan_losses(plan, b.record, latencies, request)
    notes = [*a.notes, *b.notes]
    if b.sha256 and b.sha256 in plan.inputs.values():
        notes.append("The plan was made from the same answers, so what it loses there is in-sample, and too little.")
    if a.plan is None:
        notes.append(f"{a.name} has no plan: what a search would choose there now stands for it.")
    if latencies is None:
        notes.append(
            "There are no latencies, so tokens per step are compared, with as many rows as the plan's tree has."
        )
    if plan.mix:
        notes.append("The plan has one tree for a mix. It is compared with the best tree for each batch size alone.")
    if source_of(b.record).num_ranks == 1 and plan.entries[0].tree.max_rank > 0:
        notes.append(f"{b.name} tells of chains alone, so the plan's best chain is judged, not its tree.")
    if why := broken(b.record):
        notes.append(f"{b.name}: {why}")
    for side in (a, b):
        if side.source and side.source.answers is None:
            notes.append(
                f"{side.name} has no conversations: its counts are taken as independent, so its noise is larger."
            )
    return Compared(
        names=(a.name, b.name), losses=tuple(losses), tolerance=tolerance, notes=tuple(dict.fromkeys(notes))
    )


def taken_by_engine(plan: Plan) -> PlanRequest:
    """A request for all drafts that the plan's engine takes; for all drafts where it was planned for none."""
    method = planned_method(plan)
    return REQUEST if method is None else replace(REQUEST, **drafts_of(method))


def planned(side: Side, latencies: LatencyProfile | None, batch_size: int | None, budget: int) -> Plan:
    """The plan of a side, or the one that a search would make; of the batch size that is asked for."""
    if side.plan is None:
        assert side.record is not None
        shape = "chain" if source_of(side.record).num_ranks == 1 else None
        sizes = None if batch_size is None else (batch_size,)
        options = SearchOptions(budget=budget, batch_sizes=sizes)
        request, _ = request_of(side.record, latencies, options, TreeLimits(shape=shape))
        return plan_trees(side.record, latencies, request)
    if batch_size is None:
        return side.plan
    return replace(side.plan, entries=(side.plan.entry(batch_size),), schedule=[])


def compare_groups(
    side: Side, batch_size: int | None = None, budget: int = 64, tolerance: float = 0.005
) -> GroupsCompared:
    """What each group of a side's prompts loses by sharing its plan."""
    source = side.source
    if source is None or not source.is_exact:
        raise InvalidInput(f"Groups are compared in a trace, but {side.name} has none: pass a second source.")
    trace = cast(RankTrace, source.answers)
    with progress("Comparing groups", None):
        plan = planned(side, side.profile, batch_size, budget)
        losses = group_losses(plan, trace, side.profile, taken_by_engine(plan))
    return GroupsCompared(name=side.name, groups=tuple(losses), tolerance=tolerance)


def check_alike(a: Side, b: Side) -> None:
    """Raise InvalidInput where two sides are of other models, drafters or rules, as far as that is known."""
    check_same_origin(a.origin, b.origin, f"{a.name} (there) and {b.name} (here)")


def kind_of(given: Given) -> Literal["run", "arms", "result", "file", "counts"]:
    """What a source is.

    run    : a run directory
    arms   : settings that were run: a run directory that has nothing else, or a file
    result : a result in memory
    file   : a file that treeopt wrote, or a shipped name
    counts : what an engine counted
    """
    if isinstance(given, RunDirectory) or (isinstance(given, str | Path) and Path(given).is_dir()):
        run = RunDirectory.of(given)
        return "arms" if run.arms.exists() and not run.plan.exists() and not run.accuracies() else "run"
    if not isinstance(given, str | Path):
        return "result"
    file = Path(given)
    if not file.exists():
        if str(given) in places.shipped("calibration"):
            return "file"
        raise InvalidInput(f"{given} does not exist.")
    schema = "treeopt." if file.suffix == ".npz" else _schema(file)
    if schema.startswith("treeopt."):
        return "arms" if schema.startswith("treeopt.arms/") else "file"
    return "counts" if kind_of_file(file) else "arms"


def side_of(given: Sequence[Given], *, drafter: str | None = None) -> Side:
    """A run directory, a file of ours, a shipped name, a result, or files of an engine's counters by one ``drafter``."""
    one, kind = given[0], kind_of(given[0])
    if kind in ("counts", "arms"):
        paths = [Path(str(path)) for path in given]
        what, measured = read_measurement(paths, drafter=drafter)
        return Side(f"{paths[-1].name} ({what})", measured.calibration, notes=measured.notes)
    if len(given) > 1:
        raise InvalidInput(f"B may be several files of an engine's counters, or one source, but got {len(given)}.")
    if kind == "run":
        return _side_of_run(RunDirectory.of(cast(str | Path | RunDirectory, one)))
    file = Path(str(one)) if kind == "file" else None
    name, result = (file.name, load_result(file)) if file else ("the given result", cast(Result, one))
    if isinstance(result, LatencyProfile | Benchmark | RequestLog):
        raise InvalidInput(f"Traces, calibrations, plans, runs and counters are compared, but {name} is none of them.")
    sha256 = storage.sha256_of(file) if file and file.is_file() else ""
    if not isinstance(result, Plan):
        return Side(name, result, sha256=sha256)
    if file is None:
        return Side(name, None, result)
    run = RunDirectory(file.parent)
    return Side(name, read_grown_on(run, result.inputs), result, read_timed(run, result.inputs), sha256)


def _side_of_run(run: RunDirectory) -> Side:
    plan = run.read_plan() if run.plan.exists() else None
    profile = run.read_profile() if run.profile.exists() else None
    if plan is not None and run.accuracies() in ([], [run.requests]):
        return Side(str(run.path), None, plan, profile)
    path, record = read_planned(run)
    notes = tuple(stale_plan(run, plan)) if plan else ()
    return Side(str(run.path), record, plan, profile, storage.sha256_of(path), notes)


def _schema(file: Path) -> str:
    """The schema of a JSON document; empty where there is none."""
    try:
        document = storage.load_json(file) if file.suffix == ".json" else None
    except InvalidInput:  # lines of JSON, or a log
        return ""
    return str(document.get("schema")) if isinstance(document, dict) else ""
