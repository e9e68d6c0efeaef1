"""Read and write Hydra and Hydra++ heads, as hydra_lm_head.pt and as the same tensors in safetensors.

Names: hydra_mlp.{i}.{j} and hydra_lm_head.{i}; in Hydra++, whose dropout takes the even places, the blocks are
.1 .3 .5 ... and the projections .1. The prefix layer is a whole LlamaModel under prefix_embeding_layer (sic).
The blocks after a head's first are one module in the published code: a pickle's tensors then share storage.

K heads · L blocks · d width · V vocabulary · F inner width of the prefix layer
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treeopt.errors import Unsupported
from treeopt.runtime.checkpoints.checks import (
    ROUNDING,
    Base,
    LoadedHeads,
    check_names,
    check_shapes,
    check_size,
    choose_embedding,
    count_notes,
    loaded_heads,
    most_common,
    read_floats,
)
from treeopt.runtime.checkpoints.files import StoredTensors, quoted
from treeopt.runtime.checkpoints.layer import LAYER, build_layer_config, layer_shapes
from treeopt.runtime.drafters.hydra import HydraHeads

PREFIX = "prefix_embeding_layer."
EMBEDDING = "input_embed_fn.weight"
PREFIX_EMBEDDING = PREFIX + "embed_tokens.weight"
FREQUENCIES = PREFIX + "layers.0.self_attn.rotary_emb.inv_freq"
NORMS = ("layers.0.input_layernorm.weight", "norm.weight")
ARCHITECTURES = {"hydra": "mlp", "hydra++": "prefix-mlp"}
NAME = re.compile(r"(hydra_mlp|hydra_lm_head)\.(0|[1-9]\d{0,3})\.((?:0|[1-9]\d{0,3})\.)?[a-z_.]+", re.ASCII)


@dataclass(frozen=True)
class RecognisedHydra:
    """A checkpoint of Hydra heads whose tensors are all accounted for, by name."""

    layout: str
    num_heads: int
    num_layers: int
    names: tuple[str, ...]  # that guesses depend on
    unused: tuple[str, ...]


def block_name(layout: str, i: int, j: int) -> str:
    return f"hydra_mlp.{i}.{2 * j + 1 if layout == 'hydra++' else j}"


def projection_name(layout: str, i: int) -> str:
    return f"hydra_lm_head.{i}.1" if layout == "hydra++" else f"hydra_lm_head.{i}"


def head_names(layout: str, i: int, num_layers: int) -> Iterator[tuple[str, str]]:
    """Every tensor of head i: (its name in a checkpoint, its name in a `HydraHead`)."""
    first = block_name(layout, i, 0)
    pairs = [(f"{first}.linear", "linear"), (f"{first}.res_connection", "res_connection")]
    pairs += [(f"{block_name(layout, i, j)}.linear", f"blocks.{j - 1}") for j in range(1, num_layers)]
    pairs.append((projection_name(layout, i), "lm_head"))
    for theirs, ours in pairs:
        for kind in ("weight", "bias"):
            yield f"{theirs}.{kind}", f"{ours}.{kind}"


def recognise_hydra(stored: StoredTensors, config: dict[str, Any], *, has_target: bool) -> RecognisedHydra | None:
    """Tell Hydra's layouts apart and count, by the tensors' names; None where nothing says Hydra."""
    matches = {name: match for name in stored.parts if (match := NAME.fullmatch(name))}
    has_prefix = any(name.startswith(PREFIX) for name in stored.parts)
    if "hydra_num_heads" not in config and not any(n.startswith(("hydra_", PREFIX)) for n in stored.parts):
        return None
    _check_config(stored, config)
    dropout = any(m[1] == "hydra_lm_head" and m[3] for m in matches.values())
    layout = "hydra++" if has_prefix or dropout else "hydra"
    num_heads = 1 + max((int(match[2]) for match in matches.values()), default=0)
    last = max((int(m[3][:-1]) for m in matches.values() if m[1] == "hydra_mlp" and m[3]), default=0)
    num_layers = 1 + (last // 2 if layout == "hydra++" else last)

    # What no guess depends on is optional.
    unused = [name for name in (PREFIX_EMBEDDING, FREQUENCIES) if layout == "hydra++" and name in stored.parts]

    def names() -> Iterator[str]:
        if EMBEDDING in stored.parts or not has_target:
            yield EMBEDDING
        if layout == "hydra++":
            yield from (PREFIX + name for name in (*LAYER, *NORMS))
        for i in range(num_heads):
            yield from (theirs for theirs, _ in head_names(layout, i, num_layers))

    prefix = " and a prefix layer" if layout == "hydra++" else ""
    found = check_names(
        stored,
        names(),
        f"{num_heads} heads of {num_layers} blocks{prefix} in the layout {layout!r}",
        known=[*matches, *(PREFIX + name for name in (*LAYER, *NORMS)), EMBEDDING],
        optional=unused,
    )
    return RecognisedHydra(layout, num_heads, num_layers, tuple(found), tuple(unused))


def _check_config(stored: StoredTensors, config: dict[str, Any]) -> None:
    """Raise where config.json asks for something that would change the guesses and is not known here."""
    offset, grounded = config.get("hidden_state_offset"), config.get("grounded_heads")
    architecture = config.get("hydra_head_arch")
    if architecture not in (None, *ARCHITECTURES.values()):
        raise Unsupported(
            f"Hydra heads are read in the architectures 'mlp' and 'prefix-mlp', but config.json of {stored.origin} "
            f"says hydra_head_arch {quoted(architecture)}."
        )
    if offset is not None and (isinstance(offset, bool) or offset != 0):
        raise Unsupported(
            f"Hydra heads are read with hidden_state_offset 0, but config.json of {stored.origin} says "
            f"{quoted(offset)}."
        )
    if grounded not in (None, True):
        raise Unsupported(
            f"Hydra heads are read where grounded_heads is true, as they then read the guesses before them, but "
            f"config.json of {stored.origin} says {quoted(grounded)}."
        )


def build_hydra(
    stored: StoredTensors,
    config: dict[str, Any],
    found: RecognisedHydra,
    base: Base,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> LoadedHeads:
    """Read the tensors of recognised heads and check them."""
    layout, num_heads, num_layers = found.layout, found.num_heads, found.num_layers
    notes = [*stored.notes, *_notes(found, config)]
    tensors, dtype = read_floats(stored, found.names, dtype)
    unused, _ = read_floats(stored, found.unused, None) if found.unused else ({}, None)
    width = most_common(t.shape[0] for n, t in tensors.items() if n.startswith("hydra_mlp.") and t.ndim)
    rows = [t.shape[0] for n, t in tensors.items() if n.startswith("hydra_lm_head.") and t.ndim]
    vocab_size = most_common(rows)
    shapes = _head_shapes(found, width, vocab_size)
    shapes |= {name: (vocab_size, width) for name in (EMBEDDING, PREFIX_EMBEDDING) if name in stored.parts}
    what = f"{num_heads} heads of width {width}"
    check_shapes(stored, tensors | unused, shapes, what)
    check_size(stored, config, "hidden_size", width, block_name(layout, 0, 0) + ".linear.weight")
    check_size(stored, config, "vocab_size", vocab_size, projection_name(layout, 0) + ".weight")

    prefix = None
    if layout == "hydra++":
        frequencies = unused.get(FREQUENCIES)
        head_width = 2 * len(frequencies) if frequencies is not None and frequencies.ndim == 1 else None
        prefix = build_layer_config(
            stored, tensors, PREFIX, width, like=base.config, head_width=head_width, told_by=FREQUENCIES
        )
        norms = {PREFIX + name: (width,) for name in NORMS}
        check_shapes(stored, tensors | unused, layer_shapes(prefix, PREFIX) | norms, what + " and a prefix layer")
        if base.config is None:
            notes.append("Without the target's config the prefix layer has Llama's usual rotary base and norm epsilon.")
    _note_shared_storage(found, tensors, notes)
    own = choose_embedding(stored, EMBEDDING, tensors.get(EMBEDDING), base.embedding, dtype, notes)
    heads = HydraHeads(num_heads, num_layers, vocab_size, embedding=own, prefix=prefix, dtype=dtype, device=device)
    with torch.no_grad():
        for i, head in enumerate(heads.heads):
            weights = dict(head.named_parameters())
            for theirs, ours in head_names(layout, i, num_layers):
                weights[ours].copy_(tensors[theirs])
        if heads.prefix_layer is not None:
            for name, weight in heads.prefix_layer.weights.items():
                weight.copy_(tensors[PREFIX + name])
            _check_frequencies(stored, heads, unused.get(FREQUENCIES), notes, has_config=base.config is not None)
    copy = unused.get(PREFIX_EMBEDDING)
    if copy is not None and copy.dtype == own.dtype and torch.equal(copy.to(own.device), own):
        del unused[PREFIX_EMBEDDING]
    heads.unused = {name: tensor.clone() for name, tensor in unused.items()}
    return loaded_heads(heads, layout, stored, (*found.names, *found.unused), notes, config)


def _head_shapes(found: RecognisedHydra, width: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(found.num_heads):
        for theirs, ours in head_names(found.layout, i, found.num_layers):
            inputs = (i + 2) * width if ours.startswith(("linear", "res_connection")) else width
            outputs = vocab_size if ours.startswith("lm_head") else width
            shapes[theirs] = (outputs, inputs) if ours.endswith("weight") else (outputs,)
    return shapes


def _notes(found: RecognisedHydra, config: dict[str, Any]) -> list[str]:
    claims = config.get("hydra_num_heads"), config.get("hydra_num_layers")
    notes = count_notes(claims, found.num_heads, found.num_layers)
    claimed, architecture = config.get("hydra_head_arch"), ARCHITECTURES[found.layout]
    if claimed not in (None, architecture):
        notes.append(f"config.json says hydra_head_arch {claimed}, the tensors are those of {architecture}.")
    return notes


def _note_shared_storage(found: RecognisedHydra, tensors: dict[str, Tensor], notes: list[str]) -> None:
    later = [
        [tensors[f"{block_name(found.layout, i, j)}.linear.weight"] for j in range(1, found.num_layers)]
        for i in range(found.num_heads)
    ]
    if any(len({tensor.data_ptr() for tensor in blocks}) < len(blocks) for blocks in later):
        notes.append("Each head's blocks after the first share their storage: they are one block, repeated.")


def _check_frequencies(
    stored: StoredTensors, heads: HydraHeads, frequencies: Tensor | None, notes: list[str], *, has_config: bool
) -> None:
    if frequencies is None:
        return
    assert heads.prefix_layer is not None
    used = heads.prefix_layer.model.rotary_emb.inv_freq.cpu()
    check_shapes(stored, {FREQUENCIES: frequencies}, {FREQUENCIES: tuple(used.shape)}, "a prefix layer")
    if has_config and not torch.allclose(frequencies.float(), used, rtol=ROUNDING, atol=0.0):
        notes.append(
            f"{quoted(FREQUENCIES)} has other rotary frequencies than the target's config says: the config's are used."
        )


def hydra_tensors(heads: HydraHeads) -> dict[str, Tensor]:
    """The heads' tensors on the CPU under their published names, none sharing storage with another."""
    layout, tensors = heads.kind, {EMBEDDING: heads.embedding}
    for i, head in enumerate(heads.heads):
        weights = dict(head.named_parameters())
        tensors |= {theirs: weights[ours] for theirs, ours in head_names(layout, i, heads.num_layers)}
    if heads.prefix_layer is not None:
        tensors |= {PREFIX + name: weight for name, weight in heads.prefix_layer.weights.items()}
        tensors[PREFIX_EMBEDDING] = heads.embedding
        tensors[FREQUENCIES] = heads.prefix_layer.model.rotary_emb.inv_freq
    return tensors | heads.unused


def hydra_config(heads: HydraHeads, base: str) -> dict[str, Any]:
    return {
        "hydra_num_heads": heads.num_heads,
        "hydra_num_layers": heads.num_layers,
        "hydra_head_arch": ARCHITECTURES[heads.kind],
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": base,
    }
