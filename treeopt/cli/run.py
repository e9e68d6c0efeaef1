"""treeopt run: the whole line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.options import BATCH_SIZES, command, counted, model_options, positive, run_directory, show_result

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@model_options
@run_directory
@BATCH_SIZES
@counted(treeopt.search, "--budget", "Most rows verified per sequence and step, root included.")
@counted(treeopt.calibrate, "--num-prompts", "Prompts to calibrate on.")
@click.option("--bench-prompts", **positive(), help="Held-out prompts.  [default: 24, or 10 a row]")
@counted(treeopt.calibrate, "--max-new-tokens", "Longest answer.")
@click.option("--time-limit", **positive(45), help="Seconds for timing steps.")
@click.option(
    "--engine", type=click.Choice(["openvino", "openvino-int8"]), help="Time, plan for and decode in this runtime."
)
@click.option("--overwrite", is_flag=True, help="Replace other measurements of the run.")
def run(run: RunDirectory, source: dict[str, Any], as_json: bool, engine: str | None, **options: Any) -> None:
    """Do everything, from calibrate to report.

    The steps are calibrate, profile, search, bench, export, plot and report, on the demo model or on your own.
    Dynamic trees are planned for drafters that an engine grows them of, such as EAGLE-3; calibrate does so for all.
    The same command again continues where it was stopped. Several drafters have a run directory each, within that of --run;
    then a table says which is fastest at each batch size.

    \b
    Example:
        treeopt run
        treeopt run --model MODEL --drafter HEADS --prompts prompts.jsonl --batch-size 1,4
        treeopt run --drafter medusa,hydra,ngram,draft --batch-size 1,4
        treeopt run --model smollm2 --drafter eagle3 --prompts prompts.jsonl --engine openvino
    """
    from treeopt import demo, pipeline
    from treeopt.files.shell import printable
    from treeopt.files.storage import schema
    from treeopt.report.bench_table import bench_table, closing
    from treeopt.report.compared_table import compared_table, verdict
    from treeopt.report.ending import ending
    from treeopt.report.plan_table import plan_table
    from treeopt.report.terminal import note, out

    if "drafter" in source and len(drafters := pipeline.drafters_of(source["drafter"])) > 1:
        found = pipeline.run_drafters(run, source, drafters, engine=engine, **options)
        files = pipeline.draw_picture(found, run.figures / "drafters.png", run.figures / "drafters.svg")
        for text in (*found.notes, f"The picture is {files[0]}."):
            note(text)
        show_result(
            {"schema": schema("comparison"), "verdict": verdict(found), **found.document()},
            compared_table(found),
            as_json,
        )
        return
    source = pipeline.resolve(run, source, overwrite=options["overwrite"], num_prompts=options["num_prompts"])
    wanted = pipeline.SearchOptions(options.pop("budget"), options.pop("batch_sizes"), engine=engine)
    plan, results, engines = pipeline.run_line(run, pipeline.open_session(source), wanted, **options)
    if as_json:
        show_result({"plan": plan.document(), "bench": [r.document() for r in results]}, None, as_json)
        return
    out(plan_table(plan))
    for entry, result in zip(plan.entries, results, strict=True):
        out(bench_table(result))
        if compared := closing(entry, result):
            out(compared)
    note((f"For your engine: {run.export}/. " if engines else "") + f"To look at it all, open {run.report}")
    said, following = ending(run, plan, results, engines, is_demo=source.get("model", demo.NAME) == demo.NAME)
    out(said)
    click.echo(printable(following))  # on a line of its own, however long, to be copied
