"""The commands that measure and decide: run, calibrate, profile, search, bench."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import (
    BATCH_SIZES,
    Integers,
    Loads,
    demo_dtype,
    model_options,
    open_random_session,
    open_session,
    positive,
    resolve,
    run_directory,
    show_result,
)
from treeopt.errors import TreeoptError

if TYPE_CHECKING:
    from treeopt.rundir import RunDirectory


@click.command()
@model_options
@run_directory
@BATCH_SIZES
@click.option("--budget", **positive(64), help="Most rows verified per sequence and step, root included.")
@click.option("--num-prompts", **positive(192), help="Prompts to calibrate on.")
@click.option("--bench-prompts", **positive(), help="Held-out prompts.  [default: 24, or 10 a row]")
@click.option("--max-new-tokens", **positive(128), help="Longest answer.")
@click.option("--time-limit", **positive(60), help="Seconds for timing steps.")
def run(
    run: RunDirectory, source: dict[str, Any], batch_size: tuple[int, ...], budget: int, num_prompts: int,
    bench_prompts: int | None, max_new_tokens: int, time_limit: int, as_json: bool,
) -> None:  # fmt: skip
    """Calibrate, profile, search, bench, export, plot and report, on the demo model or on your own.

    The demo model runs in bfloat16 where the processor computes in it, as servers do, else in float32;
    the other commands take float32 on a CPU unless --dtype says otherwise.

    \b
    Example:
        treeopt run
        treeopt run --model MODEL --drafter HEADS --prompts prompts.jsonl --batch-size 1,4
    """
    from treeopt import figures, pipeline
    from treeopt.console import bench_table, closing, note, out, plan_table, progress
    from treeopt.export import ENGINES
    from treeopt.journal import Journal, discard
    from treeopt.report import write_report

    source = resolve(run, source)
    if not {"model", "dtype", "device"} & source.keys():
        source["dtype"] = demo_dtype()
    session = open_session(source)
    options = {"source": source, "num_prompts": num_prompts, "max_new_tokens": max_new_tokens, "budget": budget,
               "batch_sizes": batch_size, "time_limit": time_limit, "drafter": session.drafter}  # fmt: skip
    steps = Journal(run.partial("run"), options)  # those that a killed run had finished
    if steps.finished() < 1:
        pipeline.calibrate(
            run, session, num_prompts=num_prompts, max_new_tokens=max_new_tokens, source=source
        )
        steps.append({"step": "calibrate"})
    if steps.finished() < 2:
        pipeline.profile(run, session, batch_sizes=batch_size, budget=budget, time_limit_s=time_limit)
        steps.append({"step": "profile"})
    plan = pipeline.search(run, batch_sizes=batch_size, budget=budget)
    results = [
        pipeline.bench(run, session, batch_size=entry.batch_size, num_prompts=bench_prompts)
        for entry in plan.entries
    ]
    for engine, entry in itertools.product(ENGINES, plan.entries):
        try:
            pipeline.export(run, engine, batch_size=entry.batch_size)
        except TreeoptError as error:
            note(f"Not exported for {engine}: {error}")
    with progress("Drawing", None):
        figures.draw(run)
        write_report(run)
    discard(run.partial("run"))
    if as_json:
        show_result({"plan": plan.document(), "bench": [r.document() for r in results]}, None, as_json)
        return
    out(plan_table(plan))
    for entry, result in zip(plan.entries, results, strict=True):
        out(bench_table(result))
        out(closing(entry, result))
    note(f"For your engine: {run.export}/. To look at it all, open {run.report}")


@click.command()
@model_options
@run_directory
@click.option("--num-prompts", **positive(192), help="Prompts to answer.")
@click.option("--max-new-tokens", **positive(128), help="Longest answer.")
@click.option("--batch-size", **positive(16), help="Sequences decoded at once.")
@click.option(
    "--top-k", type=click.IntRange(1, 10_000), default=32, show_default=True, help="Ranks to tell apart."
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), help="At which the target itself sampled the --responses."
)
def calibrate(run: RunDirectory, source: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Measure at which rank each head has the token that really comes.

    The target answers the prompts greedily, conversations turn by turn. With --responses nothing is
    generated: given answers are read in one pass. What that measures is exact for the answers that the
    target itself sampled at --temperature, and an estimate for greedy decoding otherwise.

    \b
    Example:
        treeopt calibrate --num-prompts 64
        treeopt calibrate --model MODEL --drafter HEADS --prompts prompts.jsonl --group-by category
    """
    from treeopt import pipeline
    from treeopt.console import calibration_table

    source = resolve(run, source)
    session = open_session(source)
    result = pipeline.calibrate(run, session, source=source, **options)
    show_result(result.document(), calibration_table(result), as_json)


@click.command()
@model_options
@run_directory
@BATCH_SIZES
@click.option(
    "--context",
    "contexts",
    type=Integers(),
    help="Hold rows at these lengths: 512,4096.  [default: the prompts']",
)
@click.option(
    "--sizes", type=Integers(), help="Time exactly these tree sizes, root included.  [default: placed]"
)
@click.option("--budget", **positive(64), help="Largest size to place, root included.")
@click.option("--precision", type=click.FloatRange(min=0, min_open=True), default=2.0, show_default=True,
              help="Percent to know every latency to (95 % interval).")  # fmt: skip
@click.option("--time-limit", **positive(60), help="Seconds for all batch sizes and contexts together.")
@click.option("--calibration", help="What timed trees are grown on, a file or a name.  [default: the run's]")
@click.option(
    "--random-weights", metavar="CONFIG", help="Time a model of this config.json's shape, of random weights."
)
@click.option("--heads", **positive(), help="Heads of --random-weights.  [default: 4]")
@click.option("--bandwidth", type=click.FloatRange(min=0, min_open=True), metavar="GB_PER_S",
              help="Memory bandwidth to compare plain steps with.")  # fmt: skip
