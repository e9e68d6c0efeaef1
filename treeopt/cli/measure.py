"""The commands that measure and decide: run, calibrate, search, bench."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import (
    BATCH_SIZES,
    Loads,
    demo_dtype,
    model_options,
    open_session,
    positive,
    resolve,
    run_directory,
    show_result,
)
from treeopt.records.rules import RULES

if TYPE_CHECKING:
    from treeopt.records.plan import Plan
    from treeopt.records.rundir import RunDirectory


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
    run: RunDirectory,
    source: dict[str, Any],
    batch_size: tuple[int, ...],
    budget: int,
    num_prompts: int,
    bench_prompts: int | None,
    max_new_tokens: int,
    time_limit: int,
    as_json: bool,
) -> None:
    """Calibrate, profile, search, bench, export, plot and report, on the demo model or on your own.

    The demo model runs in bfloat16 where the processor computes in it, as servers do, else in float32;
    the other commands take float32 on a CPU unless --dtype says otherwise.

    \b
    Example:
        treeopt run
        treeopt run --model MODEL --drafter HEADS --prompts prompts.jsonl --batch-size 1,4
    """
    from treeopt import pipeline
    from treeopt.files.journal import Journal, discard
    from treeopt.report import figures
    from treeopt.report.bench_table import bench_table, closing
    from treeopt.report.page import write_report
    from treeopt.report.terminal import note, out, plan_table, progress

    source = resolve(run, source)
    if not {"model", "dtype", "device"} & source.keys():
        source["dtype"] = demo_dtype()
    session = open_session(source)
    options = {
        "source": source,
        "num_prompts": num_prompts,
        "max_new_tokens": max_new_tokens,
        "budget": budget,
        "batch_sizes": batch_size,
        "time_limit": time_limit,
        "drafter": session.drafter_record,
    }
    steps = Journal(run.partial("run"), options)  # those that a killed run had finished
    if steps.finished() < 1:
        pipeline.calibrate(
            run, session, num_prompts=num_prompts, max_new_tokens=max_new_tokens, probe_rounds=1, source=source
        )
        steps.append({"step": "calibrate"})
    if steps.finished() < 2:
        pipeline.profile(run, session, batch_sizes=batch_size, budget=budget, time_limit_s=time_limit)
        steps.append({"step": "profile"})
    if steps.finished() < 3 and run.probe.exists():
        pipeline.probe_again(run, session)
        steps.append({"step": "probe"})
    plan = pipeline.search(run, batch_sizes=batch_size, budget=budget)
    results = [
        pipeline.bench(run, session, batch_size=entry.batch_size, num_prompts=bench_prompts) for entry in plan.entries
    ]
    engines = pipeline.export_all(run, plan)
    with progress("Drawing", None):
        figures.draw(run)
        write_report(run)
    discard(run.partial("run"))
    if as_json:
        show_result({"plan": plan.document(), "bench": [r.document() for r in results]}, None, as_json)
        return
    note_warnings(plan)
    out(plan_table(plan))
    for entry, result in zip(plan.entries, results, strict=True):
        out(bench_table(result))
        out(closing(entry, result))
    note((f"For your engine: {run.export}/. " if engines else "") + f"To look at it all, open {run.report}")


@click.command()
@model_options
@run_directory
@click.option("--num-prompts", **positive(192), help="Prompts to answer.")
@click.option("--max-new-tokens", **positive(128), help="Longest answer.")
@click.option("--batch-size", **positive(16), help="Sequences decoded at once.")
@click.option("--ranks", type=click.IntRange(1, 10_000), default=32, show_default=True, help="Ranks to tell apart.")
def calibrate(run: RunDirectory, source: dict[str, Any], as_json: bool, ranks: int, **options: Any) -> None:
    """Measure at which rank the drafter has the token that really comes.

    The target answers the prompts by the rule of --acceptance, conversations turn by turn. With --responses
    nothing is generated: given answers are read in one pass. What that measures is exact for the answers that
    the target itself sampled at --temperature, and an estimate for greedy decoding otherwise.

    \b
    Example:
        treeopt calibrate --num-prompts 64
        treeopt calibrate --drafter ngram --acceptance sample --temperature 0.7
        treeopt calibrate --model MODEL --drafter HEADS --prompts prompts.jsonl --group-by category
    """
    from treeopt import pipeline
    from treeopt.report.terminal import calibration_table

    source = resolve(run, source)
    session = open_session(source)
    result = pipeline.calibrate(run, session, source=source, top_k=ranks, **options)
    show_result(result.document(), calibration_table(result), as_json)


@click.command()
@run_directory
@click.option("--budget", **positive(64), help="Most rows verified per sequence and step, root included.")
@click.option(
    "--batch-size",
    type=Loads(),
    help="Sequences decoded at once: 1,4,8; or one tree for a mix of loads, "
    "1:0.5,4:0.3,8:0.2.  [default: the profile's]",
)
@click.option("--context", **positive(), help="Tokens that a sequence has.  [default: as in the trace]")
@click.option("--for", "engine", help="Plan what this engine can take (treeopt list engines).")
@click.option("--method", help="One of the engine's ways to speculate.  [default: the drafter's]")
@click.option(
    "--shape", help="any, sibling-closed, low-rank-expands or chain.  [default: the engine's, or sibling-closed]"
)
@click.option("--max-rank", type=click.IntRange(min=0), help="Largest rank of a node.  [default: 9, or the engine's]")
@click.option("--max-depth", **positive(), help="Deepest node.  [default: the number of heads]")
@click.option("--objective", default="replay", show_default=True, help="independent, joint or replay.")
@click.option("--measured-only", is_flag=True, help="Choose among sizes that were timed, without estimates between.")
@click.option(
    "--verify",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Decode for real with the N best sizes and the chosen one's neighbours, and take the fastest.",
)
@click.option("--calibration", help="A trace, a calibration, or the name of a shipped one (treeopt list).")
@click.option("--profile", "profile_path", help="A profile, or the name of a shipped one.")
@click.option("--acceptance", type=click.Choice(list(RULES)), help="Refuse a calibration that is of another rule.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Of that rule.")
def search(
    run: RunDirectory,
    as_json: bool,
    batch_size: tuple[int, ...] | dict[int, float] | None,
    verify: int,
    acceptance: str | None,
    temperature: float | None,
    **options: Any,
) -> None:
    """Choose the tree with the best throughput for each batch size.

    Figures are held out, with error bars over conversations and over rounds of timing. Sizes that the
    data cannot tell apart are named as tied; of those that cost at most 0.5 % the smallest is chosen.

    \b
    Example:
        treeopt search --budget 64 --batch-size 4
        treeopt search --batch-size 1:0.5,4:0.3,8:0.2
        treeopt search --verify 3
        treeopt search --for vllm --batch-size 1,8,32
        treeopt search --calibration vicuna-7b-medusa1 --budget 39
    """
    from treeopt import pipeline
    from treeopt.report.terminal import plan_table

    session = open_session(resolve(run, {})) if verify else None
    if temperature is not None and acceptance is None:
        raise click.UsageError("--temperature goes with --acceptance.")
    rule: dict[str, Any] | None = {"rule": RULES[acceptance]} if acceptance else None
    if rule is not None and temperature is not None:
        rule["temperature"] = temperature
    plan = pipeline.search(run, batch_sizes=batch_size, session=session, verify=verify, acceptance=rule, **options)
    note_warnings(plan)
    show_result(plan.document(), plan_table(plan), as_json)


def note_warnings(plan: Plan) -> None:
    """Each of the plan's warnings once, with the batch sizes that it is for."""
    from treeopt.report.terminal import note

    for warning in dict.fromkeys(warning for entry in plan.entries for warning in entry.warnings):
        which = [str(entry.batch_size) for entry in plan.entries if warning in entry.warnings]
        note(warning if len(which) == len(plan.entries) else f"Batch size {', '.join(which)}: {warning}")


