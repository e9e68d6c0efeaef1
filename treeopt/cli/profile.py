"""treeopt profile: what a decoding step costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import treeopt
from treeopt.cli.options import (
    BATCH_SIZES,
    Integers,
    command,
    counted,
    default_of,
    model_options,
    open_random_session,
    positive,
    run_directory,
    show_result,
    tensor_parallel,
)

if TYPE_CHECKING:
    from treeopt.records.profile import LatencyProfile
    from treeopt.records.rundir import RunDirectory

# Where latencies come from if treeopt does not time steps itself, and the options that each takes.
ELSEWHERE = {
    "from_csv": ("contexts", "num_heads", "runtime", "overwrite"),
    "command": ("contexts", "num_heads", "runtime", "batch_sizes", "sizes", "budget", "precision", "time_limit_s",
                "calibration", "overwrite"),
    "analytical": ("contexts", "num_heads", "model", "dtype", "batch_sizes", "sizes", "budget", "overwrite"),
}  # fmt: skip


@command()
@model_options
@tensor_parallel
@run_directory
@BATCH_SIZES
@click.option(
    "--context",
    "contexts",
    type=Integers(),
    default=(),
    help="Hold rows at these lengths: 512,4096.  [default: the prompts']",
)
@click.option(
    "--sizes",
    type=Integers(),
    help="Time exactly these tree sizes, root included.  [default: sizes at the edges of tiles]",
)
@counted(treeopt.profile, "--budget", "Largest tree size to time, root included.")
@click.option(
    "--precision",
    type=click.FloatRange(min=0, min_open=True),
    default=100 * default_of(treeopt.profile, "precision"),
    show_default=True,
    help="Wanted margin of error of every latency, in percent (95 % interval).",
)
@click.option(
    "--time-limit",
    "time_limit_s",
    **positive(default_of(treeopt.profile, "time_limit_s")),
    help="Seconds in all, for all batch sizes and contexts.",
)
@click.option(
    "--calibration", help="Calibration that timed trees are grown on: a file or a name.  [default: the run's]"
)
@click.option("--random-weights", metavar="CONFIG", help="Time a model of this config.json's shape, of random weights.")
@click.option(
    "--heads",
    "num_heads",
    **positive(),
    help=("Number of heads, if no drafter says it.  [default: as calibrated, or 4]"),
)
@click.option(
    "--bandwidth",
    "gb_per_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB_PER_S",
    help="Memory bandwidth to compare plain steps with.",
)
@click.option("--engine", help="Time another runtime's own steps: openvino, openvino-int8.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the target (on CUDA with CUDA graphs).")
@click.option(
    "--from-csv",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read latencies of your own engine from a table instead of timing.",
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
    help="Compute latencies from a device's roofline and the config.json of --model instead of timing.",
)
@click.option("--overwrite", is_flag=True, help="Replace a profile of something else.")
def profile(run: RunDirectory, source: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Time real decoding steps, with trees and without.

    Batch sizes and contexts are added to what the run's profile knows of the same model and runtime.
    Without --overwrite a profile of something else is kept. The sizes are
    placed at the edges of tiles; those that a plan would choose between are timed for themselves.

    With --random-weights nothing is loaded: a dense model of that shape is made on the device, and how
    many guesses are accepted is drawn from --calibration.

    Latencies of another engine come from a table (--from-csv: batch_size, size, step_ms, ...; size 1 is
    plain decoding) or from your own benchmark (--command). Before there is hardware, --analytical computes
    them: an upper bound of what speculation brings.

    With --engine the steps are those of another runtime on this machine, with chains and dynamic trees.

    \b
    Example:
        treeopt profile --batch-size 1,4 --time-limit 120
        treeopt profile --engine openvino --time-limit 300
        treeopt profile --context 512,4096 --precision 1
        treeopt profile --random-weights config.json --dtype bfloat16 --bandwidth 3350
        treeopt profile --from-csv steps.csv --runtime vllm-0.11
        treeopt profile --command './bench.sh {size} {batch_size}' --sizes 4,8,16,32 --time-limit 3600
        treeopt profile --analytical H100-SXM --model config.json --batch-size 1,8 --context 2048
    """
    from treeopt import pipeline
    from treeopt.report.profile_table import profile_table

    elsewhere = _elsewhere()
    options["precision"] /= 100
    if elsewhere is None:
        result = _timed(run, source, **options)
    else:
        measures: dict[str, Callable[..., LatencyProfile]] = {
            "from_csv": pipeline.profile_from_file,
            "command": pipeline.profile_command,
            "analytical": pipeline.profile_analytical,
        }
        given = {"dtype": None, **source, **options}
        result = measures[elsewhere](run, options[elsewhere], **{name: given[name] for name in ELSEWHERE[elsewhere]})
    show_result(result.document(), profile_table(result), as_json)


def _timed(
    run: RunDirectory, source: dict[str, Any], *, random_weights: str | None, num_heads: int | None, **options: Any
) -> LatencyProfile:
    """Time steps here, of the model that the options name or of one of random weights."""
    if num_heads is not None and random_weights is None:
        raise click.UsageError("--heads is for --random-weights; other heads come with --drafter.")
    taken = inspect.signature(treeopt.profile).parameters
    session, timed = None, {name: value for name, value in options.items() if name in taken}
    if random_weights is not None:
        session, source = open_random_session(random_weights, source, num_heads), {}
    return treeopt.profile(session or source.pop("model", None), run=run, **timed, **source)


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
    heeded = {asked[0], "folder", "as_json", *ELSEWHERE[asked[0]]}
    unheeded = [option for name, option in typed.items() if name not in heeded]
    if unheeded:
        raise click.UsageError(f"{unheeded[0]} does not go with {typed[asked[0]]}.")
    if asked[0] == "analytical" and "model" not in typed:
        raise click.UsageError("--analytical needs the model's shape: --model config.json.")
    return asked[0]
