"""Plans for groups: each has a run directory of its own, groups/NAME, with its part of the record, latencies and plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from treeopt.files.places import distinct, folder_name
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import inputs_of
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import note

Part = TypeVar("Part", bound=RankTrace | RequestLog)


def plan_groups(
    run: RunDirectory, parts: Mapping[str, Part], latencies: LatencyProfile | None, plan_part: Callable[[Part], Plan]
) -> None:
    """Write a run directory for each group."""
    for (name, part), folder in zip(parts.items(), distinct([folder_name(name) for name in parts]), strict=True):
        own = RunDirectory(run.path / "groups" / folder)
        with own.writing():
            own.profile.unlink(missing_ok=True)  # of a search before
            if latencies is not None:
                latencies.save(own.profile)
            if isinstance(part, RequestLog):
                own.replace_requests(part)
            else:
                own.replace_accuracies(Calibration.from_trace(part), part)
            files = [own.requests if isinstance(part, RequestLog) else own.trace, *([own.profile] if latencies else [])]
            replace(plan_part(part), inputs=inputs_of(*files)).save(own.plan)
        note(f"The plan of the group {name} is in {own.path}.")
