"""Compare: is a plan still right for other traffic, would groups gain by plans of their own, which drafter is fastest.

A side of a comparison is a run directory, a file of one, a result in memory, or what a serving engine counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, cast

from treeopt.engines.imports import read_measurement
from treeopt.engines.plans import planned_trees
from treeopt.errors import InvalidInput
from treeopt.files import shipped, storage
from treeopt.files.writing import atomic_writer
from treeopt.growth.drift import measure_for, shifts
from treeopt.growth.source import source_of
from treeopt.pipeline.drafters import compare_drafters
from treeopt.pipeline.search import request_of
from treeopt.planning.compared import Compared, DraftersCompared, GroupsCompared
from treeopt.planning.planner import plan_trees
from treeopt.planning.regret import group_losses, plan_losses
from treeopt.planning.request import DYNAMIC
from treeopt.records.benchmark import Benchmark
from treeopt.records.drafters import COUNTED
from treeopt.records.inputs import Accuracies, changed, read_grown_on, read_planned, read_timed
from treeopt.records.load import Result, load_result
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.rules import marked_rule, rule_of, same_drafter
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.figures import style
from treeopt.report.figures.batches import drafters_chart
from treeopt.report.figures.chart import draw
from treeopt.report.terminal import progress

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
    def meta(self) -> Mapping[str, Any]:
        """What the record says of itself, or the plan."""
        if self.record is not None:
            return self.record.meta
        return {"drafter": self.plan.drafter, "acceptance": self.plan.acceptance} if self.plan else {}


def compare(
    first: Given,
    *others: Given,
    profile: LatencyProfile | str | Path | None = None,
    batch_size: int | None = None,
    budget: int = 64,
    tolerance: float = 0.5,
) -> Compared | GroupsCompared | DraftersCompared:
    """Two sources; the groups of one; or run directories of several drafters. See `treeopt.compare`."""
    runs = [RunDirectory.of(given) for given in (first, *others) if _is_run(given)]
    if others and len(runs) == 1 + len(others) and _have_other_drafters(runs):
        if profile is not None:
            raise InvalidInput("Drafters are compared by the latencies of their own runs: leave `profile` out.")
        return compare_drafters(runs, batch_size=batch_size)
    a = side_of([first])
    if profile is not None:
        a = replace(a, profile=_latencies(profile))
    if not others:
        return compare_groups(a, batch_size, budget, tolerance / 100)
    kind = (a.meta.get("drafter") or {}).get("kind")
    b = side_of(list(others), drafter=kind if kind in COUNTED else None)
    return compare_sides(a, b, batch_size, budget, tolerance / 100)


def compare_sides(a: Side, b: Side, batch_size: int | None, budget: int, tolerance: float) -> Compared:
    """How B differs from A, and what A's plan loses there."""
    if b.record is None:
        raise InvalidInput(
            f"{b.name} must have the accuracies of other traffic, but it is a plan whose trace is not at hand: pass a "
            "trace, a calibration, a run directory, or what an engine counted."
        )
    check_alike(a, b)
    latencies = a.profile or b.profile
    with progress("Comparing", None):
        plan = planned(a, latencies, batch_size, budget)
        way = planned_trees(plan)
        losses = plan_losses(plan, b.record, latencies, way.dynamic_limits if way else DYNAMIC)
        moved = shifts(a.record, b.record) if a.record is not None else []
    notes = [*a.notes, *b.notes]
    if a.record is None:
        notes.append(f"The trace that {a.name} was made from is not at hand, so depths are not compared.")
    if b.sha256 and b.sha256 in plan.inputs.values():
        notes.append("The plan was made from the same answers, so what it loses there is in-sample, and too little.")
    if latencies is None:
        notes.append(
            "There are no latencies, so tokens per step are compared, with as many rows as the plan's tree has."
        )
    if plan.mix:
        notes.append("The plan has one tree for a mix. It is compared with the best tree for each batch size alone.")
    tree = plan.entries[0].tree
    if source_of(b.record).num_ranks == 1 and tree.max_rank > 0:
        notes.append(f"{b.name} tells of chains alone, so the plan's best chain is judged, not its tree.")
    for side in (a, b):
        if side.record is not None and source_of(side.record).answers is None:
            notes.append(
                f"{side.name} has no conversations: its counts are taken as independent, which they are not, so its "
                "noise is larger than is said."
            )
    measure = measure_for(*(record for record in (a.record, b.record) if record is not None))
    return Compared(
        names=(a.name, b.name),
        measure=measure,
        shifts=tuple(moved),
        losses=tuple(losses),
        tolerance=tolerance,
        notes=tuple(dict.fromkeys(notes)),
    )


def planned(side: Side, latencies: LatencyProfile | None, batch_size: int | None, budget: int) -> Plan:
    """The plan of a side, or the one that a search would make; of the batch size that is asked for."""
    if side.plan is None:
        assert side.record is not None
        shape = "chain" if source_of(side.record).num_ranks == 1 else None
        asked = None if batch_size is None else (batch_size,)
        request, _ = request_of(side.record, latencies, budget=budget, batch_sizes=asked, shape=shape)
        return plan_trees(side.record, latencies, request)
    if batch_size is None:
        return side.plan
    return replace(side.plan, entries=(side.plan.entry(batch_size),), schedule=[])


def compare_groups(side: Side, batch_size: int | None, budget: int, tolerance: float) -> GroupsCompared:
    """What the groups of a run lose by sharing its plan."""
    source = source_of(side.record) if side.record is not None else None
    if source is None or not source.is_exact:
        raise InvalidInput(
            f"One source alone has its groups compared, which takes a trace, but {side.name} has none: pass a second source."
        )
    trace = cast(RankTrace, source.answers)
    with progress("Comparing groups", None):
        plan = planned(side, side.profile, batch_size, budget)
        losses = group_losses(plan, trace, side.profile)
    return GroupsCompared(name=side.name, groups=tuple(losses), tolerance=tolerance)


