"""Results that are given in memory: they are laid out as files, so that a step does with them what its command does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treeopt.pipeline.search import SearchOptions, search
from treeopt.pipeline.session import open_session, resolve
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import read_planned
from treeopt.records.plan import Plan
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace


def search_on(
    calibration: RankTrace | Calibration | Probe | str | Path | None,
    profile: LatencyProfile | str | Path | None,
    run: str | Path | RunDirectory | None,
    options: SearchOptions,
    *,
    default: str,
    verify: int,
) -> Plan:
    """Search in the run directory, or beside it on what is given; a plan beside it is kept only where ``run`` is said.

    default : the run directory where none is said and nothing is given
    """
    records = [given for given in (calibration, profile) if given is not None and not isinstance(given, str | Path)]
    names = {"calibration": _name(calibration), "profile_path": _name(profile)}

    def searched(directory: RunDirectory) -> Plan:
        session = open_session(resolve(directory, {})) if verify else None
        return search(directory, options, **names, session=session, verify=verify)

    if not records and (run is not None or calibration is None):
        directory = RunDirectory.of(run or default)
        with directory.writing():
            return searched(directory)
    if calibration is None:
        names["calibration"] = str(read_planned(RunDirectory.of(run or default))[0])
    with RunDirectory.holding(*records) as directory:
        if names["calibration"] and names["profile_path"] is None and profile is not None:
            names["profile_path"] = str(directory.profile)  # beside a calibration by name it must be named too
        plan = searched(directory)
    if run is not None:
        kept = RunDirectory.of(run)
        with kept.writing():
            plan.save(kept.plan)
    return plan


def _name(given: Any) -> str | None:
    return str(given) if isinstance(given, str | Path) else None
