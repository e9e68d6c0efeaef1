"""Read published heads: recognise the layout, check every tensor, stack them.

Counts come from the tensors. config.json is a hint: another count is told in a note, another width or
vocabulary is refused.

d width · V the target's vocabulary · Vt tokens that the heads know · K heads · L blocks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.checkpoints.files import (
    StoredTensors,
    find_checkpoint,
    find_tensors,
    quoted,
    read_config,
)
from treeopt.runtime.checkpoints.layouts import Recognised, claimed_counts, recognise
from treeopt.runtime.drafters.medusa import MedusaHeads

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class LoadedHeads:
    """Heads with what is to be known of where they came from."""

    heads: MedusaHeads
    layout: str
    files: tuple[Path, ...]  # the files of weights that were read
    notes: tuple[str, ...]  # a sentence for whatever was repaired or is worth knowing
    base: str | None  # the base model that config.json names


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of heads that was recognised and not read yet."""

    path: Path
    config: dict[str, Any]
    stored: StoredTensors
    recognised: Recognised


def load_heads(
    path_or_id: str,
    *,
    lm_head: Tensor | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
    revision: str | None = None,
) -> LoadedHeads:
    """The heads in a file, a folder or a hub repository, in any published layout of Medusa heads.

    lm_head is the target's (V, d) weight, which heads without a projection of their own share; dtype None
    is the stored one. Raises Unsupported, by name, for other drafters and InvalidInput for everything that
    does not fit together.
    """
    return build_heads(open_checkpoint(path_or_id, revision), lm_head=lm_head, dtype=dtype, device=device)


def open_checkpoint(path_or_id: str, revision: str | None = None) -> Checkpoint:
    """Find and recognise a checkpoint by its names; no tensor of safetensors is read."""
    path = find_checkpoint(str(path_or_id), revision)
    stored, config = find_tensors(path), read_config(path)
    return Checkpoint(path, config, stored, recognise(stored, config))


def build_heads(
    checkpoint: Checkpoint, *, lm_head: Tensor | None, dtype: torch.dtype | None, device: torch.device | str
) -> LoadedHeads:
    """Read the tensors of a recognised checkpoint, check them and stack them."""
    stored, config, found = checkpoint.stored, checkpoint.config, checkpoint.recognised
    notes = [*stored.notes, *_count_notes(found, config)]
    if found.layout == "tensorrt-llm":
        _check_ranks(stored, config)
    tensors = {name: stored.read(name) for name in found.names}
    token_map = tensors.pop(found.token_map) if found.token_map else None
    for name, tensor in tensors.items():
        _check_dtype(stored, name, tensor)
    dtype = dtype or reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    for name, tensor in tensors.items():
        _check_finite(stored, name, tensor, dtype)
    width = _check_shapes(stored, found, tensors)
    _check_size(stored, config, "hidden_size", width, found.names[0])

    rows = [tensors[name] for name in found.projections]
    rows = [rows[0].clone()] if found.shares and rows else rows  # it is kept, and the file may change
    token_ids = None
    if found.layout == "vllm":
        notes += _vllm_notes(stored, found, config)
        if token_map is None:
            vocab_size = _whole(stored, config, found.projections[0], len(rows[0]))
        else:
            rows, token_ids, vocab_size = _truncated(stored, config, rows, token_map, lm_head, notes)
    elif found.layout == "medusa-shared":
        rows = [_targets_own(stored, lm_head, width)]
        vocab_size = len(rows[0])
        notes.append("The heads share the target's lm_head.")
    else:
        if found.layout in ("merged", "modelopt"):
            notes.append("The files also hold the base that the heads belong to: pass them as --model too.")
        vocab_size = len(rows[0])
        if found.layout == "tensorrt-llm":
            vocab_size = _unpadded(stored, config, vocab_size, notes)
            rows = [tensor[:vocab_size] for tensor in rows]
    if found.layout != "vllm":
        _check_size(stored, config, "vocab_size", vocab_size, (*found.projections, "lm_head.weight")[0])

    shared = rows[0] if found.shares else None
    heads = MedusaHeads(found.num_heads, found.num_layers, width, vocab_size, shared=shared,
                        token_ids=token_ids, dtype=dtype, device=device).requires_grad_(False)  # fmt: skip
    for k in range(found.num_heads):
        for layer in range(found.num_layers):
            heads.blocks[layer, k].copy_(tensors[found.scheme.block_name(k, layer, "weight")].T)
            if "bias" in found.kinds:
                heads.biases[layer, k, 0].copy_(tensors[found.scheme.block_name(k, layer, "bias")])
        if not found.shares:
            heads.projection[k].copy_(rows[k].T)
    files = sorted({file for name in found.names for file in stored.parts[name]})
    base = config.get("base_model_name_or_path")
    base = base if isinstance(base, str) and base else None
    return LoadedHeads(heads.eval(), found.layout, tuple(files), tuple(notes), base)