@click.command()
@model_options
@run_directory
@click.option("--batch-size", **positive(), help="Which of the plan's.  [default: its first]")
@click.option("--num-prompts", **positive(), help="Held-out prompts.  [default: 24, or 10 a row]")
@click.option("--max-new-tokens", **positive(), help="Longest answer.  [default: as calibrated]")
@click.option("--rounds", **positive(2), help="Times that every contender decodes every prompt.")
@click.option("--tree", "trees", multiple=True, help="Add a tree: a file, or the name of a published one.")
def bench(run: RunDirectory, source: dict[str, Any], as_json: bool, trees: tuple[str, ...], **options: Any) -> None:
    """Decode held-out prompts for real: the chosen tree against plain decoding and others.

    --prompts trace decodes the prompts of the run's own trace instead.

    \b
    Example:
        treeopt bench --num-prompts 16 --rounds 3
        treeopt bench --prompts trace --tree my_tree.json --dtype float64
    """
    from treeopt import pipeline
    from treeopt.report.bench_table import bench_table

    on_trace = source.get("prompts") == "trace"
    if on_trace:
        del source["prompts"]
    session = open_session(resolve(run, source))
    result = pipeline.bench(run, session, trees=trees, on_trace=on_trace, **options)
    show_result(result.document(), bench_table(result), as_json)
