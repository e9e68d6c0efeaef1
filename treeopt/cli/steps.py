"""The steps of the line: treeopt run, calibrate, requests, profile, search, bench, compare and score; and train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

import treeopt
from treeopt.cli.command import command, say, show_comparison, show_result
from treeopt.records.options import (
    BenchOptions,
    CalibrateOptions,
    CompareOptions,
    Latencies,
    LineOptions,
    Model,
    ProfileOptions,
    Prompts,
    RuleOption,
    SearchOptions,
    Server,
    Source,
    TrainOptions,
    TreeLimits,
    Workers,
)
from treeopt.runtime.training.recipe import Recipe

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory

# Options of a profile that are heeded where steps are not timed here.
OF_TABLES = {"from_csv", "runtime", "contexts", "num_heads", "overwrite"}
OF_ROOFLINES = {
    "analytical", "contexts", "num_heads", "model", "drafter", "dtype", "batch_sizes", "sizes", "budget", "overwrite",
}  # fmt: skip
NOT_FOR_TRAINING = {"drafter", "draft_depth", "engine_python", "group_by"}


def typed_source(*parts: Model | Prompts | RuleOption) -> Source:
    """What a session is opened with, of what was typed."""
    return Source(**{name: value for part in parts for name, value in part.given.items()})


@command(Model, Prompts, RuleOption, LineOptions)
def run(
    run: RunDirectory, as_json: bool, model: Model, prompts: Prompts, rule: RuleOption, options: LineOptions
) -> None:
    """Do everything, from calibrate to report.

    The steps are calibrate, profile, search, bench, export, plot and report, on the demo model or on your own.
    The same command again continues where it was stopped. Several drafters have a run directory each, within that of --run;
    then a table says which is fastest at each batch size.

    \b
    Example:
        treeopt run
        treeopt run --model MODEL --drafter HEADS --prompts prompts.jsonl --batch-size 1,4
        treeopt run --drafter medusa,hydra,ngram,draft --batch-size 1,4
    """
    from treeopt.pipeline.run import drafters_of, run_drafters

    source = typed_source(model, prompts, rule)
    drafters = drafters_of(source.drafter or "")
    if len(drafters) > 1:
        show_comparison(run_drafters(run, source, drafters, options), as_json)
    else:
        _run_one(run, as_json, source, options)


def _run_one(run: RunDirectory, as_json: bool, source: Source, options: LineOptions) -> None:
    from treeopt import demo
    from treeopt.pipeline.run import run_line
    from treeopt.pipeline.session import session_of
    from treeopt.report.bench_table import bench_table, closing
    from treeopt.report.comparison import compared_table
    from treeopt.report.plan_table import plan_table
    from treeopt.report.terminal import note, out
    from treeopt.report.verdict import ending

    session = session_of(run, source, overwrite=options.overwrite)
    line = run_line(run, session, options)
    plan, groups = line.plan, line.groups
    if as_json:
        document = {"plan": plan.document(), "bench": [result.document() for result in line.benches]}
        show_result({**document, "groups": groups.document() if groups else None}, None, as_json)
        return
    out(plan_table(plan))
    for entry, result in zip(plan.entries, line.benches, strict=True):
        out(bench_table(result))
        if compared := closing(entry, result):
            out(compared)
    note((f"For your engine: {run.export}/. " if line.engines else "") + f"To look at it all, open {run.report}")
    is_demo = session.source.model in (None, demo.NAME)
    verdict, following = ending(run, plan, line.benches, line.engines, is_demo=is_demo)
    if groups:
        out(compared_table(groups))
    out(verdict)
    say(following)  # on a line of its own, however long, to be copied
    note(", ".join(f"{name} {seconds:.0f} s" for name, seconds in line.seconds.items()))


@command(Model, Prompts, RuleOption, CalibrateOptions, Workers, common={"dtype", "device", "group_by"}, writes=False)
def calibrate(
    run: RunDirectory,
    as_json: bool,
    model: Model,
    prompts: Prompts,
    rule: RuleOption,
    options: CalibrateOptions,
    workers: Workers,
) -> None:
    """Measure how often the drafter guesses right, rank by rank.

    The target answers the prompts, conversations turn by turn. With --responses nothing is generated: given answers are read
    in one pass, which is exact for what the target itself wrote by the --rule that is named.

    The same command again continues where it was stopped. Another measurement of the run is kept without --overwrite. With
    --shard several machines share the prompts, each in a run directory of its own; treeopt import joins them.

    \b
    Example:
        treeopt calibrate --num-prompts 64
        treeopt calibrate --drafter ngram --rule sample:temperature=0.7
        treeopt calibrate --model MODEL --drafter HEADS --prompts prompts.jsonl
    """
    from treeopt.pipeline.calibrate import calibrate_run
    from treeopt.report.tables import calibration_table

    result, _ = calibrate_run(run, typed_source(model, prompts, rule), replace(options, workers=workers))
    show_result(result.document(), calibration_table(result), as_json)


@command(Prompts, without={"prompts", "split", "in_order", "seed"})
@click.argument("log", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="Folder with tokenizer.json, for logs that have texts."
)
@click.option("--overwrite", is_flag=True, help="Replace another measurement of the run.")
def requests(
    run: RunDirectory, as_json: bool, prompts: Prompts, log: Path, tokenizer: Path | None, overwrite: bool
) -> None:
    """Read a log of requests, for drafters that copy text.

    No model is run, and torch is not needed: LOG's requests become token ids.

    \b
    Example:
        treeopt requests logs.jsonl --tokenizer MODEL
        treeopt search --for vllm
    """
    from treeopt.report.tables import requests_table

    records = treeopt.requests(log, tokenizer=tokenizer, columns=prompts, run=run, overwrite=overwrite)
    show_result(records.document(), requests_table(records), as_json)
    say(f"To choose settings: {run.command('search', '--for', 'ENGINE')}", err=True)


@command(SearchOptions, TreeLimits)
def search(run: RunDirectory, as_json: bool, options: SearchOptions, limits: TreeLimits) -> None:
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
    from treeopt.pipeline.search import search
    from treeopt.report.plan_table import plan_table
    from treeopt.report.plan_verdict import next_commands
    from treeopt.report.terminal import note

    plan = search(run, options, limits)
    show_result(plan.document(), plan_table(plan, next_commands(run, plan)), as_json)
    note(*plan.notes)


@command(BenchOptions, Server, Model, Prompts, RuleOption, writes=False)
def bench(
    run: RunDirectory,
    as_json: bool,
    options: BenchOptions,
    server: Server,
    model: Model,
    prompts: Prompts,
    rule: RuleOption,
) -> None:
    """Decode held-out prompts for real, with trees and without.

    The chosen tree is compared with plain decoding, the published tree, a chain and the largest tree. --engine decodes in
    another runtime. --launch starts servers by your own command, with the plan's options and without, several times in turn,
    and stops all that they started. With --lengths it starts them with each number of guesses, without a plan, until no further
    launch is worth it.

    \b
    Example:
        treeopt bench --num-prompts 16 --rounds 3
        treeopt bench --engine openvino
        treeopt bench --launch 'vllm serve MODEL --port {port} {options}'
        treeopt bench --launch 'llama-server -m M -md D --port {port}' --lengths 0,2,4
    """
    from treeopt.arms.arm import Arms
    from treeopt.arms.tuned import tune_arms
    from treeopt.cli.exchange import show_arms
    from treeopt.pipeline.proof import bench_run
    from treeopt.records.rundir import LAUNCHED
    from treeopt.report.bench_table import bench_table, closing
    from treeopt.report.terminal import note

    result = bench_run(run, typed_source(model, prompts, rule), options, server)
    if isinstance(result, Arms):
        show_arms(tune_arms(result), as_json)
        return
    plan, results = run.read_plan(), [result]
    if server.launch and options.batch_size is None:
        results = [type(result).load(run.bench_of(entry.batch_size, LAUNCHED)) for entry in plan.entries]
    for benchmark in results:
        show_result(benchmark.document(), bench_table(benchmark), as_json)
        entry = plan.entry(benchmark.contenders[0].batch_size)
        note(closing(entry, benchmark) if plan.copies else None)


@command(CompareOptions)
@click.argument("sources", nargs=-1, required=True, type=click.Path(), metavar="A [B...]")
def compare(as_json: bool, options: CompareOptions, sources: tuple[str, ...]) -> None:
    """Say whether a plan is still right for other traffic.

    \b
    A and B are run directories, or a trace, calibration or plan. B may also be
    what an engine counted: scrapes of its metrics, its log, its responses.
    A alone            its groups: what each would gain by a plan of its own
    A B without a plan a gate: PASS, FAIL or INCONCLUSIVE
    A B ... of several drafters, for one model on one machine: which is fastest

    Exit status: 0 keep the plan, or PASS; 3 plan anew, or FAIL; 4 INCONCLUSIVE; 1 and 2 as always.

    \b
    Example:
        treeopt compare treeopt-run this-month
        treeopt compare treeopt-run before.prom after.prom --tolerance 1
        treeopt compare before.csv after.csv --tolerance 3
    """
    from treeopt.pipeline.compare import compare

    comparison = compare(*sources, profile=options.profile, options=options)
    show_comparison(comparison, as_json)
    click.get_current_context().exit(comparison.status)


@command(writes=False)
@click.argument("tree", type=click.Path())
@click.option("--calibration", help="A trace or a calibration: a file, or a shipped name.  [default: the run's]")
@click.option("--batch-size", type=click.IntRange(1), help="Which of a plan's trees, where TREE is a plan.")
def score(run: RunDirectory, as_json: bool, tree: str, calibration: str | None, batch_size: int | None) -> None:
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

    result = treeopt.score(tree, calibration, run=run, batch_size=batch_size)
    note(*result.notes)
    document = {"schema": schema("score"), "tree": tree, **result.document()}
    show_result(document, score_table(result, tree), as_json)


@command(Model, Prompts, ProfileOptions, Latencies)
def profile(
    run: RunDirectory, as_json: bool, model: Model, prompts: Prompts, options: ProfileOptions, latencies: Latencies
) -> None:
    """Time real decoding steps, with trees and without.

    Batch sizes and contexts are added to what the run's profile knows of the same model and runtime. With --engine the steps
    are those of another runtime on this machine, with chains and dynamic trees.

    Latencies of another engine come from a table (--from-csv: batch_size, size, step_ms, ...; size 1 is plain decoding).
    Before there is hardware, --analytical estimates them.

    \b
    Example:
        treeopt profile --batch-size 1,4 --time-limit 120
        treeopt profile --engine openvino --time-limit 300
        treeopt profile --from-csv steps.csv --runtime vllm-0.11
        treeopt profile --analytical H100-SXM --model config.json --drafter eagle3
    """
    from treeopt.pipeline.profile.timed import profile
    from treeopt.pipeline.profile.untimed import profile_analytical, profile_from_file
    from treeopt.pipeline.session import open_random, session_of_run
    from treeopt.report.latency_table import profile_table

    source, num_heads = typed_source(model, prompts), latencies.num_heads
    typed = {**source.given, **options.given, **latencies.given}
    if latencies.from_csv is not None:
        _check_heeded(typed, OF_TABLES, "from_csv")
        result = profile_from_file(
            run,
            latencies.from_csv,
            runtime=latencies.runtime,
            contexts=options.contexts,
            num_heads=num_heads,
            overwrite=options.overwrite,
        )
    elif latencies.analytical is not None:
        _check_heeded(typed, OF_ROOFLINES, "analytical")
        result = profile_analytical(run, latencies.analytical, source, options, num_heads=num_heads)
    elif latencies.runtime is not None:
        raise click.UsageError("--runtime is for --from-csv.")
    elif latencies.random_weights is not None:
        session = open_random(latencies.random_weights, source, num_heads)
        result = profile(run, session, options)
    elif num_heads is not None:
        raise click.UsageError("--heads is for --random-weights; other heads come with --drafter.")
    else:
        result = profile(run, session_of_run(run, source, options.engine), options)
    show_result(result.document(), profile_table(result), as_json)


def _check_heeded(typed: dict[str, object], heeded: set[str], source: str) -> None:
    flags = {param.name: param.opts[0] for param in click.get_current_context().command.params}
    if unheeded := [flags[name] for name in typed if name not in heeded]:
        raise click.UsageError(f"{unheeded[0]} does not go with {flags[source]}.")


@command(Model, Prompts, RuleOption, Recipe, TrainOptions, Workers, without=NOT_FOR_TRAINING)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for the heads.")
def train(
    as_json: bool,
    model: Model,
    prompts: Prompts,
    rule: RuleOption,
    recipe: Recipe,
    texts: TrainOptions,
    workers: Workers,
    output: Path,
) -> None:
    """Train a drafter for a model that has none: heads, or layers.

    They learn from the model's own answers to the prompts (or from given --responses). The model
    stays as it is. The same command continues a run that was stopped.

    \b
    Example:
        treeopt train --kind medusa-1 --minutes 5 -o my-heads
        treeopt train --kind hydra --model MODEL --prompts seeds.jsonl --epochs 2 -o my-heads
    """
    from treeopt.pipeline.train import train
    from treeopt.report.tables import training_table

    source = typed_source(model, prompts, rule)
    training = train(output, source, recipe, texts, workers)
    show_result(training.document(), training_table(training.record, training.command), as_json)
