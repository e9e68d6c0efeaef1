"""The losses of heads, as sums over states: a step divides them once, however many passes it takes.

A state is a place p of a text; head k (from 1) guesses the token at p + k + 1. ``ahead`` holds the tokens
that really follow: column 0 is the base's own guess p + 1, column k is head k's.

N states · V vocabulary · K heads
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

NO_LABEL = -100  # what torch's cross-entropy leaves out


def text_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p of the (N,) labels under (N, V) logits [nats], summed; NO_LABEL counts nothing.

    >>> round(float(text_loss(torch.zeros(3, 4), torch.tensor([0, 2, NO_LABEL]))), 4)  # 2 ln 4
    2.7726
    """
    return F.cross_entropy(at_least_float32(logits), labels, ignore_index=NO_LABEL, reduction="sum")


def teacher_loss(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of (N, V) logits against the distribution of the (N, V) teacher's, summed [nats].

    Rows without a label count nothing.
    """
    known = labels != NO_LABEL
    wanted = at_least_float32(teacher[known]).softmax(-1)
    return F.cross_entropy(at_least_float32(logits[known]), wanted, reduction="sum")


def kl_to_base(logits: Tensor, original: Tensor, labels: Tensor) -> Tensor:
    """KL(original || now) of two (N, V) logits, summed over the rows with a label [nats]."""
    known = labels != NO_LABEL
    now = at_least_float32(logits[known]).log_softmax(-1)
    before = at_least_float32(original[known]).log_softmax(-1)
    return F.kl_div(now, before, reduction="sum", log_target=True)


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
