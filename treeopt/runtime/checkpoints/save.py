"""Write heads in any of the layouts, as the engine that reads it wants them.

Every file appears whole or not at all, config.json last. What a layout cannot hold is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeopt.errors import InvalidInput, Unsupported, first_line
from treeopt.files.shipped import LAYOUTS
from treeopt.files.writing import atomic_writer, replacing, write_text
from treeopt.runtime.checkpoints.checks import Heads
from treeopt.runtime.checkpoints.eagle import eagle_config, eagle_tensors
from treeopt.runtime.checkpoints.eagle3 import eagle3_tensors
from treeopt.runtime.checkpoints.eagle3_config import eagle3_config
from treeopt.runtime.checkpoints.files import (
    HEAD_FILES,
    MODEL_FILES,
    SUFFIXES,
    StoredTensors,
    find_tensors,
    open_safetensors,
    readable,
)
from treeopt.runtime.checkpoints.hydra import hydra_config, hydra_tensors
from treeopt.runtime.checkpoints.layouts import named_weights, scheme_of
from treeopt.runtime.drafters.eagle import EagleHeads
from treeopt.runtime.drafters.eagle3 import Eagle3Heads
from treeopt.runtime.drafters.hydra import HydraHeads
from treeopt.runtime.drafters.medusa import MedusaHeads

WEIGHTS = (*SUFFIXES, ".index.json")  # how the names of a checkpoint's files end
HYDRA_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
MOST_NODES = 63  # max_draft_len of TensorRT-LLM: the tree's nodes without the root, as published trees have
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # a base's tokenizer and the like


def save_heads(
    heads: Heads,
    layout: str,
    folder: Path,
    *,
    base: str,
    base_folder: Path | None = None,
    lm_head: Tensor | None = None,
) -> list[Path]:
    """Write ``heads`` to ``folder`` in one of `LAYOUTS`; the files written.

    base is the base model's name, for config.json. base_folder has its weights, which the layouts "merged"
    and "modelopt" contain. lm_head (V, d), or base_folder's, proves for "medusa-shared" that the heads'
    projections are copies of it. Raises Unsupported where the layout cannot hold these heads.
    """
    check_kind(heads.kind, layout)
    counts = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    own = {**counts, "base_model_name_or_path": base}
    config: dict[str, Any] | None = own
    if isinstance(heads, EagleHeads):
        name, tensors, config = MODEL_FILES[0], eagle_tensors(heads), eagle_config(heads, base)
    elif isinstance(heads, Eagle3Heads):
        name, tensors, config = MODEL_FILES[0], eagle3_tensors(heads), eagle3_config(heads, base)
    elif isinstance(heads, HydraHeads):
        name, tensors, config = HYDRA_FILES[layout.endswith("-pt")], hydra_tensors(heads), hydra_config(heads, base)
    else:
        if layout == "medusa-shared" and lm_head is None and base_folder is not None:
            lm_head = read_lm_head(base_folder)
        _check_layout(heads, layout, lm_head)
        tensors = _medusa_tensors(heads, layout)
        if layout in ("merged", "modelopt"):
            if base_folder is None:
                raise InvalidInput(f"The layout {layout!r} contains the base model, so pass its folder with --model.")
            return _save_with_base(heads, layout, folder, _stored(tensors), base_folder)
        name, config = {
            "medusa": (HEAD_FILES[0], own),
            "medusa-pt": (HEAD_FILES[1], own),
            "medusa-shared": (HEAD_FILES[0], {**own, "version": "2"}),
            "vllm": (MODEL_FILES[0], _vllm_config(heads)),
            "tensorrt-llm": ("rank0.safetensors", _tensorrt_llm_config(heads)),
            "neuron": (HEAD_FILES[2], None),
        }[layout]
    # Neuron's file lies in the base's own folder, beside its weights and its config.json.
    _check_folder(folder, {name}, HEAD_FILES if layout == "neuron" else WEIGHTS)
    written = [write_tensors(folder / name, _stored(tensors))]
    return written if config is None else [*written, _write_config(folder, config)]


def kind_of(layout: str) -> str:
    """The kind of the heads that a layout holds: medusa, hydra, hydra++, eagle or eagle3."""
    kind = {"eagle-1": "eagle", "eagle-3": "eagle3"}.get(layout, layout.removesuffix("-pt"))
    return kind if kind in ("hydra", "hydra++", "eagle", "eagle3") else "medusa"


def check_kind(kind: str, layout: str) -> None:
    """Raise where ``layout`` is none, or one of heads of another kind."""
    if layout not in LAYOUTS:
        raise InvalidInput(f"--to must be one of {', '.join(LAYOUTS)}, but got {layout!r}.")
    if kind_of(layout) != kind:
        own = ", ".join(name for name in LAYOUTS if kind_of(name) == kind)
        raise Unsupported(
            f"The layout {layout!r} cannot hold these heads: these are {kind!r} heads, whose layouts are {own}."
        )


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
            fault = "these have projections of their own: pass --model if they are copies of the base's lm_head"
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


def _stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, none sharing storage with another."""
    return {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}


def _vllm_config(heads: MedusaHeads) -> dict[str, Any]:
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


def _tensorrt_llm_config(heads: MedusaHeads) -> dict[str, Any]:
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


