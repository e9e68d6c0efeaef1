"""Small checkpoints of random numbers in the published layouts: the names, shapes and sharing of their authors' files.

K heads · L blocks · D = 16 width · F = 24 · V = 40 vocabulary · KV = 8 of the keys · Vt = 12 tokens of a truncated one
"""

import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from treeopt.errors import InvalidInput

D, F, V, KV, VT = 16, 24, 40, 8, 12
Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
BASE = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": F,
         "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": V,
         "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
         "torch_dtype": "float16"}  # fmt: skip


def linear(name: str, out: int, into: int) -> Shapes:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def llama_layer(prefix: str, *, input_norm: bool = True, into: int = D) -> Shapes:
    attention = {"q": (D, into), "k": (KV, into), "v": (KV, into), "o": (D, D)}
    norms = ["input_layernorm"] * input_norm + ["post_attention_layernorm"]
    return {
        **{f"{prefix}self_attn.{name}_proj.weight": shape for name, shape in attention.items()},
        **{f"{prefix}mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")},
        f"{prefix}mlp.down_proj.weight": (D, F),
        **{f"{prefix}{name}.weight": (D,) for name in norms},
    }


def medusa_heads(heads: int, *, prefix: str = "", blocks: int = 1, projections: bool = True) -> Shapes:
    found: Shapes = {}
    for k in range(heads):
        for block in range(blocks):
            found |= linear(f"{prefix}{k}.{block}.linear", D, D)
        if projections:
            found[f"{prefix}{k}.{blocks}.weight"] = (V, D)
    return found


def base_model() -> Shapes:
    embedding = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    return embedding | llama_layer("model.layers.0.")


def hydra_heads() -> Shapes:
    found: Shapes = {"input_embed_fn.weight": (V, D)}
    for k in range(4):
        for kind in ("linear", "res_connection"):
            found |= linear(f"hydra_mlp.{k}.0.{kind}", D, (k + 2) * D)
        found |= linear(f"hydra_mlp.{k}.1.linear", D, D) | linear(f"hydra_mlp.{k}.2.linear", D, D)
        found |= linear(f"hydra_lm_head.{k}", V, D)
    return found


def eagle3() -> Shapes:
    found: Shapes = {"fc.weight": (D, 3 * D), "lm_head.weight": (VT, D), "norm.weight": (D,), "d2t": (VT,), "t2d": (V,)}
    return found | llama_layer("midlayer.", into=2 * D) | {"midlayer.hidden_norm.weight": (D,)}


def share_blocks(tensors: Tensors, one: str, others: tuple[str, ...]) -> None:
    """``[ResBlock(d)] * n`` repeats one module: the same storage under several names."""
    for name in [name for name in tensors if f".{one}.linear." in name]:
        for other in others:
            tensors[name.replace(f".{one}.linear.", f".{other}.linear.")] = tensors[name]


def counts(heads: int, layers: int = 1, **more: object) -> dict[str, object]:
    return {"medusa_num_heads": heads, "medusa_num_layers": layers, **more, **BASE}


