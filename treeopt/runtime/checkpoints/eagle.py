"""Read and write EAGLE-1's drafter, which EAGLE-2 shares: one layer without input norm, and no lm_head of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.runtime.checkpoints.checks import (
    Base,
    LoadedHeads,
    check_names,
    check_shapes,
    check_size,
    choose_embedding,
    loaded_heads,
    read_floats,
    size_of,
    targets_lm_head,
)
from treeopt.runtime.checkpoints.files import StoredTensors, quoted
from treeopt.runtime.checkpoints.layer import LAYER, build_layer_config, layer_shapes
from treeopt.runtime.drafters.eagle import EagleHeads
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH

LAYOUT = "eagle-1"
EMBEDDING = "embed_tokens.weight"
NOTE = "EAGLE-1 and EAGLE-2 share this layout: a static tree, as EAGLE-1 has, is measured and planned."
DESCRIBED = (
    "num_attention_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


@dataclass(frozen=True)
class RecognisedEagle:
    """A checkpoint of EAGLE-1 whose tensors are all accounted for, by name."""

    names: tuple[str, ...]
    layout: str = LAYOUT

    @property
    def bias(self) -> bool:
        return "fc.bias" in self.names


def recognise_eagle(stored: StoredTensors, *, has_target: bool) -> RecognisedEagle | None:
    """Recognise the drafter by its names; None where it is another."""

    def has(start: str) -> bool:
        return any(name.startswith(start) for name in stored.parts)

    if not has("fc.") or not has("layers.0.") or has("midlayer."):
        return None
    names = ["fc.weight", *(["fc.bias"] if "fc.bias" in stored.parts else []), *LAYER]
    if EMBEDDING in stored.parts or not has_target:
        names.insert(0, EMBEDDING)
    found = check_names(stored, names, f"a drafter in the layout {LAYOUT!r}", known=names)
    return RecognisedEagle(tuple(found))


def build_eagle(
    stored: StoredTensors,
    config: dict[str, Any],
    found: RecognisedEagle,
    base: Base,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    num_heads: int | None,
) -> LoadedHeads:
    """Read the tensors of a recognised drafter and check them."""
    notes = [*stored.notes, NOTE]
    tensors, dtype = read_floats(stored, found.names, dtype)
    width = size_of(tensors, ("o_proj.weight", "down_proj.weight", "norm.weight", "fc.weight", "fc.bias"), 0)
    lm_head = targets_lm_head(stored, base.lm_head, width)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width)}
    if found.bias:
        shapes["fc.bias"] = (width,)
    if EMBEDDING in tensors:
        shapes[EMBEDDING] = (len(lm_head), width)
    what = f"a layer of width {width} for {len(lm_head)} tokens"
    check_shapes(stored, tensors, shapes, what)
    layer = build_layer_config(stored, tensors, "", width, like=_described(stored, config, width, base.config))
    check_shapes(stored, tensors, layer_shapes(layer, ""), what)
    for key, size, name in (
        ("hidden_size", width, "fc.weight"),
        ("vocab_size", len(lm_head), EMBEDDING),
        ("num_attention_heads", layer.num_attention_heads, LAYER[0]),
        ("num_key_value_heads", layer.num_key_value_heads, LAYER[1]),
        ("intermediate_size", layer.intermediate_size, LAYER[4]),
    ):
        check_size(stored, config, key, size, name)
    if config.get("bias") is not None and config["bias"] is not found.bias:
        there = "one" if found.bias else "none"
        notes.append(f"config.json says bias {quoted(config['bias'])}, but fc has {there} in the file, which decides.")
    if "bias" not in config and not found.bias:
        notes.append("config.json lacks bias, which means true in EAGLE, but fc has none in the file, which decides.")

    own = choose_embedding(stored, EMBEDDING, tensors.get(EMBEDDING), base.embedding, dtype, notes)
    heads = EagleHeads(
        layer,
        embedding=own,
        lm_head=lm_head,
        bias=found.bias,
        num_heads=num_heads or DRAFT_DEPTH,
        dtype=dtype,
        device=device,
    )
    with torch.no_grad():
        for name, weight in _weights(heads).items():
            weight.copy_(tensors[name])
    return loaded_heads(heads, LAYOUT, stored, found.names, notes, config)


def _described(stored: StoredTensors, config: dict[str, Any], width: int, target_config: Any) -> Any:
    """The config that the layer takes what its tensors do not tell from: the drafter's own, or else the target's."""
    heads, eps = config.get("num_attention_heads"), config.get("rms_norm_eps", 1e-6)
    if heads is None:
        return target_config
    for key, least in (("num_attention_heads", 1), ("head_dim", 2)):
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise InvalidInput(
                f"{key} must be a whole number of at least {least}, but config.json of {stored.origin} says "
                f"{quoted(value)}."
            )
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise InvalidInput(
            f"rms_norm_eps must be a number of at least 0, but config.json of {stored.origin} says {quoted(eps)}."
        )
    from transformers import LlamaConfig

    try:
        described = {key: config[key] for key in DESCRIBED if config.get(key) is not None}
        return LlamaConfig(hidden_size=width, **described)
    except Exception as error:  # transformers raises whatever its checks raise
        reason = " ".join(str(error).split())[:200]
        raise InvalidInput(
            f"config.json of {stored.origin} must describe a Llama layer, but: {reason or type(error).__name__}"
        ) from None


def _weights(heads: EagleHeads) -> dict[str, torch.nn.Parameter]:
    """The drafter's own weights by their published names."""
    return {**{f"fc.{name}": weight for name, weight in heads.fc.named_parameters()}, **heads.layer.weights}


def eagle_tensors(heads: EagleHeads) -> dict[str, Tensor]:
    """All tensors of the layout under their published names."""
    return {EMBEDDING: heads.embedding, **_weights(heads)}


def eagle_config(heads: EagleHeads, base: str) -> dict[str, Any]:
    layer = heads.layer.config
    rope = dict(layer.rope_parameters)
    theta = rope.pop("rope_theta")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": heads.width,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": heads.vocab_size,
        "max_position_embeddings": layer.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "hidden_act": layer.hidden_act,
        "rope_theta": theta,
        **({} if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}),
        "tie_word_embeddings": False,
        "torch_dtype": str(heads.fc.weight.dtype).removeprefix("torch."),
        "bias": heads.fc.bias is not None,
        "base_model_name_or_path": base,
    }
