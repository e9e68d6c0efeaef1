"""Medusa heads: head k guesses the token at offset k + 1 from one hidden state.

Head k is L residual blocks and a vocabulary projection, W2 (SiLU(W1 h) + h) for L = 1
(Medusa, section 2.1.1). All heads' weights are stacked, inputs first, so that a decoding step runs all
the heads it needs in one batched product: with one row per head that is several times as fast as a
product per head. Heads may share one projection, the target's lm_head, which is then stored once.

N hidden states · d width · V vocabulary
K heads · L blocks · D heads that a tree needs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.errors import Unsupported
from treeopt.records.drafters import LAYOUTS
from treeopt.runtime.drafters.marginals import MarginalDraft
from treeopt.runtime.drafters.states import Heads, Logits, StateDraft
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Batch
from treeopt.runtime.training.recipe import Recipe


class MedusaHeads(Heads):
    """K independent heads on the target's last hidden state (after its final norm).

    blocks     : (L, K, d, d)   x + SiLU(x W + b) per block; W = 0, b = 0 at first: the identity
    biases     : (L, K, 1, d)
    projection : (K, d, V)     no bias; (1, d, V) where all heads share it

    ``shared`` is the (V, d) projection of all heads, whose storage is used and not copied; ``placed`` are dtype and device.
    """

    kind, has_marginals = "medusa", True

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        width: int,
        vocab_size: int,
        *,
        shared: Tensor | None = None,
        **placed: Any,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_layers, self.width, self.vocab_size = num_heads, num_layers, width, vocab_size
        self.token_ids = None
        zeros = partial(torch.zeros, **placed)
        self.blocks = nn.Parameter(zeros(num_layers, num_heads, width, width))
        self.biases = nn.Parameter(zeros(num_layers, num_heads, 1, width))
        own = zeros(num_heads, width, vocab_size) if shared is None else shared.detach().to(**placed).T[None]
        self.projection = nn.Parameter(own)
        self.shares_projection = shared is not None

    @classmethod
    def like_lm_head(cls, lm_head: Tensor, num_heads: int, num_layers: int = 1) -> MedusaHeads:
        """Untrained heads that start as copies of the target's own (V, d) head, as the paper does."""
        vocab_size, width = lm_head.shape
        heads = cls(num_heads, num_layers, width, vocab_size, dtype=lm_head.dtype, device=lm_head.device)
        with torch.no_grad():
            heads.projection.copy_(lm_head.T.expand(num_heads, -1, -1))
        return heads

    @property
    def weights(self) -> dict[str, Tensor]:
        """Views of them, by the names and in the shapes that Medusa's own files have."""
        found = {}
        for k in range(self.num_heads):
            for layer in range(self.num_layers):
                found[f"{k}.{layer}.linear.weight"] = self.blocks[layer, k].T
                found[f"{k}.{layer}.linear.bias"] = self.biases[layer, k, 0]
            found[f"{k}.{self.num_layers}.weight"] = self.projection[0 if self.shares_projection else k].T
        return found

    def logits(self, hidden: Tensor, k: int) -> Tensor:
        """Logits of head k (from 0): (N, d) to (N, V)."""
        for block, bias in zip(self.blocks, self.biases, strict=True):
            hidden = hidden + F.silu(torch.addmm(bias[k], hidden, block[k]))
        return hidden @ self.projection[0 if self.shares_projection else k]

    def first(self, depth: int) -> Callable[[Tensor], Tensor]:
        """Heads 0...depth-1 as they are now: a function that gives all their logits at once, (N, d) to (N, D, V)."""
        layers = [(block[:depth], bias[:depth]) for block, bias in zip(self.blocks, self.biases, strict=True)]
        projection = self.projection[0 if self.shares_projection else slice(depth)]

        def logits(hidden: Tensor) -> Tensor:
            x = hidden.expand(depth, *hidden.shape)  # (D, N, d)
            for block, bias in layers:
                x = F.silu(torch.baddbmm(bias, x, block), inplace=True).add_(x)
            return torch.matmul(x, projection).transpose(0, 1)

        return logits

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        states = batch.states(hidden)
        for k in range(self.num_heads):
            yield states, partial(self.logits, k=k)

    def start(self, batch_size: int, capacity: int) -> MedusaDraft:
        return MedusaDraft(self)


class MedusaDraft(MarginalDraft, StateDraft):
    """The rows of a decoder: all heads that the tree needs guess at once."""

    def __init__(self, drafter: MedusaHeads) -> None:
        super().__init__(drafter)
        self._first = cache(drafter.first)

    def marginals(self, roots: Tensor, depth: int) -> Tensor:
        return self._first(depth)(self.hidden)


def untrained(target: Target, recipe: Recipe, lm_head: Tensor, _: object) -> MedusaHeads:
    """Heads to train, which begin as the target's own head: see `treeopt.records.drafters.DrafterKind`."""
    if not LAYOUTS[recipe.defaults.layout].shares:
        return MedusaHeads.like_lm_head(lm_head, recipe.num_heads, recipe.layers)
    check_bias(target)
    sizes = (recipe.num_heads, recipe.layers, *reversed(lm_head.shape))
    return MedusaHeads(*sizes, shared=lm_head, dtype=lm_head.dtype, device=lm_head.device)


def check_bias(target: Target) -> None:
    """Raise Unsupported for a target whose lm_head cannot be shared."""
    if getattr(target.lm_head, "bias", None) is not None:
        raise Unsupported("Heads that share the lm_head need one without a bias, but this model's has one.")