def read_lm_head(folder: Path) -> Tensor:
    """The (V, d) lm_head of the model in ``folder``, or its embedding, which is the same where it has none."""
    stored = _base_tensors(folder)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"):
        if name in stored.parts:
            return stored.read(name)
    raise InvalidInput(f"--model must be a causal LM with an lm_head.weight, but {folder} has none.")


def _base_tensors(folder: Path) -> StoredTensors:
    """The tensors of the base model in ``folder``, whatever heads lie beside them."""
    for name in MODEL_FILES:
        if (folder / name).is_file():
            return find_tensors(folder / name)
    raise InvalidInput(f"--model must be a folder with {' or '.join(MODEL_FILES)}, but {folder} has none of them.")


def _save_with_base(
    heads: MedusaHeads, layout: str, folder: Path, tensors: dict[str, Tensor], base_folder: Path
) -> list[Path]:
    """The base's shards, then one with the heads, an index of all, what lies beside them, and config.json."""
    stored = _base_tensors(base_folder)
    config = dict(stored.config)
    for key, size in (("hidden_size", heads.width), ("vocab_size", heads.vocab_size)):
        if config.get(key) != size:
            raise InvalidInput(
                f"The heads must fit the base, but config.json in {base_folder} says {key} {config.get(key)} and "
                f"they have {size}."
            )
    shards = sorted({file for parts in stored.parts.values() for file in parts})
    if any(shard.suffix != ".safetensors" for shard in shards):
        raise Unsupported(
            f"The base's weights must be safetensors, but {base_folder} has {shards[0].name}: save them with "
            "transformers' save_pretrained."
        )
    if folder.exists() and folder.samefile(base_folder):
        raise InvalidInput(f"--output must be another folder than the base's, but both are {folder}.")
    names = [f"model-{i + 1:05}-of-{len(shards) + 1:05}.safetensors" for i in range(len(shards) + 1)]
    index = MODEL_FILES[1]
    _check_folder(folder, {*names, index})

    where: dict[str, str] = {}
    for shard, name in zip(shards, names, strict=False):
        kept = _copy_shard(shard, folder / name)
        where |= dict.fromkeys(kept, name)
    write_tensors(folder / names[-1], tensors)
    where |= dict.fromkeys(tensors, names[-1])
    total = sum(_data_bytes(folder / name) for name in names)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_text(folder / index, json.dumps(document, indent=2) + "\n")

    beside = [file for file in sorted(base_folder.iterdir()) if file.is_file() and file.suffix in BESIDE]
    beside = [file for file in beside if file.name != "config.json" and not file.name.endswith(".index.json")]
    for file in beside:
        _replace(folder / file.name, partial(shutil.copyfile, file))
    for key in ("medusa", "medusa_num_heads", "medusa_num_layers"):
        config.pop(key, None)
    if layout == "merged":
        config |= {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    else:
        config["medusa"] = {"num_medusa_heads": heads.num_heads, "num_medusa_layers": heads.num_layers}
    others = [*names, index, *(file.name for file in beside)]
    return [*(folder / name for name in others), _write_config(folder, config)]


def _copy_shard(shard: Path, to: Path) -> list[str]:
    """Copy the base's tensors in ``shard``, without heads that it may hold; their names."""
    with readable(shard), open_safetensors(shard) as opened:
        names = sorted(opened.keys())
        kept = [name for name in names if not name.startswith(("medusa_head.", "medusa_heads."))]
        if kept == names:
            _replace(to, partial(shutil.copyfile, shard))
        else:
            write_tensors(to, {name: opened.get_tensor(name) for name in kept})
    return kept


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> Path:
    """Write safetensors, or a pickled state dict where the name ends in .pt; whole or not at all."""
    if file.suffix == ".pt":
        with atomic_writer(file) as stream:
            torch.save(tensors, stream)
    else:
        from safetensors.torch import save_file

        _replace(file, lambda made: save_file(tensors, made, metadata={"format": "pt"}))
    return file


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` make a file, and give it its name when it is complete."""
    with replacing(file) as made, by_libraries(file):
        made.touch()
        usual = made.stat().st_mode
        write(made)
        made.chmod(usual)  # safetensors makes files for their owner alone


@contextmanager
def by_libraries(file: Path) -> Iterator[None]:
    """Turn what libraries raise where they cannot write into InvalidInput."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # a sentence names it later
            raise
        raise InvalidInput(f"{file} cannot be written: {error.strerror or error}.") from None
    except Exception as error:
        if "os error" not in str(error):  # as Rust calls the system's
            raise
        raise InvalidInput(f"{file} cannot be written: {first_line(error)}.") from None


def _write_config(folder: Path, config: dict[str, Any]) -> Path:
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return folder / "config.json"


def _check_folder(folder: Path, names: Iterable[str], clashing: tuple[str, ...] = WEIGHTS) -> None:
    """Raise where another checkpoint lies in ``folder``: a reader could not tell which is meant."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"--output must be a folder, but {folder} is a file.")
    present = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    strange = [name for name in present if name.endswith(clashing) and name not in set(names)]
    if strange:
        raise InvalidInput(
            f"--output must be a folder without other weights, but {folder} has {strange[0]}: pass a new one."
        )


def _data_bytes(file: Path) -> int:
    """Bytes of the tensors in a safetensors file: what follows its length and header."""
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def _dtype_name(heads: MedusaHeads) -> str:
    return str(heads.blocks.dtype).removeprefix("torch.")
