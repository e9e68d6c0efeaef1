"""What heads lose on a batch of texts, and how many of their guesses are right.

Losses are sums over states: a step divides them once, however many passes it takes. Head k (from 1) guesses the token at
p + k + 1 of a state at place p.

B texts · T tokens · n states · V vocabulary · K heads
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from treeopt.runtime.drafters.states import places_among
from treeopt.runtime.training.batches import NO_LABEL, Batch


def count(heads: Any, hidden: Tensor, batch: Batch, teacher: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(K,) loss [nats] and (K,) hits of the heads on (B, T, ...) states, each summed over the states where it has a label.

    A token that the heads do not guess is no label.

    teacher : (n, V) logits of the base at the batch's states; the loss is then against the base's distribution
    """
    ahead, ids = batch.ahead, heads.token_ids
    if ids is not None:
        places = places_among(ahead, ids)
        ahead = torch.where(ids[places] == ahead, places, NO_LABEL)
        teacher = None if teacher is None else teacher[:, ids]
    losses, hits = [], []
    for k, (read, logits_of) in enumerate(heads.taught(hidden.to(heads.dtype), batch), 1):
        labels, logits = ahead[:, k], logits_of(read)
        # The base guesses the label of head k at the state k places on, which is of the same text.
        losses.append(loss_of(logits, labels, None if teacher is None else teacher.roll(-k, 0)))
        hits.append((logits.argmax(-1) == labels).sum())
    return torch.stack(losses), torch.stack(hits)


def loss_of(logits: Tensor, labels: Tensor, teacher: Tensor | None = None) -> Tensor:
    """Cross-entropy of (N, V) logits [nats], summed over the rows that have a label.

    It is against the labels, or against the distribution of the teacher's (N, V) logits.

    >>> round(float(loss_of(torch.zeros(3, 4), torch.tensor([0, 2, NO_LABEL]))), 4)  # 2 ln 4
    2.7726
    """
    if teacher is None:
        return F.cross_entropy(at_least_float32(logits), labels, ignore_index=NO_LABEL, reduction="sum")
    known = labels != NO_LABEL
    wanted = at_least_float32(teacher[known]).softmax(-1)
    return F.cross_entropy(at_least_float32(logits[known]), wanted, reduction="sum")


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
