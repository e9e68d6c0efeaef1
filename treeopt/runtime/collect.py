"""Calibration: decode plainly, keep the hidden states, and count the heads' ranks on them.

The hidden state that a head reads at a state is the one that decoding just computed, so there is no
second pass of the target, and the heads run on many states at once.

N states · d width · V vocabulary · K heads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.runtime.decode import Decoder, Row, StopRule, capacity_for
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.prompts import Prompt
from treeopt.runtime.target import Target
from treeopt.trace import MISS, NO_TRIAL, End, RankTrace

# Bound the memory of a chunk: states times vocabulary, but at least FEWEST_STATES states, at which a
# matrix product is still efficient (float32 logits over a vocabulary of 128 k: 64 MB). Slices of the
# vocabulary would bound it further, but the true token's logit must come of the same product as those
# that it is compared with, or rounding would change ranks; so a slice would have to be computed twice.
LOGITS_AT_ONCE, FEWEST_STATES = 2**21, 128


def collect_trace(
    target: Target,
    heads: MedusaHeads,
    prompts: Sequence[Prompt],
    *,
    batch_size: int = 16,
    stop: StopRule,
    top_k: int = 32,
    meta: dict[str, Any] | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> RankTrace:
    """Answer every prompt greedily and record at which rank each head had the token that came.

    Ranks 0...top_k-1 are told apart. ``progress`` is called with the tokens of each ended answer.
    """
    tokens = [prompt.tokens for prompt in prompts]
    decoder = Decoder(target, heads, batch_size=batch_size, capacity=capacity_for(tokens, stop, target),
                      stop=stop, keep_states=True, most_nodes=1)  # fmt: skip
    decoder.start(enumerate(tokens))
    counter = RankCounter(heads, top_k)
    rows: list[Row] = []
    while not decoder.is_done:
        decoder.refill()
        if decoder.live:
            decoder.step()
        for row in decoder.finished:
            counter.add(row)
            progress(len(row.tokens))
        rows += decoder.finished
        decoder.finished.clear()
    ranks = counter.ranks()
    rows.sort(key=lambda row: row.id)
    groups = list(dict.fromkeys(prompt.group for prompt in prompts))
    return RankTrace(
        ranks=np.concatenate([ranks[row.id] for row in rows]),
        starts=np.concatenate([[0], np.cumsum([len(row.tokens) for row in rows])]),
        tokens=np.concatenate([np.array(row.tokens) for row in rows]),
        prompt_tokens=np.array([row.prompt_tokens for row in rows]),
        end=np.array([row.end for row in rows]),
        group=np.array([groups.index(prompt.group) for prompt in prompts]),
        meta={
            "top_k": top_k,
            "eos_ids": sorted(stop.eos_ids),
            "max_new_tokens": stop.max_new_tokens,
            "prompt_sha256": [prompt.sha256 for prompt in prompts],
            "group_names": groups,
            **(meta or {}),
        },
    )


class RankCounter:
    """Gathers the states of ended rows and runs the heads on whole chunks of them."""

    def __init__(self, heads: MedusaHeads, top_k: int) -> None:
        self.heads, self.top_k = heads, top_k
        self.chunk = max(LOGITS_AT_ONCE // heads.vocab_size, FEWEST_STATES)
        self._ranks: dict[int, list[NDArray[np.int16]]] = {}
        self._pending: list[tuple[int, Tensor, Tensor]] = []  # row id, (N-1, d), (N-1, K) labels

    def add(self, row: Row) -> None:
        """Take the states of an ended row; its own references to them are dropped."""
        states = row.states[: len(row.tokens) - 1]
        last = np.full((1, self.heads.num_heads), NO_TRIAL, dtype=np.int16)
        self._ranks[row.id] = [last]
        if states:
            hidden = torch.stack([hidden[i] for hidden, i in states])
            self._pending.append((row.id, hidden, labels_of(row, self.heads.num_heads)))
        row.states = []
        if sum(len(hidden) for _, hidden, _ in self._pending) >= self.chunk:
            self._flush()

    def ranks(self) -> dict[int, NDArray[np.int16]]:
        """Row id to (N, K) ranks; the last state has no trial."""
        self._flush()
        return {id_: np.concatenate(parts) for id_, parts in self._ranks.items()}

    def _flush(self) -> None:
        if not self._pending:
            return
        hidden = torch.cat([h for _, h, _ in self._pending])
        labels = torch.cat([labels for _, _, labels in self._pending])
        found = torch.cat([
            count_ranks(self.heads, h, y, self.top_k)
            for h, y in zip(hidden.split(self.chunk), labels.split(self.chunk), strict=True)
        ])  # fmt: skip
        sizes = [len(h) for _, h, _ in self._pending]
        for (id_, _, _), part in zip(self._pending, found.split(sizes), strict=True):
            self._ranks[id_].insert(0, part.numpy())
        self._pending.clear()


def labels_of(row: Row, num_heads: int) -> Tensor:
    """(N-1, K) the token that head k has to guess at each state; MISS or NO_TRIAL past the end."""
    n = len(row.tokens)
    beyond = MISS if row.end is End.EOS else NO_TRIAL
    padded = torch.tensor([*row.tokens, *[beyond] * num_heads])
    return torch.stack([padded[k : n - 1 + k] for k in range(1, num_heads + 1)], dim=1)


@torch.inference_mode()
def count_ranks(heads: MedusaHeads, hidden: Tensor, labels: Tensor, top_k: int) -> Tensor:
    """(N, d) states and (N, K) labels to (N, K) int16 ranks: counted, never sorted.

    rank = #(logit greater) + #(logit equal, smaller id); MISS from top_k on; labels below 0 stay.
    """
    ids = torch.arange(heads.vocab_size, device=hidden.device)
    ranks = labels.to(hidden.device, copy=True)  # (N, K)
    for k in range(heads.num_heads):
        label = ranks[:, k].clamp_min(0)[:, None]  # (N, 1)
        logits = heads.logits(hidden, k).float()  # (N, V)
        true = logits.gather(1, label)
        rank = (logits > true).sum(1)
        ties = (logits == true).sum(1) > 1
        if ties.any():
            equal = logits[ties] == true[ties]
            rank[ties] += (equal & (ids < label[ties])).sum(1)
        rank = torch.where(rank < top_k, rank, MISS)
        ranks[:, k] = torch.where(ranks[:, k] >= 0, rank, ranks[:, k])
    return ranks.to("cpu", torch.int16)
