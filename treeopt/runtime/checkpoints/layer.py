"""The tensors of one Llama layer in a checkpoint, and the config that they and config.json make.

d width · nh query heads and nk key heads of width hd · F inner width
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.runtime.checkpoints.checks import most_common
from treeopt.runtime.checkpoints.files import StoredTensors, quoted
from treeopt.runtime.drafters.layer import OneLayer, layer_config

ATTENTION = "layers.0.self_attn."
MLP = "layers.0.mlp."
LAYER = (
    *(f"{ATTENTION}{name}_proj.weight" for name in "qkvo"),
    *(f"{MLP}{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
)


def layer_shapes(config: Any, prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, names beginning with ``prefix``."""
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes = [
        (queries, width),
        (keys, width),
        (keys, width),
        (width, queries),
        (inner, width),
        (inner, width),
        (width, inner),
        (width,),
    ]
    return {prefix + name: shape for name, shape in zip(LAYER, shapes, strict=True)}


def build_layer_config(
    stored: StoredTensors,
    tensors: dict[str, Tensor],
    prefix: str,
    width: int,
    *,
    like: Any,
    head_width: int | None = None,
    told_by: str = "num_attention_heads",
) -> Any:
    """Config of the layer under ``prefix``: sizes from its tensors, all else like in the config ``like``.

    head_width : of each attention head, where ``told_by``, a tensor, tells; else what ``like`` has
    """
    for name in LAYER[:-1]:
        if tensors[prefix + name].ndim != 2:
            raise InvalidInput(
                f"A projection of a layer must be a matrix, but {quoted(prefix + name)} in {stored.origin} has the shape "
                f"{tuple(tensors[prefix + name].shape)}."
            )
    query, key, value = (prefix + name for name in LAYER[:3])
    query_rows = len(tensors[query])
    if head_width is None:
        heads = getattr(like, "num_attention_heads", None)
        if not heads:
            raise InvalidInput(
                f"How many attention heads the layer in {stored.origin} has is told by config.json beside it or by the "
                "target, but neither is there: pass --model."
            )
        head_width = getattr(like, "head_dim", None) or max(1, width // heads)
    for name in (query, key, value):
        rows = len(tensors[name])
        if head_width < 2 or head_width % 2 or not rows or rows % head_width or query_rows % rows:
            raise InvalidInput(
                f"The attention of a layer must have whole heads, of width {head_width} by {quoted(told_by)}, and as many "
                f"or a whole multiple of them for queries, but {quoted(name)} in {stored.origin} has {rows} rows beside {query_rows} "
                f"of {quoted(query)}."
            )
    inner = most_common(
        [len(tensors[prefix + LAYER[4]]), len(tensors[prefix + LAYER[5]]), tensors[prefix + LAYER[6]].shape[1]]
    )
    sizes = {
        "heads": query_rows // head_width,
        "key_heads": len(tensors[key]) // head_width,
        "head_width": head_width,
        "inner_width": inner,
    }
    try:
        config = layer_config(like, width, **sizes)
        OneLayer(config, normed=False, device="meta")  # finds what a config alone does not
    except InvalidInput:
        raise
    except Exception as error:  # transformers raises whatever its checks raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InvalidInput(
            f"The config of the layer in {stored.origin} must be one of a Llama model, but: {reason}"
        ) from None
    return config
