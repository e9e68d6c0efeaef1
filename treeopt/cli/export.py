"""treeopt export: an engine's own configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import positive, run_directory, show_files

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@click.command()
@run_directory
@click.option("--to", "engine", required=True, help="The serving engine (treeopt list engines).")
@click.option("--method", help="One of the engine's ways to speculate.  [default: the drafter's]")
@click.option("--engine-version", "version", help="Release, where its files differ by release: 1.2.")
@click.option(
    "--batch-size",
    **positive(),
    help="Which of the plan's trees, where it has several.  [default: the schedule, where the engine takes one]",
)
@click.option("--tree", help="Export this tree instead of the plan's: a file, or the name of a published one.")
@click.option("--heads", **positive(), help="Heads that the drafter of --tree has.  [default: its depth]")
@click.option("--max-draft-len", **positive(), help="Of a TensorRT-LLM engine that is built already.")
def export(run: RunDirectory, engine: str, as_json: bool, **options: Any) -> None:
    """Write what was chosen as an engine's own configuration, and print the command that uses it.

    The files are read again by the engine's rules before they are written. What it would refuse or misread is
    refused here, with the search to run instead.

    \b
    Example:
        treeopt export --to tensorrt-llm --batch-size 4
        treeopt export --to vllm
        treeopt export --to neuron-medusa --tree mc_sim_7b_63
    """
    from treeopt import pipeline

    paths, written = pipeline.export(run, engine, **options)
    show_files(paths, written.notes, as_json, command=written.command)
