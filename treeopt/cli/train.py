"""The command that makes heads: train."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.options import AS_JSON, model_options, positive, show_result
from treeopt.runtime.training.recipe import KINDS, PRECISIONS, Recipe

if TYPE_CHECKING:
    from rich.console import RenderableType

    from treeopt.pipeline.train import Training

RECIPE = tuple(field.name for field in fields(Recipe))
REFUSED = {  # options of other commands that load a model, and why train has no use for them
    "drafter": "makes a drafter",
    "draft_depth": "makes a drafter",
    "group_by": "reports no groups",
    "epsilon": "has answers written greedily or with --acceptance sample",
    "delta": "has answers written greedily or with --acceptance sample",
}


@click.command()
@model_options(hidden=REFUSED)
@click.option("--kind", type=click.Choice(KINDS), default=Recipe.kind, show_default=True, help="What to train.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder for the heads.")
@click.option("--heads", "num_heads", **positive(Recipe.num_heads), help="Tokens to guess beyond the next one.")
@click.option("--layers", "num_layers", **positive(), help="Blocks of a head.  [default: 1; hydra++ 4]")
@click.option("--steps", **positive(), help="Steps to train.")
@click.option("--epochs", type=float, help="Passes over the texts.  [default: 1, unless --steps or --minutes]")
@click.option("--minutes", type=float, help="Minutes to train, the learning rate falling with the clock.")
@click.option("--batch-size", **positive(Recipe.batch_size), help="Texts of a step, over all devices.")
@click.option("--accumulate", **positive(Recipe.accumulate), help="Passes that a step is spread over, to save memory.")
@click.option("--learning-rate", type=float, help="Highest, of the heads.  [default: 0.001; medusa-2 0.002]")
@click.option("--num-prompts", **positive(1024), help="Prompts to answer.")
@click.option("--max-new-tokens", **positive(128), help="Longest answer.")
@click.option("--tokens", **positive(), help="Longest text, prompt included.  [default: the model's context]")
@click.option(
    "--answers",
    type=click.Path(path_type=Path),
    help="Folder for the model's answers, for several runs.  [default: by the heads]",
)
@click.option("--mixed-precision", type=click.Choice(PRECISIONS), help="What products are computed in.")
@click.option("--load-in-8bit", is_flag=True, help="Load the frozen base in 8 bits (needs bitsandbytes and CUDA).")
@AS_JSON
def train(source: dict[str, Any], output: Path, as_json: bool, **options: Any) -> None:
    """Train Medusa or Hydra heads for a model that has none.

    They learn from the model's own answers to the prompts (or from given --responses). medusa-1, hydra and
    hydra++ leave the model as it is; medusa-2 trains it too, through LoRA, and holds it near to what it was.
    The same command continues a run that was stopped. Several devices: accelerate launch -m treeopt.cli train
    ...

    \b
    Example:
        treeopt train --kind medusa-1 --minutes 5 -o my-heads
        treeopt train --kind hydra --model MODEL --prompts seeds.jsonl --epochs 2 -o my-heads
    """
    from treeopt import pipeline

    for name, reason in REFUSED.items():
        if name in source:
            raise click.UsageError(f"treeopt train {reason}: leave out --{name.replace('_', '-')}.")
    chosen = {name: options.pop(name) for name in RECIPE if name in options}
    recipe = Recipe(**chosen, seed=source.get("seed", Recipe.seed))
    done = pipeline.train(output, source, recipe, **options)
    if done is not None:
        show_result(done.document(), training_table(done), as_json)


def training_table(training: Training) -> RenderableType:
    """Accuracy of each head on the held-out texts, before and after; then the line that uses them."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    from treeopt.report.terminal import pm

    before, after = (training.record["held_out"][when] for when in ("before", "after"))
    texts = training.record["texts"]["held_out"]
    table = Table(title=f"First choices that are right, on {texts} held-out texts", title_justify="left")
    for name in ("head", "before", "after", "loss before [nats]", "after", "states"):
        table.add_column(name, justify="right")
    for k, trials in enumerate(after["trials"]):
        cells = [pm(counts[key][k], None, 3) for key in ("accuracy", "head_loss_nats") for counts in (before, after)]
        table.add_row(str(k + 1), *cells, f"{trials:,}")
    said = [f"{training.record['steps']:,} steps in {training.record['seconds']:,.0f} s."]
    if after["base_nats_per_token"] is not None:
        said.append(
            f"The base's own loss on them was {before['base_nats_per_token']:.4f} nats per token and is "
            f"{after['base_nats_per_token']:.4f}; KL to what it was: {after['base_kl_nats_per_token']:.4f}."
        )
    said.append("Calibrate on other prompts than these heads learned from:")
    return Group(table, *said, escape(training.command))
