"""Accelerators and models by name: what an analytical latency (`roofline`) depends on.

A model is a decoder of equal layers with gated MLPs and weights of 16 bits.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files import storage


@dataclass(frozen=True)
class Device:
    """The two roofs of an accelerator, as its maker says.

    tflops   : dense products in bfloat16 or float16 with float32 sums, no sparsity [TFLOP/s]
    tb_per_s : memory bandwidth [TB/s]
    units    : multiprocessors that share the tiles of a product, where tiles and efficiencies were fitted; else None
    """

    name: str
    tflops: float
    tb_per_s: float
    units: int | None = None


DEVICES = {
    device.name: device
    for device in (
        Device("A100-80GB-PCIe", 312, 1.935, units=108),
        Device("A100-80GB-SXM", 312, 2.039),
        Device("A100-40GB-SXM", 312, 1.555),
        Device("H100-SXM", 989.4, 3.35),
        Device("H100-PCIe", 756, 2.0),
        Device("H200-SXM", 989.4, 4.8),
        Device("L40S", 362.05, 0.864),
        Device("L4", 121, 0.3),
        Device("A10G", 70, 0.6),
        Device("RTX-4090", 165.2, 1.008),
        Device("MI300X", 1307.4, 5.3),
    )
}


def device_of(text: str) -> Device:
    """A device by its name, or any by its two roofs, "312:1.935" [TFLOP/s:TB/s].

    >>> device_of("312:2").tb_per_s, device_of("l4").name
    (2.0, 'L4')
    """
    by_name = {name.lower(): device for name, device in DEVICES.items()}
    if text.lower() in by_name:
        return by_name[text.lower()]
    with suppress(ValueError):
        tflops, tb_per_s = map(float, text.split(":"))
        if 0 < tflops < math.inf and 0 < tb_per_s < math.inf:
            return Device(f"{tflops:g} TFLOP/s, {tb_per_s:g} TB/s", tflops, tb_per_s)
    raise InvalidInput(
        f"`analytical` must be one of {', '.join(DEVICES)}, or TFLOPS:TB_PER_S such as 312:1.935, but got {text!r}."
    )


# Architectures of q, k, v, o, gate, up and down, and the head width where the config is silent (None: width / heads).
KNOWN: dict[str, int | None] = {
    "llama": None, "mistral": None, "qwen2": None, "qwen3": 128, "phi3": None, "gemma": 256, "granite": None, "olmo2": None,
}  # fmt: skip
DTYPES, ITEMSIZE = ("bfloat16", "float16"), 2  # whose numbers take so many bytes
DRAFT_VOCABULARY = 32000  # of EAGLE-3's published checkpoints, if its config is not given


@dataclass(frozen=True)
class ModelShape:
    name: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocab_size: int


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
    if kind in ("eagle", "mtp"):
        return Drafting(kind, replace(target, layers=1))
    if kind == "eagle3":
        return Drafting(kind, replace(target, layers=1, vocab_size=min(target.vocab_size, DRAFT_VOCABULARY)))
    if not Path(text).exists():
        raise Unsupported(
            "`analytical` knows what drafting costs with medusa, hydra, eagle, eagle3, mtp, ngram "
            f"and with the config.json of a draft model or of an EAGLE layer, but got {text!r}."
        )
    shape = shape_of(text)[0]
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
    if kind not in KNOWN or config.get("quantization_config"):
        what = f"a {kind}" if kind not in KNOWN else "quantised"
        raise Unsupported(
            f"`analytical` knows the operators of {', '.join(KNOWN)} in 16 bits, but {file} is {what}. Time its shape on a "
            "device with: treeopt profile --random-weights"
        )

    def number(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"{file} must have {key}, a whole number of at least 1, but it has {value!r}.")
        return value

    width, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InvalidInput(f"{file} must have num_attention_heads a multiple of num_key_value_heads.")
    return ModelShape(
        name,
        layers=number("num_hidden_layers"),
        width=width,
        inner=number("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=number("head_dim", KNOWN[kind] or width // heads),
        vocab_size=number("draft_vocab_size", number("vocab_size")),
    )
