"""What is there to look at: treeopt show, with plot and list as words for parts of it, report and status."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from textwrap import fill
from typing import TYPE_CHECKING

import click

from treeopt.cli.command import command, show_files, show_result
from treeopt.errors import InvalidInput

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory

FIGURES = ("tree", "accuracy", "groups", "sizes", "latency", "throughput", "accepted", "contenders")
SCHEMAS = ("calibration", "profile", "plan", "bench", "arms", "score")
TOPICS = ("calibrations", "profiles", "trees", "drafters", "engines", "acceptance", "layouts", "figures")
FORMATS = click.option(
    "--format", "formats", multiple=True, default=("png", "svg"), help="Kind of pictures: png, svg; both by default."
)
BATCH_SIZE = click.option("--batch-size", type=click.IntRange(1), help="Only of this batch size of the plan's.")


@command(writes=False)
@click.argument("names", nargs=-1, type=click.Path(), metavar="[NAMES]...")
@FORMATS
@BATCH_SIZE
@click.option(
    "--schema", type=click.Choice(SCHEMAS), help="Print the JSON schema of a kind of file, or of what score prints."
)
def show(
    run: RunDirectory,
    as_json: bool,
    names: tuple[str, ...],
    formats: tuple[str, ...],
    batch_size: int | None,
    schema: str | None,
) -> None:
    """Show a tree, draw pictures, or list what has a name.

    \b
    Without NAMES  the chosen tree in the terminal, with what each node adds
    a tree         a file in any format that treeopt reads, or a published name
    figures        tree, throughput, ... are drawn into RUN/figures (treeopt plot: all)
    a topic        engines, drafters, trees, ... are listed (treeopt list: all);
                   behind engines may stand the name of one

    \b
    Example:
        treeopt show --batch-size 4
        treeopt show throughput latency --format svg
        treeopt show engines vllm
        treeopt show --schema plan
    """
    if schema:
        from treeopt.report.schemas import json_schema

        show_result(json_schema(schema), None, as_json=True)
    elif names and names[0] in TOPICS:
        _list(names, as_json)
    elif names and names[0] in FIGURES:
        _draw(run, names, formats, batch_size, as_json)
    else:
        _show_tree(run, names, batch_size, as_json)


@command(writes=False)
@click.argument("names", nargs=-1, metavar="[NAMES]...")
@FORMATS
@BATCH_SIZE
def plot(
    run: RunDirectory, as_json: bool, names: tuple[str, ...], formats: tuple[str, ...], batch_size: int | None
) -> None:
    """Draw pictures of what was measured and chosen.

    NAMES are figures to draw (treeopt list figures); without any, all that the run has the files for.

    \b
    Example:
        treeopt plot
        treeopt plot tree throughput --format svg
    """
    _draw(run, names, formats, batch_size, as_json)


@command(name="list")
@click.argument("names", nargs=-1, metavar="[TOPIC [NAME]]")
def list_(as_json: bool, names: tuple[str, ...]) -> None:
    """List engines, shipped files, trees and all that has a name.

    TOPIC is calibrations, profiles, trees, drafters, engines, acceptance, layouts or figures.
    With the NAME of an engine everything that is known of it is shown.

    \b
    Example:
        treeopt list
        treeopt list engines
        treeopt list engines vllm
    """
    _list(names, as_json)


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

    state = status(run)
    show_result(asdict(state), status_table(state), as_json)
    if check and {file.state for file in state.files} != {OK}:
        sys.exit(1)


def _show_tree(run: RunDirectory, names: Sequence[str], batch_size: int | None, as_json: bool) -> None:
    from treeopt.report.terminal import note
    from treeopt.report.tree_view import tree_view

    gains = {}
    if names:
        from treeopt.pipeline.trees import named_tree

        if len(names) > 1:
            raise InvalidInput(f"One tree is shown at a time, but got {', '.join(names)}.")
        tree = named_tree(names[0], batch_size=batch_size)
    else:
        from treeopt.records.stale import stale_plan

        plan = run.read_plan()
        note(*stale_plan(run, plan))
        if plan.copies:
            from treeopt.report.plan_table import plan_table

            show_result(plan.document(), plan_table(plan), as_json)
            return
        entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
        tree, gains = entry.tree, dict(entry.growth_order)
    show_result(tree.record, tree_view(tree, gains), as_json)


def _draw(
    run: RunDirectory, names: Sequence[str], formats: Sequence[str], batch_size: int | None, as_json: bool
) -> None:
    from treeopt.report import figures

    with run.writing():
        paths, notes = figures.draw(run, names=names or None, formats=formats, batch_size=batch_size)
    if not paths:
        raise InvalidInput(notes[0] if names else f"{run.path} has nothing to draw yet. Begin with: treeopt calibrate")
    show_files(paths, notes, as_json)


def _list(names: Sequence[str], as_json: bool) -> None:
    from treeopt.engines.names import engine_names
    from treeopt.files.places import shipped
    from treeopt.records.drafters import DRAFTERS, LAYOUTS
    from treeopt.records.rules import MEANINGS
    from treeopt.trees.published import PUBLISHED_TREES

    topics: dict[str, Mapping[str, str]] = {
        "calibrations": dict.fromkeys(shipped("calibration"), ""),
        "profiles": dict.fromkeys(shipped("profiles"), ""),
        "trees": dict.fromkeys(PUBLISHED_TREES, ""),
        "drafters": {name: drafter.about for name, drafter in DRAFTERS.items()},
        "engines": dict.fromkeys(engine_names(), ""),
        "acceptance": MEANINGS,
        "layouts": {name: layout.about for name, layout in LAYOUTS.items()},
        "figures": dict.fromkeys(FIGURES, ""),
    }
    topic, others = names[0] if names else None, names[1:]
    if topic is not None and topic not in TOPICS:
        raise click.BadParameter(f"must be one of {', '.join(TOPICS)}, but got {topic!r}.", param_hint="TOPIC")
    if others and (topic != "engines" or len(others) > 1):
        raise click.BadParameter(f"goes with engines alone, but got {' '.join(others)!r}.", param_hint="NAME")
    if topic is None:
        every = {topic: list(entries) for topic, entries in topics.items()}
        show_result(every, _lines({topic: ", ".join(every[topic]) or "none" for topic in every}), as_json)
    elif topic == "engines":
        from treeopt.engines.registry import ENGINES, engine_named
        from treeopt.report.engine_table import engine_table, method_table, records

        engines = {name: ENGINES[name] for name in map(engine_named, others)} or ENGINES
        table = method_table(*engines.values()) if others else engine_table(engines)
        show_result({"engines": records(engines)}, table, as_json)
    else:
        entries = topics[topic]
        table = _lines(entries) if any(entries.values()) else "\n".join(entries)
        show_result({topic: list(entries)}, table, as_json)


def _lines(texts: Mapping[str, str]) -> str:
    """Names with their texts, within the width of the terminal."""
    width, indent = click.get_current_context().make_formatter().width, max(map(len, texts)) + 2
    return "\n".join(
        fill(text, width, initial_indent=name.ljust(indent), subsequent_indent=" " * indent, break_on_hyphens=False)
        for name, text in texts.items()
    )
