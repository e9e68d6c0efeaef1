"""The command for measurements from elsewhere: import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import positive, run_directory, show_result

if TYPE_CHECKING:
    from treeopt.rundir import RunDirectory


@click.command("import")
@run_directory
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from", "kind", help="medusa-pt, recall, acceptance, csv or ranks.  [default: as the file tells]"
)
@click.option(
    "--trials", **positive(), help="Trials of every head to assume, where the file has shares only."
)
@click.option("--heads", **positive(), help="Depths that one acceptance vector stands for.")
@click.option("--overwrite", is_flag=True, help="Replace the run's trace and calibration.")
def import_(run: RunDirectory, file: Path, as_json: bool, **options: Any) -> None:
    """Take head accuracies that another tool measured as the run's calibration.

    FILE holds hit tensors of Medusa's heads_accuracy.py, recall@k as JSON, an acceptance vector as
    Sequoia keeps it, a CSV table, or ranks that an engine logged as JSON lines.

    \b
    Example:
        treeopt import vicuna_heads_accuracy.pt
        treeopt import recall.json --trials 5000 --run other-run
    """
    from treeopt import pipeline
    from treeopt.console import calibration_table, note

    calibration = pipeline.import_file(run, file, **options)
    for text in calibration.info["notes"]:
        note(text)
    show_result(calibration.document(), calibration_table(calibration), as_json)