def check_alike(a: Side, b: Side) -> None:
    """Raise InvalidInput where two sides are of other models, drafters or rules, as far as that is known."""
    ours, theirs = a.meta, b.meta
    models = [(meta.get("provenance") or {}).get("model") for meta in (ours, theirs)]
    if None not in models and models[0] != models[1]:
        raise InvalidInput(
            f"Traffic is compared for one model, but {a.name} is of {models[0]}, {b.name} of {models[1]}."
        )
    drafters = [meta.get("drafter") or {} for meta in (ours, theirs)]
    if not same_drafter(*drafters):
        names = [one.get("id") or one.get("kind") for one in drafters]
        raise InvalidInput(
            f"Traffic is compared for one drafter, but {a.name} is of {names[0]}, {b.name} of {names[1]}. To compare "
            "drafters, pass their run directories."
        )
    rules = [meta.get("acceptance") for meta in (ours, theirs)]
    if None not in rules and rule_of(rules[0]) != rule_of(rules[1]):
        said = [marked_rule(rule or {}) for rule in rules]
        raise InvalidInput(f"Traffic is compared under one rule, but {a.name} is of {said[0]}, {b.name} of {said[1]}.")


def side_of(given: Sequence[Given], *, drafter: str | None = None) -> Side:
    """A run directory, a file of ours, a shipped name, a result, or files of an engine's counters by one ``drafter``."""
    one = given[0]
    if _is_run(one):
        _alone(given)
        return _side_of_run(RunDirectory.of(one))
    if not isinstance(one, str | Path):
        _alone(given)
        return _side_of_result("the given result", cast(Result, one))
    if _is_ours(one):
        _alone(given)
        found = _side_of_result(Path(one).name, load_result(one), RunDirectory(Path(one).parent))
        return replace(found, sha256=storage.sha256_of(Path(one))) if Path(one).is_file() else found
    paths = [Path(str(path)) for path in given]
    kind, measured = read_measurement(paths, drafter=drafter)
    return Side(f"{paths[-1].name} ({kind})", measured.source, notes=measured.notes)


def _side_of_run(run: RunDirectory) -> Side:
    plan = run.read_plan() if run.plan.exists() else None
    profile = run.read_profile() if run.profile.exists() else None
    if plan is not None and not any(file.exists() for file in (run.trace, run.probe, run.calibration)):
        return Side(str(run.path), None, plan, profile)
    path, record = read_planned(run)
    stale = (
        [f"{run.plan} was made from another {name} than is there now." for name in changed(run, plan.inputs)]
        if plan
        else []
    )
    return Side(str(run.path), record, plan, profile, storage.sha256_of(path), tuple(stale))


def _side_of_result(name: str, result: Result, folder: RunDirectory | None = None) -> Side:
    if isinstance(result, LatencyProfile | Benchmark):
        raise InvalidInput(
            f"Traces, calibrations, plans, run directories and engines' counters are compared, but {name} is none of them."
        )
    if not isinstance(result, Plan):
        return Side(name, result)
    if folder is None:
        return Side(name, None, result)
    return Side(name, read_grown_on(folder, result.inputs), result, read_timed(folder, result.inputs))


def _latencies(given: LatencyProfile | str | Path) -> LatencyProfile:
    if not isinstance(given, str | Path):
        return given
    return LatencyProfile.load(shipped.find("profiles", str(given)))


def _alone(given: Sequence[Given]) -> None:
    if len(given) > 1:
        raise InvalidInput(
            f"B may be several files of an engine's counters, run directories of several drafters, or one source, but "
            f"got {len(given)} with {given[0]} among them."
        )


def _is_run(given: Given) -> TypeGuard[str | Path | RunDirectory]:
    return isinstance(given, RunDirectory) or (isinstance(given, str | Path) and Path(given).is_dir())


def draw_picture(result: Compared | GroupsCompared | DraftersCompared, *files: Path) -> tuple[Path, ...]:
    """Draw a comparison of drafters; InvalidInput for another, or a file that is neither .png nor .svg."""
    if not isinstance(result, DraftersCompared):
        raise InvalidInput("`picture` draws runs of several drafters, but these are of one.")
    kinds = [file.suffix.removeprefix(".") for file in files]
    for kind, file in zip(kinds, files, strict=True):
        if kind not in style.FORMATS:
            raise InvalidInput(
                f"`picture` must end in {' or '.join(f'.{one}' for one in style.FORMATS)}, but got {file}."
            )
    drawing = draw(drafters_chart(result))
    for kind, file in zip(kinds, files, strict=True):
        with atomic_writer(file) as stream:
            stream.write(style.to_bytes(drawing, kind))
    return files


def _is_ours(path: str | Path) -> bool:
    """Whether a file is one that treeopt writes, or the name of a shipped calibration."""
    file = Path(path)
    if not file.exists():
        return str(path) in shipped.shipped("calibration")
    if file.suffix == ".npz":
        return True
    try:
        document = storage.load_json(file) if file.suffix == ".json" else None
    except InvalidInput:  # lines of JSON, or a log
        return False
    return isinstance(document, dict) and str(document.get("schema")).startswith("treeopt.")


def _have_other_drafters(runs: Sequence[RunDirectory]) -> bool:
    known = [_side_of_run(run).meta.get("drafter") or {} for run in runs]
    return not all(same_drafter(known[0], other) for other in known[1:])
