"""The steps of the line: treeopt run, calibrate, profile, search, bench, compare and score; and train."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.declared import command, show_comparison, show_result, typed_options
from treeopt.files.parameters import Count, parameters_of
from treeopt.files.shell import printable
from treeopt.runtime.training.recipe import Recipe

if TYPE_CHECKING:
    from treeopt import pipeline
    from treeopt.records.rundir import RunDirectory
    from treeopt.runtime.session import Session


# Where latencies come from if treeopt does not time steps itself: the step of the line, and the options that each takes.
ELSEWHERE = {
    "from_csv": ("profile_from_file", {"contexts", "num_heads", "runtime", "overwrite"}),
    "analytical": ("profile_analytical", {"contexts", "num_heads", "model", "drafter", "dtype", "batch_sizes", "sizes", "budget",
                   "overwrite"}),
}  # fmt: skip


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

    source = {name: options.pop(name) for name in parameters_of(treeopt.open) if name in options}
    wanted = pipeline.LineOptions(**options)
    drafters = pipeline.drafters_of(source.get("drafter", ""))
    if len(drafters) > 1:
        show_comparison(pipeline.run_drafters(run, source, drafters, wanted), as_json)
    else:
        _run_one(run, as_json, source, wanted)


def _run_one(run: RunDirectory, as_json: bool, source: Mapping[str, Any], wanted: pipeline.LineOptions) -> None:
    from treeopt import demo, pipeline
    from treeopt.report.bench_table import bench_table, closing
    from treeopt.report.comparison import compared_table
    from treeopt.report.plan_table import plan_table
    from treeopt.report.terminal import note, out
    from treeopt.report.verdict import ending

    source = pipeline.resolve(run, source, overwrite=wanted.overwrite)
    plan, results, engines, groups = pipeline.run_line(run, pipeline.open_session(source), wanted)
    if as_json:
        found = {"plan": plan.document(), "bench": [r.document() for r in results]}
        show_result({**found, "groups": groups.document() if groups else None}, None, as_json)
        return
    out(plan_table(plan))
    for entry, result in zip(plan.entries, results, strict=True):
        out(bench_table(result))
        if compared := closing(entry, result):
            out(compared)
    note((f"For your engine: {run.export}/. " if engines else "") + f"To look at it all, open {run.report}")
    said, following = ending(run, plan, results, engines, is_demo=source.get("model", demo.NAME) == demo.NAME)
    if groups:
        out(compared_table(groups))
    out(said)
    click.echo(printable(following))  # on a line of its own, however long, to be copied


@command(treeopt.calibrate)
def calibrate(run: RunDirectory, as_json: bool, **options: Any) -> None:
    """Measure how often the drafter guesses right, rank by rank.

    The target answers the prompts by the rule of --acceptance, conversations turn by turn. With --responses
    nothing is generated: given answers are read in one pass. What that measures is exact for the answers that
    the target itself sampled at --temperature, and an estimate for greedy decoding otherwise.

    The same command again continues where it was stopped, with or without --engine ray. Another measurement of
    the run is kept without --overwrite. With --shard several machines share the prompts, each in a run directory
    of its own, and treeopt merge joins them.

    With --from-logs no model is run, and torch is not needed: what a server was asked and answered becomes token ids, for
    drafters that copy text.

    \b
    Example:
        treeopt calibrate --num-prompts 64
        treeopt calibrate --drafter ngram --acceptance sample --temperature 0.7
        treeopt calibrate --model MODEL --drafter HEADS --prompts prompts.jsonl --group-by category
        treeopt calibrate --shard 2/8 --run part-2
        treeopt calibrate --from-logs logs.jsonl --tokenizer MODEL
        treeopt calibrate --model MODEL --drafter HEADS --prompts prompts.jsonl --engine ray --workers 4 --gpus-per-worker 1
    """
    from treeopt.records.requestlog import RequestLog
    from treeopt.report.tables import calibration_table, requests_table

    if isinstance(log := treeopt.calibrate(run=run, **options), RequestLog):
        show_result(log.document(), requests_table(log), as_json)
        click.echo(printable(f"To choose settings: {run.command('search', '--for', 'ENGINE')}"), err=True)
        return
    result = run.read_calibration()
    show_result(result.document(), calibration_table(result), as_json)


@command(treeopt.search, words={"engine": "--for"})
def search(run: RunDirectory, as_json: bool, **options: Any) -> None:
    """Choose the tree with the best throughput for each batch size.

    Figures are held out, with error bars over conversations and over rounds of timing. Sizes that the
    data cannot tell apart are named as tied; of those that cost at most 0.5 % the smallest is chosen.

    \b
    Example:
        treeopt search --budget 64 --batch-size 4
        treeopt search --batch-size 1:0.5,4:0.3,8:0.2
        treeopt search --for vllm --batch-size 1,8,32
        treeopt search --calibration vicuna-7b-medusa1 --budget 39
    """
    from treeopt.report.plan_table import plan_table

    plan = treeopt.search(run=run, **options)
    show_result(plan.document(), plan_table(plan), as_json)


@command(treeopt.bench, without=("plan",))
def bench(run: RunDirectory, as_json: bool, **options: Any) -> None:
    """Decode held-out prompts for real, with trees and without.

    The chosen tree is compared with plain decoding, the published tree, a chain and the largest tree. Of the other trees,
    those that are shown to be slower than the chosen one stop early, and that is said.
    --engine decodes the plan's chain or dynamic tree in another
    runtime, beside its own plain decoding; bench.json stays. --launch starts servers by your own command, with the plan's
    options and without, several times in turn, and stops all that they started. With --lengths it starts them with each number of
    guesses, without a plan, until no further launch is worth it; the arms are kept after every launch.

    \b
    Example:
        treeopt bench --num-prompts 16 --rounds 3
        treeopt bench --launch 'vllm serve MODEL --port {port} {options}' --engine vllm --drafter DRAFTER --prompts prompts.jsonl
        treeopt bench --launch 'llama-server -m M.gguf -md D.gguf --metrics --port {port}' --lengths 0,2,4 --prompts prompts.jsonl
        treeopt bench --engine transformers
        treeopt bench --engine openvino --model MODEL --run RUN-OF-A-LOG
        treeopt bench --tree my_tree.json --dtype float64
    """
    from treeopt.arms.arm import Arms
    from treeopt.arms.tuned import tune_arms
    from treeopt.cli.exchange import show_arms
    from treeopt.records.rundir import LAUNCHED
    from treeopt.report.bench_table import bench_table, closing
    from treeopt.report.terminal import note

    result = treeopt.bench(run=run, **options)
    if isinstance(result, Arms):
        show_arms(tune_arms(result), as_json)
        return
    plan = run.read_plan()
    sizes = [e.batch_size for e in plan.entries] if "launch" in options and "batch_size" not in options else []
    for found in [type(result).load(run.bench_of(size, LAUNCHED)) for size in sizes[1:] and sizes] or [result]:
        show_result(found.document(), bench_table(found), as_json)
        note(*filter(None, [plan.copies and closing(plan.entry(found.contenders[0].batch_size), found)]))


@command(treeopt.compare, without=("first", "others"))
def compare(sources: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Say whether a plan is still right for other traffic.

    \b
    A and B are run directories, or a trace, calibration or plan. B may also be
    what an engine counted: scrapes of its metrics, its log, its responses.
    It says which depths moved, beyond noise or not, and what A's plan loses on B.
    A alone            its groups: what each would gain by a plan of its own; or contexts
    A B without a plan a gate: PASS, FAIL or INCONCLUSIVE, of counters, logs or tables of settings
    A B ... of several drafters, for one model on one machine: which is fastest

    Exit status: 0 keep the plan, or PASS; 3 plan anew, or FAIL; 4 INCONCLUSIVE; 1 and 2 as always.

    \b
    Example:
        treeopt compare treeopt-run this-month
        treeopt compare treeopt-run before.prom after.prom --tolerance 1
        treeopt compare treeopt-run --group-by context
        treeopt compare before.csv after.csv --tolerance 3
        treeopt compare runs/medusa runs/hydra
    """
    found = treeopt.compare(*sources, **options)
    show_comparison(found, as_json)
    click.get_current_context().exit(found.status)


