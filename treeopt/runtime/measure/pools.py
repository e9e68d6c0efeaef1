"""Record the pools of dynamic trees: at every state of an answer the drafter drafts as it would if decoding had come there.

n states · S levels · M nodes of the pool
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.records.pools import NO_PLACE, columns_of
from treeopt.runtime.drafters.levels import LevelDraft, Pool
from treeopt.runtime.drafters.protocol import GivenText
from treeopt.trees.dynamic import MOST_ROWS

NUMBERS_AT_ONCE, MOST_STATES = 2**24, 256  # of the keys of the rows that are drafted together, and rows


class PoolRecorder:
    """Records the pools of a drafter, for several topk up to so many levels."""

    def __init__(self, drafter: Any, levels: int, topks: tuple[int, ...]) -> None:
        self.drafter, self.levels, self.topks = drafter, levels, topks
        self._rows = self._capacity = 0

    @torch.inference_mode()
    def record(self, answer: GivenText) -> NDArray[np.uint8]:
        """(N, n, S (S + 1) / 2) places at the N states of an answer: see `Pools`."""
        draft = self._sought(len(answer.prompt) + len(answer.tokens))
        draft.read(answer)
        labels, roots = answer.labels(self.levels), torch.tensor(answer.tokens)
        device = answer.hidden.device
        places = []
        for begin in reversed(range(0, len(roots), self._rows)):  # see `LevelDraft.stand`
            states = slice(begin, min(begin + self._rows, len(roots)))
            draft.seek(range(states.start, states.stop))
            pools = draft.grow(self.levels, self.topks, roots[states].to(device), lambda part: None)
            true = labels[states].to(device)
            places.append(torch.stack([true_places(pool, true, self.levels) for pool in pools], 1).cpu())
        found: NDArray[np.uint8] = torch.cat(places[::-1]).numpy()
        return found

    def _sought(self, tokens: int) -> LevelDraft:
        """Rows with room for a text of so many tokens."""
        capacity = tokens + 1 + (self.levels - 1) * sum(self.topks)
        if capacity > self._capacity:
            width = getattr(self.drafter, "width", 0) or self.drafter.model.width
            layers = 1 if not hasattr(self.drafter, "model") else self.drafter.model.num_layers
            self._rows = min(max(NUMBERS_AT_ONCE // (capacity * width * layers), 1), MOST_STATES)
            self._capacity, self._draft = capacity, self.drafter.start(self._rows, capacity)
        found: LevelDraft = self._draft
        return found


def true_places(pool: Pool, labels: Tensor, levels: int) -> Tensor:
    """(n, S (S + 1) / 2) uint8 places of the true path's nodes, by the (n, S) tokens that come; below 0 for none."""
    (n, size), device = pool.scores.shape, pool.scores.device
    found = torch.full((n, columns_of(levels).stop), NO_PLACE, dtype=torch.uint8, device=device)
    node = torch.full((n, 1), -1, device=device)  # the true path's of the level above; the root
    alive = torch.ones((n, 1), dtype=torch.bool, device=device)
    ends = torch.bincount(pool.depths)[1:].cumsum(0)
    for depth in range(1, levels + 1):
        is_true = (pool.parents == node) & (pool.tokens == labels[:, depth - 1, None]) & (pool.depths == depth)
        alive = alive & is_true.any(1, keepdim=True) & (labels[:, depth - 1, None] >= 0)
        node = is_true.to(torch.uint8).argmax(1, keepdim=True)
        score = pool.scores.gather(1, node)
        before = (pool.scores > score) | ((pool.scores == score) & (torch.arange(size, device=device) < node))
        places = before.cumsum(1)[:, ends[depth - 1 :] - 1]  # (n, S - depth + 1) among the nodes of the first s levels
        places = torch.where(alive & (places <= MOST_ROWS - 2), places, NO_PLACE).to(torch.uint8)
        found[:, [columns_of(s).start + depth - 1 for s in range(depth, levels + 1)]] = places
    return found
