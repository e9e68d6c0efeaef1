"""treeopt merge: several calibrations as one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from treeopt.cli.options import command, run_directory, show_result

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@run_directory
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--weight",
    "shares",
    type=click.FloatRange(min=0, min_open=True, max=1e9),
    multiple=True,
    help="Share of the traffic that each RUN stands for, once for each.  [default: every conversation counts once]",
)
@click.option("--overwrite", is_flag=True, help="Replace the run's trace and calibration.")
def merge(run: RunDirectory, runs: tuple[Path, ...], shares: tuple[float, ...], as_json: bool, overwrite: bool) -> None:
    """Make one calibration of several, or of its shards.

    Each RUN is a run directory. All shards that treeopt calibrate --shard made become the trace of a single
    process, byte for byte, in whatever order and however many at a time they are merged. Calibrations
    of different prompts become groups of one trace; with --weight each counts by its share of the
    conversations. Other models, drafters, acceptance rules or ranks are refused.

    \b
    Example:
        treeopt merge part-1 part-2 part-3 --run whole
        treeopt merge chat code --weight 0.7 --weight 0.3 --run traffic
    """
    from treeopt import pipeline
    from treeopt.report.calibration_table import calibration_table

    calibration = pipeline.merge_runs(run, runs, shares=shares or None, overwrite=overwrite)
    show_result(calibration.document(), calibration_table(calibration), as_json)
