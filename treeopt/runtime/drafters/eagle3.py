"""EAGLE-3: one layer that reads the target between its layers, and then its own states; it has a vocabulary of its own.

The target's residual stream at three of its layers is fused into one state, h = fc [g_low, g_mid, g_high]. The layer's
attention reads the embedding of the next token and h, each after a norm of its own; h itself is the residual. What comes
out stands in for the fused state at the next depth (EAGLE-3, sections 3.1 and 3.2), and after a norm the drafter's own
head guesses from it. EAGLE-3.1 norms the target's states before fc, and feeds back the state behind the last norm.

b rows · n states of each · L states of the target that are fused · w their width · d width of the layer
V vocabulary · Vt tokens that the drafter guesses
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.errors import InvalidInput
from treeopt.runtime.drafters.layer import OneLayer, UnrolledHeads, begin_weights, layer_config, zero_linear
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Text, common_tokens
from treeopt.runtime.training.recipe import Recipe

FEWEST_LAYERS = 7  # of a target whose layers 2, N // 2 and N - 3 are three
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Form:
    """The ways in which EAGLE-3 drafters differ.

    width, vocab_size : w and V, the target's
    states            : L
    layers            : at whose inputs they are read (the number of layers is the last one's output); None for the
                        usual ones: 2, N // 2 and N - 3 of N
    before_residual   : the residual is h after its norm (norm_before_residual)
    fuse_norm         : one norm of all states before fc (norm_before_fc)
    state_norms       : a norm of each of them before fc (fc_norm)
    normed_feedback   : the state behind the last norm is fed back (norm_output), not the one before it
    fc_bias, bias     : whether fc, and the projections of the attention, have a bias
    head_norms        : norms of every query and key head, as Qwen3 has (q_norm, k_norm)
    own_embedding     : whether the input embeddings are not the target's
    mask_id           : of a P-EAGLE drafter, the token that stands for what is to be guessed
    """

    width: int
    vocab_size: int
    states: int = 3
    layers: tuple[int, ...] | None = None
    before_residual: bool = False
    fuse_norm: bool = False
    state_norms: bool = False
    normed_feedback: bool = False
    fc_bias: bool = False
    bias: bool = False
    head_norms: bool = False
    own_embedding: bool = False
    mask_id: int | None = None


class Eagle3Heads(UnrolledHeads):
    """EAGLE-3's drafter, by its `layer_config`; it guesses ``num_heads`` tokens ahead.

    lm_head : the target's; None where the drafter has its own
    """

    kind = "eagle3"

    def __init__(
        self,
        config: Any,
        form: Form,
        *,
        embedding: Tensor | None,
        lm_head: Tensor | None = None,
        token_ids: Tensor | None = None,
        num_heads: int = DRAFT_DEPTH,
        **placed: Any,
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        super().__init__()
        self.form, self.num_heads, self.width, self.vocab_size = form, num_heads, form.width, form.vocab_size
        d = config.hidden_size

        def norm(width: int) -> nn.Module:
            made = LlamaRMSNorm(width, eps=config.rms_norm_eps).to(**placed)
            nn.init.zeros_(made.weight)
            return made

        self.register_vocabulary(embedding, lm_head, token_ids, d, **placed)
        self.fc = zero_linear(form.states * form.width, d, bias=form.fc_bias, **placed)
        self.input_norm = norm(form.states * form.width) if form.fuse_norm else None
        self.fc_norm = nn.ModuleList(norm(form.width) for _ in range(form.states * form.state_norms))
        self.layer = OneLayer(config, make=partial(layer_at, form=form), **placed)
        self.norm = norm(d)

    def layers_of(self, num_layers: int) -> Sequence[int]:
        """The layers that are read of a target of so many; InvalidInput where there are no usual ones."""
        if self.form.layers is not None:
            return self.form.layers
        if num_layers < FEWEST_LAYERS:
            raise InvalidInput(
                "An EAGLE-3 drafter reads the target before its layers 2, N // 2 and N - 3, three of them from "
                f"{FEWEST_LAYERS} layers on, but the target has {num_layers}: say in the drafter's config.json which are "
                "read (eagle_aux_hidden_state_layer_ids), or pass the `model` that it was trained for."
            )
        return 2, num_layers // 2, num_layers - 3

    def fused(self, hidden: Tensor) -> Tensor:
        states = hidden[..., self.width :]  # behind the target's last state
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm:
            parts = states.split(self.width, -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def predict(self, following: Tensor, hidden: Tensor, *passed: Any) -> Tensor:
        made = self.layer(torch.cat([F.embedding(following, self.embedding), hidden], -1), *passed)
        return self.norm(made) if self.form.normed_feedback else made

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states if self.form.normed_feedback else self.norm(states), self.lm_head)


class PairLayer(nn.Module):
    """A Llama layer on pairs [embedding, state], (b, n, 2d) to (b, n, d): each has a norm, the state is the residual."""

    def __init__(self, config: Any, form: Form) -> None:
        from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

        super().__init__()
        d, self.before_residual = config.hidden_size, form.before_residual
        self.self_attn = attention_at(config, 0, form)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(d, eps=config.rms_norm_eps) for _ in range(3)
        )

    def forward(self, pairs: Tensor, **kwargs: Any) -> Tensor:
        embedded, state = pairs.chunk(2, -1)
        normed = self.hidden_norm(state)
        read = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, _ = self.self_attn(hidden_states=read, **kwargs)
        state = attended + (normed if self.before_residual else state)
        return state + self.mlp(self.post_attention_layernorm(state))


def layer_at(config: Any, place: int, form: Form) -> nn.Module:
    """The layer at a place: the first reads pairs, those behind it, which P-EAGLE has, are plain."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if place == 0:
        return PairLayer(config, form)
    layer = LlamaDecoderLayer(config, place)
    layer.self_attn = attention_at(config, place, form)
    return layer


def attention_at(config: Any, place: int, form: Form) -> nn.Module:
    """The attention of a layer, whose first one reads vectors of twice the width."""
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    made: nn.Module = (Qwen3Attention if form.head_norms else LlamaAttention)(config, place)
    for name in PROJECTIONS:
        rows, columns = getattr(made, name).weight.shape
        twice = place == 0 and name != "o_proj"
        setattr(made, name, nn.Linear(columns << twice, rows, bias=form.bias))
    return made


def layers_to_read(num_layers: int) -> tuple[int, ...] | None:
    """At whose inputs a drafter that is trained here reads the target: None for the usual three, where they are three.

    The first is never 1, which readers take for the output of layer 1.

    >>> [layers_to_read(n) for n in (1, 2, 3, 4, 6, 7)]
    [(0, 1), (0, 1, 2), (0, 2, 3), (2, 3, 4), (2, 4, 6), None]
    """
    if num_layers >= FEWEST_LAYERS:
        return None
    low = 2 if num_layers > 3 else 0
    return tuple(dict.fromkeys((low, (low + num_layers + 1) // 2, num_layers)))


@torch.no_grad()
def untrained(target: Target, recipe: Recipe, lm_head: Tensor, texts: Sequence[Text]) -> Eagle3Heads:
    """A layer to train: it hands the target's last state on, and its head is rows of the target's own (V, d).

    Its rotation is the plain one that EAGLE-3's readers take where config.json says none.
    """
    config, width = layer_config(target.config, target.width, layers=recipe.layers), target.width
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    layers = layers_to_read(target.num_layers)
    ids = common_tokens(texts, target.vocab_size, recipe.guessed)
    made = Eagle3Heads(
        config,
        Form(width, target.vocab_size, states=3 if layers is None else len(layers), layers=layers),
        embedding=target.model.get_input_embeddings().weight,
        token_ids=None if len(ids) == target.vocab_size else ids,
        num_heads=recipe.num_heads,
        dtype=lm_head.dtype,
        device=lm_head.device,
    )
    begin_weights(made, target)
    made.fc.weight.zero_()
    made.fc.weight[:, -width:] = torch.eye(width)
    made.lm_head.copy_(lm_head[ids.to(lm_head.device)])
    return made
