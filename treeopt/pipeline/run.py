"""Run: the whole line, step after step; a killed run continues with the step that it was in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treeopt.files.journal import Journal
from treeopt.files.writing import discard
from treeopt.pipeline.bench import bench
from treeopt.pipeline.calibrate import calibrate
from treeopt.pipeline.export import export_all
from treeopt.pipeline.probe import probe_again
from treeopt.pipeline.profile.timed import profile
from treeopt.pipeline.search import SearchOptions, search
from treeopt.records.benchmark import Benchmark
from treeopt.records.plan import Plan
from treeopt.records.rundir import RunDirectory
from treeopt.report import figures
from treeopt.report.page import write_report
from treeopt.report.terminal import progress

if TYPE_CHECKING:
    from treeopt.runtime.session import Session


def run_line(
    run: RunDirectory,
    session: Session,
    *,
    batch_sizes: Sequence[int],
    budget: int,
    num_prompts: int,
    bench_prompts: int | None,
    max_new_tokens: int,
    time_limit: int,
) -> tuple[Plan, list[Benchmark], list[str]]:
    """Calibrate, profile, search, bench, export, draw and report: (plan, benchmark of each entry, engines exported to)."""
    options = {
        "source": session.source,
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "budget": budget,
        "batch_sizes": batch_sizes,
        "time_limit": time_limit,
        "drafter": session.drafter_record,
    }
    steps = Journal(run.partial("run"), options)  # those that a killed run had finished
    if steps.finished() < 1:
        calibrate(run, session, num_prompts=num_prompts, max_new_tokens=max_new_tokens, probe_rounds=1)
        steps.append({"step": "calibrate"})
    if steps.finished() < 2:
        profile(run, session, batch_sizes=batch_sizes, budget=budget, time_limit_s=time_limit)
        steps.append({"step": "profile"})
    if steps.finished() < 3 and run.probe.exists():
        probe_again(run, session)
        steps.append({"step": "probe"})
    plan = search(run, SearchOptions(budget, batch_sizes))
    results = [bench(run, session, batch_size=entry.batch_size, num_prompts=bench_prompts) for entry in plan.entries]
    engines = export_all(run, plan)
    with progress("Drawing", None):
        figures.draw(run)
        write_report(run)
    discard(run.partial("run"))
    return plan, results, engines
