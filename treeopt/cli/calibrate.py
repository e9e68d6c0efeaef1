"""treeopt calibrate: what the drafter guesses right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.options import (
    Integers,
    command,
    counted,
    default_of,
    model_options,
    run_directory,
    show_result,
    tensor_parallel,
    worker_options,
)

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@model_options
@tensor_parallel
@run_directory
@counted(treeopt.calibrate, "--num-prompts", "Prompts to answer.")
@counted(treeopt.calibrate, "--max-new-tokens", "Longest answer.")
@counted(treeopt.calibrate, "--batch-size", "Sequences decoded at once.")
@click.option(
    "--ranks",
    type=click.IntRange(1, 10_000),
    default=default_of(treeopt.calibrate, "ranks"),
    show_default=True,
    help="Ranks to tell apart.",
)
@click.option(
    "--topk",
    "topks",
    type=Integers(),
    default=",".join(map(str, default_of(treeopt.calibrate, "topks"))),
    show_default=True,
    help="Nodes that dynamic trees expand on each level, to be recorded: numbers from 1 to 10.",
)
@click.option("--shard", metavar="I/N", help="Measure every Nth block of prompts only, from the Ith on.")
@click.option("--overwrite", is_flag=True, help="Replace another measurement of the run.")
@worker_options
def calibrate(run: RunDirectory, source: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Measure how often the drafter guesses right, rank by rank.

    The target answers the prompts by the rule of --acceptance, conversations turn by turn. With --responses
    nothing is generated: given answers are read in one pass. What that measures is exact for the answers that
    the target itself sampled at --temperature, and an estimate for greedy decoding otherwise.

    The same command again continues where it was stopped, with or without --engine ray. Another measurement of
    the run is kept without --overwrite. With --shard several machines share the prompts, each in a run directory
    of its own, and treeopt merge joins them.

    \b
    Example:
        treeopt calibrate --num-prompts 64
        treeopt calibrate --drafter ngram --acceptance sample --temperature 0.7
        treeopt calibrate --model MODEL --drafter HEADS --prompts prompts.jsonl --group-by category
        treeopt calibrate --shard 2/8 --run part-2
        treeopt calibrate --model MODEL --drafter HEADS --prompts prompts.jsonl --engine ray --workers 4 --gpus-per-worker 1
    """
    from treeopt.report.calibration_table import calibration_table

    treeopt.calibrate(run=run, **options, **source)
    result = run.read_calibration()
    show_result(result.document(), calibration_table(result), as_json)
