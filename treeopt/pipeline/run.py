"""Run: the whole line, step after step; a killed run continues with the step that it was in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal
from treeopt.files.notes import note
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
from treeopt.pipeline.session import session_of
from treeopt.planning.compared import DraftersCompared, GroupsCompared
from treeopt.records.benchmark import Benchmark
from treeopt.records.options import BenchOptions, CalibrateOptions, LineOptions, ProfileOptions, SearchOptions, Source
from treeopt.records.plan import Plan
from treeopt.records.pools import RANKS_ALONE, USUAL, USUAL_OF_BLOCKS
from treeopt.records.rundir import STEPWISE, RunDirectory
from treeopt.report import figures
from treeopt.report.page import write_report
from treeopt.report.terminal import progress
from treeopt.report.verdict import timing_caveats

if TYPE_CHECKING:
    from treeopt.runtime.session import Session


FREE = ("bench_prompts", "bench_limit_s", "overwrite")  # options that may change when a killed run continues


@dataclass(frozen=True)
class Line:
    """What the whole line came to.

    benches : of each of the plan's entries
    engines : those that files were written for
    groups  : of prompts, where they are known
    seconds : that each part took, those before a kill with them
    """

    plan: Plan
    benches: list[Benchmark]
    engines: list[str]
    groups: GroupsCompared | None
    seconds: dict[str, float]


class Parts:
    """Parts of the line with the seconds that each took; those that last are in a journal."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.began = journal, time.monotonic()
        self.seconds: dict[str, float] = {part["step"]: part.get("seconds", 0.0) for part in journal.documents()}

    def finish(self, name: str, *, lasting: bool = False) -> None:
        """The part of that name has ended, and the next begins."""
        self.seconds[name] = time.monotonic() - self.began
        self.began += self.seconds[name]
        if lasting:
            self.journal.append({"step": name, "seconds": self.seconds[name]})


def run_line(run: RunDirectory, session: Session, wanted: LineOptions) -> Line:
    """Calibrate, profile, search, bench, export, draw and report.

    Dynamic trees are recorded for drafters that an engine grows them of, trees over marginals for those of blocks.
    """
    from treeopt.engines.registry import methods_for, with_engine
    from treeopt.records.drafters import BLOCKS

    wanted, kind = with_engine(wanted, STEPWISE), session.drafter.kind
    counts = USUAL_OF_BLOCKS if kind in BLOCKS else RANKS_ALONE
    if any(method.limits.dynamic for method in methods_for(kind)):
        counts = USUAL
    key = {"source": session.source.given, "drafter": session.drafter_record, **_lasting(wanted)}
    steps = Journal(run.partial("run"), key)
    parts = Parts(steps)
    if steps.finished() < 1:
        if wanted.engine is None:
            check_can_join(run, session.runtime(), session.provenance(seed=0), overwrite=wanted.overwrite)
        options = CalibrateOptions(
            num_prompts=wanted.num_prompts, max_new_tokens=wanted.max_new_tokens, overwrite=wanted.overwrite
        )
        calibrate(run, session, options, counts=counts, probe_rounds=1)
        parts.finish("calibrate", lasting=True)
    if steps.finished() < 2:
        timing = ProfileOptions(
            batch_sizes=wanted.batch_sizes,
            budget=wanted.budget,
            engine=wanted.engine,
            time_limit_s=wanted.time_limit_s,
            overwrite=wanted.overwrite,
        )
        profile(run, session, timing)
        parts.finish("profile", lasting=True)
    if steps.finished() < 3 and run.probe.exists():
        probe_again(run, session)
        parts.finish("probe", lasting=True)
    # The precision changes latencies, not what the engine takes.
    name = wanted.engine.partition("-")[0] if wanted.engine else None
    plan = search(run, SearchOptions(budget=wanted.budget, batch_sizes=wanted.batch_sizes, engine=name))
    timing_notes = timing_caveats(run.read_profile())  # which profile printed
    note(*(text for text in plan.notes if text not in timing_notes))
    parts.finish("search")
    decoding = BenchOptions(engine=wanted.engine, num_prompts=wanted.bench_prompts, time_limit_s=wanted.bench_limit_s)
    results = [bench(run, session, replace(decoding, batch_size=entry.batch_size)) for entry in plan.entries]
    parts.finish("bench")
    engines = export_all(run, plan, [name] if name else [])
    parts.finish("export")
    with progress("Drawing", None):
        drawn = list(figures.pictures(run))
        figures.draw(run, drawn=drawn)
        write_report(run, drawn=drawn)
    groups = groups_of(run, session)
    parts.finish("pictures")
    discard(run.partial("run"))
    return Line(plan, results, engines, groups, parts.seconds)


def _lasting(wanted: LineOptions) -> dict[str, object]:
    """The options that may not be others when a killed run continues."""
    return {name: value for name, value in asdict(wanted).items() if name not in FREE}


def groups_of(run: RunDirectory, session: Session) -> GroupsCompared | None:
    """What each group of prompts gains by a setting of its own; a note where that cannot be told."""
    try:
        return compare_groups(side_of([run])) if session.source.group_by else None
    except InvalidInput as reason:  # few conversations, or a rule whose record has no answers
        note(str(reason))
    return None


def drafters_of(asked: str) -> list[str]:
    """The drafters of a list with commas; one where there is a file or folder of that whole name."""
    names = [asked] if Path(asked).exists() else asked.split(",")
    return [name.strip() for name in names if name.strip()]


def run_drafters(run: RunDirectory, source: Source, drafters: Sequence[str], wanted: LineOptions) -> DraftersCompared:
    """The whole line for each drafter, in a folder of its name in the run directory, and what that comes to.

    The same call again goes on behind the drafters that are finished.
    """
    if len(set(drafters)) < len(drafters):
        raise InvalidInput(f"`drafter` must name each drafter once, but got {','.join(drafters)}.")
    key = {"source": source.given, "drafters": list(drafters), "options": _lasting(wanted)}
    done = Journal(run.partial("drafters"), key)
    runs = [RunDirectory(run.path / name) for name in distinct(list(map(folder_name, drafters)))]
    for number, (own, drafter) in list(enumerate(zip(runs, drafters, strict=True)))[done.finished() :]:
        note(f"Drafter {number + 1} of {len(runs)}: {drafter}, in {own.path}")
        with own.writing():
            session = session_of(own, replace(source, drafter=drafter), overwrite=wanted.overwrite)
            run_line(own, session, wanted)
        done.append({"drafter": drafter})
    found = compare_drafters(runs)
    discard(run.partial("drafters"))
    return found
