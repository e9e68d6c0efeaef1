"""Accelerators and models by name: what an analytical latency (`roofline`) depends on.

tflops    dense products in bfloat16 or float16 with float32 sums, no sparsity [TFLOP/s]
tb_per_s  memory bandwidth [TB/s], both as the makers say
units     what tiles of a product are dealt out to: streaming multiprocessors, compute units
fitted    whether efficiencies were fitted to measurements on it (`roofline.EFFICIENCY`); the others borrow them

A model is a dense decoder: h its `width`, i the `inner` width of an MLP, d the `head_width` of attention.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, Unsupported
from treeopt.files import storage


@dataclass(frozen=True)
class Device:
    """The two roofs of an accelerator."""

    name: str
    tflops: float
    tb_per_s: float
    units: int | None = None
    memory_gb: float | None = None
    source: str | None = None
    fitted: bool = False

    @property
    def ridge(self) -> float:
        """Operations per byte [FLOP/byte] above which it is computing that takes the time.

        >>> round(DEVICES["A100-80GB-PCIe"].ridge, 1)
        161.2
        """
        return self.tflops / self.tb_per_s


DEVICES = {
    device.name: device
    for device in (
        Device("A100-80GB-PCIe", 312, 1.935, 108, 80, "NVIDIA A100 datasheet, 2021", fitted=True),
        Device("A100-80GB-SXM", 312, 2.039, 108, 80, "NVIDIA A100 datasheet, 2021"),
        Device("A100-40GB-SXM", 312, 1.555, 108, 40, "NVIDIA A100 datasheet, 2020"),
        Device("H100-SXM", 989.4, 3.35, 132, 80, "NVIDIA H100 datasheet, half of the sparse figure"),
        Device("H100-PCIe", 756, 2.0, 114, 80, "NVIDIA H100 datasheet, half of the sparse figure"),
        Device("H200-SXM", 989.4, 4.8, 132, 141, "NVIDIA H200 datasheet, half of the sparse figure"),
        Device("L40S", 362.05, 0.864, 142, 48, "NVIDIA L40S datasheet"),
        Device("L4", 121, 0.3, 58, 24, "NVIDIA L4 datasheet, half of the sparse figure"),
        Device("A10G", 70, 0.6, 80, 24, "NVIDIA A10G datasheet"),
        Device("RTX-4090", 165.2, 1.008, 128, 24, "NVIDIA Ada GPU architecture white paper, appendix A"),
        Device("MI300X", 1307.4, 5.3, 304, 192, "AMD Instinct MI300X datasheet"),
    )
}


def device_of(text: str) -> Device:
    """A device by its name, or any by its two roofs, "312:1.935" [TFLOP/s:TB/s].

    >>> device_of("312:2").ridge
    156.0
    """
    known = {name.lower(): device for name, device in DEVICES.items()}
    if text.lower() in known:
        return known[text.lower()]
    with suppress(ValueError):
        tflops, tb_per_s = map(float, text.split(":"))
        if 0 < tflops < math.inf and 0 < tb_per_s < math.inf:
            return Device(f"{tflops:g} TFLOP/s, {tb_per_s:g} TB/s", tflops, tb_per_s)
    raise InvalidInput(
        f"`analytical` must be one of {', '.join(DEVICES)}, or TFLOPS:TB_PER_S such as 312:1.935, but got {text!r}."
    )


# Architectures of q, k, v, o, gate, up and down, and the head width where the config is silent (None: h / heads).
KNOWN: dict[str, int | None] = {
    "llama": None, "mistral": None, "qwen2": None, "qwen3": 128, "phi3": None, "gemma": 256, "granite": None,
    "olmo2": None,
}  # fmt: skip
WINDOWED = ("mistral", "phi3")  # all of whose layers have the window that the config names
DTYPES, ITEMSIZE = ("bfloat16", "float16"), 2  # whose numbers take so many bytes


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers with gated MLPs."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    vocab_size: int
    window: int | None = None  # keys that a query sees at most

    @property
    def weights(self) -> int:
        """Numbers that a plain step reads: all weights but the embedding, norms left out."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.width * self.inner
        return self.layers * layer + self.width * self.vocab_size

    @property
    def cache_numbers(self) -> int:
        """Numbers of keys and values that the cache has for a token."""
        return 2 * self.layers * self.kv_heads * self.head_width


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
        known = ", ".join(SHAPES)
        raise InvalidInput(f"`model` must be a config.json, its folder, or one of {known}, but {file} does not exist.")
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
    if config.get("quantization_config"):
        raise Unsupported(f"`analytical` counts weights of 16 bits, but {file} says quantization_config.")

    def number(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"{file} must have {key}, a whole number of at least 1, but it has {value!r}.")
        return value

    width, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InvalidInput(f"{file} must have num_attention_heads a multiple of num_key_value_heads.")
    windowed = kind in WINDOWED and config.get("sliding_window") is not None
    return ModelShape(
        name,
        layers=number("num_hidden_layers"),
        width=width,
        inner=number("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=number("head_dim", KNOWN[kind] or width // heads),
        vocab_size=number("vocab_size"),
        window=number("sliding_window") if windowed else None,
    )
