"""Trees from elsewhere: treeopt score and import-tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

import treeopt
from treeopt.cli.options import AS_JSON, command, positive, run_directory, show_result

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@run_directory(writes=False)
@click.argument("tree")
@click.option("--calibration", help="A trace, a calibration, or the name of a shipped one (treeopt list).")
@click.option("--batch-size", **positive(), help="Which of a plan's trees, where TREE is a plan.")
def score(run: RunDirectory, tree: str, calibration: str | None, batch_size: int | None, as_json: bool) -> None:
    """Compare a tree with the best tree of its size.

    TREE is a list of medusa_choices, a plan, any file that treeopt export writes, or the name of a
    published tree (treeopt list). It is judged by the run's trace, or its calibration.

    \b
    Example:
        treeopt score mc_sim_7b_63
        treeopt score my_tree.json --calibration vicuna-7b-medusa1
    """
    from treeopt.files.storage import schema
    from treeopt.report.score_table import score_table
    from treeopt.report.terminal import note

    found = treeopt.score(tree, calibration, run=run, batch_size=batch_size)
    for text in found.notes:
        note(text)
    document = {"schema": schema("score"), "tree": tree, **found.document()}
    show_result(document, score_table(found, tree), as_json)


@command("import-tree")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the tree there.  [default: print it]")
@click.option("--batch-size", **positive(), help="Which of a plan's trees, where FILE is a plan.")
@AS_JSON
def import_tree(file: Path, output: Path | None, batch_size: int | None, as_json: bool) -> None:
    """Read a tree in any engine's format, and say what is wrong.

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
