"""Read and write EAGLE-1's drafter, which EAGLE-2 shares: one layer without input norm, and no lm_head of its own."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from treeopt.errors import quoted
from treeopt.runtime.checkpoints.files import MODEL_FILES, StoredTensors
from treeopt.runtime.checkpoints.layer import LAYER, build_layer_config, described, layer_record, layer_sizes
from treeopt.runtime.checkpoints.reading import Base, Checkpoint, LoadedHeads, Published, Reading, check_names
from treeopt.runtime.drafters.eagle import EagleHeads
from treeopt.runtime.drafters.layer import OneLayer
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH

LAYOUT = "eagle-1"
EMBEDDING = "embed_tokens.weight"
NOTE = "EAGLE-1 and EAGLE-2 share this layout: a static tree, as EAGLE-1 has, is measured and planned."
WIDE = r"(o_proj|down_proj|norm|fc)\.(weight|bias)$"  # tensors whose rows are as many as the layer is wide


def recognise_eagle(stored: StoredTensors) -> Checkpoint | None:
    """Recognise the drafter by its names; None where it is another."""
    if not all(any(name.startswith(start) for name in stored.parts) for start in ("fc.", "layers.0.")):
        return None
    names = [*(name for name in (EMBEDDING, "fc.bias") if name in stored.parts), "fc.weight", *LAYER]
    check_names(stored, names, f"a drafter in the layout {LAYOUT!r}", known=names)
    return Checkpoint(stored, LAYOUT, partial(_build, stored, names), shares=True)


def _build(stored: StoredTensors, names: list[str], base: Base) -> LoadedHeads:
    reading = Reading(stored, base, dict(zip(names, names, strict=True)))
    reading.notes.append(NOTE)
    width = reading.most_common_size(WIDE)
    lm_head = reading.lm_head(width)
    what = f"a layer of width {width} for {len(lm_head)} tokens"
    shapes = {"fc.weight": (width, 2 * width), "fc.bias": (width,), EMBEDDING: (len(lm_head), width)}
    reading.check_shapes(shapes, what)
    config, like = reading.config, described(reading.config, width) or base.config
    layer = build_layer_config(reading, width, what, like=like, make=partial(OneLayer, normed=False))
    sizes = {"hidden_size": (width, "fc.weight"), "vocab_size": (len(lm_head), EMBEDDING)}
    config.check_sizes(sizes | layer_sizes(layer, reading.names))
    bias, said = "fc.bias" in names, config.get("bias", True)
    if said is not None and said is not bias:
        means = f"says bias {quoted(said)}" if "bias" in config else "lacks bias, which means true in EAGLE"
        reading.notes.append(f"config.json {means}, but fc has {'one' if bias else 'none'} in the file, which decides.")
    heads = EagleHeads(
        layer,
        embedding=reading.embedding(EMBEDDING),
        lm_head=lm_head,
        bias=bias,
        num_heads=base.num_heads or DRAFT_DEPTH,
        dtype=reading.dtype,
        device=base.device,
    )
    return reading.loaded(heads, LAYOUT, _weights(heads).items())


def _weights(heads: EagleHeads) -> dict[str, nn.Parameter]:
    """The drafter's own weights by their published names."""
    return {**{f"fc.{name}": weight for name, weight in heads.fc.named_parameters()}, **heads.layer.weights}


def publish_eagle(heads: EagleHeads, layout: str, base: str, lm_head: Tensor | None) -> Published:
    config = {**layer_record(heads, "LlamaForCausalLM", base), "bias": heads.fc.bias is not None}
    return Published(MODEL_FILES[0], {EMBEDDING: heads.embedding, **_weights(heads)}, config)
