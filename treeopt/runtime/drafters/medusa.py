"""Medusa heads: head k guesses the token at offset k + 1 from one hidden state.

Head k is L residual blocks and a vocabulary projection, W2 (SiLU(W1 h) + h) for L = 1
(Medusa, section 2.1.1). All heads' weights are stacked, inputs first, so that a decoding step runs all
the heads it needs in one batched product: with one row per head that is several times as fast as a
product per head.

N hidden states · d width · V vocabulary · K heads · L blocks · D heads that a tree needs
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MedusaHeads(nn.Module):
    """K independent heads on the target's last hidden state (after its final norm).

    blocks     : (L, K, d, d)  x + SiLU(x W + b) per block; W = 0, b = 0 at first: the identity
    biases     : (L, K, 1, d)
    projection : (K, d, V)     no bias
    """

    kind = "medusa"

    def __init__(self, num_heads: int, num_layers: int, width: int, vocab_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_layers, self.width, self.vocab_size = (
            num_heads,
            num_layers,
            width,
            vocab_size,
        )
        self.blocks = nn.Parameter(torch.zeros(num_layers, num_heads, width, width))
        self.biases = nn.Parameter(torch.zeros(num_layers, num_heads, 1, width))
        self.projection = nn.Parameter(torch.zeros(num_heads, width, vocab_size))

    @classmethod
    def like_lm_head(cls, lm_head: Tensor, num_heads: int, num_layers: int = 1) -> MedusaHeads:
        """Untrained heads that start as copies of the target's own (V, d) head, as the paper does."""
        vocab_size, width = lm_head.shape
        heads = cls(num_heads, num_layers, width, vocab_size).to(lm_head.device, lm_head.dtype)
        with torch.no_grad():
            heads.projection.copy_(lm_head.T.expand(num_heads, -1, -1))
        return heads

    def logits(self, hidden: Tensor, k: int) -> Tensor:
        """Logits of head k (from 0): (N, d) to (N, V)."""
        for block, bias in zip(self.blocks, self.biases, strict=True):
            hidden = hidden + F.silu(torch.addmm(bias[k], hidden, block[k]))
        return hidden @ self.projection[k]

    def first_logits(self, hidden: Tensor, depth: int) -> Tensor:
        """Logits of heads 0...depth-1 at once: (N, d) to (N, D, V)."""
        x = hidden.expand(depth, *hidden.shape)  # (D, N, d)
        for block, bias in zip(self.blocks, self.biases, strict=True):
            x = x + F.silu(torch.baddbmm(bias[:depth], x, block[:depth]))
        return torch.bmm(x, self.projection[:depth]).transpose(0, 1)

    def named_tensors(self) -> dict[str, Tensor]:
        """The weights under the names, and in the shapes, of the published checkpoints."""
        tensors = {}
        for k in range(self.num_heads):
            for layer in range(self.num_layers):
                tensors[f"{k}.{layer}.linear.weight"] = self.blocks[layer, k].T
                tensors[f"{k}.{layer}.linear.bias"] = self.biases[layer, k, 0]
            tensors[f"{k}.{self.num_layers}.weight"] = self.projection[k].T
        return tensors
