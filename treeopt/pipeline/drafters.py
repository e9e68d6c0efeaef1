"""Runs of several drafters for one model: making them, and their table by batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files.journal import Journal
from treeopt.files.places import distinct, folder_name
from treeopt.files.writing import discard
from treeopt.pipeline.run import LineOptions, run_line
from treeopt.pipeline.session import open_session, resolve
from treeopt.planning.compared import DrafterFigure, DraftersCompared
from treeopt.records.benchmark import Benchmark
from treeopt.records.inputs import changed
from treeopt.records.origins import OURS, differing
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.rundir import RunDirectory
from treeopt.report.figures.registry import Inputs
from treeopt.report.terminal import note

SAME = ("model", "revision", "dtype", "device", "machine", "threads")  # what a comparison of drafters holds fixed


def compare_drafters(runs: Sequence[RunDirectory], *, batch_size: int | None = None) -> DraftersCompared:
    """What the plans of some runs reach, by real decoding where there is a benchmark of the plan as it is now.

    Raises InvalidInput for runs of several models or machines, OutOfRange where none has the batch size.
    """
    names = distinct([run.path.name or str(run.path) for run in runs])
    found, origins, runtimes, notes = [], [], [], []
    for run, name in zip(runs, names, strict=True):
        plan = run.read_plan()
        benches = benches_of(run, plan)
        timed = run.read_profile().info.get("provenance") if run.profile.exists() else None
        origins.append({key: ((timed or {}).get(key)) for key in SAME})
        runtimes.append(plan.runtime)
        for entry in plan.entries:
            if batch_size in (None, entry.batch_size) and (
                one := figure_of(name, entry, benches.get(entry.batch_size))
            ):
                found.append(one)
    _check_same(names, origins, runtimes)
    if not found:
        which = "" if batch_size is None else f" at batch size {batch_size}"
        raise OutOfRange(
            f"The runs must have plans with latencies{which}, but have none: treeopt profile, treeopt search."
        )
    if predicted := sorted({f"{one.drafter} at batch size {one.batch_size}" for one in found if not one.is_measured}):
        notes.append(f"Predicted, not decoded: {', '.join(predicted)}. treeopt bench decodes.")
    about = ", ".join(str(origins[0][key]) for key in ("model", "dtype", "device") if origins[0].get(key))
    return DraftersCompared(
        settings=tuple(sorted(found, key=lambda one: one.batch_size)), about=about, notes=tuple(notes)
    )


def _check_same(names: Sequence[str], origins: Sequence[Mapping[str, Any]], runtimes: Sequence[Any]) -> None:
    """Raise InvalidInput where two runs differ in what both are known to be of."""
    known: dict[str, tuple[str, Any]] = {}  # by the first run that says it
    for name, origin, runtime in zip(names, origins, runtimes, strict=True):
        for key, value in {**origin, "runtime": (runtime or {}).get("name")}.items():
            first, there = known.setdefault(key, (name, value)) if value is not None else (name, None)
            if differs := differing({key: there}, {key: value}):
                raise InvalidInput(
                    f"Drafters are compared for one model on one machine, but {first} (there) and {name} (here) differ in "
                    f"{', '.join(differs)}."
                )


def benches_of(run: RunDirectory, plan: Plan) -> dict[int, Benchmark]:
    """Batch size -> the benchmark of the plan as it is now, by the runtime that the latencies are of."""
    if (plan.runtime or {}).get("name") in (None, OURS):
        return Inputs(run).benches()
    loaded = [Benchmark.load(file) for file in run.engine_benches()]
    return {bench.contenders[0].batch_size: bench for bench in loaded if not changed(run, bench.inputs or {})}


def figure_of(drafter: str, entry: PlanEntry, bench: Benchmark | None) -> DrafterFigure | None:
    """What was measured of the plan's draft, or predicted; None where nothing is known of its speed."""
    if bench and bench.speedup(bench.judged):
        setting = "" if bench.judged == "chosen" else bench.judged
        return DrafterFigure(drafter=drafter, figure=bench.figure(bench.judged), setting=setting, is_measured=True)
    if entry.chosen.speedup is None:
        return None
    return DrafterFigure(drafter=drafter, figure=entry.chosen, setting="", is_measured=False)


def drafters_of(asked: str) -> list[str]:
    """The drafters of a list with commas; one where there is a file or folder of that whole name.

    >>> drafters_of("medusa, ngram"), drafters_of("my-heads")
    (['medusa', 'ngram'], ['my-heads'])
    """
    if Path(asked).exists():
        return [asked]
    return [name.strip() for name in asked.split(",") if name.strip()]


def run_drafters(
    run: RunDirectory, source: Mapping[str, Any], drafters: Sequence[str], wanted: LineOptions
) -> DraftersCompared:
    """The whole line for each drafter, in a folder of its name in the run directory, and what that comes to.

    The same call again goes on behind the drafters that are finished.
    """
    if len(set(drafters)) < len(drafters):
        raise InvalidInput(f"`drafter` must name each drafter once, but got {','.join(drafters)}.")
    key = {"source": dict(source), "drafters": list(drafters), "options": asdict(wanted)}
    done = Journal(run.partial("drafters"), key)
    runs = [RunDirectory(run.path / name) for name in distinct(list(map(folder_name, drafters)))]
    for number, (own, drafter) in enumerate(zip(runs, drafters, strict=True)):
        if number < done.finished():
            continue
        note(f"Drafter {number + 1} of {len(runs)}: {drafter}, in {own.path}")
        with own.writing():
            given = resolve(
                own, {**source, "drafter": drafter}, overwrite=wanted.overwrite, num_prompts=wanted.num_prompts
            )
            run_line(own, open_session(given), wanted)
        done.append({"drafter": drafter})
    found = compare_drafters(runs)
    discard(run.partial("drafters"))
    return found
