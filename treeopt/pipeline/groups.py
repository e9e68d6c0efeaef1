"""Plans for groups: each has a run directory of its own, groups/NAME, with its part of the record, latencies and plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from treeopt.files.places import distinct, folder_name
from treeopt.records.inputs import inputs_of
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note

Part = TypeVar("Part")


def plan_groups(
    run: RunDirectory,
    parts: Mapping[str, Part],
    latencies: LatencyProfile | None,
    plan_part: Callable[[RunDirectory, Part], tuple[Path, Plan]],
) -> None:
    """Write a run directory for each group.

    plan_part : keeps a part in its directory, and gives the file and the plan
    """
    for (name, part), folder in zip(parts.items(), distinct([folder_name(name) for name in parts]), strict=True):
        own = RunDirectory(run.path / "groups" / folder)
        with own.writing():
            own.profile.unlink(missing_ok=True)  # of a search before
            if latencies is not None:
                latencies.save(own.profile)
            file, plan = plan_part(own, part)
            replace(plan, inputs=inputs_of(file, *([own.profile] if latencies else []))).save(own.plan)
        note(f"The plan of the group {name} is in {own.path}.")
