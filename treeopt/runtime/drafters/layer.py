"""A Llama layer that reads vectors, which EAGLE runs over the text before a guess, and EAGLE-1, which is one.

The pair of the hidden state f_j of token j and the embedding of the token after it goes through a linear layer,
fc [e_{j+1}, f_j], and a Llama layer without input norm, which attends to the pairs before it; what comes out
stands for f_{j+1} (EAGLE, section 4.1), and the target's own head guesses from it. In a tree it takes the place of the
target's state for the next depth. EAGLE-2's checkpoints are the same.

b, B rows or texts · T their tokens · n vectors per row · A states of each · K guesses in a row · d width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from treeopt.errors import InvalidInput
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH
from treeopt.runtime.drafters.states import CausalDraft, Heads, Logits
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Batch

MOST_SCALING = 1000  # of a rotation, which is some 1
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

    make   : makes another layer of the config for each place from 0 on; the norms before its attention are its own
    placed : dtype and device
    """

    def __init__(self, config: Any, *, make: Callable[[Any, int], nn.Module] | None = None, **placed: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding

        super().__init__()
        self.config = config
        with torch.device("meta"):
            model = LlamaModel(config)
            if make is not None:
                model.layers = nn.ModuleList(make(config, place) for place in range(config.num_hidden_layers))
        del model.embed_tokens
        model.norm = nn.Identity()
        if make is None:
            model.layers[0].input_layernorm = model.norm
        rotary = rotation_of(config, LlamaRotaryEmbedding)  # its frequencies stay float32
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


def rotation_of(config: Any, family: Callable[[Any], Any]) -> Any:
    """The rotary embedding of a layer; InvalidInput where a config's rope parameters make none for heads of its width."""
    rotary, half = family(config), config.head_dim // 2
    frequencies, scaling = rotary.inv_freq, rotary.attention_scaling
    is_scaling = isinstance(scaling, int | float) and 0 < scaling < MOST_SCALING
    if frequencies.shape != (half,) or not bool(frequencies.isfinite().all()) or not is_scaling:
        raise InvalidInput(
            f"A layer with heads of width {config.head_dim} needs {half} finite rotary frequencies, scaled by at most "
            f"{MOST_SCALING}, but its config's rope parameters give others: {config.rope_parameters}."
        )
    return rotary


def layer_config(like: Any, width: int, *, layers: int = 1, family: Any = LlamaConfig, **given: int) -> Any:
    """The config of one layer of this width, in all that is not given as a layer of the model ``like`` is.

    like   : the config of a transformers model; None where all sizes are given: then the rest is the family's default
    layers : how many there are of it
    family : the class of config
    given  : num_attention_heads, num_key_value_heads, head_dim, intermediate_size
    """

    def size(name: str, usual: int | None = None) -> Any:
        return given.get(name) or getattr(like, name, None) or usual

    heads = size("num_attention_heads")
    taken = {key: value for key in TAKEN if (value := getattr(like, key, None)) is not None}
    rope = getattr(like, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention", rope))  # some models have one for each kind of layer
    rope.pop("partial_rotary_factor", None)
    if "rope_theta" in rope:
        taken["rope_parameters"] = rope
    return family(
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", width // heads),
        intermediate_size=size("intermediate_size", 4 * width),
        attn_implementation="sdpa",
        **taken,
    )


@torch.no_grad()
def begin_weights(heads: Any, target: Target) -> None:
    """Draw the weights of a drafter to train, whose layers add nothing at first; its last norm begins as the target's RMSNorm."""
    for name, weight in heads.weights.items():
        if weight.ndim == 1:
            nn.init.ones_(weight)
        elif not name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    last: Any = getattr(target.model.get_decoder(), "norm", None)
    if "RMSNorm" in type(last).__name__:  # which scales a vector of ones by its weight, however it is stored
        heads.norm.weight.copy_(last(torch.ones(target.width, dtype=target.dtype, device=target.device)))


class UnrolledHeads(Heads):
    """One layer that reads its own predictions: the base of EAGLE-1, EAGLE-3 and MTP heads."""

    reads_prompt = True
    num_layers = 1

    def logits(self, states: Tensor) -> Tensor:
        """Logits of the token after predicted states: (..., d) to (..., Vt)."""
        raise NotImplementedError

    def read_next(self, following: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What a further step reads: the (B, A) tokens before its guesses, and the (B, A, d) that the step before has made."""
        return following, states

    def start(self, batch_size: int, capacity: int) -> CausalDraft:
        return CausalDraft(self, 1, batch_size, capacity, self.embedding.device)

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        """Logits of the layer unrolled over its own steps (EAGLE-3, figure 6).

        Step k at a place reads what step k - 1 predicted there and the true token, and attends to the true pairs up to it
        and to its own earlier steps, as it does when it decodes. Steps are made where they are asked for.
        """
        tokens, (rows, pairs), cache = batch.tokens, batch.tokens[:, 1:].shape, DynamicCache()
        row, pair = torch.arange(rows, device=tokens.device)[:, None], torch.arange(pairs, device=tokens.device)
        first = self.predict(tokens[:, 1:], self.fused(hidden[:, :pairs]), pair.expand(rows, -1), cache)
        places, own = batch.places()  # (B, A), (n,)
        states, seen = first[row, places], [pair <= places[:, :, None]]  # (B, A, d), (B, A, T - 1)
        itself = torch.eye(places.shape[1], dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        for k in range(self.num_heads):
            if k:
                seen.append(itself)
                read = self.read_next(tokens[row, (places + k + 1).clamp_max(pairs)], states)
                states = self.predict(*read, places + k, cache, torch.cat(seen, 2)[:, None])
            yield states[batch.rows, own], self.logits


class EagleHeads(UnrolledHeads):
    """EAGLE-1's layer, by its `layer_config`; it guesses ``num_heads`` tokens ahead."""

    kind = "eagle"

    def __init__(
        self,
        config: Any,
        *,
        embedding: Tensor,
        lm_head: Tensor,
        bias: bool = True,
        num_heads: int = DRAFT_DEPTH,
        **placed: Any,
    ) -> None:
        super().__init__()
        self.num_heads, (self.vocab_size, self.width) = num_heads, lm_head.shape
        self.register_vocabulary(embedding, lm_head, None, self.width, **placed)
        self.fc = zero_linear(2 * self.width, self.width, bias=bias, **placed)
        self.layer = OneLayer(config, **placed)

    def predict(self, following: Tensor, hidden: Tensor, *passed: Any) -> Tensor:
        return self.layer(self.fc(torch.cat([F.embedding(following, self.embedding), hidden], -1)), *passed)

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.lm_head)
