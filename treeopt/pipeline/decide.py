"""Search: the best tree for each batch size, from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt import library
from treeopt.calibration import Calibration
from treeopt.console import progress
from treeopt.errors import InvalidInput
from treeopt.growth import MAX_RANK
from treeopt.latency import LatencyProfile
from treeopt.plan import Plan
from treeopt.planner import plan_trees
from treeopt.rundir import RunDirectory, digests
from treeopt.trace import RankTrace


def search(
    run: RunDirectory,
    *,
    batch_sizes: Sequence[int],
    budget: int,
    max_rank: int = MAX_RANK,
    max_depth: int | None = None,
    objective: str = "replay",
    calibration: str | None = None,
    profile_path: str | None = None,
) -> Plan:
    """Choose the best tree per batch size from the run's trace, or from a calibration by path or name."""
    source: RankTrace | Calibration
    if calibration is not None:
        used = library.find("calibration", calibration)
        source = RankTrace.load(used) if used.suffix == ".npz" else Calibration.load(used)
    elif run.trace.exists() or not run.calibration.exists():
        used, source = run.trace, run.read_trace()
    else:
        used, source = run.calibration, run.read_calibration()
    latencies, files = None, [used]
    if profile_path is not None:
        files.append(library.find("profiles", profile_path))
        latencies = LatencyProfile.load(files[-1])
    elif run.profile.exists() and calibration is None:
        files.append(run.profile)
        latencies = run.read_profile()
        check_same_model(source, latencies, run)
    with progress("Searching", None):
        plan = plan_trees(source, latencies, batch_sizes=batch_sizes, budget=budget, max_rank=max_rank,
                          max_depth=max_depth, objective=objective, inputs=digests(*files))  # fmt: skip
    plan.save(run.plan)
    return plan


def check_same_model(source: RankTrace | Calibration, profile: LatencyProfile, run: RunDirectory) -> None:
    """Raise InvalidInput where the run's own profile is of another model than what it was calibrated on."""
    info = source.meta if isinstance(source, RankTrace) else source.info
    ours, theirs = ((record.get("provenance") or {}).get("model") for record in (info, profile.info))
    if ours and theirs and ours != theirs:
        raise InvalidInput(
            f"A plan needs latencies of the model that was calibrated, {ours}, but {run.profile} is of "
            f"{theirs}. Measure again with: treeopt profile"
        )
