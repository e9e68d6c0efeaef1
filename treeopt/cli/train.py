"""treeopt train: heads for a model that has none."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from treeopt.cli.options import AS_JSON, command, model_options, positive, show_result, worker_options
from treeopt.runtime.training.recipe import DRAFT_VOCAB, KINDS, PRECISIONS, Recipe

RECIPE = tuple(field.name for field in fields(Recipe))
REFUSED = {  # options of other commands that load a model, and why train has no use for them
    "drafter": "makes a drafter",
    "draft_depth": "makes a drafter",
    "group_by": "reports no groups",
    "threads": "takes as many threads as OMP_NUM_THREADS says, or all",
    "epsilon": "has answers written greedily or with --acceptance sample",
    "delta": "has answers written greedily or with --acceptance sample",
}


@command()
@model_options(hidden=REFUSED)
@click.option("--kind", type=click.Choice(KINDS), default=Recipe.kind, show_default=True, help="What to train.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder for the heads.")
@click.option(
    "--heads",
    "num_heads",
    **positive(Recipe.num_heads),
    help="Number of heads: tokens to guess beyond the next one. Of eagle3 the steps that its layer is unrolled over.",
)
@click.option("--layers", "num_layers", **positive(), help="Residual blocks of each head.  [default: 1; hydra++ 4]")
@click.option(
    "--draft-vocab",
    **positive(),
    help=f"Tokens that eagle3 guesses: those that the answers have most often.  [default: {DRAFT_VOCAB:,}, or all]",
)
@click.option("--steps", **positive(), help="Steps to train.")
@click.option("--epochs", type=float, help="Passes over the texts.  [default: 1, unless --steps or --minutes]")
@click.option("--minutes", type=float, help="Minutes to train. The learning rate falls over this time.")
@click.option("--batch-size", **positive(Recipe.batch_size), help="Texts in each step, over all devices.")
@click.option(
    "--accumulate", **positive(Recipe.accumulate), help="Split each step into this many passes, to save memory."
)
@click.option(
    "--learning-rate", type=float, help="Highest learning rate.  [default: 0.001; medusa-2 0.002; eagle3 0.0005]"
)
@click.option("--num-prompts", **positive(1024), help="Prompts to answer.")
@click.option("--max-new-tokens", **positive(128), help="Longest answer.")
@click.option("--tokens", **positive(), help="Longest text, prompt included.  [default: the model's context]")
@click.option(
    "--answers",
    type=click.Path(path_type=Path),
    help="Folder for the model's answers, which several runs may share.  [default: beside the heads]",
)
@click.option("--mixed-precision", type=click.Choice(PRECISIONS), help="Number format of matrix products.")
@click.option("--load-in-8bit", is_flag=True, help="Load the frozen base in 8 bits (needs bitsandbytes and CUDA).")
@worker_options
@AS_JSON
def train(source: dict[str, Any], output: Path, as_json: bool, **options: Any) -> None:
    """Train Medusa, Hydra or EAGLE-3 heads for a model.

    They learn from the model's own answers to the prompts (or from given --responses). medusa-1, hydra, hydra++
    and eagle3 leave the model as it is; medusa-2 trains it too, through LoRA, and holds it near to what it was.
    The same command continues a run that was stopped. Several devices: accelerate launch -m treeopt.cli train
    ...

    \b
    Example:
        treeopt train --kind medusa-1 --minutes 5 -o my-heads
        treeopt train --kind hydra --model MODEL --prompts seeds.jsonl --epochs 2 -o my-heads
    """
    from treeopt import pipeline
    from treeopt.report.training_table import training_table

    for name, reason in REFUSED.items():
        if name in source:
            raise click.UsageError(f"treeopt train {reason}: leave out --{name.replace('_', '-')}.")
    chosen = {name: options.pop(name) for name in RECIPE if name in options}
    recipe = Recipe(**chosen, seed=source.get("seed", Recipe.seed))
    texts = {name: options.pop(name) for name in ("num_prompts", "max_new_tokens", "tokens", "answers")}
    on = {name: options.pop(name) for name in ("workers", "gpus_per_worker", "address", "journal")}
    with pipeline.cluster_of(options.pop("engine"), **on) as cluster:
        done = pipeline.train(output, source, recipe, pipeline.TextOptions(**texts), cluster=cluster, **options)
    if done is not None:
        show_result(done.document(), training_table(done.record, done.command), as_json)
