"""treeopt profile: what a decoding step costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import treeopt
from treeopt.cli import declared
from treeopt.cli.output import show_result
from treeopt.files.parameters import Count, parameters_of

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory
    from treeopt.runtime.session import Session

# Where latencies come from if treeopt does not time steps itself: the step of the line, and the options that each takes.
ELSEWHERE = {
    "from_csv": ("profile_from_file", {"contexts", "num_heads", "runtime", "overwrite"}),
    "command": ("profile_command", {"contexts", "num_heads", "runtime", "batch_sizes", "sizes", "budget", "precision",
                "time_limit_s", "calibration", "overwrite"}),
    "analytical": ("profile_analytical", {"contexts", "num_heads", "model", "dtype", "batch_sizes", "sizes", "budget",
                   "overwrite"}),
}  # fmt: skip


@declared.command(treeopt.profile)
def profile(
    run: RunDirectory,
    as_json: bool,
    *,
    random_weights: str | None = None,
    num_heads: Count | None = None,
    from_csv: Path | None = None,
    command: str | None = None,
    runtime: str | None = None,
    analytical: str | None = None,
    **options: Any,
) -> None:
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

    random_weights : time a model of this config.json's shape, of random weights
    num_heads  : number of heads, if no drafter says it; by default as calibrated, or 4
    from_csv   : read latencies of your own engine from a table instead of timing
    command    : run your own benchmark instead, with {size} {batch_size} {depth} {context} {tree} filled in; its last line is
                 ms per step, or JSON
    runtime    : name of the engine of ``from_csv`` or ``command``
    analytical : compute latencies from a device's roofline and the config.json of ``model`` instead of timing
    """
    from treeopt import pipeline
    from treeopt.report.tables import profile_table

    if source := _heeded_source():
        step, heeded = ELSEWHERE[source]
        asked = {"from_csv": from_csv, "command": command, "analytical": analytical}[source]
        known = {**options, "num_heads": num_heads, "runtime": runtime}
        heard = {name: value for name, value in known.items() if name in heeded and value is not None}
        result = getattr(pipeline, step)(run, asked, **heard)
    elif random_weights is not None:
        session, timed = _random_session(random_weights, num_heads, options)
        result = treeopt.profile(session, run=run, **timed)
    else:
        result = treeopt.profile(run=run, **options)
    show_result(result.document(), profile_table(result), as_json)


def _heeded_source() -> str | None:
    """The source of latencies; click.UsageError for options that it would not heed."""
    context = click.get_current_context()
    typed = {
        str(parameter.name): parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    }
    source = next((name for name in ELSEWHERE if name in typed), None)
    if source is None:
        if "runtime" in typed:
            raise click.UsageError("--runtime is for --from-csv and --command.")
        if "num_heads" in typed and "random_weights" not in typed:
            raise click.UsageError("--heads is for --random-weights; other heads come with --drafter.")
        return None
    heeded = {source, "run", "as_json", *ELSEWHERE[source][1]}
    if unheeded := [option for name, option in typed.items() if name not in heeded]:
        raise click.UsageError(f"{unheeded[0]} does not go with {typed[source]}.")
    if source == "analytical" and "model" not in typed:
        raise click.UsageError("--analytical needs the model's shape: --model config.json.")
    return source


def _random_session(config: str, num_heads: int | None, options: dict[str, Any]) -> tuple[Session, dict[str, Any]]:
    """A model of random weights, and the options of its timing; of those of a model only --dtype and --device go with it."""
    from treeopt.report.terminal import progress
    from treeopt.runtime.random_weights import NUM_HEADS, open_random_session

    source = {name: options.pop(name) for name in parameters_of(treeopt.open) if name in options}
    if other := sorted(source.keys() - {"dtype", "device"}):
        raise click.UsageError(
            f"--random-weights needs no weights, tokenizer or prompts: leave out --{other[0].replace('_', '-')}."
        )
    with progress("Making random weights", None):
        return open_random_session(config, num_heads=num_heads or NUM_HEADS, **source), options
