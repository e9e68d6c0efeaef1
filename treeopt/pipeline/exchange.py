"""Trees from elsewhere: what a given one is worth here."""

from __future__ import annotations

from pathlib import Path

from treeopt.console import progress
from treeopt.errors import InvalidInput
from treeopt.pipeline.deliver import read_plan, read_tree
from treeopt.published import PUBLISHED, published_tree
from treeopt.rundir import RunDirectory
from treeopt.score import Score, score_tree
from treeopt.storage import sha256_of


def score(
    run: RunDirectory, tree: str, *, calibration: str | None = None, batch_size: int | None = None
) -> Score:
    """Score a tree by file or published name on the run's trace, or on a calibration by path or name."""
    file, grown_on = Path(tree), set()
    if file.is_file():
        asked, plan = read_tree(file, batch_size=batch_size), read_plan(file)
        grown_on = set(plan.inputs.values()) if plan else set()
    elif tree not in PUBLISHED:
        raise InvalidInput(
            f"There is no file {tree}, nor a published tree of that name ({', '.join(PUBLISHED)})."
        )
    elif batch_size is not None:
        raise InvalidInput(f"--batch-size picks one of a plan's trees, but {tree} is one tree: leave it out.")
    else:
        asked = published_tree(tree)
    path, source = run.read_source(calibration)
    with progress("Scoring", None):
        return score_tree(source, asked, grown_here=sha256_of(path) in grown_on)
