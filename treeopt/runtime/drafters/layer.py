"""One Llama layer that reads vectors: what Hydra++ and EAGLE run over the text before a guess.

b rows · n vectors per row · d width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from treeopt.errors import InvalidInput
from treeopt.runtime.cache import TreeCache

TAKEN = ("max_position_embeddings", "rms_norm_eps", "hidden_act")  # of the model that the layer is like


def zero_linear(inputs: int, outputs: int, *, bias: bool = True, **placed: Any) -> nn.Linear:
    """A linear layer, all weights zero. placed : dtype and device"""
    made = nn.utils.skip_init(
        nn.Linear, inputs, outputs, bias=bias, **{**placed, "device": placed.get("device") or "cpu"}
    )
    for weight in made.parameters():
        nn.init.zeros_(weight)
    return made


class OneLayer(nn.Module):
    """A Llama decoder layer, all weights zero. Its parameters bear the names that a LlamaModel gives them.

    normed : whether it has the norms before its attention (input_layernorm) and after its last sum (norm)
    make   : makes another layer in its place, of its config; the norms before its attention are its own
    placed : dtype and device
    """

    def __init__(
        self, config: Any, *, normed: bool, make: Callable[[Any], nn.Module] | None = None, **placed: Any
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding

        super().__init__()
        self.config = config
        with torch.device("meta"):
            model = LlamaModel(config)
            if make is not None:
                model.layers[0] = make(config)
        del model.embed_tokens
        if not normed:
            model.norm = nn.Identity()
            if make is None:
                model.layers[0].input_layernorm = model.norm
        rotary = LlamaRotaryEmbedding(config)  # its frequencies stay float32
        if rotary.inv_freq.shape != (config.head_dim // 2,) or not bool(rotary.inv_freq.isfinite().all()):
            raise InvalidInput(
                f"A layer with heads of width {config.head_dim} needs {config.head_dim // 2} finite rotary frequencies, "
                f"but its config's rope parameters give others: {config.rope_parameters}."
            )
        device = placed.get("device")
        self.model = model.to(placed.get("dtype")).to_empty(device=device or "cpu")
        self.model.rotary_emb = rotary.to(device)
        for weight in self.model.parameters():
            nn.init.zeros_(weight)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor | None = None,
        cache: TreeCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(b, n, d) to (b, n, d). Without a mask it is causal, so that rows may be padded on the right."""
        output = self.model(
            inputs_embeds=inputs,
            position_ids=positions,
            past_key_values=cache,
            attention_mask=mask,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def _apply(self, fn: Any, recurse: bool = True) -> OneLayer:
        """Apply a change of type or device, as modules do; but the rotary frequencies stay float32."""
        rotary: Any = self.model.rotary_emb
        exact = dict(rotary.named_buffers())
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            setattr(rotary, name, frequencies.to(getattr(rotary, name).device))
        return self

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """By their names in a LlamaModel: layers.0.self_attn.q_proj.weight, ..."""
        return dict(self.model.named_parameters())


def layer_config(like: Any, width: int, **given: int) -> Any:
    """A LlamaConfig of one layer of this width, in all that is not given as a layer of the model ``like`` is.

    like  : the config of a transformers model; None where all sizes are given: then the rest is Llama's default
    given : num_attention_heads, num_key_value_heads, head_dim, intermediate_size
    """
    from transformers import LlamaConfig

    def size(name: str, usual: int | None = None) -> Any:
        return given.get(name) or getattr(like, name, None) or usual

    heads = size("num_attention_heads")
    taken = {key: value for key in TAKEN if (value := getattr(like, key, None)) is not None}
    rope = getattr(like, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention", rope))  # some models have one for each kind of layer
    rope.pop("partial_rotary_factor", None)
    if "rope_theta" in rope:
        taken["rope_parameters"] = rope
    return LlamaConfig(
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", width // heads),
        intermediate_size=size("intermediate_size", 4 * width),
        attn_implementation="sdpa",
        **taken,
    )
