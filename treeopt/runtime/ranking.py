"""The one order of candidates: by (float32 logit descending, token id ascending).

Half precision is full of ties, which a library's ``topk`` breaks as it likes. The decoder takes its candidates
from here and the trace counts its ranks here, so that both mean the same.

N states · V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from treeopt.records.trace import MISS

FEW = 128  # logits


def top_candidates(logits: Tensor, width: int) -> Tensor:
    """Ids of the ``width`` best tokens by the common order: (..., V) to (..., width).

    >>> top_candidates(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3).tolist()
    [1, 2, 3]
    """
    logits = logits.float()
    if width == 1:
        return logits.argmax(-1, keepdim=True)  # the first of equal maxima
    values, ids = logits.topk(min(width + 1, logits.shape[-1]), dim=-1)
    if values.numel() <= FEW:  # so few are looked at faster here than by torch
        has_ties = any(len(set(row)) < len(row) for row in values.reshape(-1, values.shape[-1]).tolist())
    else:
        has_ties = bool((values[..., 1:] == values[..., :-1]).any())
    if has_ties:
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
    return ids[..., :width]


@torch.inference_mode()
def rank_of(logits: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """(N,) rank of each token among (N, V) logits: #(greater) + #(equal, smaller id), never sorted.

    MISS from top_k on.

    >>> rank_of(torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 4), torch.arange(4), 3).tolist()
    [-1, 0, 1, 2]
    """
    logits, label = logits.float(), tokens.to(logits.device)[:, None]
    true = logits.gather(1, label)
    rank = (logits > true).sum(1)
    ties = (logits == true).sum(1) > 1
    if ties.any():
        ids = torch.arange(logits.shape[1], device=logits.device)
        rank[ties] += ((logits[ties] == true[ties]) & (ids < label[ties])).sum(1)
    return torch.where(rank < top_k, rank, MISS)
