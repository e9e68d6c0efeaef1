"""Medusa heads: head k guesses the token at offset k + 1 from one hidden state.

Head k is L residual blocks and a vocabulary projection, W2 (SiLU(W1 h) + h) for L = 1
(Medusa, section 2.1.1).

N hidden states · d width · V vocabulary · K heads · L blocks
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResBlock(nn.Module):
    """x + SiLU(W x + b), width d to width d; starts as the identity (W = 0, b = 0)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Head(nn.Sequential):
    """L residual blocks and a vocabulary projection without bias."""

    def __init__(self, num_layers: int, width: int, vocab_size: int) -> None:
        blocks = [ResBlock(width) for _ in range(num_layers)]
        super().__init__(*blocks, nn.Linear(width, vocab_size, bias=False))


class MedusaHeads(nn.Module):
    """K independent heads on the target's last hidden state (after its final norm).

    The names of the parameters are those of the published checkpoints:
    ``{k}.{l}.linear.weight``, ``{k}.{l}.linear.bias`` and ``{k}.{L}.weight``, k from 0.
    """

    kind = "medusa"

    def __init__(self, num_heads: int, num_layers: int, width: int, vocab_size: int) -> None:
        super().__init__()
        self.num_layers, self.vocab_size = num_layers, vocab_size
        self.heads = nn.ModuleList(Head(num_layers, width, vocab_size) for _ in range(num_heads))

    @classmethod
    def like_lm_head(cls, lm_head: Tensor, num_heads: int, num_layers: int = 1) -> MedusaHeads:
        """Untrained heads that start as copies of the target's own (V, d) head, as the paper does."""
        vocab_size, width = lm_head.shape
        heads = cls(num_heads, num_layers, width, vocab_size).to(lm_head.device, lm_head.dtype)
        with torch.no_grad():
            for k in range(num_heads):
                heads.projection(k).copy_(lm_head)
        return heads

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def width(self) -> int:
        """Width d of the hidden state that the heads read."""
        return int(self.projection(0).shape[1])

    def projection(self, k: int) -> Tensor:
        """The (V, d) vocabulary projection of head k (from 0)."""
        head = self.heads[k]
        assert isinstance(head, Head)
        projection = head[-1]
        assert isinstance(projection, nn.Linear)
        return projection.weight

    def logits(self, hidden: Tensor, k: int) -> Tensor:
        """Logits of head k (from 0): (..., d) to (..., V)."""
        return self.heads[k](hidden)
