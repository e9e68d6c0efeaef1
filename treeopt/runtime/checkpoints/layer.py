"""The tensors of one Llama layer in a checkpoint, and the config that they and config.json make.

d width · nh query heads and nk key heads of width hd · F inner width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from treeopt.errors import InvalidInput, quoted
from treeopt.runtime.checkpoints.checks import check_shapes, most_common
from treeopt.runtime.checkpoints.files import StoredTensors
from treeopt.runtime.drafters.layer import OneLayer, layer_config

ATTENTION = "layers.0.self_attn."
LAYER = (
    *(f"{ATTENTION}{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
)
FREQUENCIES = ATTENTION + "rotary_emb.inv_freq"
TOLD = ("num_attention_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act")  # not by tensors
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
SIZES = ("hidden_size", "intermediate_size", "num_key_value_heads")


@contextmanager
def describing(origin: Path) -> Iterator[None]:
    """Turn whatever transformers' checks raise on a config into InvalidInput."""
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:  # transformers raises whatever its checks raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidInput(f"config.json of {origin} must describe a Llama layer, but: {reason}") from None


def build_layer_config(
    stored: StoredTensors,
    tensors: dict[str, Tensor],
    named: Callable[[str], str],
    width: int,
    what: str,
    *,
    like: Any,
    make: Callable[..., OneLayer],
    frequencies: Tensor | None = None,
) -> Any:
    """Config of a layer: sizes from its tensors, which are checked, all else like in ``like``.

    named       : what the checkpoint calls a tensor of a LlamaModel
    make        : makes such a layer of a config, on a ``device``
    frequencies : (hd / 2,) of its rotation, which tell the width of a head; without them ``like`` does
    """
    for name in map(named, LAYER[:-1]):
        if tensors[name].ndim != 2:
            raise InvalidInput(
                f"A projection of a layer must be a matrix, but {quoted(name)} in {stored.origin} has the shape "
                f"{tuple(tensors[name].shape)}."
            )
    query, key, value, _, gate, up, down, _ = map(named, LAYER)
    query_rows = len(tensors[query])
    if frequencies is not None and frequencies.ndim == 1:
        head_width, told_by = 2 * len(frequencies), named(FREQUENCIES)
    elif heads := getattr(like, "num_attention_heads", None):
        head_width, told_by = getattr(like, "head_dim", None) or max(1, width // heads), "num_attention_heads"
    else:
        raise InvalidInput(
            f"The number of attention heads of the layer in {stored.origin} comes from config.json beside it "
            "or from the target, but neither is there: pass `model`."
        )
    for name in (query, key, value):
        rows = len(tensors[name])
        if head_width < 2 or head_width % 2 or not rows or rows % head_width or query_rows % rows:
            raise InvalidInput(
                f"The attention of a layer must have whole heads, of width {head_width} by {quoted(told_by)}, and as many "
                f"or a whole multiple of them for queries, but {quoted(name)} in {stored.origin} has {rows} rows beside {query_rows} "
                f"of {quoted(query)}."
            )
    with describing(stored.origin):
        config = layer_config(
            like,
            width,
            heads=query_rows // head_width,
            key_heads=len(tensors[key]) // head_width,
            head_width=head_width,
            inner_width=most_common([len(tensors[gate]), len(tensors[up]), tensors[down].shape[1]]),
        )
        weights = make(config, device="meta").weights  # finds what a config alone does not
    check_shapes(stored, tensors, {named(name): tuple(weight.shape) for name, weight in weights.items()}, what)
    return config


def described(stored: StoredTensors, told: Mapping[str, Any], width: int) -> Any | None:
    """The LlamaConfig of a layer by what a checkpoint's config.json says; None where it says nothing of heads."""
    given = {key: told[key] for key in (*TOLD, *ROPE) if told.get(key) is not None}
    if "num_attention_heads" not in given:
        return None
    for key, kind, rule, least in (
        ("num_attention_heads", int, "whole number", 1),
        ("head_dim", int, "whole number", 2),
        ("rms_norm_eps", int | float, "number", 0),
    ):
        value = given.get(key, least)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
            raise InvalidInput(
                f"{key} must be a {rule} of at least {least}, but config.json of {stored.origin} says {quoted(value)}."
            )
    from transformers import LlamaConfig

    with describing(stored.origin):
        return LlamaConfig(hidden_size=width, **given)


def layer_record(layer: Any) -> dict[str, object]:
    """The settings of a layer, as a config.json has them."""
    rope = dict(layer.rope_parameters)
    theta = rope.pop("rope_theta")
    return {
        **{key: getattr(layer, key) for key in (*SIZES, *TOLD)},
        "num_hidden_layers": 1,
        "rope_theta": theta,
        **({} if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}),
    }
