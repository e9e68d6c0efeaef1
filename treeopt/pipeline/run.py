"""Run: the whole line, step after step; a killed run continues with the step that it was in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal
from treeopt.files.parameters import Count, Positive
from treeopt.files.places import distinct, folder_name
from treeopt.files.writing import discard
from treeopt.pipeline.bench import bench
from treeopt.pipeline.calibrate import calibrate, probe_again
from treeopt.pipeline.compare import compare_groups, side_of
from treeopt.pipeline.drafters import compare_drafters
from treeopt.pipeline.export import export_all
from treeopt.pipeline.profile.outcome import check_can_join
from treeopt.pipeline.profile.timed import profile
from treeopt.pipeline.search import search
from treeopt.pipeline.session import open_session, resolve
from treeopt.planning.compared import DraftersCompared, GroupsCompared
from treeopt.records.benchmark import Benchmark
from treeopt.records.plan import Plan
from treeopt.records.pools import RANKS_ALONE, USUAL, USUAL_OF_BLOCKS
from treeopt.records.rundir import RunDirectory
from treeopt.report import figures
from treeopt.report.page import write_report
from treeopt.report.terminal import note, progress

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
    bench_prompts  : held-out prompts; by default 64, or 10 a row
    time_limit_s   : seconds for timing steps
    overwrite      : replace other measurements of the run
    """

    batch_sizes: Sequence[Count] = (1,)
    budget: Count = 64
    engine: Literal["openvino", "openvino-int8", "openvino-default", "openvino-int8-default", "vllm"] | None = None
    num_prompts: Count = 128
    max_new_tokens: Count = 128
    bench_prompts: Count | None = None
    time_limit_s: Positive = 45
    overwrite: bool = False


def run_line(
    run: RunDirectory, session: Session, wanted: LineOptions
) -> tuple[Plan, list[Benchmark], list[str], GroupsCompared | None]:
    """Calibrate, profile, search, bench, export, draw and report: (plan, benchmark of each entry, engines exported to,
    groups of prompts where they are known).

    Dynamic trees are recorded for drafters that an engine grows them of, trees over marginals for those of blocks.
    """
    from treeopt.engines.registry import methods_for
    from treeopt.records.drafters import BLOCKS

    kind = session.drafter.kind
    counts = (
        USUAL
        if any(method.limits.dynamic for method in methods_for(kind))
        else USUAL_OF_BLOCKS
        if kind in BLOCKS
        else RANKS_ALONE
    )
    key = {"source": session.source, "drafter": session.drafter_record, **asdict(wanted)}
    free = ("bench_prompts", "overwrite")  # may be others when a killed run continues
    steps = Journal(run.partial("run"), {name: value for name, value in key.items() if name not in free})
    if steps.finished() < 1:
        if wanted.engine is None:
            check_can_join(run, session.runtime(), session.provenance(seed=0), overwrite=wanted.overwrite)
        calibrate(
            run,
            session,
            num_prompts=wanted.num_prompts,
            max_new_tokens=wanted.max_new_tokens,
            counts=counts,
            probe_rounds=1,
            overwrite=wanted.overwrite,
        )
        steps.append({"step": "calibrate"})
    sizes: dict[str, Any] = {"batch_sizes": wanted.batch_sizes, "budget": wanted.budget}
    if steps.finished() < 2:
        limit_s, overwrite = wanted.time_limit_s, wanted.overwrite
        profile(run, session, engine=wanted.engine, time_limit_s=limit_s, overwrite=overwrite, **sizes)
        steps.append({"step": "profile"})
    if steps.finished() < 3 and run.probe.exists():
        probe_again(run, session)
        steps.append({"step": "probe"})
    # The precision changes latencies, not what the engine takes.
    name = wanted.engine.partition("-")[0] if wanted.engine else None
    plan = search(run, engine=name, **sizes)
    told: dict[str, Any] = {"engine": wanted.engine, "num_prompts": wanted.bench_prompts}
    results = [bench(run, session, batch_size=entry.batch_size, **told) for entry in plan.entries]
    engines = export_all(run, plan, [name] if name else [])
    with progress("Drawing", None):
        drawn = list(figures.pictures(run))
        figures.draw(run, drawn=drawn)
        write_report(run, drawn=drawn)
    discard(run.partial("run"))
    return plan, results, engines, groups_of(run, session)


def groups_of(run: RunDirectory, session: Session) -> GroupsCompared | None:
    """What each group of prompts gains by a setting of its own; a note where that cannot be told."""
    try:
        return compare_groups(side_of([run])) if session.source.get("group_by") else None
    except InvalidInput as reason:  # few conversations, or a rule whose record has no answers
        note(str(reason))
    return None


def drafters_of(asked: str) -> list[str]:
    """The drafters of a list with commas; one where there is a file or folder of that whole name."""
    names = [asked] if Path(asked).exists() else asked.split(",")
    return [name.strip() for name in names if name.strip()]


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
    for number, (own, drafter) in list(enumerate(zip(runs, drafters, strict=True)))[done.finished() :]:
        note(f"Drafter {number + 1} of {len(runs)}: {drafter}, in {own.path}")
        asked = {**source, "drafter": drafter}
        with own.writing():
            given = resolve(own, asked, overwrite=wanted.overwrite)
            run_line(own, open_session(given), wanted)
        done.append({"drafter": drafter})
    found = compare_drafters(runs)
    discard(run.partial("drafters"))
    return found
