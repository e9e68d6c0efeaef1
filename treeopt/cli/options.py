"""Options that commands share, and what they turn into."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt

if TYPE_CHECKING:
    from treeopt.runtime.session import Session

Command = Callable[..., Any]
# What another runtime or nobody decodes, or is not divided.
ALONE = ("engine", "compiled", "random_weights", "from_csv", "command", "analytical")
# Headings of --help and the options below them, by parameter; what is in none of them comes first.
GROUPS = {
    "Load": ("batch_sizes", "context", "contexts"),
    "Trees and engine": ("budget", "sizes", "engine", "method", "version", "shape", "max_rank", "max_depth", "tree", "heads",
                         "max_draft_len", "measured_only", "for_groups", "tolerance"),
    "Latencies from elsewhere": ("from_csv", "command", "runtime", "analytical", "num_heads", "overwrite"),
    "Model and drafter": ("random_weights", "model", "drafter", "draft_depth", "revision", "dtype", "device", "device_map",
                          "tensor_parallel", "compiled",
                          "mixed_precision", "load_in_8bit", "trust_remote_code"),
    "Several machines": ("workers", "gpus_per_worker", "address", "journal"),
    "Prompts and answers": ("prompts", "column", "group_by", "responses", "split", "chat_template", "num_prompts",
                            "bench_prompts", "max_new_tokens", "tokens", "answers"),
    "How guesses are accepted": ("acceptance", "temperature", "top_p", "top_k", "epsilon", "delta", "seed"),
    "Files and output": ("calibration", "profile", "folder", "output", "picture", "as_json", "_click_default_help"),
}  # fmt: skip


class Grouped(click.Command):
    """A command whose --help has its options in `GROUPS`; a single one of a group stands among the ungrouped."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        group_of = {name: title for title, names in GROUPS.items() for name in names}
        found: dict[str, list[tuple[str, str]]] = {"Options": [], **{title: [] for title in GROUPS}}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None and isinstance(parameter, click.Option):
                found[group_of.get(parameter.name or "", "Options")].append(record)
        alone = [title for title, records in found.items() if len(records) == 1]
        found["Options"] += [record for title in alone if title != "Options" for record in found.pop(title)]
        for title, records in found.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def command(name: str | None = None) -> Callable[[Command], click.Command]:
    """Makes a function a command with its options in groups."""
    return click.command(name, cls=Grouped)


