"""What was measured elsewhere as the run's own: imports from other tools, and merges of other runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from treeopt import __version__
from treeopt.engines.imports import read_measurement
from treeopt.engines.measured.rates import Meaning
from treeopt.errors import InvalidInput
from treeopt.files.notes import note
from treeopt.files.storage import sha256_of
from treeopt.pipeline.calibrate import summary
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.inputs import broken
from treeopt.records.merging import merge
from treeopt.records.origins import Provenance
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace


def import_file(
    run: RunDirectory,
    paths: Path | Sequence[Path],
    *,
    kind: str | None = None,
    rates: Meaning | None = None,
    trials: int | None = None,
    tokens: int | None = None,
    drafter: str | None = None,
    overwrite: bool = False,
) -> Calibration:
    """Make files of another tool the run's calibration.

    Several files are one measurement of an engine: two scrapes of its counters, or logs to be pooled.

    kind      : what FILE holds: a name from the list above; by default found from the file
    rates     : what rates by position without counts are: survival (a guess was accepted with all before it, as engines print
                them), conditional (where all before it were) or marginal (whatever those were); by default survival where one
                rate a head never rises, else marginal
    trials    : trials of every head, or number of drafts, if the file has shares only
    tokens    : tokens that were generated meanwhile, the first of each answer left out, if the file does not say it: tells how
                many steps had no draft
    drafter   : what made the drafts, where the file does not say it: medusa, hydra, eagle, eagle3, mtp, draft-model, ngram,
                suffix, dflash, dspark or redrafter
    overwrite : replace the run's trace and calibration

    Raises InvalidInput where the run has been calibrated already, unless it is to be overwritten; then its trace is deleted,
    so that all accuracies are of one origin.
    """
    paths = [paths] if isinstance(paths, Path) else list(paths)
    if missing := [path for path in paths if not path.exists()]:
        raise InvalidInput(f"{missing[0]} does not exist.")
    if not overwrite:
        run.check_free("an import", run.accuracies())
    files = [{"file": path.name, "sha256": sha256_of(path)} for path in paths if path.is_file()]
    if len({file["sha256"] for file in files}) < len(files):
        raise InvalidInput("Every file may be given once, but two of them have the same content.")
    kind, found = read_measurement(paths, kind, drafter=drafter, trials=trials, rates=rates, tokens=tokens)
    # On which machine and by which versions it was measured the file does not say.
    imported = {**(files[0] if len(files) == 1 else {"files": files}), "kind": kind}
    made = replace(Provenance.here(), versions={"treeopt": __version__}, machine=None, imported=imported)
    about = {"provenance": made.record, "drafter": {"kind": found.drafter} if found.drafter else None}
    calibration = found.calibration
    calibration.meta.update(about)
    if calibration.meta.get("source") != ENGINE_LOG:
        calibration.meta["source"] = "imported"
    why = broken(calibration)
    calibration.meta["notes"] = [*([why] if why else []), *found.notes]
    run.replace_accuracies(calibration)
    return calibration


def merge_runs(run: RunDirectory, others: Sequence[Path], *, overwrite: bool = False) -> Calibration:
    """Make the traces of the shards in other runs, together, that of the run.

    overwrite : replace the run's trace and calibration

    Raises InvalidInput where they do not belong together, and where the run has been calibrated already, unless that is
    to be overwritten.
    """
    trace = merge([(str(other), _trace_of(RunDirectory(other))) for other in others])
    there = run.accuracies()
    if not overwrite and not (there == [run.trace] and _is_same(run.read_trace(), trace)):
        run.check_free("merging", run.accuracies())
    now = Provenance.here()
    calibration = summary(trace, replace(Provenance.of(trace.meta), command=now.command, time=now.time))
    run.replace_accuracies(calibration, trace)
    note(f"Merged {trace.num_conversations:,} conversations, {int(trace.has_step.sum()):,} states.")
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