def _count_notes(found: Recognised, config: dict[str, Any]) -> list[str]:
    claims = claimed_counts(found.layout, config)
    counts = ("heads", found.num_heads), ("blocks per head", found.num_layers)
    return [
        f"config.json says {quoted(claim)} {what}, the file has {count}: {count} are used."
        for claim, (what, count) in zip(claims, counts, strict=True)
        if claim is not None and claim != count
    ]


def _check_dtype(stored: StoredTensors, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise InvalidInput(
            f"Heads must be stored as float16, bfloat16, float32 or float64, but {quoted(name)} in "
            f"{stored.origin} is {str(tensor.dtype).removeprefix('torch.')}: export them unquantised."
        )


def _check_finite(stored: StoredTensors, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise InvalidInput(
            f"Weights must be finite, but {quoted(name)} in {stored.origin} has NaN or infinities."
        )
    if tensor.dtype != dtype and not bool(torch.isfinite(tensor.to(dtype)).all()):
        raise InvalidInput(
            f"{quoted(name)} in {stored.origin} has weights that are too large for "
            f"{str(dtype).removeprefix('torch.')}: use another --dtype."
        )


def _check_shapes(stored: StoredTensors, found: Recognised, tensors: dict[str, Tensor]) -> int:
    """The heads' width; raises InvalidInput where a tensor does not have the shape of the others."""
    width = _most_common(tensor.shape[-1] for tensor in tensors.values() if tensor.ndim)
    rows = _most_common(tensors[name].shape[0] for name in found.projections if tensors[name].ndim)
    kinds = {"projection": (rows, width), "weight": (width, width), "bias": (width,)}
    kind_of = {
        name: "projection" if name in found.projections else name.rpartition(".")[2] for name in tensors
    }
    for name, tensor in tensors.items():
        expected = kinds[kind_of[name]]
        if tensor.shape != expected or not tensor.numel():
            good = (n for n, t in tensors.items() if kind_of[n] == kind_of[name] and t.shape == expected)
            like = next((f" like {quoted(n)}" for n in good if n != name), "")
            raise InvalidInput(
                f"{stored.origin} holds {found.num_heads} heads of width {width}, so {quoted(name)} must have "
                f"the shape {expected}{like}, but it has {tuple(tensor.shape)}."
            )
    return width


def _most_common(sizes: Iterable[int]) -> int:
    return next((size for size, _ in Counter(sizes).most_common(1)), 0)


def _check_size(stored: StoredTensors, config: dict[str, Any], key: str, size: int, name: str) -> None:
    """Raise where config.json says another width or vocabulary than tensor ``name`` has."""
    if config.get(key) not in (None, size):
        raise InvalidInput(
            f"config.json must describe the heads beside it, but it says {key} {quoted(config[key])} where "
            f"{quoted(name)} of {stored.origin} has {size}: one of them is another model's."
        )


def _targets_own(stored: StoredTensors, lm_head: Tensor | None, width: int) -> Tensor:
    if lm_head is None:
        raise InvalidInput(
            f"The heads in {stored.origin} have no projection of their own and share the target's lm_head, so "
            "they need the target: pass --model."
        )
    if lm_head.ndim != 2 or lm_head.shape[1] != width:
        raise InvalidInput(
            f"The heads in {stored.origin} have width {width} and share the target's lm_head, but that has the "
            f"shape {tuple(lm_head.shape)}: pass the --model that they were trained for."
        )
    return lm_head.detach()


def _check_ranks(stored: StoredTensors, config: dict[str, Any]) -> None:
    mapping = config.get("mapping") or {}
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


def _unpadded(stored: StoredTensors, config: dict[str, Any], rows: int, notes: list[str]) -> int:
    """The vocabulary's size where the rows of the projections were padded to a multiple for the ranks."""
    vocab_size, ranks = config.get("vocab_size"), stored.ranks or 1
    if not isinstance(vocab_size, int) or not 0 < vocab_size < rows:
        return rows  # and another size than the config's is refused like any other layout's
    if rows not in {-(-vocab_size // m) * m for unit in (1, 64, 128) for m in (unit, unit * ranks)}:
        return rows
    notes.append(f"The projections have {rows} rows, padding included: {vocab_size} are used.")
    return vocab_size


def _vllm_notes(stored: StoredTensors, found: Recognised, config: dict[str, Any]) -> list[str]:
    notes = []
    scale = config.get("logit_scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or scale <= 0:
        raise InvalidInput(
            f"logit_scale must be a number above 0, which keeps the candidates' order, but config.json of "
            f"{stored.origin} says {quoted(scale)}."
        )
    if scale != 1:
        notes.append(
            f"config.json says logit_scale {scale}, which keeps the candidates' order: it is ignored."
        )
    if "bias" in found.kinds and not config.get("medusa_fc_bias"):
        notes.append(
            "The blocks have biases, which vLLM drops since config.json lacks medusa_fc_bias: they are used."
        )
    return notes


def _whole(stored: StoredTensors, config: dict[str, Any], name: str, rows: int) -> int:
    """The vocabulary of vLLM's heads without a token_map."""
    claimed = config.get("truncated_vocab_size")
    if claimed not in (None, config.get("vocab_size") or rows):
        raise InvalidInput(
            f"A truncated vocabulary needs a token_map, but {stored.origin} has none and config.json says "
            f"truncated_vocab_size {quoted(claimed)}."
        )
    _check_size(stored, config, "vocab_size", rows, name)
    return rows


def _truncated(
    stored: StoredTensors,
    config: dict[str, Any],
    projections: list[Tensor],
    token_map: Tensor,
    lm_head: Tensor | None,
    notes: list[str],
) -> tuple[list[Tensor], Tensor | None, int]:
    """vLLM's projections in the order of target ids, these ids, and the target's vocabulary.

    token_map says the target id of every draft token; the rows of the projections are draft tokens, or all
    of the vocabulary's tokens, of which token_map takes some. As in vLLM it counts only where
    truncated_vocab_size is below vocab_size.
    """
    rows, claimed = len(projections[0]), config.get("truncated_vocab_size")
    vocab_size = config.get("vocab_size")
    if vocab_size is None and lm_head is not None:
        vocab_size = len(lm_head)
    if token_map.ndim != 1 or token_map.dtype != torch.int64 or not len(token_map):
        raise InvalidInput(
            f"token_map must be a list of int64 token ids, but in {stored.origin} it is {token_map.dtype} of "
            f"shape {tuple(token_map.shape)}."
        )
    if rows == vocab_size and claimed in (None, rows):
        notes.append(
            "token_map is ignored, as in vLLM, since config.json says no smaller truncated_vocab_size."
        )
        return projections, None, rows
    if vocab_size is None:
        vocab_size = max(rows, int(token_map.max()) + 1)
        notes.append(
            f"config.json lacks vocab_size: {vocab_size} is taken, from token_map and the projections."
        )
    if (
        isinstance(vocab_size, bool)
        or not isinstance(vocab_size, int)
        or rows not in (len(token_map), vocab_size)
    ):
        raise InvalidInput(
            f"The projections must have a row for each of the {len(token_map)} tokens of token_map or for the whole "
            f"vocabulary, {quoted(vocab_size)} by config.json, but in {stored.origin} they have {rows}."
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
