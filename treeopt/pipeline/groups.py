"""Search for groups of prompts: a plan for each, in a run directory of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from treeopt.errors import InvalidInput
from treeopt.files.places import distinct, folder_name
from treeopt.growth.source import source_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.regret import MODES, group_parts
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import Accuracies, inputs_of
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import note


def search_groups(
    run: RunDirectory, record: Accuracies, latencies: LatencyProfile | None, request: PlanRequest, *, mode: str
) -> None:
    """With mode "own" write a plan for each group, in a run directory of its own; with "shared" nothing.

    Raises InvalidInput for another mode, for a mix of loads, and where groups are not known.
    """
    if mode not in MODES:
        raise InvalidInput(f"`for_groups` must be one of {', '.join(MODES)}, but got {mode!r}.")
    if mode == "shared":
        return
    if request.mix:
        raise InvalidInput(f"`for_groups={mode}` needs batch sizes without shares: leave the shares out.")
    source = source_of(record)
    if not source.is_exact:
        raise InvalidInput(f"`for_groups={mode}` needs a trace with groups, but got a {source.kind}.")
    if run.is_held:
        raise InvalidInput(
            "`for_groups=own` writes to the run directory: search that of the trace, not the trace alone."
        )
    _write_own(run, group_parts(cast(RankTrace, record)), latencies, request)


def _write_own(
    run: RunDirectory, groups: dict[str, RankTrace], latencies: LatencyProfile | None, request: PlanRequest
) -> None:
    """A run directory with trace, latencies and plan for each group."""
    folders = distinct([folder_name(name) for name in groups])
    for (name, part), folder in zip(groups.items(), folders, strict=True):
        own = RunDirectory(run.path / "groups" / folder)
        plan = plan_trees(part, latencies, request)
        with own.writing():
            own.replace_accuracies(Calibration.from_trace(part), part)
            own.profile.unlink(missing_ok=True)  # of a search before
            if latencies is not None:
                latencies.save(own.profile)
            files = (own.trace, own.profile) if latencies is not None else (own.trace,)
            replace(plan, inputs=inputs_of(*files)).save(own.plan)
        note(f"The plan of the group {name} is in {own.path}.")
