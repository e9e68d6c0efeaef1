"""Read and write Hydra and Hydra++ heads, as hydra_lm_head.pt and as the same tensors in safetensors.

Names: hydra_mlp.{i}.{j} and hydra_lm_head.{i}; in Hydra++, whose dropout takes the even places, the blocks are
.1 .3 .5 ... and the projections .1. The prefix layer is a whole LlamaModel under prefix_embeding_layer (sic).
The blocks after a head's first are one module in the published code: a pickle's tensors then share storage.

K heads · L blocks · d width · V vocabulary · F inner width of the prefix layer
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from treeopt.errors import Unsupported, quoted
from treeopt.runtime.checkpoints.checks import (
    ROUNDING,
    Base,
    Checkpoint,
    LoadedHeads,
    Published,
    Shapes,
    check_names,
    check_shapes,
    check_size,
    choose_embedding,
    count_notes,
    loaded_heads,
    most_common,
    read_floats,
)
from treeopt.runtime.checkpoints.files import StoredTensors
from treeopt.runtime.checkpoints.layer import FREQUENCIES, LAYER, build_layer_config
from treeopt.runtime.drafters.hydra import HydraHeads
from treeopt.runtime.drafters.layer import OneLayer

PREFIX = "prefix_embeding_layer."
EMBEDDING = "input_embed_fn.weight"
PREFIX_EMBEDDING = PREFIX + "embed_tokens.weight"
PREFIX_FREQUENCIES = PREFIX + FREQUENCIES
NORMS = ("layers.0.input_layernorm.weight", "norm.weight")
FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
ARCHITECTURES = {"hydra": "mlp", "hydra++": "prefix-mlp"}
NAME = re.compile(r"(hydra_mlp|hydra_lm_head)\.(0|[1-9]\d{0,3})\.((?:0|[1-9]\d{0,3})\.)?[a-z_.]+", re.ASCII)


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


def recognise_hydra(stored: StoredTensors) -> Checkpoint | None:
    """Tell Hydra's layouts apart and count, by the tensors' names; None where nothing says Hydra."""
    matches = {name: match for name in stored.parts if (match := NAME.fullmatch(name))}
    has_prefix = any(name.startswith(PREFIX) for name in stored.parts)
    if "hydra_num_heads" not in stored.config and not any(n.startswith(("hydra_", PREFIX)) for n in stored.parts):
        return None
    _check_config(stored)
    dropout = any(m[1] == "hydra_lm_head" and m[3] for m in matches.values())
    layout = "hydra++" if has_prefix or dropout else "hydra"
    num_heads = 1 + max((int(match[2]) for match in matches.values()), default=0)
    last = max((int(m[3][:-1]) for m in matches.values() if m[1] == "hydra_mlp" and m[3]), default=0)
    num_layers = 1 + (last // 2 if layout == "hydra++" else last)

    # What no guess depends on is optional.
    unused = [name for name in (PREFIX_EMBEDDING, PREFIX_FREQUENCIES) if layout == "hydra++" and name in stored.parts]

    def names() -> Iterator[str]:
        if EMBEDDING in stored.parts:
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
    return Checkpoint(stored, layout, partial(_build, stored, layout, num_heads, num_layers, found, unused))


def _check_config(stored: StoredTensors) -> None:
    """Raise where config.json asks for something that would change the guesses and is not known here."""
    for key, known, rule in (
        ("hydra_head_arch", tuple(ARCHITECTURES.values()), "with hydra_head_arch 'mlp' and 'prefix-mlp'"),
        ("hidden_state_offset", (0,), "with hidden_state_offset 0"),
        ("grounded_heads", (True,), "where grounded_heads is true, as they then read the guesses before them"),
    ):
        said = stored.config.get(key)
        if said not in (None, *known):
            raise Unsupported(f"Hydra heads are read {rule}, but config.json of {stored.origin} says {quoted(said)}.")


def _build(
    stored: StoredTensors,
    layout: str,
    num_heads: int,
    num_layers: int,
    names: list[str],
    optional: list[str],
    base: Base,
) -> LoadedHeads:
    """Read the tensors of recognised heads, and the ``optional`` ones that no guess depends on, and check them."""
    notes = [*stored.notes, *_notes(stored.config, layout, num_heads, num_layers)]
    tensors, dtype = read_floats(stored, names, base.dtype)
    unused, _ = read_floats(stored, optional, None) if optional else ({}, None)
    width = most_common(t.shape[0] for n, t in tensors.items() if n.startswith("hydra_mlp.") and t.ndim)
    vocab_size = most_common(t.shape[0] for n, t in tensors.items() if n.startswith("hydra_lm_head.") and t.ndim)
    shapes: Shapes = dict.fromkeys((EMBEDDING, PREFIX_EMBEDDING), (vocab_size, width))
    for i in range(num_heads):
        shapes |= _head_shapes(layout, i, num_layers, width, vocab_size)
    what = f"{num_heads} heads of width {width}"
    check_shapes(stored, tensors | unused, shapes, what)
    check_size(stored, "hidden_size", width, block_name(layout, 0, 0) + ".linear.weight")
    check_size(stored, "vocab_size", vocab_size, projection_name(layout, 0) + ".weight")

    prefix, frequencies = None, unused.get(PREFIX_FREQUENCIES)
    if layout == "hydra++":
        what, like, make = f"{what} and a prefix layer", base.config, partial(OneLayer, normed=True)
        prefix = build_layer_config(
            stored, tensors, PREFIX.__add__, width, what, like=like, make=make, frequencies=frequencies
        )
        if like is None:
            notes.append("Without the target's config the prefix layer has Llama's usual rotary base and norm epsilon.")
    for i in range(num_heads):
        later = [tensors[f"{block_name(layout, i, j)}.linear.weight"].data_ptr() for j in range(1, num_layers)]
        if len(set(later)) < len(later):
            notes.append("Each head's blocks after the first share their storage: they are one block, repeated.")
            break
    own = choose_embedding(stored, EMBEDDING, tensors.get(EMBEDDING), base.embedding, dtype, notes)
    heads = HydraHeads(num_heads, num_layers, vocab_size, embedding=own, prefix=prefix, dtype=dtype, device=base.device)
    with torch.no_grad():
        for name, weight in _weights(heads).items():
            weight.copy_(tensors[name])
    if heads.prefix_layer is not None and frequencies is not None:
        used = heads.prefix_layer.model.rotary_emb.inv_freq.cpu()
        check_shapes(stored, unused, {PREFIX_FREQUENCIES: tuple(used.shape)}, "a prefix layer")
        if base.config is not None and not torch.allclose(frequencies.float(), used, rtol=ROUNDING, atol=0.0):
            notes.append(
                f"{quoted(PREFIX_FREQUENCIES)} has other rotary frequencies than the target's config says: the "
                "config's are used."
            )
    copy = unused.get(PREFIX_EMBEDDING)
    if copy is not None and copy.dtype == own.dtype and torch.equal(copy.to(own.device), own):
        del unused[PREFIX_EMBEDDING]
    heads.unused = {name: tensor.clone() for name, tensor in unused.items()}
    return loaded_heads(heads, layout, stored, [*names, *optional], notes)


def _head_shapes(layout: str, i: int, num_layers: int, width: int, vocab_size: int) -> Shapes:
    shapes: Shapes = {}
    for theirs, ours in head_names(layout, i, num_layers):
        inputs = (i + 2) * width if ours.startswith(("linear", "res_connection")) else width
        outputs = vocab_size if ours.startswith("lm_head") else width
        shapes[theirs] = (outputs, inputs) if ours.endswith("weight") else (outputs,)
    return shapes


def _notes(config: dict[str, object], layout: str, num_heads: int, num_layers: int) -> list[str]:
    claims = config.get("hydra_num_heads"), config.get("hydra_num_layers")
    notes = count_notes(claims, num_heads, num_layers)
    claimed = config.get("hydra_head_arch")
    if claimed not in (None, ARCHITECTURES[layout]):
        notes.append(f"config.json says hydra_head_arch {claimed}, the tensors are those of {ARCHITECTURES[layout]}.")
    return notes


def _weights(heads: HydraHeads) -> dict[str, torch.nn.Parameter]:
    """The heads' own weights by their published names."""
    found: dict[str, torch.nn.Parameter] = {}
    for i, head in enumerate(heads.heads):
        weights = dict(head.named_parameters())
        found |= {theirs: weights[ours] for theirs, ours in head_names(heads.kind, i, heads.num_layers)}
    if heads.prefix_layer is not None:
        found |= {PREFIX + name: weight for name, weight in heads.prefix_layer.weights.items()}
    return found


def publish_hydra(heads: HydraHeads, layout: str, base: str, lm_head: Tensor | None) -> Published:
    tensors = {EMBEDDING: heads.embedding, **_weights(heads)}
    if heads.prefix_layer is not None:
        tensors[PREFIX_EMBEDDING] = heads.embedding
        tensors[PREFIX_FREQUENCIES] = heads.prefix_layer.model.rotary_emb.inv_freq
    config = {
        "hydra_num_heads": heads.num_heads,
        "hydra_num_layers": heads.num_layers,
        "hydra_head_arch": ARCHITECTURES[heads.kind],
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": base,
    }
    return Published(FILES[layout.endswith("-pt")], tensors | heads.unused, config)
