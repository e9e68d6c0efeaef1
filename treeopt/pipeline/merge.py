"""Merge: the shards of one calibration, or calibrations of different prompts, as one run's trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files.parameters import Positive
from treeopt.pipeline.calibrate import summary
from treeopt.records.calibration import Calibration
from treeopt.records.merging import merge
from treeopt.records.origins import ProvenanceRecord, provenance
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.terminal import note
from treeopt.report.wording import ranges


def merge_runs(
    run: RunDirectory, others: Sequence[Path], *, shares: Sequence[Positive] = (), overwrite: bool = False
) -> Calibration:
    """Make the traces of other runs, together, that of the run.

    shares    : share of the traffic that each RUN stands for, once for each; by default every conversation counts once
    overwrite : replace the run's trace and calibration

    Raises InvalidInput where they do not belong together, and where the run has been calibrated already, unless that is
    to be overwritten.
    """
    there = [file for file in (run.trace, run.probe, run.calibration) if file.exists()]
    trace = merge([(str(other), _trace_of(RunDirectory(other))) for other in others], shares or None)
    if there and not overwrite and not (there == [run.trace] and _is_same(run.read_trace(), trace)):
        raise InvalidInput(
            f"{there[0]} exists, and merging replaces it only with `overwrite`: pass that, or another `run`."
        )
    now = provenance()
    made: ProvenanceRecord = trace.meta.get("provenance", {})
    calibration = summary(trace, {**made, "command": now["command"], "time": now["time"]})
    calibration.meta["merged"] = trace.meta.get("merged")
    run.replace_accuracies(calibration, trace)
    note(*_told(trace))
    return calibration


def _trace_of(run: RunDirectory) -> RankTrace:
    if run.probe.exists():
        raise InvalidInput(
            f"Merging takes traces, but {run.path} was measured under typical acceptance: calibrate on all prompts at once."
        )
    return run.read_trace()


def _is_same(one: RankTrace, other: RankTrace) -> bool:
    """Whether a trace is that of the same answers, as a merge leaves it that is killed before the calibration is written."""
    hashes = [trace.meta.get("prompt_sha256") for trace in (one, other)]
    return hashes[0] == hashes[1] and np.array_equal(one.ranks, other.ranks)


def _told(trace: RankTrace) -> list[str]:
    """What was merged, and what is missing."""
    told = [f"Merged {trace.num_conversations:,} conversations, {int(trace.has_step.sum()):,} states."]
    if shard := trace.meta.get("shard"):
        here = {part["key"] for part in shard["blocks"]}
        missing = [place + 1 for place in range(shard["num_blocks"]) if place not in here]
        told.append(
            f"{len(missing)} of {shard['num_blocks']} blocks of prompts are missing: {ranges(missing)}. "
            "Merge the shards that have them too."
        )
    if trace.weight is not None:
        shares = [f"{source['share']:.3g} {source['name'] or '(unknown)'}" for source in trace.meta["merged"]]
        told.append(
            f"Trees are grown by these shares of the traffic: {', '.join(shares)}. calibration.json counts every state once."
        )
    return told
