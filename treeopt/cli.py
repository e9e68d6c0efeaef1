"""The command line: every command reads files, calls one function, and writes one file.

Results go to stdout, talk and progress to stderr. Exit 0 done, 1 could not, 2 misused.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt import __version__
from treeopt.errors import TreeoptError

if TYPE_CHECKING:
    from treeopt.rundir import RunDirectory
    from treeopt.runtime.session import Session

Command = Callable[..., Any]


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


class Group(click.Group):
    """Prints a TreeoptError as one sentence and exits 1; lists commands in the order of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TreeoptError as error:
            click.echo(f"treeopt: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            command = f"treeopt {ctx.invoked_subcommand}"
            click.echo(f"\ntreeopt: interrupted; files are whole. Start again with: {command}", err=True)
            sys.exit(1)


def positive(default: int | None = None) -> dict[str, Any]:
    return {"type": click.IntRange(min=1), "default": default, "show_default": default is not None}


def run_directory(command: Command) -> Command:
    """--run and --json, which every command takes; passes ``run`` as a RunDirectory."""

    @click.option("--run", "folder", default="treeopt-run", show_default=True, help="Run directory.")
    @click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
    @functools.wraps(command)
    def wrapped(folder: str, **options: Any) -> Any:
        from treeopt.rundir import RunDirectory

        return command(run=RunDirectory(folder), **options)

    return wrapped


MODEL_OPTIONS = ("model", "drafter", "prompts", "dtype", "device", "revision", "trust_remote_code")


def model_options(command: Command) -> Command:
    """What loads a model; passes ``source``, the given ones of `MODEL_OPTIONS`."""
    options = (
        click.option("--model", help="Folder or hub id of the target.  [default: the run's, or the demo]"),
        click.option("--drafter", help="Folder or file of its Medusa heads."),
        click.option("--prompts", help="A .jsonl or .txt file."),
        click.option("--dtype", help="float64, float32, bfloat16 or float16.  [default: float32 on CPU]"),
        click.option("--device", help="cpu, cuda, cuda:1 ...  [default: cpu]"),
        click.option("--revision", help="Revision of a hub model."),
        click.option("--trust-remote-code", is_flag=True, default=None, help="Run a hub model's own code."),
    )

    @functools.wraps(command)
    def wrapped(**options: Any) -> Any:
        given = {name: options.pop(name) for name in MODEL_OPTIONS}
        source = {name: value for name, value in given.items() if value is not None}
        return command(source=source, **options)

    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), wrapped)


def resolve(run: RunDirectory, source: dict[str, Any]) -> dict[str, Any]:
    """The given model options on top of those that the run was calibrated with.

    Whether to trust a model's own code is asked anew every time.
    """
    if "model" in source or not run.trace.exists():
        return source
    earlier = run.read_trace().meta.get("source") or {}
    known = {k: v for k, v in earlier.items() if k in MODEL_OPTIONS and isinstance(v, str)}
    return {**known, **source}


def open_session(source: dict[str, Any]) -> Session:
    from treeopt.console import progress
    from treeopt.runtime.session import open_session

    with progress("Loading", None):
        return open_session(**source)


def demo_dtype() -> str:
    """What the demo runs in: verifying several rows pays where products of few rows are cheap."""
    import torch

    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def show_result(document: Any, table: Any, as_json: bool) -> None:
    """Print the JSON document or the table."""
    from treeopt.console import out
    from treeopt.storage import to_json

    click.echo(to_json(document)) if as_json else out(table)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="treeopt")
def cli() -> None:
    """Find the best speculation tree for Medusa-style decoding, and prove it by real decoding.

    \b
    treeopt run             the whole line on the built-in demo model, or on your own
    treeopt COMMAND -h      what a command does, with an example
    """


