"""text-generation-inference: the length of a chain, one top-1 guess per head; it takes no tree.

The launcher's --model-id names the folder of the heads, whose config.json names the base model.
"""

from treeopt.engines.base import About, Method, ServingEngine
from treeopt.engines.templates import Templates
from treeopt.trees.draft import Draft

MOST_ROWS = 128  # of all sequences; above it TGI silently stops speculating


def many_rows(chain: Draft, about: About) -> list[str]:
    """A warning if TGI would not speculate with so many rows."""
    rows = about.batch_size * chain.rows
    if rows <= MOST_ROWS:
        return []
    return [
        f"TGI silently stops speculating above {MOST_ROWS} rows, but {about.batch_size} sequences x {chain.rows} rows are {rows}."
    ]


write = Templates(
    command="text-generation-launcher --model-id",
    alone="text-generation-launcher --model-id MODEL",
    options={"medusa": "HEADS --speculate {length}", "ngram": "MODEL --speculate {length}"},
    notes_of={
        "medusa": (
            "HEADS holds medusa_lm_head.safetensors and a config.json that names the base model and has no "
            '"architectures": treeopt convert DRAFTER --to medusa --output HEADS',
        )
    },
    warnings=many_rows,
)

ENGINE = ServingEngine(name="tgi", title="text-generation-inference", server="text-generation-launcher", methods=(
    Method(name="speculate", checked="main db931fc of 2026-01", drafters=tuple(write.options), rules=("greedy", "sample"),
           carrier="--speculate", versions="current; the project is in maintenance mode",
           source="huggingface/text-generation-inference server/text_generation_server/models/__init__.py, layers/medusa.py",
           write=write),
))  # fmt: skip
