"""The commands that hand over what was found: export, convert, plot, show, report, list."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import AS_JSON, Words, positive, run_directory, show_files, show_result
from treeopt.errors import InvalidInput

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


SAID = {  # by treeopt list
    "drafters": {
        "medusa": "the demo model's Medusa-1 heads; of your own: their folder, file or hub id",
        "hydra": "the demo model's Hydra heads; of your own: as above",
        "draft": "the demo model's draft model; of your own: a folder of a small causal LM with the same tokenizer",
        "ngram": "what came in the text before behind its last tokens; no weights",
        "early-exit": "the target's own first layers, early-exit:LAYER; no weights, and no engine that runs it",
    },
    "acceptance": {
        "greedy": "the target's likeliest token; the default",
        "sample": "what the target samples at --temperature; lossless, with every drafter and tree",
        "reject": "the same distribution by p/q rejection, with chains of a draft model",
        "typical": "Medusa's: whatever is likely enough passes; faster, with another text",
    },
}


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


@click.command()
@click.argument("drafter")
@click.option("--to", "layout", required=True, help="Layout to write; treeopt list names them.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@click.option("--model", help="Folder of the base model: for merged layouts and shared heads.")
@click.option("--revision", help="Revision of a hub checkpoint.")
@AS_JSON
def convert(drafter: str, output: Path, as_json: bool, **options: Any) -> None:
    """Write published Medusa heads in another engine's layout.

    DRAFTER is a folder, a file or a hub id in any layout that treeopt reads.

    \b
    Example:
        treeopt convert medusa-vicuna-7b-v1.3 --to vllm --output heads-for-vllm
    """
    from treeopt import pipeline

    paths, notes = pipeline.convert(drafter, output, **options)
    show_files(paths, notes, as_json)


@click.command()
@run_directory
@click.argument("names", nargs=-1)
@click.option("--format", "formats", type=Words(), default="png,svg", show_default=True, help="png, svg or both.")
@click.option("--batch-size", **positive(), help="Only of this batch size.  [default: all of the plan's]")
def plot(
    run: RunDirectory, names: tuple[str, ...], formats: tuple[str, ...], batch_size: int | None, as_json: bool
) -> None:
    """Draw what was measured: the tree, accuracies, throughput, latencies, predictions.

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


@click.command()
@run_directory
def report(run: RunDirectory, as_json: bool) -> None:
    """Write one HTML file with the results, the pictures, and where they come from.

    \b
    Example:
        treeopt report
    """
    from treeopt.report.page import write_report

    path = write_report(run)
    show_result({"files": [str(path)]}, str(path), as_json)


@click.command()
@run_directory(writes=False)
@click.option("--batch-size", **positive(), help="Which of the plan's trees.  [default: its first]")
@click.option("--tree", "name", help="Show this tree instead: a file, or the name of a published one.")
def show(run: RunDirectory, batch_size: int | None, name: str | None, as_json: bool) -> None:
    """Draw a tree in the terminal: ranks, paths, and what each node adds.

    \b
    Example:
        treeopt show --batch-size 4
    """
    from treeopt import pipeline
    from treeopt.report.terminal import tree_view

    if name is not None:
        tree, gains = pipeline.named_tree(name, batch_size=batch_size), None
    else:
        plan = run.read_plan()
        entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
        tree, gains = entry.tree, {tuple(path): gain for path, gain in entry.growth_order}
    show_result(
        {"size": len(tree), "depth": tree.depth, "medusa_choices": tree.choices}, tree_view(tree, gains), as_json
    )


@click.command("list")
@click.argument("topic", required=False, metavar="[TOPIC]")
@AS_JSON
def list_(topic: str | None, as_json: bool) -> None:
    """List shipped calibrations and profiles, the demo's drafters, published trees, engines, acceptance rules, objectives,
    layouts and figures.

    TOPIC is one of them. For engines there is a table: what each can take, where it goes, which releases.

    \b
    Example:
        treeopt list
        treeopt list engines
    """
    from treeopt import demo
    from treeopt.export import listing
    from treeopt.export.table import ENGINES
    from treeopt.files.shipped import LAYOUTS, shipped
    from treeopt.growth.objectives import OBJECTIVES
    from treeopt.records.rules import RULES
    from treeopt.report.figures import FIGURES, STANDALONE
    from treeopt.trees.published import PUBLISHED_TREES

    found = {
        "calibrations": list(shipped("calibration")),
        "profiles": list(shipped("profiles")),
        "trees": list(PUBLISHED_TREES),
        "drafters": [*demo.DRAFTERS, "ngram", "early-exit"],
        "engines": list(ENGINES),
        "acceptance": list(RULES),
        "objectives": list(OBJECTIVES),
        "layouts": list(LAYOUTS),
        "figures": [*FIGURES, *STANDALONE],
    }
    if topic is None:
        show_result(found, "\n".join(f"{k}: {', '.join(v) or 'none'}" for k, v in found.items()), as_json)
    elif topic == "engines":
        show_result({"engines": listing.records(ENGINES)}, listing.table(ENGINES), as_json)
    elif topic in found:
        said = SAID.get(topic, {})
        lines = [f"{name:<12}{said[name]}" if said else name for name in found[topic]]
        show_result({topic: found[topic]}, "\n".join(lines), as_json)
    else:
        raise click.BadParameter(f"must be one of {', '.join(found)}, but got {topic!r}.", param_hint="TOPIC")
