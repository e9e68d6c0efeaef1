"""Runs of several drafters for one model on one machine: what their plans reach, and which is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from treeopt.errors import OutOfRange
from treeopt.files.places import distinct
from treeopt.records.benchmark import Benchmark
from treeopt.records.origins import OURS, Origin, check_same_origin
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.rundir import RunDirectory
from treeopt.records.stale import changed

if TYPE_CHECKING:
    from treeopt.planning.compared import DrafterFigure, DraftersCompared


def compare_drafters(runs: Sequence[RunDirectory], *, batch_size: int | None = None) -> DraftersCompared:
    """What the plans of some runs reach, by real decoding where there is a benchmark of the plan as it is now.

    Raises InvalidInput for runs of several models or machines, OutOfRange where none has the batch size.
    """
    from treeopt.planning.compared import DraftersCompared

    names = distinct([run.path.name or str(run.path) for run in runs])
    found, origins = [], []
    for run, name in zip(runs, names, strict=True):
        plan = run.read_plan()
        benches = benches_of(run, plan)
        info = run.read_profile().info if run.profile.exists() else {}
        origin = Origin.of_latencies(info, plan.runtime or {})
        origins.append(replace(origin, drafter={}, acceptance={}, weights=None))
        entries = [entry for entry in plan.entries if batch_size in (None, entry.batch_size)]
        figures = [figure_of(name, entry, benches.get(entry.batch_size)) for entry in entries]
        found += [figure for figure in figures if figure]
    for (first, there), (name, here) in combinations(zip(names, origins, strict=True), 2):
        what = f"Drafters are compared on one machine, but {first} (there) and {name} (here)"
        check_same_origin(there, here, what)
    if not found:
        which = "" if batch_size is None else f" at batch size {batch_size}"
        raise OutOfRange(f"The runs must have plans with latencies{which}: treeopt profile, treeopt search.")
    notes: tuple[str, ...] = ()
    if predicted := sorted({f"{one.drafter} at batch size {one.batch_size}" for one in found if not one.is_measured}):
        notes = (f"Predicted, not decoded: {', '.join(predicted)}. treeopt bench decodes.",)
    about = ", ".join(filter(None, (origins[0].model, origins[0].dtype, origins[0].device)))
    settings = tuple(sorted(found, key=lambda one: one.batch_size))
    return DraftersCompared(settings=settings, about=about, notes=notes)


def benches_of(run: RunDirectory, plan: Plan) -> dict[int, Benchmark]:
    """Batch size -> the benchmark of the plan as it is now, by the runtime that the latencies are of."""
    if not run.benches():
        return {}
    if (plan.runtime or {}).get("name") in (None, OURS):
        from treeopt.report.figures.registry import Inputs

        return Inputs(run).benches()
    loaded = [Benchmark.load(file) for file in run.engine_benches()]
    return {bench.contenders[0].batch_size: bench for bench in loaded if not changed(run, bench.inputs or {})}


def figure_of(drafter: str, entry: PlanEntry, bench: Benchmark | None) -> DrafterFigure | None:
    """What was measured of the plan's draft, or predicted; None where nothing is known of its speed."""
    from treeopt.planning.compared import DrafterFigure

    if bench and bench.speedup(bench.judged):
        setting = "" if bench.judged == "chosen" else bench.judged
        return DrafterFigure(drafter=drafter, figure=bench.figure(bench.judged), setting=setting, is_measured=True)
    if entry.chosen.speedup is None:
        return None
    return DrafterFigure(drafter=drafter, figure=entry.chosen, setting="", is_measured=False)
