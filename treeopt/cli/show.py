"""What people look at: treeopt plot, report, show and status."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from treeopt.cli.declared import command
from treeopt.cli.output import show_files, show_result
from treeopt.errors import InvalidInput
from treeopt.files.parameters import Count

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
def plot(
    run: RunDirectory,
    as_json: bool,
    names: tuple[str, ...] = (),
    *,
    formats: tuple[str, ...] = ("png", "svg"),
    batch_size: Count | None = None,
) -> None:
    """Draw pictures of what was measured and chosen.

    There are pictures of the tree, accuracies, throughput, latencies and predictions.
    NAMES are figures to draw; without any, all that the run has the files for.

    \b
    Example:
        treeopt plot
        treeopt plot tree throughput --format svg

    formats    : kinds of files: png, svg or both
    batch_size : only of this batch size; by default all of the plan's
    """
    from treeopt.report import figures

    paths, notes = figures.draw(run, names=names or None, formats=formats, batch_size=batch_size)
    if not paths:
        raise InvalidInput(notes[0] if names else f"{run.path} has nothing to draw yet. Begin with: treeopt calibrate")
    show_files(paths, notes, as_json)


@command()
def report(run: RunDirectory, as_json: bool) -> None:
    """Write one HTML page with all results and pictures.

    \b
    Example:
        treeopt report
    """
    from treeopt.report.page import write_report
    from treeopt.report.terminal import note

    path = write_report(run, hint=note)
    show_result({"files": [str(path)]}, str(path), as_json)


@command(writes=False)
def show(run: RunDirectory, as_json: bool, *, batch_size: Count | None = None, tree: str | None = None) -> None:
    """Draw a tree in the terminal, with what each node adds.

    \b
    Example:
        treeopt show --batch-size 4

    batch_size : which of the plan's trees; by default its first
    tree       : show this tree instead: a file, or the name of a published one
    """
    from treeopt import pipeline
    from treeopt.records.inputs import stale_plan
    from treeopt.report.plan_table import tree_view
    from treeopt.report.terminal import note

    if tree is not None:
        found, gains = pipeline.named_tree(tree, batch_size=batch_size), None
    else:
        plan = run.read_plan()
        for said in stale_plan(run, plan):
            note(said)
        entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
        found, gains = entry.tree, dict(entry.growth_order)
    show_result(
        {"size": len(found), "depth": found.depth, "medusa_choices": found.choices}, tree_view(found, gains), as_json
    )


@command(writes=False)
def status(run: RunDirectory, as_json: bool) -> None:
    """Say what the run directory holds, and what to do next.

    A file is stale if what it was made from has changed since. A file that cannot be read is named.

    \b
    Example:
        treeopt status
        treeopt status --run other-run
    """
    from treeopt.report.status import status
    from treeopt.report.tables import status_table

    found = status(run)
    show_result(asdict(found), status_table(found), as_json)
