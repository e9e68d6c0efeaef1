"""The command that says what a step costs: profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from treeopt.cli.options import (
    BATCH_SIZES,
    Integers,
    model_options,
    open_random_session,
    open_session,
    positive,
    resolve,
    run_directory,
    show_result,
)

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory

# Where latencies come from if treeopt does not time steps itself, and the options that go with it.
ANYWHERE = {"folder", "as_json", "contexts", "heads"}
ELSEWHERE = {
    "from_csv": ANYWHERE | {"runtime", "overwrite"},
    "command": ANYWHERE | {"runtime", "batch_size", "sizes", "budget", "precision", "time_limit", "calibration"},
    "analytical": ANYWHERE | {"model", "dtype", "batch_size", "sizes", "budget", "overwrite"},
}


@click.command()
@model_options
@run_directory
@BATCH_SIZES
@click.option(
    "--context", "contexts", type=Integers(), help="Hold rows at these lengths: 512,4096.  [default: the prompts']"
)
@click.option("--sizes", type=Integers(), help="Time exactly these tree sizes, root included.  [default: placed]")
@click.option("--budget", **positive(64), help="Largest size to place, root included.")
@click.option(
    "--precision",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Percent to know every latency to (95 % interval).",
)
@click.option("--time-limit", **positive(60), help="Seconds for all batch sizes and contexts together.")
@click.option("--calibration", help="What timed trees are grown on, a file or a name.  [default: the run's]")
@click.option("--random-weights", metavar="CONFIG", help="Time a model of this config.json's shape, of random weights.")
@click.option("--heads", **positive(), help="Heads, where no drafter says how many.  [default: as calibrated, or 4]")
@click.option(
    "--bandwidth",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB_PER_S",
    help="Memory bandwidth to compare plain steps with.",
)
@click.option("--compile", "compiled", is_flag=True, help="Compile the target (on CUDA with CUDA graphs).")
@click.option(
    "--from-csv",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Time nothing: read latencies of your own engine from a table.",
)
@click.option(
    "--command",
    metavar="TEMPLATE",
    help="Run your own benchmark instead, with {size} {batch_size} {depth} "
    "{context} {tree} filled in; its last line is ms per step, or JSON.",
)
@click.option("--runtime", metavar="NAME", help="Name of the engine of --from-csv or --command.")
@click.option(
    "--analytical",
    metavar="DEVICE",
    help="Time nothing: compute latencies from a device's roofline and the config.json of --model.",
)
@click.option("--overwrite", is_flag=True, help="Replace a measured profile by --from-csv or --analytical.")
def profile(
    run: RunDirectory,
    source: dict[str, Any],
    batch_size: tuple[int, ...],
    contexts: tuple[int, ...] | None,
    precision: float,
    time_limit: int,
    random_weights: str | None,
    heads: int | None,
    bandwidth: float | None,
    compiled: bool,
    overwrite: bool,
    from_csv: Path | None,
    command: str | None,
    runtime: str | None,
    analytical: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Time real decoding steps with trees of chosen sizes and depths, and plain ones.

    Batch sizes and contexts are added to what the run's profile knows of the same model. The sizes are
    placed at the edges of tiles; those that a plan would choose between are timed for themselves.

    With --random-weights nothing is loaded: a dense model of that shape is made on the device, and how
    many guesses are accepted is drawn from --calibration.

    Latencies of another engine come from a table (--from-csv: batch_size, size, step_ms, ...; size 1 is
    plain decoding) or from your own benchmark (--command). Before there is hardware, --analytical computes
    them: an upper bound of what speculation brings.

    \b
    Example:
        treeopt profile --batch-size 1,4 --time-limit 120
        treeopt profile --context 512,4096 --precision 1
        treeopt profile --random-weights config.json --dtype bfloat16 --bandwidth 3350
        treeopt profile --from-csv steps.csv --runtime vllm-0.11
        treeopt profile --command './bench.sh {size} {batch_size}' --sizes 4,8,16,32 --time-limit 3600
        treeopt profile --analytical H100-SXM --model config.json --batch-size 1,8 --context 2048
    """
    from treeopt import pipeline
    from treeopt.report.terminal import note, profile_table

    elsewhere = _elsewhere()
    if elsewhere is None and heads is not None and random_weights is None:
        raise click.UsageError("--heads is for --random-weights; other heads come with --drafter.")
    if elsewhere is None and overwrite:
        raise click.UsageError("--overwrite is for --from-csv and --analytical; timed steps are added to the profile.")
    if elsewhere is not None:
        options |= {"contexts": contexts or (), "num_heads": heads}
        timed: dict[str, Any] = {"precision": precision / 100, "time_limit_s": time_limit, "runtime": runtime}
        if from_csv is not None:
            result = pipeline.profile_from_file(
                run, from_csv, runtime=runtime, contexts=contexts or (), num_heads=heads, overwrite=overwrite
            )
        elif command is not None:
            result = pipeline.profile_command(run, command, batch_sizes=batch_size, **timed, **options)
        else:
            del options["calibration"]
            result = pipeline.profile_analytical(
                run,
                str(analytical),
                source["model"],
                dtype=source.get("dtype"),
                batch_sizes=batch_size,
                overwrite=overwrite,
                **options,
            )
        show_result(result.document(), profile_table(result), as_json)
        return
    session = (
        open_random_session(random_weights, source, heads)
        if random_weights is not None
        else open_session(resolve(run, source))
    )
    if compiled:
        from treeopt.runtime.compiled import compile_target, compiled_note

        compile_target(session.target)
    result = pipeline.profile(
        run,
        session,
        batch_sizes=batch_size,
        contexts=contexts or (),
        precision=precision / 100,
        time_limit_s=time_limit,
        gb_per_s=bandwidth,
        **options,
    )
    if compiled:
        note(compiled_note(session.target))
    show_result(result.document(), profile_table(result), as_json)


def _elsewhere() -> str | None:
    """Which other source of latencies was asked for; options that it would not heed are refused."""
    context = click.get_current_context()
    typed = {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }
    asked = [name for name in ELSEWHERE if name in typed]
    if not asked:
        if "runtime" in typed:
            raise click.UsageError("--runtime is for --from-csv and --command.")
        return None
    unheeded = [option for name, option in typed.items() if name != asked[0] and name not in ELSEWHERE[asked[0]]]
    if unheeded:
        raise click.UsageError(f"{unheeded[0]} does not go with {typed[asked[0]]}.")
    if asked[0] == "analytical" and "model" not in typed:
        raise click.UsageError("--analytical needs the model's shape: --model config.json.")
    return asked[0]
