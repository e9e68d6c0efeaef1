"""Accelerators and models by name: what an analytical latency (`roofline`) depends on.

A model is a decoder of equal layers: h its `width`, i the `inner` width of an MLP, d the `head_width` of attention; in some
all layers but the first ones have experts in the MLP's place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files import storage


@dataclass(frozen=True)
class Device:
    """The two roofs of an accelerator, as its maker says.

    tflops        : dense products in bfloat16 or float16 with float32 sums, no sparsity [TFLOP/s]
    tb_per_s      : memory bandwidth [TB/s]
    link_gb_per_s : what a device sends to the others of a server, in one direction [GB/s]; by default by PCIe 4.0
    units         : multiprocessors that share the tiles of a product, where tiles and efficiencies were fitted; else None
    """

    name: str
    tflops: float
    tb_per_s: float
    link_gb_per_s: float = 32
    units: int | None = None


DEVICES = {
    device.name: device
    for device in (
        Device("A100-80GB-PCIe", 312, 1.935, units=108),
        Device("A100-80GB-SXM", 312, 2.039, link_gb_per_s=300),
        Device("A100-40GB-SXM", 312, 1.555, link_gb_per_s=300),
        Device("H100-SXM", 989.4, 3.35, link_gb_per_s=450),
        Device("H100-PCIe", 756, 2.0, link_gb_per_s=64),
        Device("H200-SXM", 989.4, 4.8, link_gb_per_s=450),
        Device("L40S", 362.05, 0.864),
        Device("L4", 121, 0.3),
        Device("A10G", 70, 0.6),
        Device("RTX-4090", 165.2, 1.008),
        Device("MI300X", 1307.4, 5.3, link_gb_per_s=448),
    )
}


def device_of(text: str) -> tuple[Device, int]:
    """A device by its name, or any by its two roofs, "312:1.935" [TFLOP/s:TB/s]; and how many: "4xH100-SXM".

    >>> device_of("312:2")[0].tb_per_s, device_of("4xH100-SXM")[1]
    (2.0, 4)
    """
    by_name = {name.lower(): device for name, device in DEVICES.items()}
    number, times, name = text.lower().partition("x")
    count, name = (int(number), name) if times and number.isdecimal() and int(number) else (1, text.lower())
    if name in by_name:
        return by_name[name], count
    with suppress(ValueError):
        tflops, tb_per_s = map(float, name.split(":"))
        if 0 < tflops < math.inf and 0 < tb_per_s < math.inf:
            return Device(f"{tflops:g} TFLOP/s, {tb_per_s:g} TB/s", tflops, tb_per_s), count
    raise InvalidInput(
        f"`analytical` must be one of {', '.join(DEVICES)}, or TFLOPS:TB_PER_S such as 312:1.935, or several of one, such as "
        f"4xH100-SXM, but got {text!r}."
    )


# Architectures of q, k, v, o, gate, up and down, and the head width where the config is silent (None: h / heads).
KNOWN: dict[str, int | None] = {
    "llama": None, "mistral": None, "qwen2": None, "qwen3": 128, "phi3": None, "gemma": 256, "granite": None,
    "olmo2": None, "mixtral": None, "qwen2_moe": None, "qwen3_moe": 128, "glm4_moe": 128,
}  # fmt: skip
# What configs call the number of experts, the width of each, and that of those which all rows take (a number of them: N).
EXPERTS = {
    "mixtral": ("num_local_experts", "intermediate_size", ""),
    "qwen2_moe": ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size", ""),
    "glm4_moe": ("n_routed_experts", "moe_intermediate_size", "n_shared_experts"),
}
DTYPES, ITEMSIZE = ("bfloat16", "float16"), 2  # whose numbers take so many bytes
DRAFT_VOCABULARY = 32000  # of EAGLE-3's published checkpoints, if its config is not given


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers with gated MLPs.

    weight_bytes  : of a weight of the layers; the lm_head has 16 bits
    sparse_layers : the last ones, which have experts
    shared_inner  : width of all experts together that every row takes
    devices       : number of devices that share every layer
    """

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocab_size: int
    weight_bytes: float = ITEMSIZE
    sparse_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    devices: int = 1

    def one_layer(self, vocab_size: int) -> ModelShape:
        """A drafter of one such layer: dense, as wide as a row's experts together, in 16 bits."""
        inner = self.experts_per_token * self.expert_inner + self.shared_inner if self.sparse_layers else self.inner
        vocab_size = min(vocab_size, self.vocab_size)
        return replace(self, layers=1, inner=inner, sparse_layers=0, weight_bytes=ITEMSIZE, vocab_size=vocab_size)


