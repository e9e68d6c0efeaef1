"""Read and write EAGLE-1's drafter, which EAGLE-2 shares: one layer without input norm, and no lm_head of its own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from treeopt.errors import quoted
from treeopt.runtime.checkpoints.checks import (
    Base,
    Checkpoint,
    LoadedHeads,
    Published,
    check_names,
    check_shapes,
    check_size,
    choose_embedding,
    loaded_heads,
    read_floats,
    size_of,
    targets_lm_head,
)
from treeopt.runtime.checkpoints.files import MODEL_FILES, StoredTensors
from treeopt.runtime.checkpoints.layer import LAYER, build_layer_config, described, layer_record
from treeopt.runtime.drafters.eagle import EagleHeads
from treeopt.runtime.drafters.layer import OneLayer
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH

LAYOUT = "eagle-1"
EMBEDDING = "embed_tokens.weight"
NOTE = "EAGLE-1 and EAGLE-2 share this layout: a static tree, as EAGLE-1 has, is measured and planned."


def recognise_eagle(stored: StoredTensors) -> Checkpoint | None:
    """Recognise the drafter by its names; None where it is another."""

    def has(start: str) -> bool:
        return any(name.startswith(start) for name in stored.parts)

    if not has("fc.") or not has("layers.0."):
        return None
    names = [*(name for name in (EMBEDDING, "fc.bias") if name in stored.parts), "fc.weight", *LAYER]
    found = check_names(stored, names, f"a drafter in the layout {LAYOUT!r}", known=names)
    return Checkpoint(stored, LAYOUT, partial(_build, stored, found), shares=True)


def _build(stored: StoredTensors, names: list[str], base: Base) -> LoadedHeads:
    config, bias, notes = stored.config, "fc.bias" in names, [*stored.notes, NOTE]
    tensors, dtype = read_floats(stored, names, base.dtype)
    width = size_of(tensors, ("o_proj.weight", "down_proj.weight", "norm.weight", "fc.weight", "fc.bias"), 0)
    lm_head = targets_lm_head(stored, base.lm_head, width)
    what = f"a layer of width {width} for {len(lm_head)} tokens"
    shapes = {"fc.weight": (width, 2 * width), "fc.bias": (width,), EMBEDDING: (len(lm_head), width)}
    check_shapes(stored, tensors, shapes, what)
    like, make = described(stored, config, width) or base.config, partial(OneLayer, normed=False)
    layer = build_layer_config(stored, tensors, str, width, what, like=like, make=make)
    for key, size, name in (
        ("hidden_size", width, "fc.weight"),
        ("vocab_size", len(lm_head), EMBEDDING),
        ("num_attention_heads", layer.num_attention_heads, LAYER[0]),
        ("num_key_value_heads", layer.num_key_value_heads, LAYER[1]),
        ("intermediate_size", layer.intermediate_size, LAYER[4]),
    ):
        check_size(stored, key, size, name)
    if config.get("bias") is not None and config["bias"] is not bias:
        there = "one" if bias else "none"
        notes.append(f"config.json says bias {quoted(config['bias'])}, but fc has {there} in the file, which decides.")
    if "bias" not in config and not bias:
        notes.append("config.json lacks bias, which means true in EAGLE, but fc has none in the file, which decides.")

    own = choose_embedding(stored, EMBEDDING, tensors.get(EMBEDDING), base.embedding, dtype, notes)
    heads = EagleHeads(
        layer,
        embedding=own,
        lm_head=lm_head,
        bias=bias,
        num_heads=base.num_heads or DRAFT_DEPTH,
        dtype=dtype,
        device=base.device,
    )
    with torch.no_grad():
        for name, weight in _weights(heads).items():
            weight.copy_(tensors[name])
    return loaded_heads(heads, LAYOUT, stored, names, notes)


def _weights(heads: EagleHeads) -> dict[str, torch.nn.Parameter]:
    """The drafter's own weights by their published names."""
    return {**{f"fc.{name}": weight for name, weight in heads.fc.named_parameters()}, **heads.layer.weights}


def publish_eagle(heads: EagleHeads, layout: str, base: str, lm_head: Tensor | None) -> Published:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **layer_record(heads.layer.config),
        "vocab_size": heads.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(heads.fc.weight.dtype).removeprefix("torch."),
        "bias": heads.fc.bias is not None,
        "base_model_name_or_path": base,
    }
    return Published(MODEL_FILES[0], {EMBEDDING: heads.embedding, **_weights(heads)}, config)
