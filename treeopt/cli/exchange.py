"""The commands for trees from elsewhere: score, import-tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from treeopt.cli.options import AS_JSON, positive, run_directory, show_result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.growth.score import Score
    from treeopt.records.rundir import RunDirectory


@click.command()
@run_directory(writes=False)
@click.argument("tree")
@click.option("--calibration", help="A trace, a calibration, or the name of a shipped one (treeopt list).")
@click.option("--batch-size", **positive(), help="Which of a plan's trees, where TREE is a plan.")
def score(run: RunDirectory, tree: str, calibration: str | None, batch_size: int | None, as_json: bool) -> None:
    """Say what a tree reaches, and how far it is from the best tree of its size.

    TREE is a list of medusa_choices, a plan, any file that treeopt export writes, or the name of a
    published tree (treeopt list). It is judged by the run's trace, or its calibration.

    \b
    Example:
        treeopt score mc_sim_7b_63
        treeopt score my_tree.json --calibration vicuna-7b-medusa1
    """
    from treeopt import pipeline
    from treeopt.files.storage import schema
    from treeopt.report.terminal import note

    found = pipeline.score(run, tree, calibration=calibration, batch_size=batch_size)
    for text in found.notes:
        note(text)
    document = {"schema": schema("score"), "tree": tree, **found.document()}
    show_result(document, score_table(found, tree), as_json)


@click.command("import-tree")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Write the tree there.  [default: print it]")
@click.option("--batch-size", **positive(), help="Which of a plan's trees, where FILE is a plan.")
@AS_JSON
def import_tree(file: Path, output: Path | None, batch_size: int | None, as_json: bool) -> None:
    """Read a tree in any engine's format, and say what was silently wrong in it.

    FILE is a list in Python, JSON or YAML, an engine's configuration or launch command with one, Triton's braces,
    Neuron's lists of children, vLLM's tuples, or a plan. What has one obvious repair is repaired, and said;
    so is what each engine would have made of the list as it stood.

    \b
    Example:
        treeopt import-tree medusa_choices.py --output tree.json
        treeopt import-tree config.pbtxt
    """
    from treeopt import pipeline
    from treeopt.export.diagnosis import document
    from treeopt.files.storage import schema, write_json
    from treeopt.report.terminal import note

    found = pipeline.import_tree(file, batch_size=batch_size)
    for text in found.repaired:
        note(text)
    for reading in found.readings:
        note(f"{reading.engine} reads {reading.reads}: {reading.why}")
    tree = document(found)
    if output is not None:
        write_json(output, "tree", tree)
    shown = {"schema": schema("tree"), **tree, **({"files": [str(output)]} if output is not None else {})}
    show_result(shown, str(output) if output is not None else str(found.tree.choices), as_json)


def score_table(score: Score, name: str) -> RenderableType:
    """The tree, the best of its size and the smallest that reaches as much; what it comes to, in sentences."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    from treeopt.report.terminal import pm

    table = Table(title="Tokens per step", title_justify="left")
    for column in ("tree", "rows", "depth", "product", "joint", "replayed"):
        table.add_column(column, justify="left" if column == "tree" else "right")
    held_out = " (held out)" if score.best.replayed is not None else ""
    rows = {
        name: score.given,
        f"best of its size{held_out}": score.best,
        f"smallest that reaches it{held_out}": score.smallest,
    }
    for label, rated in rows.items():
        if rated is not None:
            table.add_row(
                escape(label),
                str(len(rated.tree)),
                str(rated.tree.depth),
                pm(rated.product, None, 3),
                pm(rated.joint, None, 3),
                pm(rated.replayed, rated.replayed_stderr, 3),
            )
    return Group(table, escape(verdict(score, name)))


def verdict(score: Score, name: str) -> str:
    """What the table comes to."""
    from treeopt.report.terminal import pm

    error = score.distance_stderr
    size, best = len(score.given.tree), len(score.best.tree)
    share = pm(100 * score.distance, None if error is None else 100 * error, 1)
    if score.unknown_nodes:
        return f"{name} is at most {share} % below the best tree of {best} rows."
    said = f"{name} is {share} % below the best tree of {best} rows."
    if round(score.distance, 4) <= 2 * (error or 0.0):
        noise = f", within the noise ({share} % below)" if error else ""
        said = f"{name} is as good as the best tree of {best} rows{noise}."
    if score.smallest and len(score.smallest.tree) < size:
        said += f" {len(score.smallest.tree)} rows reach what its {size} do."
    return said