class Integers(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A comma-separated list of whole numbers, each at least 1."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"must be whole numbers with commas between, but got {value!r}.", param, ctx)
        if min(numbers) < 1:
            self.fail(f"must be at least 1, but got {min(numbers)}.", param, ctx)
        return numbers


class Loads(Integers):
    """Batch sizes, or batch sizes with the share of the time that each takes."""

    name = "N,N,... | N:SHARE,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, dict) or ":" not in str(value):
            return value if isinstance(value, dict) else super().convert(value, param, ctx)
        shares: dict[int, float] = {}
        for part in str(value).split(","):
            number, _, share = part.partition(":")
            (batch_size,) = super().convert(number, param, ctx)
            if batch_size in shares:
                self.fail(f"must have each batch size once, but has {batch_size} twice.", param, ctx)
            try:
                shares[batch_size] = float(share)
            except ValueError:
                shares[batch_size] = -1.0
            if not 0 < shares[batch_size] < float("inf"):
                self.fail(f"must have a positive share behind every batch size, but got {part!r}.", param, ctx)
        return shares


class Words(click.ParamType):  # type: ignore[type-arg]
    """A comma-separated list of names."""

    name = "NAME,NAME,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(word.strip() for word in str(value).split(",") if word.strip())


def default_of(function: Callable[..., Any], name: str) -> Any:
    """The default of an option, which stands in the function of `treeopt` that the command calls."""
    return inspect.signature(function).parameters[name].default


def positive(default: int | None = None) -> dict[str, Any]:
    return {"type": click.IntRange(min=1), "default": default, "show_default": default is not None}


def counted(function: Callable[..., Any], flag: str, help: str) -> Command:
    """An option that is a whole number of at least 1, with the default of the function of `treeopt`."""
    return click.option(flag, **positive(default_of(function, flag[2:].replace("-", "_"))), help=help)


BATCH_SIZES = click.option(
    "--batch-size",
    "batch_sizes",
    type=Integers(),
    default=",".join(map(str, default_of(treeopt.profile, "batch_sizes"))),
    show_default=True,
    help="Sequences decoded at once: 1,4,8.",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")


def run_directory(command: Command | None = None, *, writes: bool = True) -> Command:
    """--run and --json, which most commands take; passes ``run`` as a RunDirectory.

    A command that writes is the directory's only writer while it runs.
    """
    if command is None:
        return functools.partial(run_directory, writes=writes)

    @click.option("--run", "folder", default=treeopt.RUN, show_default=True, help="Run directory.")
    @AS_JSON
    @functools.wraps(command)
    def wrapped(folder: str, **options: Any) -> Any:
        from treeopt.records.rundir import RunDirectory

        run = RunDirectory(folder)
        if not writes:
            return command(run=run, **options)
        with run.writing():
            return command(run=run, **options)

    return wrapped


def tensor_parallel(command: Command) -> Command:
    """--tensor-parallel, of commands that decode: they run once on each of so many processes, which share the target.

    It goes above `run_directory`, since all processes but the first work in a copy.
    """

    @click.option(
        "--tensor-parallel",
        type=click.IntRange(2),
        metavar="N",
        help="Divide the target's layers among N processes, each with a device of its own.",
    )
    @functools.wraps(command)
    def wrapped(tensor_parallel: int | None, folder: str, **options: Any) -> Any:
        from treeopt.pipeline import ranks

        if tensor_parallel is None:
            if ranks.are_started() and os.environ["WORLD_SIZE"] != "1":
                raise click.UsageError("Several processes were started: pass --tensor-parallel with their number.")
            return command(folder=folder, **options)
        if other := [name for name in ALONE if options.get(name)]:
            raise click.UsageError(f"--{other[0].replace('_', '-')} does not go with --tensor-parallel.")
        if not ranks.are_started():
            sys.exit(ranks.launch(tensor_parallel))
        with ranks.joined(tensor_parallel, folder) as own:
            return command(folder=own, **options)

    return wrapped


# Name of each option that says what is measured, and its help; `calibrate` puts them into the trace.
MODEL_OPTIONS: dict[str, str] = {
    "model": "Folder, GGUF file or hub id of the target, or smollm2.  [default: the run's, or the demo]",
    "drafter": "Folder, file or hub id of heads or of a draft model; mtp; ngram; early-exit:LAYER; with the demo model "
    "medusa, hydra, eagle3 or draft; with smollm2 eagle3 or medusa.  [default: the model's own heads, or the first shipped]",
    "dtype": "float64, float32, bfloat16 or float16.  [default: float32 on CPU]",
    "device": "cpu, cuda, cuda:1 ...  [default: cuda where there is one]",
    "device_map": "Spread the model over devices: auto, balanced ... (needs accelerate).",
    "revision": "Revision of a hub model.",
    "prompts": "A .jsonl, .json, .csv, .parquet or .txt file, a folder, a datasets id, or demo.",
    "column": "Column that holds the prompt or conversation.  [default: the first known name]",
    "group_by": "Column to report groups by, for example category.",
    "responses": "Column of given answers. They are read in one pass; nothing is generated.",
    "split": "Split of a datasets id.",
}
FLAGS = ("trust_remote_code", "chat_template", "in_order")
# How the target decodes and what it accepts; they are put into the trace as well.
RULE_OPTIONS: dict[str, tuple[Any, str]] = {
    "acceptance": (str, "greedy; sample (lossless, at --temperature); reject (the same with chains of a draft "
                   "model, by p/q rejection); typical (Medusa's).  [default: greedy]"),
    "temperature": (click.FloatRange(min=0), "Sampling temperature; with --responses that of the answers.  [default: 1.0; "
                    "typical 0.7]"),
    "top_p": (float, "With sample and reject: sample from the likeliest tokens of this total probability."),
    "top_k": (int, "With sample and reject: sample from this many of the likeliest tokens."),
    "threads": (click.IntRange(1), "Threads on a CPU.  [default: the run's, or the fewest that are about as fast]"),
    "seed": (int, "Seed of the prompts' order, of sampling and of training.  [default: 0]"),
    "epsilon": (float, "Threshold of --acceptance typical.  [default: 0.09]"),
    "delta": (float, "Entropy factor of --acceptance typical.  [default: the square root of epsilon]"),
    "draft_depth": (int, "How many tokens a draft model, EAGLE, MTP, ngram or early exit guesses ahead.  [default: 5]"),
}  # fmt: skip


def model_options(command: Command | None = None, *, hidden: Collection[str] = ()) -> Command:
    """What loads a model and its prompts; passes ``source``, those of the options that were given.

    hidden : options that the command refuses, left out of its help
    """
    if command is None:
        return functools.partial(model_options, hidden=hidden)
    typed = {**{name: (str, text) for name, text in MODEL_OPTIONS.items()}, **RULE_OPTIONS}
    options = [
        click.option("--" + name.replace("_", "-"), type=kind, help=text, hidden=name in hidden)
        for name, (kind, text) in typed.items()
    ]
    options += [
        click.option(
            "--no-chat-template",
            "chat_template",
            flag_value=False,
            default=None,
            type=bool,
            help="Take prompts as plain text although the tokenizer has a chat template.",
        ),
        click.option(
            "--in-order", is_flag=True, default=None, help="Take prompts as they stand in the file, not shuffled."
        ),
        click.option("--trust-remote-code", is_flag=True, default=None, help="Run a hub model's own code."),
    ]

    @functools.wraps(command)
    def wrapped(**options: Any) -> Any:
        given = {name: options.pop(name) for name in (*MODEL_OPTIONS, *RULE_OPTIONS, *FLAGS)}
        source = {name: value for name, value in given.items() if value is not None}
        return command(source=source, **options)

    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), wrapped)


