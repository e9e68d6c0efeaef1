"""What leaves the run: treeopt export and convert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import AS_JSON, command, positive, run_directory, show_files

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@run_directory
@click.option("--to", "engine", required=True, help="The serving engine (treeopt list engines).")
@click.option("--method", help="One of the engine's ways to speculate.  [default: the drafter's]")
@click.option("--engine-version", "version", help="Release of the engine, such as 1.2, if its files differ by release.")
@click.option(
    "--batch-size",
    **positive(),
    help="Which of the plan's trees, where it has several.  [default: the schedule where the engine takes one, else a "
    "folder for each]",
)
@click.option("--tree", help="Export this tree instead of the plan's: a file, or the name of a published one.")
@click.option(
    "--heads", **positive(), help="Number of heads of the drafter of --tree.  [default: the depth of the tree]"
)
@click.option("--max-draft-len", **positive(), help="max_draft_len of a TensorRT-LLM engine that is built already.")
def export(run: RunDirectory, engine: str, as_json: bool, **options: Any) -> None:
    """Write the chosen trees as an engine's own configuration.

    The command that uses them is printed. The files are read again by the engine's rules before they are
    written. What it would refuse or misread is refused here, with the search to run instead.

    \b
    Example:
        treeopt export --to tensorrt-llm --batch-size 4
        treeopt export --to vllm
        treeopt export --to neuron-medusa --tree mc_sim_7b_63
    """
    from treeopt import pipeline

    paths, written = pipeline.export(run, engine, **options)
    show_files(paths, written.notes, as_json, command=written.command)


@command()
@click.argument("drafter")
@click.option("--to", "layout", required=True, help="Layout to write; treeopt list names them.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@click.option("--model", help="Folder of the base model: for merged layouts and shared heads.")
@click.option("--revision", help="Revision of a hub checkpoint.")
@click.option("--weights", help="Format of the weights, for openvino: fp32 or int8.  [default: fp32]")
@AS_JSON
def convert(drafter: str, output: Path, as_json: bool, **options: Any) -> None:
    """Write published heads in another engine's layout.

    DRAFTER is a folder, a file or a hub id in any layout that treeopt reads. OpenVINO reads whole models too: DRAFTER is one
    where no --model is given. optimum-intel converts it, in a virtual environment of its own.

    \b
    Example:
        treeopt convert medusa-vicuna-7b-v1.3 --to vllm --output heads-for-vllm
        treeopt convert smollm2 --to openvino --weights int8 --output model-for-openvino
        treeopt convert my-eagle3 --to openvino --model smollm2 --output drafter-for-openvino
    """
    from treeopt import pipeline

    paths, notes = pipeline.convert(drafter, output, **options)
    show_files(paths, notes, as_json)
