"""Servers that are up and other tools' files: treeopt tune, import, merge, import-tree, export and convert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from treeopt.cli.declared import command, show_files, show_result, typed_options
from treeopt.errors import InvalidInput
from treeopt.files.parameters import Count, parameters_of

if TYPE_CHECKING:
    from treeopt.arms.arm import Arms
    from treeopt.arms.tuned import TunedArms
    from treeopt.records.rundir import RunDirectory
    from treeopt.serving.watch import Tuned

ARMS = "arms"  # the kind of files that hold settings that were run


@command(
    "treeopt.serving.watch:Watching",
    "treeopt.arms.tuned:tune_arms",
    without=("url", "arms"),
    words={"columns": "--column"},
    writes=False,
)
def tune(
    run: RunDirectory,
    as_json: bool,
    inputs: tuple[str, ...] = (),
    *,
    columns: Sequence[str] = (),
    markdown: bool = False,
    model: str | None = None,
    **options: Any,
) -> None:
    """Say which setting to serve, by a table or a server.

    FILE is a table as CSV, Markdown or text, or what vllm bench serve or SGLang's benchmarks wrote; without one, the arms of the run
    are taken. What a setting that was not run would give is predicted, and the run that would decide most is named.

    URL is a server of vLLM, SGLang, llama.cpp (start it with --metrics) or TensorRT-LLM. It is watched while it
    serves, and nothing is sent to it but GETs, unless --drive says which prompts. The environment variable TREEOPT_API_KEY has its key.

    \b
    Example:
        treeopt tune sweep.md
        treeopt tune results/*.json --lengths 1,2,3,4 --engine vllm
        treeopt tune http://localhost:8000 --drafter eagle3
        treeopt tune http://localhost:8000 --plain http://localhost:8001 --drive prompts.jsonl --clients 1,4,16

    columns  : what a column of a table means, as NAME=MEANING
    markdown : print a table for a pull request
    model    : the one to watch, where a router serves several; by default the first
    """
    from treeopt.arms.tuned import columns_of, read_arms, tune_arms
    from treeopt.serving.watch import Watching

    is_server = any("://" in source for source in inputs)
    of_server, of_files = {*parameters_of(Watching), "model"}, {*parameters_of(tune_arms), "columns", "markdown"}
    typed = typed_options()
    for name in sorted(of_files - of_server if is_server else of_server - of_files):
        if name in typed:
            raise InvalidInput(f"`{name}` goes with {'files' if is_server else 'the URL of a server'}: leave it out.")
        options.pop(name, None)
    if is_server:
        from treeopt import pipeline

        if len(inputs) > 1:
            raise InvalidInput("One server is watched at a time: pass its URL alone.")
        url = inputs[0] + (f"?model={quote(model)}" if model else "")
        with run.writing():
            found = pipeline.tune(run, url, Watching(**options))
        _show_server(found, as_json)
    else:
        if not inputs and not run.arms.exists():
            raise InvalidInput(
                f"{run.path} has no settings that were run yet: pass files of them, or the URL of a server."
            )
        arms = read_arms(list(map(Path, inputs)) or [run.path], columns_of(columns))
        show_arms(tune_arms(arms, **options), as_json, markdown)


def _show_server(found: Tuned, as_json: bool) -> None:
    from treeopt.report.server_table import server_table
    from treeopt.report.terminal import note

    note(*found.unknown)
    show_result(found.document(), server_table(found), as_json)
    if found.command and not as_json:
        show_result(None, found.command, as_json)


def show_arms(found: TunedArms, as_json: bool, as_markdown: bool = False) -> None:
    from treeopt.report.arms_table import decision_table, markdown
    from treeopt.report.terminal import note

    commands = list(found.commands)
    if as_markdown and not as_json:
        show_result(None, markdown(found.decided), as_json)
    else:
        document = {**found.decided.document(), "commands": commands}
        show_result(document, decision_table(found.decided, found.served), as_json)
        if commands and not as_json:
            show_result(None, "\n".join(commands), as_json)
    note(
        *(f"{name}: {meaning}." for name, meaning in found.decided.meanings.items()), *found.decided.notes, *found.notes
    )


@command("treeopt.pipeline.importing:import_file", name="import", without=("paths",), words={"columns": "--column"})
def import_(
    run: RunDirectory, as_json: bool, files: tuple[Path, ...], *, columns: Sequence[str] = (), **options: Any
) -> None:
    """Take what another tool measured as the run's own.

    \b
    FILE holds settings that were run, which become arms.json (treeopt tune decides among them):
        arms           a table with tokens per second, or what a benchmark of vLLM, SGLang or llama.cpp wrote
    or accuracies, which become calibration.json:
        csv            a table of accuracies or hits
        rates          a training log, or an analysis of acceptance
    or what an engine counted while it served chains, likewise:
        vllm-metrics   /metrics before and after, the log, vllm bench serve
        vllm-requests  responses with draft metrics, or AIPerf's records
        sglang         responses with meta_info or sglext
        tensorrt-llm   /prometheus/metrics before and after, or responses
        llama-cpp      the log, or /metrics before and after

    \b
    Example:
        treeopt import sweep.csv
        treeopt import accuracies.csv --trials 5000 --run other-run
        treeopt import before.txt after.txt --drafter eagle3

    columns : what a column of a table of settings means, as NAME=MEANING
    """
    from treeopt import pipeline
    from treeopt.arms.tuned import columns_of, keep_arms, read_arms, read_results
    from treeopt.engines.imports import kind_of_file
    from treeopt.files.storage import document, schema
    from treeopt.report.arms_table import arms_table
    from treeopt.report.tables import calibration_table
    from treeopt.report.terminal import note

    kind = options.get("kind")
    counts = kind_of_file(files[0]) if kind is None else kind
    if counts in (ARMS, None):
        arms: Arms | None = read_arms(files, columns_of(columns))
    else:
        arms = read_results(files) if kind is None else None
    if arms is not None:
        keep_arms(run, arms, overwrite=bool(options.get("overwrite")))
        note(*(f"{name}: {meaning}." for name, meaning in arms.meanings.items()), *arms.notes)
        if counts in (ARMS, None) or len(arms.arms) > 1:
            show_result({"schema": schema("arms"), **document(arms)}, arms_table(arms), as_json)
            return
        note(f"Its setting is in {run.arms} too: treeopt tune decides among several.")
    calibration = pipeline.import_file(run, files, **options)
    note(*calibration.meta["notes"])
    show_result(calibration.document(), calibration_table(calibration), as_json)


@command("treeopt.pipeline.importing:merge_runs", without=("others",))
def merge(run: RunDirectory, as_json: bool, runs: tuple[Path, ...], **options: Any) -> None:
    """Make one calibration of its shards.

    Each RUN is a run directory. All shards that treeopt calibrate --shard made become the trace of a single
    process, byte for byte, in any order. Other models, drafters, acceptance rules or ranks are refused.

    \b
    Example:
        treeopt merge part-1 part-2 part-3 --run whole
    """
    from treeopt import pipeline
    from treeopt.report.tables import calibration_table

    calibration = pipeline.merge_runs(run, runs, **options)
    show_result(calibration.document(), calibration_table(calibration), as_json)


@command(name="import-tree")
def import_tree(as_json: bool, file: Path, *, output: Path | None = None, batch_size: Count | None = None) -> None:
    """Read a tree in any engine's format.

    FILE is a list in Python, JSON or YAML, an engine's configuration or launch command with one, Neuron's lists of
    children, Sequoia's growmap, vLLM's tuples, or a plan; FILE:NAME is one of several trees. It is read as it stands:
    what is no tree is refused.

    \b
    Example:
        treeopt import-tree medusa_choices.py --output tree.json
        treeopt import-tree llm_api_options.yml

    output     : write the tree there; by default print it
    batch_size : which of a plan's trees, where FILE is a plan
    """
    from treeopt import pipeline
    from treeopt.files.storage import schema, write_json

    tree = pipeline.read_tree(file, batch_size=batch_size)
    told: dict[str, Any] = {"medusa_choices": tree.choices, "size": len(tree), "depth": tree.depth}
    if output is not None:
        write_json(output, "tree", told)
        told["files"] = [str(output)]
    show_result({"schema": schema("tree"), **told}, str(output) if output is not None else str(tree.choices), as_json)


@command("treeopt.records.plan:Plan.export", without=("folder",), words={"engine": "--to"})
def export(
    run: RunDirectory,
    as_json: bool,
    *,
    engine: str,
    tree: str | None = None,
    heads: Count | None = None,
    anyway: bool = False,
    **options: Any,
) -> None:
    """Write the chosen trees as an engine's own configuration.

    The command that uses them is printed. What the engine would refuse or misread is refused here, with the search to run
    instead.

    \b
    Example:
        treeopt export --to tensorrt-llm --batch-size 4
        treeopt export --to vllm
        treeopt export --to neuron-medusa --tree mc_sim_7b_63

    engine : the serving engine (treeopt list engines)
    tree   : export this tree instead of the plan's: a file, or the name of a published one
    heads  : number of heads of the drafter of ``tree``; by default those of the run's, or the depth of the tree
    anyway : export although the plan is stale, or was measured slower than plain decoding
    """
    from treeopt import pipeline
    from treeopt.engines.plans import ExportOptions

    asked = ExportOptions(**options)
    paths, written = pipeline.export(run, engine, asked, tree=tree, heads=heads, anyway=anyway)
    show_files(paths, written.notes, as_json, command=written.command)


@command("treeopt.pipeline.export:convert")
def convert(as_json: bool, drafter: str, **options: Any) -> None:
    """Write published heads in another engine's layout.

    DRAFTER is a folder, a file or a hub id in any layout that treeopt reads.

    \b
    Example:
        treeopt convert medusa-vicuna-7b-v1.3 --to medusa-pt --output heads
    """
    from treeopt import pipeline

    paths, notes = pipeline.convert(drafter, **options)
    show_files(paths, notes, as_json)
