"""Speculative sampling with a draft model: drafted tokens are kept or replaced so that the text is the target's own.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023, algorithm 1;
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023. A token drafted with
probability q is accepted with probability min(1, p/q); the first rejected one is replaced by a draw from the
residual, norm(max(p - q, 0)). The tokens of a chain are distributed as the target's, but are not those that plain
sampling would draw with the same seed.

The noise is keyed as in `treeopt.runtime.sampling`, so runs repeat. A place may be drafted in several steps, with
the same noise; it is decided in just one, and what was drafted there before depended on nothing that is kept.

b rows · K tokens of a chain · V vocabulary
p : (b, K+1, V)  the target's probabilities after the root and after every drafted token
q : (b, K, V)    the draft model's, which the tokens were drawn from
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.runtime.acceptance import sequence_key
from treeopt.runtime.cache import TreeCache
from treeopt.runtime.sampling import (
    Sampling,
    Stream,
    gumbel_argmax,
    rows_at_once,
    stream_states,
    uniforms,
)
from treeopt.runtime.target import Target
from treeopt.trace import End, SequenceEnd

if TYPE_CHECKING:
    from treeopt.runtime.decode import StopRule


def accepted_tokens(p: Tensor, q: Tensor, drafted: Tensor, noise: Tensor) -> Tensor:
    """(b,) how many of the (b, K) drafted tokens are accepted, by (b, K) noise inside (0, 1).

    >>> p, q = torch.tensor([[[0.3, 0.7], [0.5, 0.5]]]), torch.tensor([[[0.6, 0.4]]])
    >>> [int(accepted_tokens(p, q, torch.tensor([[0]]), torch.tensor([[noise]]))) for noise in (0.49, 0.51)]
    [1, 0]
    """
    token = drafted[..., None]
    passes = noise * q.gather(-1, token)[..., 0] < p[:, :-1].gather(-1, token)[..., 0]
    return passes.long().cumprod(1).sum(1)


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


def reject(
    p: Tensor, q: Tensor, drafted: Tensor, *, seed: int, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The step's verdict: (b,) accepted tokens, and the (b,) token behind them.

    keys      : (b,)  of each row's sequence
    positions : (b,)  of the first drafted token in its sequence, prompt included
    """
    places = positions[:, None] + torch.arange(drafted.shape[1], device=drafted.device)
    noise = uniforms(stream_states(seed, Stream.ACCEPT, keys[:, None], places), 1)[..., 0]
    accepted = accepted_tokens(p, q, drafted, noise)
    states = stream_states(seed, Stream.TOKEN, keys, positions + accepted)
    return accepted, gumbel_argmax(next_probabilities(p, q, accepted).log(), states)


@dataclass
class ChainRow:
    """One sequence while it is decoded, and its record afterwards."""

    prompt: Sequence[int]
    watch: SequenceEnd
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # drafted tokens emitted by each step
    end: End | None = None

    @property
    def length(self) -> int:
        """Tokens of the text so far, prompt included."""
        return len(self.prompt) + len(self.tokens)

    def emit(self, tokens: Sequence[int]) -> int:
        """Append tokens up to where the sequence ends; how many those are."""
        before = len(self.tokens)
        for token in tokens:
            if self.end is None:
                self.tokens.append(token)
                self.end = self.watch.push(token)
        return len(self.tokens) - before


def decode_by_rejection(
    target: Target,
    draft: Target,
    prompts: Sequence[Sequence[int]],
    *,
    chain: int,
    batch_size: int,
    stop: StopRule,
    sampling: Sampling,
) -> list[ChainRow]:
    """Decode every prompt to its end, in steps of ``chain`` drafted tokens; the records in the prompts' order.

    Raises InvalidInput for models of different vocabularies, an empty prompt or one that leaves no room.
    """
    if chain < 1:
        raise InvalidInput(f"A chain must have at least 1 token, but got {chain}.")
    check_pair(target, draft, prompts, target.context - 1)
    rows = [
        ChainRow(prompt, SequenceEnd(stop.eos_ids, stop.max_new_tokens, target.context - len(prompt),
                                     stop_at_loops=stop.at_loops))
        for prompt in prompts
    ]  # fmt: skip
    for first in range(0, len(rows), batch_size):
        together = rows[first : first + batch_size]
        longest = max(len(row.prompt) for row in together) + stop.max_new_tokens
        capacity = min(longest, target.context) + chain
        _decode_together(target, draft, together, chain, capacity, sampling)
    return rows


