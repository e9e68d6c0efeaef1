"""Trees from elsewhere: what a given one is worth here, and what is wrong with its file."""

from __future__ import annotations

from pathlib import Path

from treeopt.errors import InvalidInput
from treeopt.export.diagnosis import Diagnosis, diagnose
from treeopt.files.storage import read_text, sha256_of
from treeopt.growth.score import Score, score_tree
from treeopt.pipeline.export import named_tree, read_plan
from treeopt.records.inputs import read_accuracies
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note, progress


def score(run: RunDirectory, tree: str, *, calibration: str | None = None, batch_size: int | None = None) -> Score:
    """Score a tree by file or published name on the run's trace, or on a calibration by path or name."""
    plan = read_plan(Path(tree)) if Path(tree).is_file() else None
    grown_on = set(plan.inputs.values()) if plan else set()
    asked = named_tree(tree, batch_size=batch_size)
    path, source = read_accuracies(run, calibration)
    if calibration is None and run.probe.exists():
        note("Scored by greedy decoding: what a tree reaches under typical acceptance, treeopt bench --tree measures.")
    with progress("Scoring", None):
        return score_tree(source, asked, grown_here=sha256_of(path) in grown_on)


def import_tree(file: Path, *, batch_size: int | None = None) -> Diagnosis:
    """The tree of a file in any engine's format, or of a plan, repaired where that is obvious."""
    plan = read_plan(file)
    if plan is not None:
        return Diagnosis(plan.entry(batch_size).tree, (), ())
    if batch_size is not None:
        raise InvalidInput(f"--batch-size picks one of a plan's trees, but {file} is no plan: leave it out.")
    try:
        return diagnose(read_text(file))
    except InvalidInput as error:
        said = str(error)
        raise InvalidInput(said if str(file) in said else f"{file}: {said}") from None
