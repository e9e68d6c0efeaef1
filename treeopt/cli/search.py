"""treeopt search: the best tree for each batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.options import Loads, command, counted, default_of, positive, run_directory, show_result

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@run_directory
@counted(treeopt.search, "--budget", "Most rows verified per sequence and step, root included.")
@click.option(
    "--batch-size",
    "batch_sizes",
    type=Loads(),
    help="Sequences decoded at once: 1,4,8. With shares, 1:0.5,4:0.3,8:0.2, one tree for all: a share is of the time "
    "that the server decodes so many at once, not of requests or tokens.  [default: the profile's]",
)
@click.option("--context", **positive(), help="Tokens that a sequence has.  [default: as in the trace]")
@click.option("--for", "engine", help="Plan what this engine can take (treeopt list engines).")
@click.option("--method", help="One of the engine's ways to speculate.  [default: the drafter's]")
@click.option(
    "--shape", help="any, sibling-closed, low-rank-expands or chain.  [default: the engine's, or sibling-closed]"
)
@click.option("--max-rank", type=click.IntRange(min=0), help="Largest rank of a node.  [default: 9, or the engine's]")
@click.option("--max-depth", **positive(), help="Deepest node.  [default: the number of heads]")
@click.option(
    "--objective",
    default=default_of(treeopt.search, "objective"),
    show_default=True,
    help="independent, joint or replay.",
)
@click.option(
    "--sample", **positive(), help="Plan with so many conversations of the trace, drawn at random.  [default: all]"
)
@click.option("--measured-only", is_flag=True, help="Choose among sizes that were timed, without estimates between.")
@click.option(
    "--verify",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Decode for real with the N best sizes and the chosen one's neighbours, and take the fastest.",
)
@click.option(
    "--for-groups",
    default=default_of(treeopt.search, "for_groups"),
    show_default=True,
    help="shared: one plan for all. minimax: the one least bad for the worst group. own: beside the shared one a plan for "
    "each group, in RUN/groups/.",
)
@click.option("--calibration", help="A trace, a calibration, or the name of a shipped one (treeopt list).")
@click.option("--profile", help="A profile, or the name of a shipped one.")
def search(run: RunDirectory, as_json: bool, calibration: str | None, profile: str | None, **options: Any) -> None:
    """Choose the tree with the best throughput for each batch size.

    Figures are held out, with error bars over conversations and over rounds of timing. Sizes that the
    data cannot tell apart are named as tied; of those that cost at most 0.5 % the smallest is chosen.

    \b
    Example:
        treeopt search --budget 64 --batch-size 4
        treeopt search --batch-size 1:0.5,4:0.3,8:0.2
        treeopt search --verify 3
        treeopt search --for vllm --batch-size 1,8,32
        treeopt search --sample 5000
        treeopt search --calibration vicuna-7b-medusa1 --budget 39
    """
    from treeopt.report.plan_table import plan_table

    plan = treeopt.search(calibration, profile, run=run, **options)
    show_result(plan.document(), plan_table(plan), as_json)
