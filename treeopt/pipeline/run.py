"""Run: the whole line, step after step; a killed run continues with the step that it was in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from treeopt.files.journal import Journal
from treeopt.files.parameters import Count, Positive
from treeopt.files.writing import discard
from treeopt.pipeline.bench import bench
from treeopt.pipeline.calibrate import calibrate
from treeopt.pipeline.export import export, export_all
from treeopt.pipeline.probe import probe_again
from treeopt.pipeline.profile.outcome import check_can_join
from treeopt.pipeline.profile.timed import profile
from treeopt.pipeline.search import search
from treeopt.pipeline.threads import settle_threads
from treeopt.records.benchmark import Benchmark
from treeopt.records.plan import Plan
from treeopt.records.pools import RANKS_ALONE, USUAL
from treeopt.records.rundir import RunDirectory
from treeopt.report import figures
from treeopt.report.page import write_report
from treeopt.report.terminal import progress

if TYPE_CHECKING:
    from treeopt.runtime.session import Session


@dataclass(frozen=True)
class LineOptions:
    """Options of the whole line; with an engine that one is timed and decodes, and the plan is for it alone.

    batch_sizes    : sequences decoded at once: 1,4,8
    budget         : most rows verified per sequence and step, root included
    engine         : time, plan for and decode in this runtime
    num_prompts    : prompts to calibrate on
    max_new_tokens : longest answer
    bench_prompts  : held-out prompts; by default 24, or 10 a row
    time_limit_s   : seconds for timing steps
    overwrite      : replace other measurements of the run
    """

    batch_sizes: Sequence[Count] = (1,)
    budget: Count = 64
    engine: Literal["openvino", "openvino-int8"] | None = None
    num_prompts: Count = 128
    max_new_tokens: Count = 128
    bench_prompts: Count | None = None
    time_limit_s: Positive = 45
    overwrite: bool = False


def run_line(run: RunDirectory, session: Session, wanted: LineOptions) -> tuple[Plan, list[Benchmark], list[str]]:
    """Calibrate, profile, search, bench, export, draw and report: (plan, benchmark of each entry, engines exported to).

    Dynamic trees are recorded for drafters that an engine grows them of.
    """
    from treeopt.engines.registry import grows_trees

    key = {"source": session.source, "drafter": session.drafter_record, **asdict(wanted)}
    free = ("bench_prompts", "overwrite")  # may be others when a killed run continues
    steps = Journal(run.partial("run"), {name: value for name, value in key.items() if name not in free})
    if steps.finished() < 1:
        settle_threads(run, session)
        if wanted.engine is None:
            check_can_join(run, session.runtime(), session.provenance(seed=0).record(), overwrite=wanted.overwrite)
        calibrate(
            run,
            session,
            num_prompts=wanted.num_prompts,
            max_new_tokens=wanted.max_new_tokens,
            counts=USUAL if grows_trees(session.drafter.kind) else RANKS_ALONE,
            probe_rounds=1,
            overwrite=wanted.overwrite,
        )
        steps.append({"step": "calibrate"})
    if steps.finished() < 2:
        asked: dict[str, Any] = {
            "batch_sizes": wanted.batch_sizes,
            "budget": wanted.budget,
            "time_limit_s": wanted.time_limit_s,
            "overwrite": wanted.overwrite,
        }
        profile(run, session, engine=wanted.engine, **asked)
        steps.append({"step": "profile"})
    if steps.finished() < 3 and run.probe.exists():
        probe_again(run, session)
        steps.append({"step": "probe"})
    plan, results, engines = _proven(run, session, wanted)
    _draw(run)
    discard(run.partial("run"))
    return plan, results, engines


def _draw(run: RunDirectory) -> None:
    with progress("Drawing", None):
        drawn = list(figures.pictures(run))
        figures.draw(run, drawn=drawn)
        write_report(run, drawn=drawn)


def _proven(run: RunDirectory, session: Session, wanted: LineOptions) -> tuple[Plan, list[Benchmark], list[str]]:
    """The plan, its benchmarks and the engines that it was exported to."""
    asked: dict[str, Any] = {"budget": wanted.budget, "batch_sizes": wanted.batch_sizes}
    engine = wanted.engine
    # The format of the weights changes latencies, not what the engine takes.
    name = None if engine is None else engine.removesuffix("-int8")
    plan = search(run, engine=name, **asked)
    results = []
    for entry in plan.entries:
        told: dict[str, Any] = {"batch_size": entry.batch_size, "num_prompts": wanted.bench_prompts}
        results.append(bench(run, session, engine=engine, **told))
    if name is None:
        return plan, results, export_all(run, plan)
    if not plan.speculates:
        return plan, results, []
    export(run, name)
    return plan, results, [name]