@click.option("--compile", "compiled", is_flag=True, help="Compile the target (on CUDA with CUDA graphs).")
def profile(
    run: RunDirectory, source: dict[str, Any], batch_size: tuple[int, ...], contexts: tuple[int, ...] | None,
    precision: float, time_limit: int, random_weights: str | None, heads: int | None, bandwidth: float | None,
    compiled: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Time real decoding steps with trees of chosen sizes and depths, and plain ones.

    Batch sizes and contexts are added to what the run's profile knows of the same model. The sizes are
    placed at the edges of tiles; those that a plan would choose between are timed for themselves.

    With --random-weights nothing is loaded: a dense model of that shape is made on the device, and how
    many guesses are accepted is drawn from --calibration.

    \b
    Example:
        treeopt profile --batch-size 1,4 --time-limit 120
        treeopt profile --context 512,4096 --precision 1
        treeopt profile --random-weights config.json --dtype bfloat16 --bandwidth 3350
    """
    from treeopt import pipeline
    from treeopt.console import note, profile_table

    if heads is not None and random_weights is None:
        raise click.UsageError("--heads is for --random-weights; other heads come with --drafter.")
    session = (open_random_session(random_weights, source, heads) if random_weights is not None
               else open_session(resolve(run, source)))  # fmt: skip
    if compiled:
        from treeopt.runtime.compiled import compile_target, compiled_note

        compile_target(session.target)
    result = pipeline.profile(run, session, batch_sizes=batch_size, contexts=contexts or (),
                              precision=precision / 100, time_limit_s=time_limit, gb_per_s=bandwidth, **options)  # fmt: skip
    if compiled:
        note(compiled_note(session.target))
    show_result(result.document(), profile_table(result), as_json)


@click.command()
@run_directory
@click.option("--budget", **positive(64), help="Most rows verified per sequence and step, root included.")
@click.option("--batch-size", type=Loads(), help="Sequences decoded at once: 1,4,8; or one tree for a mix of loads, "
              "1:0.5,4:0.3,8:0.2.  [default: the profile's]")  # fmt: skip
@click.option("--context", **positive(), help="Tokens that a sequence has.  [default: as in the trace]")
@click.option(
    "--max-rank", type=click.IntRange(min=0), default=9, show_default=True, help="Largest rank of a node."
)
@click.option("--max-depth", **positive(), help="Deepest node.  [default: the number of heads]")
@click.option("--objective", default="replay", show_default=True, help="independent, joint or replay.")
@click.option(
    "--measured-only", is_flag=True, help="Choose among sizes that were timed, without estimates between."
)
@click.option("--verify", type=click.IntRange(min=0), default=0, metavar="N",
              help="Decode for real with the N best sizes and the chosen one's neighbours, and take the fastest.")  # fmt: skip
@click.option("--calibration", help="A trace, a calibration, or the name of a shipped one (treeopt list).")
@click.option("--profile", "profile_path", help="A profile, or the name of a shipped one.")
def search(
    run: RunDirectory, as_json: bool, batch_size: tuple[int, ...] | dict[int, float] | None, verify: int, **options: Any
) -> None:  # fmt: skip
    """Choose the tree with the best throughput for each batch size.

    Figures are held out, with error bars over conversations and over rounds of timing. Sizes that the
    data cannot tell apart are named as tied; of those that cost at most 0.5 % the smallest is chosen.

    \b
    Example:
        treeopt search --budget 64 --batch-size 4
        treeopt search --batch-size 1:0.5,4:0.3,8:0.2
        treeopt search --verify 3
        treeopt search --calibration vicuna-7b-medusa1 --budget 39
    """
    from treeopt import pipeline
    from treeopt.console import note, plan_table

    session = open_session(resolve(run, {})) if verify else None
    plan = pipeline.search(run, batch_sizes=batch_size, session=session, verify=verify, **options)
    for warning in dict.fromkeys(warning for entry in plan.entries for warning in entry.warnings):
        which = [str(entry.batch_size) for entry in plan.entries if warning in entry.warnings]
        note(warning if len(which) == len(plan.entries) else f"Batch size {', '.join(which)}: {warning}")
    show_result(plan.document(), plan_table(plan), as_json)


@click.command()
@model_options
@run_directory
@click.option("--batch-size", **positive(), help="Which of the plan's.  [default: its first]")
@click.option("--num-prompts", **positive(), help="Held-out prompts.  [default: 24, or 10 a row]")
@click.option("--max-new-tokens", **positive(), help="Longest answer.  [default: as calibrated]")
@click.option("--rounds", **positive(2), help="Times that every contender decodes every prompt.")
@click.option(
    "--tree", "trees", multiple=True, type=click.Path(path_type=Path), help="Add the tree of a JSON file."
)
def bench(
    run: RunDirectory, source: dict[str, Any], as_json: bool, trees: tuple[Path, ...], **options: Any
) -> None:
    """Decode held-out prompts for real: the chosen tree against plain decoding and others.

    --prompts trace decodes the prompts of the run's own trace instead.

    \b
    Example:
        treeopt bench --num-prompts 16 --rounds 3
        treeopt bench --prompts trace --tree my_tree.json --dtype float64
    """
    from treeopt import pipeline
    from treeopt.console import bench_table

    on_trace = source.get("prompts") == "trace"
    if on_trace:
        del source["prompts"]
    session = open_session(resolve(run, source))
    result = pipeline.bench(run, session, trees=trees, on_trace=on_trace, **options)
    show_result(result.document(), bench_table(result), as_json)