@dataclass(frozen=True)
class Drafting:
    """What drafts: a kind of drafter, and the shape of its layers, None for that of heads."""

    kind: str = "medusa"
    shape: ModelShape | None = None


MEDUSA = Drafting()


def drafting_of(text: str, target: ModelShape) -> Drafting:
    """A drafter by its kind, or of the config.json of a draft model or of EAGLE's layer (which has one layer).

    Raises Unsupported for a kind whose operators are not known.
    """
    kind = text.partition(":")[0]
    if kind in ("medusa", "hydra", "ngram"):
        return Drafting(kind)
    if kind == "eagle":
        return Drafting(kind, target.one_layer(target.vocab_size))
    if kind == "eagle3":
        return Drafting(kind, target.one_layer(DRAFT_VOCABULARY))
    if kind == "mtp":
        return Drafting(kind, replace(target, layers=1, sparse_layers=min(target.sparse_layers, 1)))
    if not Path(text).exists():
        raise Unsupported(
            "`analytical` knows what drafting costs with medusa, hydra, eagle, eagle3, mtp, ngram "
            f"and with the config.json of a draft model or of an EAGLE layer, but got {text!r}."
        )
    shape = replace(shape_of(text)[0], devices=target.devices)
    if shape.layers > 1:
        return Drafting("draft-model", shape)
    return Drafting("eagle" if shape.vocab_size == target.vocab_size else "eagle3", shape)


SHAPES = {  # LLaMA (arXiv 2302.13971), table 2; the Vicunas have the same
    shape.name: shape
    for shape in (
        ModelShape("llama-7b", 32, 4096, 11008, 32, 32, 128, 32000),
        ModelShape("llama-13b", 40, 5120, 13824, 40, 40, 128, 32000),
        ModelShape("llama-33b", 60, 6656, 17920, 52, 52, 128, 32000),
    )
}


def shape_of(config: str) -> tuple[ModelShape, Path | None, str | None]:
    """A shape by its name or from a ``config.json`` (the file or its folder), that file, and its dtype.

    Raises Unsupported for an architecture whose operators are not known, InvalidInput for what is no config.
    """
    if config in SHAPES and not Path(config).exists():
        return SHAPES[config], None, None
    path = Path(config)
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        names = ", ".join(SHAPES)
        raise InvalidInput(f"`model` must be a config.json, its folder, or one of {names}, but {file} does not exist.")
    document = storage.load_json(file)
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise InvalidInput(f"`model` must be a config.json with a model_type, but {file} has none.")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    dtype = document.get("torch_dtype") or document.get("dtype")
    return _shape(document, name, file), file, dtype if dtype in DTYPES else None


def _shape(config: dict[str, Any], name: str, file: Path) -> ModelShape:
    kind = config["model_type"]
    if kind not in KNOWN:
        raise Unsupported(
            f"`analytical` knows the operators of {', '.join(KNOWN)}, but {file} is a {kind}. Time its shape on a "
            "device with: treeopt profile --random-weights"
        )

    def number(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"{file} must have {key}, a whole number of at least 1, but it has {value!r}.")
        return value

    layers, width, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InvalidInput(f"{file} must have num_attention_heads a multiple of num_key_value_heads.")
    dense = ModelShape(
        name,
        layers=layers,
        width=width,
        inner=number("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=number("head_dim", KNOWN[kind] or width // heads),
        vocab_size=number("draft_vocab_size", number("vocab_size")),
        weight_bytes=_weight_bytes(config.get("quantization_config"), file),
    )
    if kind not in EXPERTS:
        return dense
    count, inner, shared = EXPERTS[kind]
    shared_inner = number(shared, 1) * (number(inner) if shared.startswith("n_") else 1) if shared else 0
    return replace(
        dense,
        sparse_layers=layers - int(config.get("first_k_dense_replace") or 0),
        experts=number(count),
        experts_per_token=number("num_experts_per_tok"),
        expert_inner=number(inner),
        shared_inner=shared_inner,
    )


def _weight_bytes(quantisation: Mapping[str, Any] | None, file: Path) -> float:
    """Bytes of a weight by a config's quantization_config, the scales of its groups included."""
    if not quantisation:
        return ITEMSIZE
    method = quantisation.get("quant_method")
    groups = quantisation.get("config_groups") or {"": {"weights": quantisation}}
    weights = next(iter(groups.values())).get("weights") or {}
    bits = 8 if method in ("fp8", "fbgemm_fp8") else weights.get("bits") or weights.get("num_bits")
    if bits not in (4, 8):
        raise Unsupported(
            f"`analytical` knows weights of 16, 8 and 4 bits, but {file} says quantization_config {method!r}."
        )
    return bits / 8 + (ITEMSIZE / size if (size := weights.get("group_size")) and size > 0 else 0.0)