@command(treeopt.score, writes=False)
def score(run: RunDirectory, as_json: bool, tree: str, **options: Any) -> None:
    """Compare a tree with the best tree of its size.

    TREE is a list of medusa_choices, a plan, any file that treeopt export writes, or the name of a
    published tree (treeopt list). It is judged by the run's trace, or its calibration.

    \b
    Example:
        treeopt score mc_sim_7b_63
        treeopt score my_tree.json --calibration vicuna-7b-medusa1
    """
    from treeopt.files.storage import schema
    from treeopt.report.tables import score_table
    from treeopt.report.terminal import note

    found = treeopt.score(tree, run=run, **options)
    note(*found.notes)
    document = {"schema": schema("score"), "tree": tree, **found.document()}
    show_result(document, score_table(found, tree), as_json)


@command(treeopt.profile)
def profile(
    run: RunDirectory,
    as_json: bool,
    *,
    random_weights: str | None = None,
    num_heads: Count | None = None,
    from_csv: Path | None = None,
    runtime: str | None = None,
    analytical: str | None = None,
    **options: Any,
) -> None:
    """Time real decoding steps, with trees and without.

    Batch sizes and contexts are added to what the run's profile knows of the same model and runtime; without --overwrite one of
    something else is kept. Sizes are placed at the edges of tiles.

    With --random-weights nothing is loaded: a dense model of that shape is made on the device, and how many guesses are accepted is
    drawn from --calibration. With --engine the steps are those of another runtime on this machine, with chains and dynamic trees.

    Latencies of another engine come from a table (--from-csv: batch_size, size, step_ms, ...; size 1 is plain decoding).
    Before there is hardware, --analytical estimates them, for --drafter of a kind or a config.json.

    \b
    Example:
        treeopt profile --batch-size 1,4 --time-limit 120
        treeopt profile --engine openvino --time-limit 300
        treeopt profile --random-weights config.json --dtype bfloat16
        treeopt profile --from-csv steps.csv --runtime vllm-0.11
        treeopt profile --analytical H100-SXM --model config.json --drafter eagle3 --batch-size 1,8

    random_weights : time a model of this config.json's shape, of random weights
    num_heads  : number of heads, if no drafter says it; by default as calibrated, or 4
    from_csv   : read latencies of your own engine from a table instead of timing
    runtime    : name of the engine of ``from_csv``
    analytical : compute latencies from a device's roofline and the config.json of ``model`` instead of timing
    """
    asked = {**locals(), **options}
    from treeopt import pipeline
    from treeopt.report.latency_table import profile_table

    typed = typed_options()
    if source := next((name for name in ELSEWHERE if name in typed), None):
        step, heeded = ELSEWHERE[source]
        if unheeded := [option for name, option in typed.items() if name not in {source, "run", "as_json", *heeded}]:
            raise click.UsageError(f"{unheeded[0]} does not go with {typed[source]}.")
        if source == "analytical" and "model" not in typed:
            raise click.UsageError("--analytical needs the model's shape: --model config.json.")
        heard = {name: asked[name] for name in heeded if asked.get(name) is not None}
        result = getattr(pipeline, step)(run, asked[source], **heard)
    elif runtime is not None:
        raise click.UsageError("--runtime is for --from-csv.")
    elif num_heads is not None and random_weights is None:
        raise click.UsageError("--heads is for --random-weights; other heads come with --drafter.")
    elif random_weights is not None:
        session, timed = _random_session(random_weights, num_heads, options)
        result = treeopt.profile(session, run=run, **timed)
    else:
        result = treeopt.profile(run=run, **options)
    show_result(result.document(), profile_table(result), as_json)


