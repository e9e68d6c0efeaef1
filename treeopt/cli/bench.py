"""treeopt bench: real decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.options import command, counted, model_options, positive, run_directory, show_result, tensor_parallel

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@model_options
@tensor_parallel
@run_directory
@click.option("--batch-size", **positive(), help="Which of the plan's.  [default: its first]")
@click.option("--num-prompts", **positive(), help="Held-out prompts.  [default: 24, or 10 a row]")
@click.option("--max-new-tokens", **positive(), help="Longest answer.  [default: as calibrated]")
@counted(treeopt.bench, "--rounds", "Times that every contender decodes every prompt.")
@click.option("--engine", help="Have another runtime decode: transformers, openvino, openvino-int8.")
@click.option("--tree", "trees", multiple=True, help="Add a tree: a file, or the name of a published one.")
def bench(run: RunDirectory, source: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Decode held-out prompts for real, with trees and without.

    The chosen tree is compared with plain decoding, the published tree, a chain and the largest tree. Of the other trees,
    those that are shown to be slower than the chosen one stop early, and that is said.
    --prompts trace decodes the prompts of the run's own trace instead. --engine decodes the plan's chain or dynamic tree in another
    runtime, beside its own plain decoding; bench.json stays.

    \b
    Example:
        treeopt bench --num-prompts 16 --rounds 3
        treeopt bench --engine transformers
        treeopt bench --prompts trace --tree my_tree.json --dtype float64
    """
    from treeopt.report.bench_table import bench_table

    result = treeopt.bench(run=run, **options, **source)
    show_result(result.document(), bench_table(result), as_json)
