"""Search for groups of prompts: the plan that is least bad for the worst, or one for each in a run directory of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from treeopt.errors import InvalidInput
from treeopt.files.places import distinct, folder_name
from treeopt.growth.source import source_of
from treeopt.planning.groups import MODES, Grouped, plan_for_groups
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import Accuracies, inputs_of
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.compared_table import per_cent
from treeopt.report.terminal import note


def searched_for_groups(
    run: RunDirectory,
    shared: Plan,
    record: Accuracies,
    latencies: LatencyProfile | None,
    request: PlanRequest,
    *,
    mode: str,
) -> Plan:
    """The plan of the run by one of `MODES`; with "own" that is the shared one, and each group gets a run directory.

    Raises InvalidInput for another mode, for a mix of loads, and where groups are not known.
    """
    if mode not in MODES:
        raise InvalidInput(f"--for-groups must be one of {', '.join(MODES)}, but got {mode!r}.")
    if mode == "shared":
        return shared
    if request.mix:
        raise InvalidInput(f"--for-groups {mode} needs batch sizes without shares: leave the shares out.")
    source = source_of(record)
    if not source.is_exact:
        raise InvalidInput(f"--for-groups {mode} needs a trace with groups, but got a {source.kind}.")
    if mode == "own":
        if run.is_held:
            raise InvalidInput(
                "--for-groups own writes to the run directory: search that of the trace, not the trace alone."
            )
        _write_own(run, Grouped.of(cast(RankTrace, record)), latencies, request)
        return shared
    plan, found = plan_for_groups(cast(RankTrace, source.answers), latencies, request, shared)
    entries = []
    for entry in plan.entries:
        here = [one for one in found.losses if one.batch_size == entry.batch_size]
        ours, theirs = (max(here, key=lambda one: getattr(one, name).share) for name in ("minimax", "shared"))
        said = (
            f"Chosen for the worst group: {ours.group} loses {per_cent(ours.minimax)} % against a plan of its own. With the "
            f"shared plan {theirs.group} loses {per_cent(theirs.shared)} %."
        )
        entries.append(replace(entry, warnings=[*entry.warnings, said]))
    return replace(plan, entries=tuple(entries))


def _write_own(run: RunDirectory, groups: Grouped, latencies: LatencyProfile | None, request: PlanRequest) -> None:
    """A run directory with trace, latencies and plan for each group."""
    folders = distinct([folder_name(name) for name in groups.names])
    for g, (name, folder) in enumerate(zip(groups.names, folders, strict=True)):
        own = RunDirectory(run.path / "groups" / folder)
        part = groups.part(g)
        plan = plan_trees(part, latencies, request)
        with own.writing():
            own.replace_accuracies(Calibration.from_trace(part), part)
            own.profile.unlink(missing_ok=True)  # of a search before
            if latencies is not None:
                latencies.save(own.profile)
            files = (own.trace, own.profile) if latencies is not None else (own.trace,)
            replace(plan, inputs=inputs_of(*files)).save(own.plan)
        note(f"The plan of the group {name} is in {own.path}.")
