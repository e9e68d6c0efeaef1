"""What was measured elsewhere as the run's own: imports from other tools, and merges of other runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from treeopt import __version__
from treeopt.arms.arm import Arms
from treeopt.arms.tuned import columns_of, keep_arms, read_arms, read_results
from treeopt.engines.imports import ARMS, SHARDS, TREE, kind_of_file, read_measurement
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.files.storage import sha256_of
from treeopt.pipeline.calibrate import summary
from treeopt.pipeline.trees import read_tree
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.exchange import ImportOptions
from treeopt.records.inputs import broken
from treeopt.records.merging import merge
from treeopt.records.origins import Provenance
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.trees.tree import Tree

AS_WRITTEN = ImportOptions()


@dataclass(frozen=True)
class Imported:
    """What files held: a tree, which is written nowhere, or what is the run's own from now on."""

    content: Tree | Arms | Calibration
    notes: tuple[str, ...] = ()


def import_files(run: RunDirectory, paths: Sequence[Path], options: ImportOptions = AS_WRITTEN) -> Imported:
    """Take what files hold, by what they are: a tree is read, everything else becomes the run's own.

    Run directories with shards of a calibration become its calibration, settings that were run its arms, and accuracies and
    what an engine counted its calibration. InvalidInput where the run has such a file that is not to be overwritten.
    """
    kind, overwrite = options.kind or kind_of_paths(paths, options.columns), options.overwrite
    if kind == TREE:
        tree = read_tree(paths[0])  # raises the error of a file that is missing
        if len(paths) > 1:
            raise InvalidInput(f"A tree is read from one file, but got {len(paths)}.")
        return Imported(tree)
    if kind == SHARDS:
        calibration = merge_runs(run, paths, overwrite=overwrite)
        answers, states = (f"{calibration.meta[key]:,} {key}" for key in ("sequences", "positions"))
        return Imported(calibration, (f"Merged {answers}, {states}.",))
    if kind == ARMS:
        arms = read_arms(paths, columns_of(options.columns))
        keep_arms(run, arms, overwrite=overwrite)
        return Imported(arms, _notes(arms))
    results, notes = read_results(paths) if options.kind is None else None, tuple[str, ...]()
    if results is not None:
        keep_arms(run, results, overwrite=overwrite)
        if len(results.arms) > 1:
            return Imported(results, _notes(results))
        notes = (*_notes(results), f"Its setting is in {run.arms} too: treeopt tune decides among several.")
    calibration = import_accuracies(run, paths, options)
    return Imported(calibration, (*notes, *calibration.meta["notes"]))


def kind_of_paths(paths: Sequence[Path], columns: Sequence[str] = ()) -> str:
    """What files or folders hold, by the first of them; shards where all are run directories with a trace."""
    first = paths[0]
    if all(RunDirectory(path).trace.exists() for path in paths):
        return SHARDS
    if not first.exists():  # FILE:NAME, of which a tree is one of several
        return TREE
    if counted := kind_of_file(first):
        return counted
    try:
        read_arms([first], columns_of(columns))
    except InvalidInput as no_arms:
        try:
            read_tree(first)
        except OutOfRange:  # a plan of several
            return TREE
        except InvalidInput as no_tree:
            raise InvalidInput(f"{no_arms} As a tree it is refused too: {no_tree}") from None
        return TREE
    return ARMS


def _notes(arms: Arms) -> tuple[str, ...]:
    return (*(f"{name}: {meaning}." for name, meaning in arms.meanings.items()), *arms.notes)


def import_accuracies(run: RunDirectory, paths: Sequence[Path], options: ImportOptions = AS_WRITTEN) -> Calibration:
    """The accuracies in some files as the run's calibration; the run's trace goes, so that all are of one origin.

    Several files are one measurement of an engine: two scrapes of its counters, or logs to be pooled.
    """
    if missing := [path for path in paths if not path.exists()]:
        raise InvalidInput(f"{missing[0]} does not exist.")
    if not options.overwrite:
        run.check_free("an import", run.accuracies())
    files = [{"file": path.name, "sha256": sha256_of(path)} for path in paths if path.is_file()]
    if len({file["sha256"] for file in files}) < len(files):
        raise InvalidInput("Every file may be given once, but two of them have the same content.")
    reading = {name: getattr(options, name) for name in ("drafter", "trials", "rates", "tokens")}
    kind, found = read_measurement(paths, options.kind, **reading)
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
        run.check_free("merging", there)
    now = Provenance.here()
    calibration = summary(trace, replace(Provenance.of(trace.meta), command=now.command, time=now.time))
    run.replace_accuracies(calibration, trace)
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
