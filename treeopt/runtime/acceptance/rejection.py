"""Speculative sampling with a draft model: drafted tokens are kept or replaced so that the text is the target's own.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023, algorithm 1;
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023. A token drafted with
probability q is accepted with probability min(1, p/q); the first rejected one is replaced by a draw from the
residual, norm(max(p - q, 0)). The tokens of a chain are distributed as the target's, but are not those that plain
sampling would draw with the same seed.

The noise is keyed as in `treeopt.runtime.acceptance.rules`, so runs repeat. A place may be drafted in several steps, with
the same noise; it is decided in just one, and what was drafted there before depended on nothing that is kept.

b rows · K tokens of a chain · V vocabulary
p : (b, K+1, V)  the target's probabilities after the root and after every drafted token
q : (b, K, V)    the draft model's, which the tokens were drawn from
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from treeopt.errors import InvalidInput
from treeopt.records.origins import RuleRecord
from treeopt.records.trace import MISS
from treeopt.runtime.acceptance.rules import (
    Greedy,
    Nodes,
    NoiseStream,
    Sampling,
    gumbel_argmax,
    rows_at_once,
    sequence_key,
    stream_states,
    uniforms,
)
from treeopt.runtime.drafters.draft_model import DraftModel, ModelDraft
from treeopt.runtime.drafters.protocol import GivenText, TreeTensors
from treeopt.runtime.target import Target
from treeopt.trees.shapes import SHAPES
from treeopt.trees.tree import Tree


def accepted_tokens(p: Tensor, q: Tensor, drafted: Tensor, noise: Tensor) -> Tensor:
    """(b,) how many of the (b, K) drafted tokens are accepted, by (b, K) noise inside (0, 1); -1 where none is drafted.

    >>> p, q = torch.tensor([[[0.3, 0.7], [0.5, 0.5]]]), torch.tensor([[[0.6, 0.4]]])
    >>> [int(accepted_tokens(p, q, torch.tensor([[0]]), torch.tensor([[noise]]))) for noise in (0.49, 0.51)]
    [1, 0]
    """
    token = drafted[..., None].clamp_min(0)
    passes = noise * q.gather(-1, token)[..., 0] < p[:, :-1].gather(-1, token)[..., 0]
    return (passes & (drafted >= 0)).long().cumprod(1).sum(1)


def next_probabilities(p: Tensor, q: Tensor, accepted: Tensor) -> Tensor:
    """(b, V) of the token behind the accepted ones: the residual, or p itself behind a whole chain.

    >>> p, q = torch.tensor([[[0.3, 0.7], [0.5, 0.5]]]), torch.tensor([[[0.6, 0.4]]])
    >>> [next_probabilities(p, q, torch.tensor([accepted])).tolist() for accepted in (0, 1)]
    [[[0.0, 1.0]], [[0.5, 0.5]]]
    """
    rows = torch.arange(len(p), device=p.device)
    after = p[rows, accepted]
    nothing = torch.zeros_like(p[:, :1])  # is drafted behind a chain
    drafts = torch.cat([q, nothing], 1)[rows, accepted]
    residual = (after - drafts).clamp_min(0)
    total = residual.sum(-1, keepdim=True)
    # Without a residual p = q: the token was rejected by rounding alone.
    return torch.where(total > 0, residual / total, after)


class SampledChain(DraftModel):
    """A draft model that draws its chains from its own distribution: guesses of rank 0 only.

    proposal : (b, K, V) probabilities of the last step of its decoder, of which there is one at a time, and of each row (b,)
               the sequence's key and the position of the first drafted token
    """

    draft_vocab_size = 1  # ranks
    has_probabilities = False  # it draws its guesses
    proposal: tuple[Tensor, Tensor, Tensor]

    def __init__(self, model: DraftModel, target: Target, sampling: Sampling) -> None:
        super().__init__(model.model, model.vocab_size, num_heads=model.num_heads)
        self.target, self.sampling, self.known = target, sampling, model.draft_vocab_size

    def start(self, batch_size: int, capacity: int) -> ChainDraft:
        return ChainDraft(self, batch_size, capacity)

    def probabilities(self, hidden: Tensor) -> Tensor:
        """(..., d) of the draft model to (..., V): nothing for tokens that only the target has."""
        shares = self.sampling.probabilities(self.model.scored(hidden)[..., : self.known])
        return F.pad(shares, (0, self.vocab_size - self.known))

    def token_ranks(self, answer: GivenText, states: Tensor, top_k: int) -> Tensor:
        """(n,) 0 where a chain that is drafted would get the text's token accepted, MISS elsewhere.

        Given that token y is what comes, it was drafted and accepted with probability min(p, q)(y) / p(y), and
        whatever else was drafted makes it a token of the residual. So this holds for chains and for texts that the
        target samples under the same rule; it is exact in law, and a draw of it for the text at hand.
        """
        first, n, device = len(answer.prompt) + 1, len(states), states.device
        tokens = torch.tensor(answer.tokens[1 : 1 + n], dtype=torch.long, device=device)[:, None]
        key = torch.tensor([sequence_key(answer.prompt)], device=device)
        places = torch.arange(first, first + n, device=device)
        noise = uniforms(stream_states(self.sampling.seed, NoiseStream.ACCEPT, key, places), 1)
        each = (states, answer.state_hidden[1 : 1 + n], tokens, noise)
        passes = [torch.zeros((0, 1), dtype=torch.bool)]
        for drafts, hidden, token, level in zip(
            *(part.split(rows_at_once(self.vocab_size)) for part in each), strict=True
        ):
            p = self.sampling.probabilities(self.target.scored(hidden))
            passes.append((level * p.gather(1, token) < self.probabilities(drafts).gather(1, token)).cpu())
        return torch.where(torch.cat(passes)[:, 0], 0, MISS)


class ChainDraft(ModelDraft):
    """The rows of a decoder that drafts chains by drawing them."""

    drafter: SampledChain

    def __init__(self, drafter: SampledChain, batch_size: int, capacity: int) -> None:
        super().__init__(drafter, batch_size, capacity)
        self.keys = torch.zeros(0, dtype=torch.long, device=self.device)

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        new = torch.tensor([sequence_key(prompt) for prompt in prompts], device=self.device)
        self.keys = torch.cat([self.keys, new])
        super().prefill(prompts, hidden)

    def propose(self, plan: TreeTensors, roots: Tensor) -> Tensor:
        if not SHAPES["chain"](plan.tree):
            raise InvalidInput(f"Rejection takes chains only, but got a tree of {len(plan.tree)} rows.")
        tokens, shares, seed = [roots[:, None]], [], self.drafter.sampling.seed
        hidden = self.catch_up(roots)[:, None]
        positions = self.starts[:, 0]  # behind the root
        for depth, level in enumerate(plan.levels):
            if depth:
                hidden = self.feed_level(level, tokens[-1], None)
            q = self.drafter.probabilities(hidden)[:, 0]  # (b, V)
            states = stream_states(seed, NoiseStream.DRAFT, self.keys, positions + depth)
            drawn = gumbel_argmax(q.log(), states)
            # Beyond the draft's own context nothing is drafted: the target then says the token by itself.
            outside = positions - 1 + depth >= self.drafter.model.context
            shares.append(q.masked_fill(outside[:, None], 0.0))
            tokens.append(drawn.masked_fill(outside, -1)[:, None])
        self.drafter.proposal = torch.stack(shares, 1), self.keys, positions
        return torch.cat(tokens, 1)

    def keep(self, order: Sequence[int]) -> None:
        super().keep(order)
        self.keys = self.keys[torch.tensor(order, dtype=torch.long, device=self.device)]

    def clear(self) -> None:
        super().clear()
        self.keys = self.keys[:0]


@dataclass(frozen=True)
class Rejection(Greedy):
    """The rule: plain steps sample, and chains are accepted or replaced so that tokens are distributed as in sampling."""

    drafter: SampledChain

    @property
    def record(self) -> RuleRecord:
        return {**self.drafter.sampling.record, "rule": "rejection"}

    def choose(self, logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        if logits.ndim > 2:  # after the nodes of a chain, of which the verdict replaces the one that matters
            return logits.argmax(-1)
        return self.drafter.sampling.choose(logits, keys, positions)

    def accept(self, tree: Tree, tokens: Nodes, choices: Nodes, logits: Tensor) -> list[int]:
        (q, keys, positions), sampling = self.drafter.proposal, self.drafter.sampling
        drafted, p = torch.tensor(tokens, device=logits.device)[:, 1:], sampling.probabilities(logits)
        assert drafted.shape == q.shape[:2], "the proposal is that of this very step"
        places = positions[:, None] + torch.arange(drafted.shape[1], device=drafted.device)
        noise = uniforms(stream_states(sampling.seed, NoiseStream.ACCEPT, keys[:, None], places), 1)[..., 0]
        accepted = accepted_tokens(p, q, drafted, noise)
        states = stream_states(sampling.seed, NoiseStream.TOKEN, keys, positions + accepted)
        following = gumbel_argmax(next_probabilities(p, q, accepted).log(), states)
        last = accepted.tolist()  # node n of a chain has depth n
        for chosen, node, token in zip(choices, last, following.tolist(), strict=True):
            chosen[node] = token
        return last