@cli.command()
@model_options
@run_directory
@click.option(
    "--batch-size", type=Integers(), default="1", show_default=True, help="Sequences decoded at once."
)
@click.option("--budget", **positive(64), help="Most rows verified per sequence and step, root included.")
@click.option("--num-prompts", **positive(192), help="Prompts to calibrate on.")
@click.option("--bench-prompts", **positive(), help="Held-out prompts.  [default: 24, or 10 a row]")
@click.option("--max-new-tokens", **positive(128), help="Longest answer.")
@click.option("--time-limit", **positive(60), help="Seconds for timing steps.")
def run(
    run: RunDirectory, source: dict[str, Any], batch_size: tuple[int, ...], budget: int, num_prompts: int,
    bench_prompts: int | None, max_new_tokens: int, time_limit: int, as_json: bool,
) -> None:  # fmt: skip
    """Calibrate, profile, search, bench and export, on the demo model or on your own.

    The demo model runs in bfloat16 where the processor computes in it, as servers do, else in float32;
    the other commands take float32 on a CPU unless --dtype says otherwise.

    \b
    Example:
        treeopt run
        treeopt run --model MODEL --drafter HEADS --prompts prompts.jsonl --batch-size 1,4
    """
    from treeopt import pipeline
    from treeopt.console import bench_table, closing, note, out, plan_table
    from treeopt.export import ENGINES

    if not {"model", "dtype", "device"} & source.keys():
        source["dtype"] = demo_dtype()
    session = open_session(source)
    pipeline.calibrate(run, session, num_prompts=num_prompts, max_new_tokens=max_new_tokens, source=source)
    sizes = [size for size in pipeline.SIZES if size < budget] + [budget]
    pipeline.profile(run, session, batch_sizes=batch_size, sizes=sizes, time_limit_s=time_limit)
    plan = pipeline.search(run, batch_sizes=batch_size, budget=budget)
    results = [
        pipeline.bench(run, session, batch_size=entry.batch_size, num_prompts=bench_prompts)
        for entry in plan.entries
    ]
    for engine, entry in itertools.product(ENGINES, plan.entries):
        try:
            if entry.size > 1:
                pipeline.export(run, engine, batch_size=entry.batch_size)
        except TreeoptError as error:
            note(f"Not exported for {engine}: {error}")
    if as_json:
        show_result({"plan": plan.document(), "bench": [r.document() for r in results]}, None, as_json)
        return
    out(plan_table(plan))
    for result in results:
        out(bench_table(result))
        out(closing(plan, result, str(run.path)))
    note(f"Everything is in {run.path}/. Look at the tree: treeopt show --run {run.path}")


@cli.command()
@model_options
@run_directory
@click.option("--num-prompts", **positive(192), help="Prompts to answer.")
@click.option("--max-new-tokens", **positive(128), help="Longest answer.")
@click.option("--batch-size", **positive(16), help="Sequences decoded at once.")
@click.option(
    "--top-k", type=click.IntRange(1, 10_000), default=32, show_default=True, help="Ranks to tell apart."
)
def calibrate(
    run: RunDirectory, source: dict[str, Any], num_prompts: int, max_new_tokens: int, batch_size: int,
    top_k: int, as_json: bool,
) -> None:  # fmt: skip
    """Measure at which rank each head has the token that really comes.

    \b
    Example:
        treeopt calibrate --num-prompts 64
        treeopt calibrate --model MODEL --drafter HEADS --prompts prompts.jsonl
    """
    from treeopt import pipeline
    from treeopt.console import calibration_table

    session = open_session(source)
    result = pipeline.calibrate(run, session, num_prompts=num_prompts, max_new_tokens=max_new_tokens,
                                batch_size=batch_size, top_k=top_k, source=source)  # fmt: skip
    show_result(result.document(), calibration_table(result), as_json)


@cli.command()
@model_options
@run_directory
@click.option(
    "--batch-size", type=Integers(), default="1", show_default=True, help="Sequences decoded at once."
)
@click.option("--sizes", type=Integers(), help="Tree sizes to time, root included.  [default: 2 ... 64]")
@click.option("--time-limit", **positive(60), help="Seconds for all batch sizes together.")
def profile(
    run: RunDirectory, source: dict[str, Any], batch_size: tuple[int, ...], sizes: tuple[int, ...] | None,
    time_limit: int, as_json: bool,
) -> None:  # fmt: skip
    """Time real decoding steps with trees of each size, and plain ones.

    \b
    Example:
        treeopt profile --batch-size 1,4 --time-limit 120
    """
    from treeopt import pipeline
    from treeopt.console import profile_table

    session = open_session(resolve(run, source))
    result = pipeline.profile(run, session, batch_sizes=batch_size, sizes=sizes or pipeline.SIZES,
                              time_limit_s=time_limit)  # fmt: skip
    show_result(result.document(), profile_table(result), as_json)


