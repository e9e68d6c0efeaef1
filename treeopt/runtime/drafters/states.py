"""Drafters with weights that read the target's hidden states: heads, and the rows of those that need the last state alone.

b rows · B texts · n, N states · K heads · d width · V vocabulary of the target · Vt tokens that the heads guess
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treeopt.records.drafters import DRAFTERS
from treeopt.records.trace import MISS
from treeopt.runtime.drafters.levels import LevelDraft
from treeopt.runtime.drafters.protocol import GivenText, rank_of
from treeopt.runtime.training.batches import Batch, Text, make_batch

Logits = Callable[[Tensor], Tensor]

# Bound the memory of a chunk: states times vocabulary, but at least FEWEST_STATES states, at which a
# matrix product is still efficient (float32 logits over a vocabulary of 128 k: 64 MB). Slices of the
# vocabulary would bound it further, but the true token's logit must come of the same product as those
# that it is compared with, or rounding would change ranks; so a slice would have to be computed twice.
LOGITS_AT_ONCE, FEWEST_STATES = 2**21, 128
TOKENS_AT_ONCE = 8192  # most vectors, padding included, of one pass over given texts
SEEN_AT_ONCE = 2**24  # most entries of the attention mask of a layer's pass over states, its own keys not counted


class Heads(nn.Module):
    """The base of drafters with weights that read the target's hidden states, and that can be stored and trained.

    width             : of the target's states
    shares_projection : whether guesses are made with the target's own lm_head
    token_ids         : (Vt,) target id of each token that they guess, ascending; None where they guess all
    """

    kind: str
    num_heads: int
    width: int
    vocab_size: int
    token_ids: Tensor | None
    reads_prompt = shares_projection = False

    @property
    def has_probabilities(self) -> bool:
        return DRAFTERS[self.kind].by_level

    @property
    def draft_vocab_size(self) -> int:
        """Vt: logits per guess, and so the most ranks that can be told apart."""
        return self.vocab_size if self.token_ids is None else len(self.token_ids)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def layers_of(self, num_layers: int) -> Sequence[int]:
        """At whose inputs a target of so many layers is read, besides its last state."""
        return ()

    def fused(self, hidden: Tensor) -> Tensor:
        """The (b, n, d) states that `predict` takes, of the target's (b, n, ...)."""
        return hidden

    def predict(self, following: Tensor, hidden: Tensor, *passed: Any) -> Tensor:
        """The layer of drafters that have one: (b, n) tokens and the (b, n, d) states before each to (b, n, d).

        passed : positions, cache and mask, as `OneLayer` takes them
        """
        raise NotImplementedError

    def taught(self, hidden: Tensor, batch: Batch) -> Iterator[tuple[Tensor, Logits]]:
        """What each of K guesses at a batch's n states is read from, (n, ...), and the function that makes (..., Vt) of it.

        hidden : (B, T or T - 1, ...) of the batch's texts; their true tokens are read as far as the guess
        """
        raise NotImplementedError

    @torch.inference_mode()
    def ranks(self, answers: Sequence[GivenText], top_k: int) -> list[NDArray[np.int16]]:
        """(N, K) of each answer: see `Drafter`."""
        found = [answer.labels(self.num_heads) for answer in answers]
        for some in batches([len(answer.hidden) for answer in answers]):
            hidden, labels = pad([answers[i].hidden for i in some]), torch.cat([found[i] for i in some])
            batch = make_batch([_text(answers[i]) for i in some], self.num_heads, hidden.device)
            for states, part in batch.parts(max(1, SEEN_AT_ONCE // batch.tokens.numel())):
                for k, (read, logits) in enumerate(self.taught(hidden, part)):
                    tried = (labels[states, k] >= 0).nonzero()[:, 0]
                    true = labels[states[tried], k].to(read.device)
                    ranks = ranks_among(
                        logits, read[tried.to(read.device)], true, top_k, self.vocab_size, self.token_ids
                    )
                    labels[states[tried], k] = ranks.cpu()
            for i, ranks in zip(some, labels.split([len(answers[i].tokens) for i in some]), strict=True):
                found[i] = ranks
        return [ranks.to(torch.int16).numpy() for ranks in found]


def _text(answer: GivenText) -> Text:
    """The tokens that the states of an answer are of, and the one behind them."""
    tokens = [*answer.prompt, *answer.tokens][-len(answer.hidden) - 1 :]
    return Text(np.array(tokens, dtype=np.int32), len(tokens) - len(answer.tokens), "")


class StateDraft(LevelDraft):
    """The hidden state of every row's last committed token: (b, d)."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.hidden = drafter, torch.empty(0)

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        new = one_of_each(hidden, [len(prompt) - 1 for prompt in prompts])
        self.hidden = torch.cat([self.hidden, new]) if len(self.hidden) else new

    def extend(self, tokens: Sequence[Sequence[int]], hidden: Tensor, paths: Sequence[Sequence[int]]) -> None:
        self.hidden = one_of_each(hidden, [path[-1] for path in paths])

    def read(self, answer: GivenText) -> None:
        self._of_text = answer.state_hidden

    def seek(self, states: Sequence[int]) -> None:
        self.hidden = self._of_text[states[0] : states[-1] + 1]

    def keep(self, order: Sequence[int]) -> None:
        self.hidden = self.hidden[torch.tensor(order, dtype=torch.long, device=self.hidden.device)]

    def clear(self) -> None:
        self.hidden = torch.empty(0)


def one_of_each(states: Tensor, places: Sequence[int]) -> Tensor:
    """(b, n, ...) to the (b, ...) at one place of each row; nothing is copied where all rows have the same."""
    if len(set(places)) == 1:
        return states[:, places[0]]
    rows = torch.arange(len(places), device=states.device)
    return states[rows, torch.tensor(places, device=states.device)]


def pad(parts: Sequence[Tensor]) -> Tensor:
    """(n, ...) of each row to (b, longest, ...), zeros on the right."""
    return nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def states_at_once(vocab_size: int) -> int:
    """How many states' logits are computed together."""
    return max(LOGITS_AT_ONCE // vocab_size, FEWEST_STATES)


def ranks_among(
    logits: Logits, states: Tensor, tokens: Tensor, top_k: int, vocab_size: int, token_ids: Tensor | None = None
) -> Tensor:
    """(n,) rank of each of (n,) tokens among the ``logits`` of (n, ...) states, some of which are computed together.

    token_ids : (Vt,) tokens that the logits are for, ascending, if not all; MISS for any other
    """
    at_once, known = states_at_once(vocab_size), places_among(tokens, token_ids)
    chunks = zip(states.split(at_once), known.split(at_once), strict=True)
    ranks = torch.cat([rank_of(logits(part), true, top_k) for part, true in chunks])
    return ranks if token_ids is None else torch.where(token_ids[known] == tokens, ranks, MISS)


def places_among(tokens: Tensor, token_ids: Tensor | None) -> Tensor:
    """Places of tokens among (Vt,) ascending ids, None for all tokens there are; of one that is not there, any."""
    return tokens if token_ids is None else torch.searchsorted(token_ids, tokens).clamp_max(len(token_ids) - 1)


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Places of texts of similar lengths that are read together, at most TOKENS_AT_ONCE with their padding.

    >>> batches([3000, 9000, 2500])
    [[2, 0], [1]]
    """
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if found and (len(found[-1]) + 1) * lengths[i] <= TOKENS_AT_ONCE:
            found[-1].append(i)
        else:
            found.append([i])
    return found