HEAD = {"lm_head.weight": (V, D)}
HYDRA = {"hydra_num_heads": 4, "grounded_heads": True, "hidden_state_offset": 0, **BASE}
EAGLE1 = {"embed_tokens.weight": (V, D), **linear("fc", D, 2 * D), **llama_layer("layers.0.", input_norm=False)}
# Name: its config.json, and what is in which file. The first one says 2 heads and has 4, as its authors' does.
LAYOUTS: dict[str, tuple[dict[str, object], dict[str, Callable[[], Shapes]]]] = {
    "medusa_v01_pt": (counts(2, transformers_version="4.31.0"), {"medusa_lm_head.pt": lambda: medusa_heads(4)}),
    "medusa_v01_safetensors": (counts(3), {"medusa_lm_head.safetensors": lambda: medusa_heads(3)}),
    "medusa_v2_safetensors": (
        counts(3, version="2"),
        {"medusa_lm_head.safetensors": lambda: medusa_heads(3, projections=False)},
    ),
    "medusa_v01_two_layers_pt": (counts(2, 2), {"medusa_lm_head.pt": lambda: medusa_heads(2, blocks=2)}),
    "medusa2_merged": (
        {**LLAMA, "medusa_num_heads": 5, "medusa_num_layers": 1},
        {
            "model-00001-of-00002.safetensors": base_model,
            "model-00002-of-00002.safetensors": lambda: HEAD | medusa_heads(5, prefix="medusa_head."),
        },
    ),
    "modelopt_hf": (
        {**LLAMA, "medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1}},
        {"model.safetensors": lambda: HEAD | base_model() | medusa_heads(3, prefix="medusa_heads.")},
    ),
    "hydra_mlp_pt": ({**HYDRA, "hydra_num_layers": 3, "hydra_head_arch": "mlp"}, {"hydra_lm_head.pt": hydra_heads}),
    "eagle1_bin": ({**LLAMA, "bias": True}, {"pytorch_model.bin": lambda: EAGLE1}),
    "eagle3_safetensors": ({**LLAMA, "draft_vocab_size": VT}, {"model.safetensors": eagle3}),
}
SHARED = {"medusa_v01_two_layers_pt": ("0", ("1",)), "hydra_mlp_pt": ("1", ("2",))}  # blocks of one storage
IDS = torch.arange(VT)
# Token ids of a truncated vocabulary: their offsets, and whether each is in it.
WHOLE = {"d2t": IDS * 2, "t2d": torch.isin(torch.arange(V), IDS * 3)}


def fill(shapes: Shapes, generator: torch.Generator) -> Tensors:
    """Numbers as small as trained weights."""

    def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return WHOLE[name] if name in WHOLE else 0.02 * torch.randn(shape, generator=generator)

    return {name: numbers(name, shape) for name, shape in shapes.items()}


def small_llama(**options: object) -> Any:
    """A base whose layers are like those of the checkpoints."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    config = LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=2, eos_token_id=3, **options)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


_kept = tempfile.TemporaryDirectory(prefix="treeopt-checkpoints-")


@cache
def synthetic(name: str) -> Path:
    """The folder of a checkpoint, made once in a process: copy it to change it."""
    (config, files), folder = LAYOUTS[name], Path(_kept.name) / name
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    weight_map: dict[str, str] = {}
    for file, shapes in files.items():
        tensors = fill(shapes(), generator)
        if name in SHARED:
            share_blocks(tensors, *SHARED[name])
        weight_map |= dict.fromkeys(tensors, file)
        write_file(tensors, folder / file)
    if len(files) > 1:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def read_file(file: Path) -> Tensors:
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def write_file(tensors: Tensors, file: Path) -> None:
    save_file(tensors, file, {"format": "pt"}) if file.suffix == ".safetensors" else torch.save(tensors, file)


def edit_json(file: Path, **changes: object) -> None:
    document = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def check_damage(
    load: Callable[[], object],
    file: Path,
    tensors: Tensors,
    may_lack: Callable[[str], bool],
    number: Iterator[int],
    every: int,
    names: Sequence[str] = (),
) -> None:
    """Every tensor renamed, dropped, reshaped or of other numbers is refused by its name; one of ``every`` changes is made."""
    for name in names or tensors:
        tensor = tensors[name]
        rest = {key: value for key, value in tensors.items() if key != name}
        wrong, flat, whole = torch.cat([tensor, tensor[:1]]), tensor.flatten()[:0], tensor.to(torch.int8)
        nan = torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor.to(torch.int16)
        renamed = {name + "x": tensor}, {"x": tensor}
        for change in ({}, *renamed, {name: wrong}, {name: flat}, {name: nan}, {name: whole}):
            if next(number) % every:
                continue
            write_file(rest | change, file)
            if not change and may_lack(name):
                continue
            with pytest.raises(InvalidInput, match=r"^(?!.*\n).*\.$") as caught:
                load()
            assert name in str(caught.value) or any(repr(odd) in str(caught.value) for odd in change), (name, change)