@cli.command()
@run_directory
@click.option("--budget", **positive(64), help="Most rows verified per sequence and step, root included.")
@click.option("--batch-size", type=Integers(), default="1", show_default=True, help="One size, or 1,2,4,8.")
@click.option(
    "--max-rank", type=click.IntRange(min=0), default=9, show_default=True, help="Largest rank of a node."
)
@click.option("--max-depth", **positive(), help="Deepest node.  [default: the number of heads]")
@click.option("--objective", default="replay", show_default=True, help="independent, joint or replay.")
@click.option("--calibration", help="A trace, a calibration, or the name of a shipped one (treeopt list).")
@click.option("--profile", "profile_path", help="A profile, or the name of a shipped one.")
def search(run: RunDirectory, as_json: bool, batch_size: tuple[int, ...], **options: Any) -> None:
    """Choose the tree with the best throughput for each batch size.

    \b
    Example:
        treeopt search --budget 64 --batch-size 4
        treeopt search --calibration medusa-vicuna-7b-v1.3 --budget 39
    """
    from treeopt import pipeline
    from treeopt.console import note, plan_table

    plan = pipeline.search(run, batch_sizes=batch_size, **options)
    for entry in plan.entries:
        for warning in entry.warnings:
            note(f"Batch size {entry.batch_size}: {warning}")
    show_result(plan.document(), plan_table(plan), as_json)


@cli.command()
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


@cli.command()
@run_directory
@click.option("--to", "engine", required=True, help="medusa or tensorrt-llm.")
@click.option("--batch-size", **positive(), help="Which of the plan's trees, where it has several.")
def export(run: RunDirectory, engine: str, batch_size: int | None, as_json: bool) -> None:
    """Write the chosen tree as an engine's own configuration.

    \b
    Example:
        treeopt export --to tensorrt-llm --batch-size 4
    """
    from treeopt import pipeline
    from treeopt.console import note

    paths, notes = pipeline.export(run, engine, batch_size=batch_size)
    for text in notes:
        note(text)
    if as_json:
        show_result({"files": [str(p) for p in paths], "notes": notes}, None, as_json)
    else:
        click.echo("\n".join(map(str, paths)))


@cli.command()
@run_directory
@click.option("--batch-size", **positive(), help="Which of the plan's trees.  [default: its first]")
@click.option("--tree", "file", type=click.Path(path_type=Path), help="Show the tree of a JSON file instead.")
def show(run: RunDirectory, batch_size: int | None, file: Path | None, as_json: bool) -> None:
    """Draw a tree in the terminal: ranks, paths, and what each node adds.

    \b
    Example:
        treeopt show --batch-size 4
    """
    from treeopt import pipeline
    from treeopt.console import tree_view

    if file is not None:
        tree, gains = pipeline.read_tree(file), None
    else:
        plan = run.read_plan()
        entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
        tree, gains = entry.tree, {tuple(path): gain for path, gain in entry.growth_order}
    show_result({"size": len(tree), "depth": tree.depth, "medusa_choices": tree.choices},
                tree_view(tree, gains), as_json)  # fmt: skip


@cli.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")
def list_(as_json: bool) -> None:
    """List shipped calibrations and profiles, engines and objectives.

    \b
    Example:
        treeopt list
    """
    from treeopt.export import ENGINES
    from treeopt.growth import OBJECTIVES
    from treeopt.library import shipped

    found = {
        "calibrations": list(shipped("calibration")),
        "profiles": list(shipped("profiles")),
        "engines": list(ENGINES),
        "objectives": list(OBJECTIVES),
    }
    show_result(found, "\n".join(f"{k}: {', '.join(v) or 'none'}" for k, v in found.items()), as_json)


def main() -> None:
    """Entry point of the ``treeopt`` command."""
    cli()


if __name__ == "__main__":
    main()
