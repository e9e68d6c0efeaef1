"""Read and write Medusa's heads in the layouts that layouts.py names.

Counts come from the tensors. config.json is a hint: another count is told in a note, another width or
vocabulary is refused.

d width · V the target's vocabulary · Vt tokens that the heads know · K heads · L blocks
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.runtime.checkpoints.checks import (
    Base,
    Checkpoint,
    LoadedHeads,
    Published,
    check_shapes,
    check_size,
    count_notes,
    loaded_heads,
    most_common,
    read_floats,
    targets_lm_head,
)
from treeopt.runtime.checkpoints.files import HEAD_FILES, MODEL_FILES, StoredTensors
from treeopt.runtime.checkpoints.layouts import RecognisedHeads, claimed_counts, named_weights, recognise, scheme_of
from treeopt.runtime.drafters.medusa import MedusaHeads

MOST_NODES = 63  # max_draft_len of TensorRT-LLM: the tree's nodes without the root, as published trees have


def recognise_medusa(stored: StoredTensors) -> Checkpoint | None:
    """Recognise heads by their names, in any layout; None where they are another's."""
    found = recognise(stored)
    if found is None:
        return None
    return Checkpoint(stored, found.layout, partial(_build, stored, found), shares=found.layout == "medusa-shared")


def _build(stored: StoredTensors, found: RecognisedHeads, base: Base) -> LoadedHeads:
    """Read the tensors of recognised heads and check them."""
    layout, config = found.layout, stored.config
    notes = [*stored.notes, *count_notes(claimed_counts(layout, config), found.num_heads, found.num_layers)]
    if layout == "tensorrt-llm":
        _check_ranks(stored)
    token_map = stored.read(found.token_map) if found.token_map else None
    tensors, dtype = read_floats(stored, found.names, base.dtype)
    width = _check_shapes(stored, found, tensors)
    check_size(stored, "hidden_size", width, found.names[0])

    rows = [tensors[name] for name in found.projections]
    rows = [rows[0].clone()] if found.shares and rows else rows  # it is kept, and the file may change
    token_ids = None
    if layout == "vllm":
        notes += _vllm_notes(stored, any(name.endswith(".bias") for name in found.names))
        if token_map is None:
            vocab_size = _whole(stored, found.projections[0], len(rows[0]))
        else:
            rows, token_ids, vocab_size = _truncated(stored, rows, token_map, base.lm_head, notes)
    elif layout == "medusa-shared":
        rows = [targets_lm_head(stored, base.lm_head, width)]
        vocab_size = len(rows[0])
        notes.append("The heads share the target's lm_head.")
    else:
        if layout in ("merged", "modelopt"):
            notes.append("The files also hold the base that the heads belong to: pass them as `model` too.")
        vocab_size = len(rows[0])
        if layout == "tensorrt-llm":
            vocab_size = _unpadded(stored, vocab_size, notes)
            rows = [tensor[:vocab_size] for tensor in rows]
    if layout != "vllm":
        check_size(stored, "vocab_size", vocab_size, (*found.projections, "lm_head.weight")[0])

    heads = MedusaHeads(
        found.num_heads,
        found.num_layers,
        width,
        vocab_size,
        shared=rows[0] if found.shares else None,
        token_ids=token_ids,
        dtype=dtype,
        device=base.device,
    ).requires_grad_(False)
    tensors |= zip(found.projections, rows, strict=False)
    for name, weight in named_weights(heads, found.scheme):
        if name in tensors:
            weight.copy_(tensors[name])
    names = [*found.names, *([found.token_map] if found.token_map else [])]
    return loaded_heads(heads, layout, stored, names, notes)


def _check_shapes(stored: StoredTensors, found: RecognisedHeads, tensors: dict[str, Tensor]) -> int:
    """The heads' width; raises InvalidInput where a tensor does not have the shape of the others."""
    width = most_common(tensor.shape[-1] for tensor in tensors.values() if tensor.ndim)
    rows = most_common(tensors[name].shape[0] for name in found.projections if tensors[name].ndim)
    kinds = {"projection": (rows, width), "weight": (width, width), "bias": (width,)}
    shapes = {name: kinds["projection" if name in found.projections else name.rpartition(".")[2]] for name in tensors}
    check_shapes(stored, tensors, shapes, f"{found.num_heads} heads of width {width}")
    return width


