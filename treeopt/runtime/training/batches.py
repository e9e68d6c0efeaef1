"""Texts as tensors: which states a batch has, and which tokens really follow each of them.

A text is P tokens of a prompt and N of an answer. Its states are the places P-1...P+N-2: the prompt's last
token and every token of the answer but the last one (see `treeopt.records.trace`).

B texts · T tokens of the longest · n states of all · K heads
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.trees.tree import IntArray

HELD_OUT_SHARE = 0.05  # of the conversations
NO_LABEL = -100  # which torch's cross-entropy leaves out


@dataclass(frozen=True, eq=False)
class Text:
    """Prompt and answer, and the conversation that they are a turn of."""

    tokens: NDArray[np.int32]  # (P + N,)
    prompt_tokens: int
    sha256: str

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(frozen=True, eq=False)
class Batch:
    """Some texts, padded on the right: causal attention keeps the padding from the real tokens.

    tokens        (B, T)
    rows, columns (n,)      text and place of each state; those of a text are consecutive
    ahead         (n, K+1)  tokens that follow it: the base's guess, then the heads'; NO_LABEL past the end
    """

    tokens: Tensor
    rows: Tensor
    columns: Tensor
    ahead: Tensor

    @property
    def trials(self) -> Tensor:
        """(K,) how many labels each head has."""
        return (self.ahead[:, 1:] != NO_LABEL).sum(0)

    def states(self, hidden: Tensor) -> Tensor:
        """(B, T, d) of all places to (n, d) of the states."""
        return hidden[self.rows, self.columns]

    def places(self) -> tuple[Tensor, Tensor]:
        """(B, A) places of the states of each text, the last one again where there are fewer, and (n,) where each state is.

        >>> batch = make_batch([Text(np.array([7, 1, 2, 3]), 1, ""), Text(np.array([7, 8, 9]), 2, "")], 1, "cpu")
        >>> places, own = batch.places()
        >>> places.tolist(), own.tolist()
        ([[0, 1, 2], [1, 1, 1]], [0, 1, 2, 0])
        """
        counts = torch.bincount(self.rows, minlength=len(self.tokens))
        ends = counts.cumsum(0)
        own = torch.arange(len(self.rows), device=self.rows.device) - (ends - counts)[self.rows]
        among = torch.arange(int(counts.max()), device=self.rows.device).expand(len(counts), -1)
        return self.columns[(ends - counts)[:, None] + among.minimum(counts[:, None] - 1)], own

    def parts(self, most: int) -> Iterator[tuple[Tensor, Batch]]:
        """At most so many states of each text at a time: their places among all, on the CPU, and their batch."""
        own = self.places()[1]
        for begin in range(0, int(own.max()) + 1, most):
            at = ((own >= begin) & (own < begin + most)).nonzero()[:, 0]
            yield at.cpu(), Batch(self.tokens, self.rows[at], self.columns[at], self.ahead[at])


def make_batch(
    texts: Sequence[Text], num_heads: int, device: torch.device | str, every: int = 1, first: int = 0
) -> Batch:
    """The tensors of some texts, on the device; of each text every so many states from the first on, or its last one.

    >>> batch = make_batch([Text(np.array([7, 1, 2, 3]), 1, "")], 2, "cpu")
    >>> batch.columns.tolist(), batch.ahead.tolist()
    ([0, 1, 2], [[1, 2, 3], [2, 3, -100], [3, -100, -100]])
    """
    width = max(len(text.tokens) for text in texts)
    tokens = np.zeros((len(texts), width), dtype=np.int64)
    rows, columns, ahead = [], [], []
    for row, text in enumerate(texts):
        n = len(text.tokens)
        tokens[row, :n] = text.tokens
        states = np.arange(text.prompt_tokens - 1 + min(first, text.answer_tokens - 1), n - 1, every)
        padded = np.concatenate([text.tokens, np.full(num_heads, NO_LABEL)])
        rows.append(np.full(len(states), row))
        columns.append(states)
        ahead.append(padded[states[:, None] + np.arange(1, num_heads + 2)])
    arrays = tokens, np.concatenate(rows), np.concatenate(columns), np.concatenate(ahead)
    return Batch(*(torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays))


def texts_of_step(step: int, n: int, batch_size: int, seed: int) -> IntArray:
    """(batch_size,) places of the texts of a step among ``n``, of which each comes once in every epoch.

    They depend on the arguments alone, so that a run that goes on takes the batches it would have taken.
    """
    epochs, places = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), n)
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(n) for epoch in set(epochs.tolist())}
    return np.array(
        [orders[epoch][place] for epoch, place in zip(epochs.tolist(), places, strict=True)], dtype=np.int64
    )


def split_texts(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and those of the held-out conversations: the ones whose hashes come first.

    Raises InvalidInput where there are fewer than two conversations.
    """
    names = sorted({text.sha256 for text in texts})
    if len(names) < 2:
        raise InvalidInput(
            "Training needs at least 2 conversations, one of them held out, but there "
            f"{'is 1' if names else 'are none'}: raise `num_prompts`, or pass other `prompts`."
        )
    held_out = set(names[: max(1, round(HELD_OUT_SHARE * len(names)))])
    return [t for t in texts if t.sha256 not in held_out], [t for t in texts if t.sha256 in held_out]


def digest_of(texts: Sequence[Text]) -> str:
    """sha256 over all tokens and where the answers begin."""
    parts = (np.array([text.prompt_tokens, *text.tokens], dtype="<i4").tobytes() for text in texts)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def common_tokens(texts: Sequence[Text], vocab_size: int, size: int) -> Tensor:
    """(size,) ids of the tokens that the answers have most often, ascending; of equally common ones the lower.

    >>> common_tokens([Text(np.array([9, 4, 7, 4]), 1, "")], 10, 3).tolist()
    [0, 4, 7]
    """
    answered = [text.tokens[text.prompt_tokens :] for text in texts]
    counts = np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *answered]), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))
