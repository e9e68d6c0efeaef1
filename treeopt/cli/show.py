"""What people look at: treeopt plot, report and show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from treeopt.cli.options import Words, command, positive, run_directory, show_files, show_result
from treeopt.errors import InvalidInput

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@run_directory
@click.argument("names", nargs=-1)
@click.option("--format", "formats", type=Words(), default="png,svg", show_default=True, help="png, svg or both.")
@click.option("--batch-size", **positive(), help="Only of this batch size.  [default: all of the plan's]")
def plot(
    run: RunDirectory, names: tuple[str, ...], formats: tuple[str, ...], batch_size: int | None, as_json: bool
) -> None:
    """Draw pictures of what was measured and chosen.

    There are pictures of the tree, accuracies, throughput, latencies and predictions.
    NAMES are figures to draw; without any, all that the run has the files for.

    \b
    Example:
        treeopt plot
        treeopt plot tree throughput --format svg
    """
    from treeopt.report import figures

    paths, notes = figures.draw(run, names=names or None, formats=formats, batch_size=batch_size)
    if not paths:
        raise InvalidInput(notes[0] if names else f"{run.path} has nothing to draw yet. Begin with: treeopt calibrate")
    show_files(paths, notes, as_json)


@command()
@run_directory
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


@command()
@run_directory(writes=False)
@click.option("--batch-size", **positive(), help="Which of the plan's trees.  [default: its first]")
@click.option("--tree", "name", help="Show this tree instead: a file, or the name of a published one.")
def show(run: RunDirectory, batch_size: int | None, name: str | None, as_json: bool) -> None:
    """Draw a tree in the terminal, with what each node adds.

    \b
    Example:
        treeopt show --batch-size 4
    """
    from treeopt import pipeline
    from treeopt.records.inputs import stale_plan
    from treeopt.report.plan_table import tree_view
    from treeopt.report.terminal import note

    if name is not None:
        tree, gains = pipeline.named_tree(name, batch_size=batch_size), None
    else:
        plan = run.read_plan()
        for said in stale_plan(run, plan):
            note(said)
        entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
        tree, gains = entry.tree, dict(entry.growth_order)
    show_result(
        {"size": len(tree), "depth": tree.depth, "medusa_choices": tree.choices}, tree_view(tree, gains), as_json
    )