def _check_ranks(stored: StoredTensors) -> None:
    mapping = stored.config.get("mapping") or {}
    if not isinstance(mapping, dict):
        raise InvalidInput(
            f"config.json of {stored.origin} must have an object 'mapping', but it has {quoted(mapping)}."
        )
    if mapping.get("pp_size") not in (None, 1):
        raise Unsupported(
            f"Heads are read from checkpoints without pipeline parallelism, but config.json of {stored.origin} "
            f"says pp_size {quoted(mapping['pp_size'])}: convert it with pp_size 1."
        )
    if mapping.get("tp_size") not in (None, stored.ranks or 1):
        raise InvalidInput(
            f"There must be a file for each of the ranks, but config.json of {stored.origin} says tp_size "
            f"{quoted(mapping['tp_size'])} and there are files of {stored.ranks or 1}."
        )


def _unpadded(stored: StoredTensors, rows: int, notes: list[str]) -> int:
    """The vocabulary's size where the rows of the projections were padded to a multiple for the ranks."""
    vocab_size, ranks = stored.config.get("vocab_size"), stored.ranks or 1
    if not isinstance(vocab_size, int) or not 0 < vocab_size < rows:
        return rows  # and another size than the config's is refused like any other layout's
    if rows not in {-(-vocab_size // m) * m for unit in (1, 64, 128) for m in (unit, unit * ranks)}:
        return rows
    notes.append(f"The projections have {rows} rows, padding included: {vocab_size} are used.")
    return vocab_size


def _vllm_notes(stored: StoredTensors, biased: bool) -> list[str]:
    notes = []
    scale = stored.config.get("logit_scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or scale <= 0:
        raise InvalidInput(
            f"logit_scale must be a number above 0, which keeps the candidates' order, but config.json of "
            f"{stored.origin} says {quoted(scale)}."
        )
    if scale != 1:
        notes.append(f"config.json says logit_scale {scale}, which keeps the candidates' order: it is ignored.")
    if biased and not stored.config.get("medusa_fc_bias"):
        notes.append("The blocks have biases, which vLLM drops since config.json lacks medusa_fc_bias: they are used.")
    return notes


def _whole(stored: StoredTensors, name: str, rows: int) -> int:
    """The vocabulary of vLLM's heads without a token_map."""
    claimed = stored.config.get("truncated_vocab_size")
    if claimed not in (None, stored.config.get("vocab_size") or rows):
        raise InvalidInput(
            f"A truncated vocabulary needs a token_map, but {stored.origin} has none and config.json says "
            f"truncated_vocab_size {quoted(claimed)}."
        )
    check_size(stored, "vocab_size", rows, name)
    return rows


def _truncated(
    stored: StoredTensors, projections: list[Tensor], token_map: Tensor, lm_head: Tensor | None, notes: list[str]
) -> tuple[list[Tensor], Tensor | None, int]:
    """vLLM's projections in the order of target ids, these ids, and the target's vocabulary.

    token_map says the target id of every draft token; the rows of the projections are draft tokens, or all
    of the vocabulary's tokens, of which token_map takes some. As in vLLM it counts only where
    truncated_vocab_size is below vocab_size.
    """
    rows, claimed = len(projections[0]), stored.config.get("truncated_vocab_size")
    vocab_size = stored.config.get("vocab_size")
    if vocab_size is None and lm_head is not None:
        vocab_size = len(lm_head)
    if token_map.ndim != 1 or token_map.dtype != torch.int64 or not len(token_map):
        raise InvalidInput(
            f"token_map must be a list of int64 token ids, but in {stored.origin} it is {token_map.dtype} of "
            f"shape {tuple(token_map.shape)}."
        )
    if rows == vocab_size and claimed in (None, rows):
        notes.append("token_map is ignored, as in vLLM, since config.json says no smaller truncated_vocab_size.")
        return projections, None, rows
    if vocab_size is None:
        vocab_size = max(rows, int(token_map.max()) + 1)
        notes.append(f"config.json lacks vocab_size: {vocab_size} is taken, from token_map and the projections.")
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or rows not in (len(token_map), vocab_size):
        raise InvalidInput(
            f"The projections must have a row for each of the {len(token_map)} tokens of token_map or for the whole "
            f"vocabulary, {quoted(vocab_size)} by config.json, but in {stored.origin} they have {rows}."
        )
    if vocab_size > 2**31:  # no token id is that large; torch cannot compare with numbers beyond 64 bits
        raise InvalidInput(
            f"vocab_size must be at most 2^31, but config.json of {stored.origin} says {quoted(vocab_size)}."
        )
    if claimed is None:
        notes.append(f"config.json lacks truncated_vocab_size, which vLLM needs: {len(token_map)} is used.")
    elif claimed != len(token_map):
        raise InvalidInput(
            f"config.json of {stored.origin} says truncated_vocab_size {quoted(claimed)}, but token_map has "
            f"{len(token_map)} tokens."
        )
    token_ids, order = token_map.sort()
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size or bool((token_ids.diff() == 0).any()):
        raise InvalidInput(
            f"token_map must have distinct token ids below the vocabulary's {vocab_size}, but that in {stored.origin} "
            "does not."
        )
    picked = order if rows == len(token_map) else token_ids
    return [tensor[picked] for tensor in projections], token_ids, vocab_size


def publish_medusa(heads: MedusaHeads, layout: str, base: str, lm_head: Tensor | None) -> Published:
    """The files of a layout; Unsupported where it would lose something of the heads."""
    _check_layout(heads, layout, lm_head)
    counts: dict[str, object] = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    own = {**counts, "base_model_name_or_path": base}
    modelopt = {"num_medusa_heads": heads.num_heads, "num_medusa_layers": heads.num_layers}
    files: dict[str, tuple[str, dict[str, object] | None]] = {
        "medusa": (HEAD_FILES[0], own),
        "medusa-pt": (HEAD_FILES[1], own),
        "medusa-shared": (HEAD_FILES[0], {**own, "version": "2"}),
        "merged": ("", counts),
        "modelopt": ("", {"medusa": modelopt}),
        "vllm": (MODEL_FILES[0], _vllm_config(heads)),
        "tensorrt-llm": ("rank0.safetensors", _tensorrt_llm_config(heads)),
        "neuron": (HEAD_FILES[2], None),
    }
    name, config = files[layout]
    return Published(name, _medusa_tensors(heads, layout), config)


def _check_layout(heads: MedusaHeads, layout: str, lm_head: Tensor | None) -> None:
    """Raise Unsupported where ``layout`` would lose something of ``heads``."""
    fault = None
    if heads.token_ids is not None and layout != "vllm":
        fault = f"these know {heads.draft_vocab_size} of {heads.vocab_size} tokens: only 'vllm' keeps a token map"
    elif heads.num_layers != 1 and layout in ("medusa-shared", "neuron"):
        fault = f"these have {heads.num_layers} residual blocks where it has one"
    elif layout == "medusa-shared":
        own, projections = lm_head, heads.projection.transpose(1, 2)
        if lm_head is None and not heads.shares_projection:
            fault = "these have projections of their own: pass `model` if they are copies of the base's lm_head"
        elif own is not None and not all(torch.equal(p, own.to(p.device, p.dtype)) for p in projections):
            fault = "these have projections other than the base's lm_head, which is all that it has"
    if fault:
        raise Unsupported(f"The layout {layout!r} cannot hold these heads: {fault}.")


def _medusa_tensors(heads: MedusaHeads, layout: str) -> dict[str, Tensor]:
    """The heads' tensors under the names of ``layout``."""
    scheme = scheme_of(layout)
    shares, biased = layout == "vllm" and heads.shares_projection, layout != "vllm" or bool(heads.biases.any())
    projections = [scheme.projection_name(k, heads.num_layers) for k in range(heads.num_heads)]
    left_out = projections if layout == "medusa-shared" else projections[1:] if shares else []
    tensors = {
        name: weight
        for name, weight in named_weights(heads, scheme)
        if name not in left_out and (biased or not name.endswith(".bias"))
    }
    return tensors if heads.token_ids is None else {**tensors, "token_map": heads.token_ids}


def _vllm_config(heads: MedusaHeads) -> dict[str, object]:
    """vLLM's config.json; it renames every key with "num" and "heads", so no other may be there."""
    special = {
        "truncated_vocab_size": None if heads.token_ids is None else heads.draft_vocab_size,
        "original_lm_head": heads.shares_projection,
        "medusa_fc_bias": bool(heads.biases.any()),
    }
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.width,
        "vocab_size": heads.vocab_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": _dtype_name(heads),
        **{key: value for key, value in special.items() if value},
    }


def _tensorrt_llm_config(heads: MedusaHeads) -> dict[str, object]:
    """The heads' part of a TensorRT-LLM checkpoint's config.json, for one rank."""
    return {
        "architecture": "MedusaForCausalLM",
        "dtype": _dtype_name(heads),
        "hidden_size": heads.width,
        "vocab_size": heads.vocab_size,
        "max_draft_len": MOST_NODES,
        "num_medusa_heads": heads.num_heads,
        "num_medusa_layers": heads.num_layers,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    }


def _dtype_name(heads: MedusaHeads) -> str:
    return str(heads.blocks.dtype).removeprefix("torch.")
