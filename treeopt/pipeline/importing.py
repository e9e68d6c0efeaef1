"""Import: what another tool measured, as the run's trace and calibration."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from treeopt import __version__
from treeopt.engines.imports import read_measurement
from treeopt.errors import InvalidInput
from treeopt.files.parameters import Count
from treeopt.files.storage import sha256_of
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.origins import provenance
from treeopt.records.rundir import RunDirectory


def import_file(
    run: RunDirectory,
    paths: Path | Sequence[Path],
    *,
    kind: str | None = None,
    trials: Count | None = None,
    heads: Count | None = None,
    drafter: str | None = None,
    overwrite: bool = False,
) -> Calibration:
    """Make files of another tool the run's calibration, and its trace where ranks are known state by state.

    Several files are one measurement of an engine: two scrapes of its counters, or logs to be pooled.

    kind      : what FILE holds: a name from the list above; by default found from the file
    trials    : trials of every head, if the file has shares only
    heads     : number of depths, if the file has one vector for all of them
    drafter   : what made the drafts, which the file does not say: medusa, hydra, eagle, eagle3, mtp, draft-model, ngram,
                suffix, dflash, dspark or redrafter
    overwrite : replace the run's trace and calibration

    Raises InvalidInput where the run has been calibrated already, unless it is to be overwritten; then a
    trace that the new numbers do not have is deleted, so that the two files are always of one origin.
    """
    there = [file for file in (run.trace, run.probe, run.calibration) if file.exists()]
    if there and not overwrite:
        raise InvalidInput(
            f"{there[0]} exists, and an import replaces it only with `overwrite`: pass that, or another `run`."
        )
    paths = [paths] if isinstance(paths, Path) else list(paths)
    files = [{"file": path.name, "sha256": sha256_of(path)} for path in paths if path.is_file()]
    if len({file["sha256"] for file in files}) < len(files):
        raise InvalidInput("Every file may be given once, but two of them have the same content.")
    kind, found = read_measurement(paths, kind, drafter=drafter, trials=trials, heads=heads)
    # On which machine and by which versions it was measured the file does not say.
    record = provenance(versions={"treeopt": __version__}) | {
        "machine": None,
        "imported": {**(files[0] if len(files) == 1 else {"files": files}), "kind": kind},
    }
    about = {"provenance": record, "drafter": {"kind": drafter} if drafter else None}
    trace = None if found.trace is None else replace(found.trace, meta=found.trace.meta | about)
    calibration = found.calibration if trace is None else Calibration.from_trace(trace)
    assert calibration is not None
    calibration.meta.update(about)
    if calibration.meta.get("source") != ENGINE_LOG:
        calibration.meta["source"] = "imported"
    calibration.meta["notes"] = list(found.notes)
    run.replace_accuracies(calibration, trace)
    return calibration
