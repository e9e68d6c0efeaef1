"""treeopt compare: is the plan still right, do groups need their own, which drafter is fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import treeopt
from treeopt.cli.options import AS_JSON, command, counted, default_of, positive, show_result


@command()
@click.argument("sources", nargs=-1, required=True, metavar="A [B...]")
@click.option("--batch-size", **positive(), help="Only of this batch size.  [default: all of the plan's]")
@counted(treeopt.compare, "--budget", "Most rows, where A has no plan and one is made.")
@click.option("--profile", help="A profile, or the name of a shipped one.  [default: A's, or B's]")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 100, max_open=True),
    default=default_of(treeopt.compare, "tolerance"),
    show_default=True,
    help="Per cent of the throughput that the plan, or a group by sharing it, may lose.",
)
@click.option(
    "--picture", type=click.Path(path_type=Path), help="Draw the comparison of drafters there, as .png or .svg."
)
@AS_JSON
def compare(sources: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Say whether a plan is still right for other traffic.

    \b
    A and B are run directories, or a trace, calibration or plan. B may also be
    what an engine counted: scrapes of its metrics, its log, its responses.
    It says which depths moved, beyond noise or not, and what A's plan loses on B.
    A alone            its groups: what each would gain by a plan of its own
    A B ... of several drafters, for one model on one machine: which is fastest

    Exit status: 0 keep the plan, 3 plan anew; 1 and 2 as always.

    \b
    Example:
        treeopt compare treeopt-run this-month
        treeopt compare treeopt-run before.prom after.prom --tolerance 1
        treeopt compare treeopt-run
        treeopt compare runs/medusa runs/hydra --picture drafters.png
    """
    from treeopt.files.storage import schema
    from treeopt.report.compared_table import compared_table, verdict
    from treeopt.report.terminal import note

    found = treeopt.compare(*sources, **options)
    for text in getattr(found, "notes", ()):
        note(text)
    document = {"schema": schema("comparison"), "verdict": verdict(found), **found.document()}
    show_result(document, compared_table(found), as_json)
    click.get_current_context().exit(found.status)