def _random_session(config: str, num_heads: int | None, options: dict[str, Any]) -> tuple[Session, dict[str, Any]]:
    """A model of random weights, and the options of its timing; of those of a model only --dtype and --device go with it."""
    from treeopt.report.terminal import progress
    from treeopt.runtime.waiting import import_torch

    import_torch()
    from treeopt.runtime.random_weights import NUM_HEADS, open_random_session

    source = {name: options.pop(name) for name in parameters_of(treeopt.open) if name in options}
    if other := sorted(source.keys() - {"dtype", "device"}):
        raise click.UsageError(f"--random-weights loads nothing: leave out --{other[0].replace('_', '-')}.")
    with progress("Making random weights", None):
        return open_random_session(config, num_heads=num_heads or NUM_HEADS, **source), options


NOT_FOR_TRAIN = {"drafter", "engine_python", "draft_depth", "group_by", "epsilon", "delta"}
RECIPE, SOURCE = parameters_of(Recipe), parameters_of(treeopt.open).keys() - NOT_FOR_TRAIN
WORKERS = ("engine", "workers", "gpus_per_worker", "address")
TEXTS = ("num_prompts", "max_new_tokens", "tokens", "answers")


@command(
    treeopt.calibrate,
    Recipe,
    treeopt.open,
    "treeopt.pipeline.train:TextOptions",
    "treeopt.pipeline.train:train",
    names={*RECIPE, *SOURCE, *WORKERS, *TEXTS, "mixed_precision"},
    words={"kind": "--kind"},
)
def train(as_json: bool, *, output: Path, **options: Any) -> None:
    """Train a drafter for a model that has none: heads, or layers.

    They learn from the model's own answers to the prompts (or from given --responses). The model
    stays as it is. The same command continues a run that was stopped.

    \b
    Example:
        treeopt train --kind medusa-1 --minutes 5 -o my-heads
        treeopt train --kind hydra --model MODEL --prompts seeds.jsonl --epochs 2 -o my-heads

    output : folder for the heads
    """
    from treeopt import pipeline
    from treeopt.report.tables import training_table

    def taken(names: Collection[str]) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    source, recipe = taken(SOURCE), taken(RECIPE)
    if "seed" in source:
        recipe["seed"] = source["seed"]
    texts = pipeline.TextOptions(**taken(TEXTS))
    with pipeline.cluster_of(options.pop("engine", None), **taken(WORKERS)) as cluster:
        done = pipeline.train(output, source, Recipe(**recipe), texts, cluster=cluster, **options)
    show_result(done.document(), training_table(done.record, done.command), as_json)
