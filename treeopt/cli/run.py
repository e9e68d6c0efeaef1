"""treeopt run: the whole line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.declared import command
from treeopt.cli.output import show_comparison, show_result
from treeopt.files.parameters import parameters_of

if TYPE_CHECKING:
    from treeopt.pipeline.run import LineOptions
    from treeopt.records.rundir import RunDirectory


@command(treeopt.open, "treeopt.pipeline.run:LineOptions")
def run(run: RunDirectory, as_json: bool, **options: Any) -> None:
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
    from treeopt import pipeline

    source = {name: value for name, value in options.items() if name in parameters_of(treeopt.open)}
    wanted = pipeline.LineOptions(**{name: value for name, value in options.items() if name not in source})
    drafters = pipeline.drafters_of(source.get("drafter", ""))
    if len(drafters) > 1:
        _run_drafters(run, as_json, source, drafters, wanted)
    else:
        _run_one(run, as_json, source, wanted)


def _run_drafters(
    run: RunDirectory, as_json: bool, source: dict[str, Any], drafters: list[str], wanted: LineOptions
) -> None:
    from treeopt import pipeline
    from treeopt.report.terminal import note

    found = pipeline.run_drafters(run, source, drafters, wanted)
    files = pipeline.draw_picture(found, run.figures / "drafters.png", run.figures / "drafters.svg")
    note(f"The picture is {files[0]}.")
    show_comparison(found, as_json)


def _run_one(run: RunDirectory, as_json: bool, source: dict[str, Any], wanted: LineOptions) -> None:
    from treeopt import demo, pipeline
    from treeopt.files.shell import printable
    from treeopt.report.bench_table import bench_table, closing
    from treeopt.report.plan_table import plan_table
    from treeopt.report.terminal import note, out
    from treeopt.report.verdict import ending

    source = pipeline.resolve(run, source, overwrite=wanted.overwrite, num_prompts=wanted.num_prompts)
    plan, results, engines = pipeline.run_line(run, pipeline.open_session(source), wanted)
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
