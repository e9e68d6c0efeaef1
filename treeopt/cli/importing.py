"""treeopt import: measurements from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import command, positive, run_directory, show_result

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command("import")
@run_directory
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option("--from", "kind", help="What FILE holds: a name from the list above.  [default: found from the file]")
@click.option("--trials", **positive(), help="Trials of every head, if the file has shares only.")
@click.option("--heads", **positive(), help="Number of depths, if the file has one vector for all of them.")
@click.option(
    "--drafter",
    help=(
        "What made the drafts, which the file does not say: medusa, hydra, eagle, eagle3, mtp, "
        "draft-model, ngram, suffix, dflash, dspark or redrafter."
    ),
)
@click.option("--overwrite", is_flag=True, help="Replace the run's trace and calibration.")
def import_(run: RunDirectory, files: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Take what another tool measured as the run's calibration.

    \b
    FILE holds
        medusa-pt      hit tensors of Medusa's heads_accuracy.py
        recall         recall@k as JSON
        acceptance     an acceptance vector as Sequoia keeps it
        csv            a table of accuracies or hits
        ranks          ranks that an engine logged, as JSON lines
    or what an engine counted while it served chains
        vllm-metrics   /metrics before and after, the log, vllm bench serve
        vllm-requests  responses with draft metrics, or AIPerf's records
        sglang         responses with meta_info or sglext
        tensorrt-llm   /prometheus/metrics before and after, or responses
        llama-cpp      the log, or /metrics before and after

    \b
    Example:
        treeopt import vicuna_heads_accuracy.pt
        treeopt import recall.json --trials 5000 --run other-run
        treeopt import before.txt after.txt --drafter eagle3
    """
    from treeopt import pipeline
    from treeopt.report.calibration_table import calibration_table
    from treeopt.report.terminal import note

    calibration = pipeline.import_file(run, files, **options)
    for text in calibration.meta["notes"]:
        note(text)
    show_result(calibration.document(), calibration_table(calibration), as_json)
