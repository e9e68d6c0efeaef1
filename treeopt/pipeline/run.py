"""Run: the whole line, step after step; a killed run continues with the step that it was in."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treeopt.files.journal import Journal
from treeopt.files.writing import discard
from treeopt.pipeline.bench import bench
from treeopt.pipeline.calibrate import calibrate
from treeopt.pipeline.engine_bench import bench_in
from treeopt.pipeline.export import export, export_all
from treeopt.pipeline.probe import probe_again
from treeopt.pipeline.profile.engine import profile_in
from treeopt.pipeline.profile.outcome import check_can_join
from treeopt.pipeline.profile.timed import profile
from treeopt.pipeline.search import SearchOptions, search
from treeopt.pipeline.threads import settle_threads
from treeopt.records.benchmark import Benchmark
from treeopt.records.plan import Plan
from treeopt.records.pools import RANKS_ALONE, USUAL
from treeopt.records.rundir import RunDirectory
from treeopt.records.served import speculates
from treeopt.report import figures
from treeopt.report.page import write_report
from treeopt.report.terminal import progress

if TYPE_CHECKING:
    from treeopt.runtime.session import Session


def run_line(
    run: RunDirectory,
    session: Session,
    wanted: SearchOptions,
    *,
    num_prompts: int,
    bench_prompts: int | None,
    max_new_tokens: int,
    time_limit: int,
    overwrite: bool = False,
) -> tuple[Plan, list[Benchmark], list[str]]:
    """Calibrate, profile, search, bench, export, draw and report: (plan, benchmark of each entry, engines exported to).

    Dynamic trees are recorded for drafters that an engine grows them of. With an engine in ``wanted`` that one is timed and
    decodes, and the plan is written for it alone.
    """
    from treeopt.export.write import grows_trees

    batch_sizes = tuple(wanted.batch_sizes or (1,))
    options = {
        "source": session.source,
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "budget": wanted.budget,
        "batch_sizes": batch_sizes,
        "time_limit": time_limit,
        "drafter": session.drafter_record,
        "engine": wanted.engine,
    }
    steps = Journal(run.partial("run"), options)  # those that a killed run had finished
    if steps.finished() < 1:
        settle_threads(run, session)
        if wanted.engine is None:
            check_can_join(run, session.runtime(), session.provenance(seed=0).record(), overwrite=overwrite)
        calibrate(
            run,
            session,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            counts=USUAL if grows_trees(session.drafter.kind) else RANKS_ALONE,
            probe_rounds=1,
            overwrite=overwrite,
        )
        steps.append({"step": "calibrate"})
    if steps.finished() < 2:
        asked: dict[str, Any] = {
            "batch_sizes": batch_sizes,
            "budget": wanted.budget,
            "time_limit_s": time_limit,
            "overwrite": overwrite,
        }
        profile_in(run, session, wanted.engine, **asked) if wanted.engine else profile(run, session, **asked)
        steps.append({"step": "profile"})
    if steps.finished() < 3 and run.probe.exists():
        probe_again(run, session)
        steps.append({"step": "probe"})
    plan, results, engines = _proven(run, session, wanted, bench_prompts)
    _draw(run)
    discard(run.partial("run"))
    return plan, results, engines


def _draw(run: RunDirectory) -> None:
    with progress("Drawing", None):
        drawn = list(figures.pictures(run))
        figures.draw(run, drawn=drawn)
        write_report(run, drawn=drawn)


def _proven(
    run: RunDirectory, session: Session, wanted: SearchOptions, bench_prompts: int | None
) -> tuple[Plan, list[Benchmark], list[str]]:
    """The plan, its benchmarks and the engines that it was exported to."""
    engine = wanted.engine
    if engine is None:
        plan = search(run, wanted)
        sizes = [entry.batch_size for entry in plan.entries]
        results = [bench(run, session, batch_size=size, num_prompts=bench_prompts) for size in sizes]
        return plan, results, export_all(run, plan)
    name = engine.removesuffix("-int8")  # the format of the weights changes latencies, not what the engine takes
    plan = search(run, replace(wanted, engine=name))
    sizes = [entry.batch_size for entry in plan.entries]
    results = [bench_in(run, session, engine, batch_size=size, num_prompts=bench_prompts) for size in sizes]
    if not speculates(plan):
        return plan, results, []
    export(run, name)
    return plan, results, [name]
