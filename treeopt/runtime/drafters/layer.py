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


def zero_linear(
    inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Linear:
    """A linear layer, all weights zero."""
    made = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, dtype=dtype, device=device or "cpu")
    for weight in made.parameters():
        nn.init.zeros_(weight)
    return made


class OneLayer(nn.Module):
    """A Llama decoder layer, all weights zero. Its parameters bear the names that a LlamaModel gives them.

    normed : whether it has the norms before its attention (input_layernorm) and after its last sum (norm)
    make   : makes another layer in its place, of its config; the norms before its attention are its own
    """

    def __init__(
        self,
        config: Any,
        *,
        normed: bool,
        make: Callable[[Any], nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
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
        self.model = model.to(dtype).to_empty(device=device or "cpu")
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


def layer_config(
    like: Any,
    width: int,
    *,
    heads: int | None = None,
    key_heads: int | None = None,
    head_width: int | None = None,
    inner_width: int | None = None,
) -> Any:
    """A LlamaConfig of one layer of this width, in all that is not given as a layer of the model ``like`` is.

    like : the config of a transformers model, or None where all is given: then the rest is Llama's default
    """
    from transformers import LlamaConfig

    heads = heads or like.num_attention_heads
    key_heads = key_heads or getattr(like, "num_key_value_heads", None) or heads
    head_width = head_width or getattr(like, "head_dim", None) or width // heads
    inner_width = inner_width or getattr(like, "intermediate_size", None) or 4 * width
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
        num_key_value_heads=key_heads,
        head_dim=head_width,
        intermediate_size=inner_width,
        attn_implementation="sdpa",
        **taken,
    )
