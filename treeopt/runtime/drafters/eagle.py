"""EAGLE-1: one layer that predicts the target's next hidden state, from which the target's own head guesses.

The pair of the hidden state f_j of token j and the embedding of the token after it goes through a linear layer,
fc [e_{j+1}, f_j], and a Llama layer without input norm, which attends to the pairs before it; what comes out
stands for f_{j+1} (EAGLE, section 4.1). In a tree it takes the place of the target's state for the next depth.
EAGLE-2's checkpoints are the same.

b rows · M pairs of a text · N states of its answer, of which n are unrolled together · K guesses in a row
d width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from treeopt.runtime.cache import TreeCache
from treeopt.runtime.drafters.causal import CausalDraft, pad
from treeopt.runtime.drafters.layer import OneLayer, zero_linear
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH, GivenText
from treeopt.runtime.drafters.states import Heads, batches, ranks_among

SEEN_AT_ONCE = 2**24  # most entries of the attention mask of an unrolled pass, its own keys not counted


class UnrolledHeads(Heads):
    """One layer that reads its own predictions: the base of EAGLE-1, EAGLE-3 and MTP heads.

    embedding : (V, d) input embeddings
    token_ids : (Vt,) target id of each token that it guesses, ascending; None where it guesses all
    """

    reads_prompt = True
    num_layers = 1
    embedding: Tensor
    token_ids: Tensor | None

    def fused(self, hidden: Tensor) -> Tensor:
        """The (b, n, d) states that `predict` takes, of the target's (b, n, ...)."""
        return hidden

    def predict(
        self,
        following: Tensor,
        hidden: Tensor,
        positions: Tensor | None = None,
        cache: TreeCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(b, n) tokens and the (b, n, d) states before each to the (b, n, d) states predicted for them."""
        raise NotImplementedError

    def logits(self, states: Tensor) -> Tensor:
        """Logits of the token after predicted states: (..., d) to (..., Vt)."""
        raise NotImplementedError

    def start(self, batch_size: int, capacity: int) -> EagleDraft:
        return EagleDraft(self, 1, batch_size, capacity, self.embedding.device)

    @torch.inference_mode()
    def ranks(self, answers: Sequence[GivenText], top_k: int) -> list[NDArray[np.int16]]:
        """(N, K) of each answer, from the layer unrolled along the true text at every state.

        Pass k at state t reads what pass k - 1 predicted there and the true token, and attends to the true pairs up
        to t and to its own earlier passes, as it does when it decodes.
        """
        found = [answer.labels(self.num_heads) for answer in answers]
        for batch in batches([len(answer.hidden) for answer in answers]):
            self._unroll([answers[i] for i in batch], [found[i] for i in batch], top_k)
        return [ranks.to(torch.int16).numpy() for ranks in found]

    def _unroll(self, answers: list[GivenText], ranks: list[Tensor], top_k: int) -> None:
        """Replace the true tokens in the (N, K) ``ranks`` of each answer by their ranks."""
        device = self.embedding.device
        after = [torch.tensor([*answer.prompt, *answer.tokens][1:], device=device) for answer in answers]
        following, hidden = pad(after), pad([answer.hidden for answer in answers])
        (b, m), longest = following.shape, max(len(answer.tokens) for answer in answers)
        n = max(1, min(longest, SEEN_AT_ONCE // (b * m)))
        cache = TreeCache(1, b, m + n * (self.num_heads - 1))
        cache.begin_prefill([m] * b)
        first = self.predict(following, self.fused(hidden), torch.arange(m, device=device).expand(b, -1), cache)
        starts = torch.full((b, 1), m, device=device)
        ends = torch.tensor([len(answer.hidden) for answer in answers], device=device)[:, None]
        firsts = ends - torch.tensor([len(answer.tokens) for answer in answers], device=device)[:, None]
        row, pair = torch.arange(b, device=device)[:, None], torch.arange(m, device=device)
        for begin in range(0, longest, n):
            # (b, n) pairs of the states; those past a row's end repeat its last one and count for nothing
            at = torch.minimum(firsts + torch.arange(begin, begin + n, device=device), ends - 1)
            seen = pair <= at[:, :, None]  # (b, n, m)
            itself = torch.eye(n, dtype=torch.bool, device=device).expand(b, -1, -1)
            states = first[row, at]
            for k in range(self.num_heads):
                if k:
                    cache.begin_step(n, starts, after=n * (k - 1))
                    mask = torch.cat([seen, *[itself] * k], 2)[:, None]
                    states = self.predict(following[row, (at + k).clamp_max(m - 1)], states, at + k, cache, mask)
                self._count(states, [part[begin : begin + n, k] for part in ranks], top_k)

    def _count(self, states: Tensor, ranks: list[Tensor], top_k: int) -> None:
        """Replace the true tokens in the views (n or fewer,) ``ranks`` of each row, from (b, n, d) states."""
        tried = [(part >= 0).nonzero()[:, 0] for part in ranks]
        states = torch.cat([of_row[at.to(of_row.device)] for of_row, at in zip(states, tried, strict=True)])
        labels = torch.cat([part[at] for part, at in zip(ranks, tried, strict=True)])
        found = ranks_among(self.logits, states, labels, top_k, self.vocab_size, self.token_ids).cpu()
        for part, at, counted in zip(ranks, tried, found.split([len(at) for at in tried]), strict=True):
            part[at] = counted


class EagleHeads(UnrolledHeads):
    """EAGLE-1's layer; it guesses ``num_heads`` tokens ahead.

    config    : of the layer, see `layer_config`
    embedding : (V, d)  input embeddings     lm_head : (V, d)  the target's
                the storage of both is used; they are neither trained nor in the state dict

    All weights are zero at first.
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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.token_ids = num_heads, None
        self.vocab_size, self.width = lm_head.shape
        self.draft_vocab_size = self.vocab_size
        self.register_buffer("embedding", embedding.detach().to(device, dtype), persistent=False)
        self.register_buffer("lm_head", lm_head.detach().to(device, dtype), persistent=False)
        self.fc = zero_linear(2 * self.width, self.width, bias=bias, dtype=dtype, device=device)
        self.layer = OneLayer(config, normed=False, dtype=dtype, device=device)

    def predict(
        self,
        following: Tensor,
        hidden: Tensor,
        positions: Tensor | None = None,
        cache: TreeCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        pairs = torch.cat([F.embedding(following, self.embedding), hidden], -1)
        return self.layer(self.fc(pairs), positions, cache, mask)

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.lm_head)


class EagleDraft(CausalDraft):
    """The rows of a decoder: the true pairs are kept, the guessed ones live for one step."""

    drafter: UnrolledHeads

    def feed(self, following: Tensor, hidden: Tensor, positions: Tensor, mask: Any) -> Tensor:
        return self.drafter.predict(following, hidden, positions, self.cache, mask)

    def fused(self, hidden: Tensor) -> Tensor:
        return self.drafter.fused(hidden)

    def begin(self, roots: Tensor, depth: int) -> None:
        self._states = self.catch_up(roots)[:, None]  # (b, E, d) predicted for the expanded nodes

    def logits(self, level: Any, tokens: Tensor) -> Tensor:
        if level.depth:
            self._states = self.feed_level(level, tokens, level.inherit(self._states))
        return self.drafter.logits(self._states)
