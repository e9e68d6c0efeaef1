"""Hydra heads: like Medusa's, but every head also reads the tokens that were guessed before its own.

Head i reads the hidden state of y_t and the target's input embeddings of y_{t+1}...y_{t+1+i}, one after the
other, and guesses y_{t+2+i} (Hydra, section 3). Its first block takes them to the target's width,
R x + SiLU(W x); further ones are Medusa's, x + SiLU(W x); its vocabulary projection has a bias. Hydra++
(section 4) first sends the hidden states of the whole text through one decoder layer, the prefix layer.

N states · K heads · L blocks · d width · V vocabulary · b live rows · E expanding nodes of a level
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.runtime.drafters.layer import OneLayer, layer_config, zero_linear
from treeopt.runtime.drafters.levels import LevelDraft
from treeopt.runtime.drafters.protocol import DrafterState, Frontier
from treeopt.runtime.drafters.states import CausalDraft, Heads, Logits, StateDraft

if TYPE_CHECKING:
    from treeopt.runtime.target import Target
    from treeopt.runtime.training.batches import Batch, Text
    from treeopt.runtime.training.recipe import Recipe


class HydraHead(nn.Module):
    """Head i: (i+2) d numbers to logits."""

    def __init__(self, i: int, num_layers: int, width: int, vocab_size: int, **placed: Any) -> None:
        super().__init__()
        self.linear = zero_linear((i + 2) * width, width, **placed)
        self.res_connection = zero_linear((i + 2) * width, width, **placed)
        self.blocks = nn.ModuleList(zero_linear(width, width, **placed) for _ in range(num_layers - 1))
        self.lm_head = zero_linear(width, vocab_size, **placed)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., (i+2) d) to (..., V)."""
        x = self.res_connection(inputs) + F.silu(self.linear(inputs))
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.lm_head(x)


class HydraHeads(Heads):
    """K heads that read the path before their guess; with a prefix layer they are Hydra++. All weights are zero at first.

    embedding : (V or more, d)  the target's input embeddings, whose storage is used; neither trained nor in the state dict
    prefix    : config of the prefix layer (see `layer_config`); None for plain Hydra
    placed    : dtype and device
    unused    : tensors of a checkpoint that no guess depends on, kept on the CPU for writing it again
    """

    embedding: Tensor

    def __init__(
        self, num_heads: int, num_layers: int, vocab_size: int, *, embedding: Tensor, prefix: Any = None, **placed: Any
    ) -> None:
        super().__init__()
        self.num_heads, self.num_layers, self.token_ids = num_heads, num_layers, None
        self.vocab_size, self.width = vocab_size, embedding.shape[1]
        self.kind, self.reads_prompt = "hydra" if prefix is None else "hydra++", prefix is not None
        self.register_buffer("embedding", embedding.detach().to(**placed), persistent=False)
        self.heads = nn.ModuleList(HydraHead(i, num_layers, self.width, vocab_size, **placed) for i in range(num_heads))
        self.prefix_layer = None if prefix is None else OneLayer(prefix, normed=True, **placed)
        self.unused: dict[str, Tensor] = {}

    def prefix(self, hidden: Tensor) -> Tensor:
        """The (b, T, d) states of whole texts, padded on the right, as the heads read them."""
        return hidden if self.prefix_layer is None else self.prefix_layer(hidden)

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        read, path = batch.states(self.prefix(hidden)), batch.ahead.clamp_min(0)
        for k, head in enumerate(self.heads):
            read = torch.cat([read, F.embedding(path[:, k], self.embedding)], 1)
            yield read, head

    def predict(self, following: Tensor, hidden: Tensor, *passed: Any) -> Tensor:
        assert self.prefix_layer is not None, "plain Hydra has no layer"
        return self.prefix_layer(hidden, *passed)

    def start(self, batch_size: int, capacity: int) -> DrafterState:
        if self.prefix_layer is None:
            return HydraDraft(self)
        return PrefixDraft(self, 1, batch_size, capacity, self.embedding.device)


class PathDraft(LevelDraft):
    """The base of both drafts: a head reads the state before the root and the tokens of the path."""

    states: Tensor  # (b, E, ...) read by the nodes of the level that was expanded last

    def logits(self, level: Frontier, tokens: Tensor) -> Tensor:
        guesses = F.embedding(tokens, self.drafter.embedding)
        self.states = torch.cat([level.inherit(self.states), guesses], -1)  # (b, E, (i+2) d)
        return self.drafter.heads[level.depth](self.states)


class HydraDraft(PathDraft, StateDraft):
    """The rows of a decoder: the state of the last committed token is all that plain Hydra needs."""

    def begin(self, roots: Tensor, depth: int) -> None:
        self.states = self.hidden[:, None]


class PrefixDraft(PathDraft, CausalDraft):
    """The rows of a decoder for Hydra++: newly committed states go through the prefix layer once a tree step."""


@torch.no_grad()
def untrained(
    target: Target, recipe: Recipe, lm_head: Tensor, texts: Sequence[Text], hidden_rms: Callable[[], float]
) -> HydraHeads:
    """Heads to train, which begin as the target's own (V, d) head: see `treeopt.records.drafters.DrafterKind`.

    Their logits are exactly the target's. With a prefix layer they are the target's times a number above 0 for each
    state, since the layer ends in a norm: the same order (if the head has no bias), and about the same numbers where
    ``hidden_rms`` is the usual root mean square of the target's hidden states.
    """
    vocab_size, width = lm_head.shape
    embedding, bias = target.model.get_input_embeddings().weight.detach(), getattr(target.lm_head, "bias", None)
    prefix: Any = layer_config(target.config, width) if recipe.kind == "hydra++" else None
    sizes, read = (recipe.num_heads, recipe.layers, vocab_size), {"embedding": embedding, "prefix": prefix}
    made = HydraHeads(*sizes, **read, dtype=lm_head.dtype, device=lm_head.device)
    for head in made.heads:
        assert isinstance(head, HydraHead)
        head.res_connection.weight[:, :width].fill_diagonal_(1)
        head.lm_head.weight.copy_(lm_head)
        if bias is not None:
            head.lm_head.bias.copy_(bias)
    for name, weight in made.prefix_layer.weights.items() if made.prefix_layer is not None else ():
        if weight.ndim == 1:
            weight.fill_(hidden_rms() if name == "norm.weight" else 1.0)
        elif "o_proj" not in name and "down_proj" not in name:  # these are zero: the layer passes on
            weight.normal_(std=prefix.initializer_range)
    return made
