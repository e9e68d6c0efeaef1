"""treeopt train: heads for a model that has none."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import click

import treeopt
from treeopt.cli.declared import command, show_result
from treeopt.files.parameters import parameters_of
from treeopt.runtime.training.recipe import Recipe

RECIPE, SOURCE = parameters_of(Recipe), parameters_of(treeopt.open)
WORKERS = ("engine", "workers", "gpus_per_worker", "address")
TEXTS = ("num_prompts", "max_new_tokens", "tokens", "answers")
REFUSED = {  # options of other commands that load a model, and why train has no use for them
    "drafter": "makes a drafter",
    "draft_depth": "makes a drafter",
    "group_by": "reports no groups",
    "threads": "takes as many threads as OMP_NUM_THREADS says, or all",
    "epsilon": "has answers written greedily or with --acceptance sample",
    "delta": "has answers written greedily or with --acceptance sample",
}


@command(
    treeopt.calibrate,
    Recipe,
    treeopt.open,
    "treeopt.pipeline.train:TextOptions",
    "treeopt.pipeline.train:train",
    names={*RECIPE, *SOURCE, *WORKERS, *TEXTS, "mixed_precision", "load_in_8bit"},
    words={"kind": "--kind"},
    hidden=REFUSED,
)
def train(as_json: bool, *, output: Path, **options: Any) -> None:
    """Train Medusa, Hydra or EAGLE-3 heads for a model.

    They learn from the model's own answers to the prompts (or from given --responses). medusa-1, hydra, hydra++
    and eagle3 leave the model as it is; medusa-2 trains it too, through LoRA, and holds it near to what it was.
    The same command continues a run that was stopped. Several devices: accelerate launch -m treeopt.cli train
    ...

    \b
    Example:
        treeopt train --kind medusa-1 --minutes 5 -o my-heads
        treeopt train --kind hydra --model MODEL --prompts seeds.jsonl --epochs 2 -o my-heads

    output : folder for the heads
    """
    from treeopt import pipeline
    from treeopt.report.tables import training_table

    def taken(names: Collection[str]) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    source, recipe = taken(SOURCE), taken(RECIPE)
    for name, reason in REFUSED.items():
        if name in source:
            raise click.UsageError(f"treeopt train {reason}: leave out --{name.replace('_', '-')}.")
    if "seed" in source:
        recipe["seed"] = source["seed"]
    texts = pipeline.TextOptions(**taken(TEXTS))
    with pipeline.cluster_of(options.pop("engine", None), **taken(WORKERS)) as cluster:
        done = pipeline.train(output, source, Recipe(**recipe), texts, cluster=cluster, **options)
    if done is not None:
        show_result(done.document(), training_table(done.record, done.command), as_json)
