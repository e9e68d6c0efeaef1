"""Results and names to look at: treeopt plot, report, show, status and list."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from textwrap import fill
from typing import TYPE_CHECKING

import click

from treeopt.cli.command import command, show_files, show_result
from treeopt.errors import InvalidInput

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@click.option(
    "--format", "formats", multiple=True, default=("png", "svg"), help="Kind of files: png, svg; both by default."
)
@click.option("--batch-size", type=click.IntRange(1), help="Only of this batch size.  [default: all of the plan's]")
def plot(
    run: RunDirectory, as_json: bool, names: tuple[str, ...], formats: tuple[str, ...], batch_size: int | None
) -> None:
    """Draw pictures of what was measured and chosen.

    There are pictures of the tree, accuracies, throughput, latencies and predictions.
    NAMES are figures to draw; without any, all that the run has the files for.

    \b
    Example:
        treeopt plot
        treeopt plot tree throughput --format svg
    """
    from treeopt.report import figures

    paths, notes = figures.draw(run, names=names or None, formats=formats, batch_size=batch_size)
    if not paths:
        raise InvalidInput(notes[0] if names else f"{run.path} has nothing to draw yet. Begin with: treeopt calibrate")
    show_files(paths, notes, as_json)


@command()
def report(run: RunDirectory, as_json: bool) -> None:
    """Write one HTML page with all results and pictures.

    \b
    Example:
        treeopt report
    """
    from treeopt.report.page import write_report

    path, notes = write_report(run)
    show_files([path], notes, as_json)


@command(writes=False)
@click.option("--batch-size", type=click.IntRange(1), help="Which of the plan's trees.  [default: its first]")
@click.option("--tree", help="Show this tree instead: a file, or the name of a published one.")
def show(run: RunDirectory, as_json: bool, batch_size: int | None, tree: str | None) -> None:
    """Draw a tree in the terminal, with what each node adds.

    \b
    Example:
        treeopt show --batch-size 4
    """
    from treeopt import pipeline
    from treeopt.records.inputs import stale_plan
    from treeopt.report.plan_table import plan_table, tree_view
    from treeopt.report.terminal import note

    gains = None
    if tree is not None:
        found = pipeline.named_tree(tree, batch_size=batch_size)
    else:
        plan = run.read_plan()
        note(*stale_plan(run, plan))
        if plan.copies:
            show_result(plan.document(), plan_table(plan), as_json)
            return
        entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
        found, gains = entry.tree, dict(entry.growth_order)
    document = {"size": len(found), "depth": found.depth, "medusa_choices": found.choices}
    show_result(document, tree_view(found, gains), as_json)


@command(writes=False)
@click.option(
    "--check", is_flag=True, help="Exit with 1 if there is no file, or one that is stale, damaged or unfinished."
)
def status(run: RunDirectory, as_json: bool, check: bool) -> None:
    """Say what the run directory holds, and what to do next.

    A file is stale if what it was made from has changed since. A file that cannot be read is named.

    \b
    Example:
        treeopt status
        treeopt status --run other-run --check
    """
    from treeopt.report.status import OK, status
    from treeopt.report.tables import status_table

    found = status(run)
    show_result(asdict(found), status_table(found), as_json)
    if check and {file.state for file in found.files} != {OK}:
        sys.exit(1)


@command(name="list")
@click.argument("topic", required=False)
@click.argument("name", required=False)
def list_(as_json: bool, topic: str | None, name: str | None) -> None:
    """List engines, shipped files, trees and all that has a name.

    TOPIC is calibrations, profiles, trees, drafters, engines, acceptance, layouts or figures.
    With the NAME of an engine everything that is known of it is shown.

    \b
    Example:
        treeopt list
        treeopt list engines
        treeopt list engines vllm
    """
    from treeopt.engines.registry import ENGINES, engine_named
    from treeopt.files.places import shipped
    from treeopt.records.drafters import DRAFTERS, LAYOUTS
    from treeopt.records.rules import MEANINGS, RULES
    from treeopt.report.engine_table import engine_table, method_table, records
    from treeopt.report.figures import FIGURES
    from treeopt.trees.published import PUBLISHED_TREES

    found: dict[str, list[str]] = {
        "calibrations": [*shipped("calibration")],
        "profiles": [*shipped("profiles")],
        "trees": [*PUBLISHED_TREES],
        "drafters": [*DRAFTERS],
        "engines": [*ENGINES],
        "acceptance": [*RULES],
        "layouts": [*LAYOUTS],
        "figures": [*FIGURES],
    }
    if name is not None and topic != "engines":
        raise click.BadParameter(f"goes with engines alone, but got {name!r}.", param_hint="NAME")
    if topic is None:
        show_result(found, _lines({topic: ", ".join(names) or "none" for topic, names in found.items()}), as_json)
    elif topic == "engines":
        engines = ENGINES if name is None else {name: engine_named(name)}
        show_result(
            {"engines": records(engines)}, method_table(*engines.values()) if name else engine_table(engines), as_json
        )
    elif topic in found:
        drafters, layouts = ({name: row.about for name, row in rows.items()} for rows in (DRAFTERS, LAYOUTS))
        said = {"drafters": drafters, "layouts": layouts, "acceptance": MEANINGS}.get(topic, {})
        table = _lines({name: said[name] for name in found[topic]}) if said else "\n".join(found[topic])
        show_result({topic: found[topic]}, table, as_json)
    else:
        raise click.BadParameter(f"must be one of {', '.join(found)}, but got {topic!r}.", param_hint="TOPIC")


def _lines(said: Mapping[str, str]) -> str:
    """Names and what is said of each, within the width of the terminal."""
    width, indent = click.get_current_context().make_formatter().width, max(map(len, said)) + 2
    return "\n".join(
        fill(text, width, initial_indent=name.ljust(indent), subsequent_indent=" " * indent, break_on_hyphens=False)
        for name, text in said.items()
    )