def worker_options(command: Command) -> Command:
    """What has the workers of a cluster answer, by the names of `treeopt.calibrate`."""
    options = [
        click.option("--engine", type=click.Choice(["ray"]), help="Have workers of a Ray cluster answer the prompts."),
        click.option("--workers", **positive(), help="Workers, each with the model.  [default: 1]"),
        click.option("--gpus-per-worker", type=click.FloatRange(min=0), help="GPUs of each worker.  [default: 0]"),
        click.option("--address", help="HOST:PORT of a running cluster, or auto.  [default: one on this machine]"),
        click.option(
            "--journal", help="fsspec URL for finished blocks, where hosts share no disk: s3://BUCKET/FOLDER."
        ),
    ]
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def open_random_session(config: str, source: dict[str, Any], num_heads: int | None) -> Session:
    """A model of random weights; of the options that say what is measured only --dtype and --device go with it."""
    from treeopt.report.terminal import progress
    from treeopt.runtime.random_weights import NUM_HEADS, open_random_session

    other = sorted(source.keys() - {"dtype", "device"})
    if other:
        raise click.UsageError(
            f"--random-weights needs no weights, tokenizer or prompts: leave out --{other[0].replace('_', '-')}."
        )
    with progress("Making random weights", None):
        return open_random_session(config, num_heads=num_heads or NUM_HEADS, **source)


def show_result(document: Any, table: Any, as_json: bool) -> None:
    """Print the JSON document or the table; a text as it is."""
    from treeopt.files.storage import to_json
    from treeopt.report.terminal import out

    if as_json or isinstance(table, str):
        click.echo(to_json(document) if as_json else table)
    else:
        out(table)


def show_files(paths: Sequence[Path], notes: Sequence[str], as_json: bool, *, command: str | None = None) -> None:
    """Print what was written and the command that uses it, and the notes to stderr."""
    from treeopt.report.terminal import note

    for text in notes:
        note(text)
    names = [str(path) for path in paths]
    document = {"files": names, "notes": list(notes)} | ({"command": command} if command else {})
    show_result(document, "\n".join([*names, *([command] if command else [])]), as_json)
