"""Servers that are up and other tools' files: treeopt tune, import, export and convert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from treeopt.cli.command import command, show_files, show_result
from treeopt.errors import InvalidInput
from treeopt.records.exchange import ExportOptions, ImportOptions, TableOptions, Watching

if TYPE_CHECKING:
    from treeopt.arms.tuned import TunedArms
    from treeopt.records.rundir import RunDirectory
    from treeopt.serving.watch import Tuned
    from treeopt.trees.tree import Tree


@command(Watching, TableOptions, writes=False)
@click.argument("sources", nargs=-1, metavar="[FILE... | URL]")
@click.option("--model", help="The model to watch, where a router serves several.  [default: the first]")
def tune(
    run: RunDirectory,
    as_json: bool,
    watching: Watching,
    table: TableOptions,
    sources: tuple[str, ...],
    model: str | None,
) -> None:
    """Say which setting to serve, by a table or a server.

    FILE is a table as CSV, Markdown or text, or what vllm bench serve or SGLang's benchmarks wrote; without one, the arms of the run
    are taken. What a setting that was not run would give is predicted, and the run that would decide most is named.

    URL is a server of vLLM, SGLang, llama.cpp (start it with --metrics) or TensorRT-LLM. It is watched while it
    serves, and nothing is sent to it but GETs, unless --drive says which prompts. The environment variable TREEOPT_API_KEY has its key.

    \b
    Example:
        treeopt tune sweep.md
        treeopt tune results/*.json --lengths 1,2,3,4 --for vllm
        treeopt tune http://localhost:8000 --drafter eagle3
        treeopt tune http://localhost:8000 --plain http://localhost:8001 --drive prompts.jsonl --clients 1,4,16
    """
    from treeopt.arms.tuned import TunedArms
    from treeopt.pipeline.tune import tune_sources

    if model and not any("://" in source for source in sources):
        raise InvalidInput("`model` goes with the URL of a server: leave it out.")
    if model:
        sources = tuple(f"{url}?model={quote(model)}" for url in sources)
    decided = tune_sources(run, sources, watching, table)
    if isinstance(decided, TunedArms):
        show_arms(decided, as_json)
    else:
        _show_server(decided, run, as_json)


def _show_server(found: Tuned, run: RunDirectory, as_json: bool) -> None:
    from treeopt.report.server_table import server_table
    from treeopt.report.terminal import note

    note(*found.unknown, f"The report is in {run.report}." if found.command else None)
    show_result(found.document(), server_table(found), as_json)
    if found.command and not as_json:
        show_result(None, found.command, as_json)


def show_arms(found: TunedArms, as_json: bool) -> None:
    from treeopt.report.arms_table import decision_table
    from treeopt.report.terminal import note

    commands = list(found.commands)
    document = {**found.decided.document(), "commands": commands}
    show_result(document, decision_table(found.decided), as_json)
    if commands and not as_json:
        show_result(None, "\n".join(commands), as_json)
    note(
        *(f"{name}: {meaning}." for name, meaning in found.decided.meanings.items()), *found.decided.notes, *found.notes
    )


@command(ImportOptions, name="import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a tree there.  [default: print it]")
def import_(
    run: RunDirectory, as_json: bool, options: ImportOptions, files: tuple[Path, ...], output: Path | None
) -> None:
    """Take what another tool, or another run, measured as the run's own.

    What FILE holds is found from the file; --from names it otherwise.

    \b
    arms          settings that were run: a table, or what a benchmark wrote
    csv, rates    accuracies, hits, or a training log
    vllm-metrics, vllm-requests, sglang, tensorrt-llm, llama-cpp
                  what an engine counted: /metrics before and after, logs, responses
    shards        run directories of calibrate --shard, which become one calibration
    tree          in any engine's format; FILE:NAME is one of several, PLAN:4 one of a plan

    \b
    Example:
        treeopt import sweep.csv
        treeopt import before.txt after.txt --drafter eagle3
        treeopt import part-1 part-2 part-3 --run whole
        treeopt import medusa_choices.py --output tree.json
    """
    from treeopt.arms.arm import Arms
    from treeopt.files.storage import document, schema
    from treeopt.pipeline.importing import import_files
    from treeopt.report.arms_table import arms_table
    from treeopt.report.tables import calibration_table
    from treeopt.report.terminal import note
    from treeopt.trees.tree import Tree

    imported = import_files(run, files, options)
    content = imported.content
    note(*imported.notes)
    if isinstance(content, Tree):
        _show_tree(content, output, as_json)
    elif isinstance(content, Arms):
        show_result({"schema": schema("arms"), **document(content)}, arms_table(content), as_json)
    else:
        show_result(content.document(), calibration_table(content), as_json)


def _show_tree(tree: Tree, output: Path | None, as_json: bool) -> None:
    from treeopt.files.storage import schema, write_json

    document = tree.record
    if output is not None:
        write_json(output, "tree", document)
        document["files"] = [str(output)]
    show_result({"schema": schema("tree"), **document}, str(output or tree.choices), as_json)


@command(ExportOptions)
@click.option("--to", "engine", required=True, help="The serving engine (treeopt list engines).")
@click.option("--tree", help="Export this tree instead of the plan's: a file, or a published name.")
@click.option(
    "--heads", type=click.IntRange(1), help="Number of heads of --tree's drafter.  [default: the run's, or its depth]"
)
@click.option("--anyway", is_flag=True, help="Export a plan that is stale, or was measured slower than plain decoding.")
def export(
    run: RunDirectory,
    as_json: bool,
    options: ExportOptions,
    engine: str,
    tree: str | None,
    heads: int | None,
    anyway: bool,
) -> None:
    """Write the chosen trees as an engine's own configuration.

    The command that uses them is printed. What the engine would refuse or misread is refused here, with the search to run
    instead.

    \b
    Example:
        treeopt export --to tensorrt-llm --batch-size 4
        treeopt export --to vllm
        treeopt export --to neuron-medusa --tree mc_sim_7b_63
    """
    from treeopt.pipeline.export import export

    paths, written = export(run, engine, options, tree=tree, heads=heads, anyway=anyway)
    show_files(paths, written.notes, as_json, command=written.command)


@command()
@click.argument("drafter")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@click.option("--to", "layout", required=True, help="Layout to write (treeopt list layouts).")
@click.option("--model", help="Folder of the base model: for shared heads.")
@click.option("--revision", help="Revision of a hub checkpoint.")
def convert(as_json: bool, drafter: str, output: Path, layout: str, model: str | None, revision: str | None) -> None:
    """Write published heads in another engine's layout.

    DRAFTER is a folder, a file or a hub id in any layout that treeopt reads.

    \b
    Example:
        treeopt convert medusa-vicuna-7b-v1.3 --to medusa-pt --output heads
    """
    from treeopt.pipeline.export import convert

    paths, notes = convert(drafter, output=output, layout=layout, model=model, revision=revision)
    show_files(paths, notes, as_json)
