"""EAGLE-1: one layer that predicts the target's next hidden state, from which the target's own head guesses.

The pair of the hidden state f_j of token j and the embedding of the token after it goes through a linear layer,
fc [e_{j+1}, f_j], and a Llama layer without input norm, which attends to the pairs before it; what comes out
stands for f_{j+1} (EAGLE, section 4.1). In a tree it takes the place of the target's state for the next depth.
EAGLE-2's checkpoints are the same.

B texts · T their tokens · A states of each · K guesses in a row · d width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from treeopt.runtime.drafters.causal import CausalDraft
from treeopt.runtime.drafters.layer import OneLayer, zero_linear
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH
from treeopt.runtime.drafters.states import Heads, Logits

if TYPE_CHECKING:
    from treeopt.runtime.training.batches import Batch


class UnrolledHeads(Heads):
    """One layer that reads its own predictions: the base of EAGLE-1, EAGLE-3 and MTP heads.

    embedding : (V, d) input embeddings
    """

    reads_prompt = True
    num_layers = 1
    embedding: Tensor

    def logits(self, states: Tensor) -> Tensor:
        """Logits of the token after predicted states: (..., d) to (..., Vt)."""
        raise NotImplementedError

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
                following = tokens[row, (places + k + 1).clamp_max(pairs)]
                states = self.predict(following, states, places + k, cache, torch.cat(seen, 2)[:, None])
            yield states[batch.rows, own], self.logits


class EagleHeads(UnrolledHeads):
    """EAGLE-1's layer; it guesses ``num_heads`` tokens ahead. All weights are zero at first.

    config             : of the layer, see `layer_config`
    embedding, lm_head : (V, d)  the target's, whose storage is used; they are neither trained nor in the state dict
    placed             : dtype and device
    """

    kind = "eagle"
    shares_projection = True
    lm_head: Tensor

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
        self.num_heads, self.token_ids = num_heads, None
        self.vocab_size, self.width = lm_head.shape
        self.register_buffer("embedding", embedding.detach().to(**placed), persistent=False)
        self.register_buffer("lm_head", lm_head.detach().to(**placed), persistent=False)
        self.fc = zero_linear(2 * self.width, self.width, bias=bias, **placed)
        self.layer = OneLayer(config, normed=False, **placed)

    def predict(self, following: Tensor, hidden: Tensor, *passed: Any) -> Tensor:
        return self.layer(self.fc(torch.cat([F.embedding(following, self.embedding), hidden], -1)), *passed)

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.lm_head)
