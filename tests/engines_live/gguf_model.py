"""A Llama checkpoint with a byte-level BPE tokenizer as a GGUF file, which llama.cpp and OpenVINO GenAI read.

GGUF 3: magic, version, counts; keys with typed values; a name, shape, type and offset a tensor; then the tensors, each
from a multiple of 32 bytes on. A string is its length in eight bytes and its UTF-8. llama.cpp's own converter knows a
tokenizer by a hash and refuses that of the demo model.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ALIGNMENT = 32
NORMAL, CONTROL = 1, 3  # kinds of token
TENSORS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(model: Path, path: Path, *, half: bool = False) -> Path:
    """The checkpoint folder ``model`` as the GGUF file ``path``, in float32; its matrices in float16 with ``half``."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tensors = {_name(key): value for key, value in load_file(model / "model.safetensors").items()}
    for name, heads in (("attn_q", config["num_attention_heads"]), ("attn_k", config["num_key_value_heads"])):
        for layer in range(config["num_hidden_layers"]):
            key = f"blk.{layer}.{name}.weight"
            tensors[key] = _neighbours_rotate(tensors[key], heads)
    keys = {"general.file_type": int(half), **_architecture(config)}
    keys |= _tokenizer(json.loads((model / "tokenizer.json").read_text(encoding="utf-8")))
    described, data = b"", b""
    for name, values in tensors.items():
        kind = int(half and values.ndim == 2)  # 0 is float32, 1 float16
        shape = struct.pack(f"<I{values.ndim}Q", values.ndim, *reversed(values.shape))
        described += _string(name) + shape + struct.pack("<IQ", kind, len(data))
        data += _padded(values.astype(("<f4", "<f2")[kind]).tobytes())
    counts = struct.pack("<IQQ", 3, len(tensors), len(keys))
    head = b"GGUF" + counts + b"".join(_string(key) + _value(value) for key, value in keys.items()) + described
    path.write_bytes(_padded(head) + data)
    return path


def _name(key: str) -> str:
    """A tensor's name in GGUF.

    >>> _name("model.layers.3.mlp.up_proj.weight"), _name("model.norm.weight")
    ('blk.3.ffn_up.weight', 'output_norm.weight')
    """
    if not key.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[key]
    layer, _, rest = key.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{TENSORS[rest.removesuffix('.weight')]}.weight"


def _neighbours_rotate(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows reordered: transformers rotates row i of a head with row i + half, GGUF's llama row 2i with row 2i + 1."""
    rows, columns = weights.shape
    return np.ascontiguousarray(weights.reshape(heads, 2, -1, columns).swapaxes(1, 2).reshape(rows, columns))


def _architecture(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.vocab_size": config["vocab_size"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
    }


def _tokenizer(tokenizer: dict[str, Any]) -> dict[str, Any]:
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {added["content"] for added in tokenizer["added_tokens"]}
    (end,) = (added["id"] for added in tokenizer["added_tokens"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


def _value(value: Any) -> bytes:
    """A value after its type: bool, unsigned and float of four bytes, string, or a list of one of the last two."""
    if isinstance(value, list):
        kind, write = (8, _string) if isinstance(value[0], str) else (5, lambda number: struct.pack("<i", number))
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(write(one) for one in value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