@torch.inference_mode()
def _decode_together(
    target: Target, draft: Target, live: list[ChainRow], chain: int, capacity: int, sampling: Sampling
) -> None:
    device, seed = target.device, sampling.seed
    of_target, of_draft = (
        TreeCache(model.num_layers, len(live), capacity, model.layer_devices) for model in (target, draft)
    )
    prompts = [row.prompt for row in live]
    keys = torch.tensor([sequence_key(prompt) for prompt in prompts], device=device)
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
    _prefill(draft, of_draft, prompts)
    last = _prefill(target, of_target, prompts)[torch.arange(len(live), device=device), ends - 1]  # (b, d)
    first = sampling.choose(target.scores(target.logits(last)), keys, ends)
    for row, root in zip(live, first.tolist(), strict=True):
        row.emit([root])
    while True:
        going = [i for i, row in enumerate(live) if row.end is None]
        live, keys = [live[i] for i in going], keys[going]
        if not live:
            return
        # The root is in no cache. The draft model may not have seen the token before it, the last of a chain, so
        # it is fed two; what its cache has from there on is written again.
        for cache, unseen in ((of_target, 1), (of_draft, 2)):
            cache.keep(going)
            cache.lengths = [row.length - unseen for row in live]
        starts = torch.tensor([row.length for row in live], device=device)  # (b,) of the first drafted token
        fed = torch.tensor([[row.prompt[-1], *row.tokens[-2:]][-2:] for row in live], device=device)  # (b, 2)
        verified, q = [fed[:, 1:]], []
        for place in range(chain):
            q.append(sampling.probabilities(_extend(draft, of_draft, fed)[:, -1]))  # (b, V)
            states = stream_states(seed, Stream.DRAFT, keys, starts + place)
            fed = gumbel_argmax(q[-1].log(), states)[:, None]  # (b, 1)
            verified.append(fed)
        tokens = torch.cat(verified, 1)  # (b, 1 + K) the roots first
        p = sampling.probabilities(_extend(target, of_target, tokens))
        drafted = tokens[:, 1:]
        accepted, following = reject(p, torch.stack(q, 1), drafted, seed=seed, keys=keys, positions=starts)
        for row, guesses, n, token in zip(
            live, drafted.tolist(), accepted.tolist(), following.tolist(), strict=True
        ):
            row.accepted.append(min(n, row.emit([*guesses[:n], token])))


def _prefill(model: Target, cache: TreeCache, texts: Sequence[Sequence[int]]) -> Tensor:
    """Feed whole texts, padded on the right: (rows, longest, d) hidden states."""
    lengths = [len(text) for text in texts]
    tokens = torch.zeros((len(texts), max(lengths)), dtype=torch.long)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    cache.begin_prefill(list(range(len(texts))), lengths, model.device)
    positions = torch.arange(max(lengths), device=model.device).clamp_max(model.context - 1)
    return model.hidden(tokens.to(model.device), positions.expand(len(texts), -1), cache, None)


def _extend(model: Target, cache: TreeCache, tokens: Tensor) -> Tensor:
    """Feed (b, T) tokens behind the rows of a cache: (b, T, V) logits."""
    count = tokens.shape[1]
    starts = torch.tensor(cache.lengths, device=model.device)[:, None]
    steps = torch.arange(count, device=model.device)
    causal = torch.ones((count, count), dtype=torch.bool, device=model.device).tril()
    cache.begin_step(count, starts)
    mask = model.mask(cache, starts, causal, steps)
    positions = (starts + steps).clamp_max(model.context - 1)  # what is beyond is never emitted
    hidden = model.hidden(tokens.to(model.device), positions, cache, mask)
    cache.lengths = [length + count for length in cache.lengths]
    return model.scores(model.logits(hidden)).to(tokens.device)


@torch.inference_mode()
def estimate_overlap(
    target: Target, draft: Target, texts: Sequence[Sequence[int]], sampling: Sampling
) -> list[NDArray[np.float64]]:
    """(n,) of each text of n tokens: sum min(p, q) behind each of them, P(a token drafted there is accepted).

    Their mean over the texts that the target writes is the acceptance rate of `treeopt.chain_theory`.
    """
    check_pair(target, draft, texts, target.context)
    rows, models = rows_at_once(target.vocab_size), (target, draft)
    found = []
    for text in texts:
        parts = []
        for model in models:
            cache = TreeCache(model.num_layers, 1, len(text), model.layer_devices)
            parts.append(_prefill(model, cache, [text])[0].split(rows))
        overlaps = []
        for both in zip(*parts, strict=True):
            p, q = (
                sampling.probabilities(model.scores(model.logits(hidden))).cpu()
                for model, hidden in zip(models, both, strict=True)
            )
            overlaps.append(torch.minimum(p, q).sum(-1))
        found.append(torch.cat(overlaps).numpy())
    return found


def check_pair(target: Target, draft: Target, texts: Sequence[Sequence[int]], most: int) -> None:
    """Raise InvalidInput for models of different vocabularies, and for texts without tokens or with too many."""
    if target.vocab_size != draft.vocab_size:
        raise InvalidInput(
            f"The draft model must have the target's vocabulary, {target.vocab_size} tokens, but has "
            f"{draft.vocab_size}."
        )
    for i, text in enumerate(texts, 1):
        if not 1 <= len(text) <= most:
            raise InvalidInput(
                f"Every prompt must have 1 to {most} tokens (the context is {target.context}), but prompt {i} has "
                f"{len(text)}."
            )
