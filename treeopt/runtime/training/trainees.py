"""The module that a step trains, which turns a batch into a loss and into counts; the losses.

The base is frozen: its hidden states are computed without gradients. Losses are sums over states: a step divides them once,
however many passes it takes. Head k (from 1) guesses the token at p + k + 1 of a state at place p.

B texts · T tokens · n states · d width · V vocabulary · K heads
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.runtime.drafters.states import places_among
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import NO_LABEL, Batch
from treeopt.runtime.training.recipe import Recipe

# () loss, divided by the trials of the whole step, and (2K,) counts: see `Trainee.forward`
Counted = tuple[Tensor, Tensor]


class Trainee(nn.Module):
    """Heads on a base, which is frozen."""

    def __init__(self, heads: Any, recipe: Recipe, target: Target) -> None:
        super().__init__()
        self.heads, self.recipe, self.target = heads, recipe, target

    def forward(self, batch: Batch, trials: Tensor) -> Counted:
        """The loss of a batch, and each head's loss [nats] and hits, both summed over the batch's states.

        trials : (K,) labels of the whole step
        """
        teacher = None
        with torch.no_grad():
            hidden = self.target.states(input_ids=batch.tokens, use_cache=False)
            if self.recipe.defaults.teacher:
                teacher = self.target.scored(batch.states(hidden))
        losses, hits = count(self.heads, hidden, batch, teacher)
        return heads_loss(losses, trials, self.recipe), torch.cat([losses.double(), hits.double()]).detach()


def count(heads: Any, hidden: Tensor, batch: Batch, teacher: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(K,) loss and (K,) hits of the heads on (B, T, ...) states, each summed over the states where it has a label.

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
        wanted = None if teacher is None else teacher.roll(-k, 0)
        losses.append(text_loss(logits, labels) if wanted is None else teacher_loss(logits, wanted, labels))
        hits.append((logits.argmax(-1) == labels).sum())
    return torch.stack(losses), torch.stack(hits)


def text_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p of the (N,) labels under (N, V) logits [nats], summed; NO_LABEL counts nothing.

    >>> round(float(text_loss(torch.zeros(3, 4), torch.tensor([0, 2, NO_LABEL]))), 4)  # 2 ln 4
    2.7726
    """
    return F.cross_entropy(at_least_float32(logits), labels, ignore_index=NO_LABEL, reduction="sum")


def teacher_loss(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of (N, V) logits against the teacher's distribution, summed over the rows with a label [nats]."""
    known = labels != NO_LABEL
    wanted = at_least_float32(teacher[known]).softmax(-1)
    return F.cross_entropy(at_least_float32(logits[known]), wanted, reduction="sum")


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def heads_loss(head_loss: Tensor, trials: Tensor, recipe: Recipe) -> Tensor:
    """sum_k decay**k times the mean loss of head k from 1 (Medusa, equation 1), which is 0 without a trial."""
    weights = recipe.defaults.decay ** torch.arange(1, 1 + len(trials), dtype=torch.float64)
    return (weights.to(head_loss) * head_loss / trials.clamp_min(1)).sum()
