"""A key/value cache with a length per row, whose tree rows are committed in place.

transformers' own caches append the same number of keys to every row and drop from the end only; a
tree step writes n rows and keeps the accepted path. Here all layers (of a device) share one tensor, so a
commit is one gather and one write. Keys are stored rotated for position length + depth, which is where an
accepted node ends up, so they need no second rotation. Where keys and values are of different widths, as in
DeepSeek's latent attention, the narrower ones take as much room as the wider.

L layers · B rows of the cache, of which the first b are live · H key heads · C capacity · D head width, the wider
T new tokens per row · n columns in use
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from treeopt.errors import Unsupported

FEW_MOVES = 6  # that cost less one by one than together


class TreeLayer(CacheLayerMixin):
    """One layer's window on the shared tensor; all bookkeeping is the cache's."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the cache allocates at the first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.write(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.columns, 0

    def get_seq_length(self) -> int:
        return self._cache.columns - self._cache.new_tokens

    def get_max_length(self) -> int:
        return self._cache.capacity


class TreeCache(Cache):
    """Keys and values of up to B rows of different lengths.

    Before every pass call `begin_prefill` or `begin_step`; it fixes where the pass writes.

    lengths : committed tokens of each live row
    """

    def __init__(
        self, num_layers: int, batch_size: int, capacity: int, devices: Sequence[torch.device] | None = None
    ) -> None:
        super().__init__(layers=[TreeLayer(self, i) for i in range(num_layers)])
        self.num_layers, self.rows, self.capacity = num_layers, batch_size, capacity
        self.lengths: list[int] = []
        self.columns = self.new_tokens = 0
        self.is_even = True  # whether all live rows of this step have the same length
        # Device and place of every layer's keys; all layers of a device share one tensor.
        where = ["all"] * num_layers if devices is None else [str(device) for device in devices]
        self._place = [(device, where[:i].count(device)) for i, device in enumerate(where)]
        self._stores: dict[str, Tensor] = {}  # device to (layers there, 2, B, H, C, D)
        self._prefilled: slice | None = None  # rows that a prefill writes
        self._rows = self._targets = torch.empty(0)  # (b, 1), (b, T) of a ragged step

    @property
    def dtype(self) -> torch.dtype | None:
        """Number format of the keys and values, once some are written."""
        return next((store.dtype for store in self._stores.values()), None)

    def begin_prefill(self, prompt_tokens: Sequence[int]) -> None:
        """The next pass writes whole prompts, padded on the right, into rows behind those that are there."""
        first = len(self.lengths)
        self.lengths += prompt_tokens
        self._prefilled = slice(first, len(self.lengths))
        self.columns = self.new_tokens = max(prompt_tokens)

    def begin_step(self, new_tokens: int, starts: Tensor, *, after: int = 0) -> None:
        """The next pass writes ``new_tokens`` to every live row, from its length on, ``starts`` (b, 1).

        after : rows of the same step that were written before and stay
        """
        self._prefilled = None
        self.new_tokens, self.columns = new_tokens, max(self.lengths) + after + new_tokens
        self.is_even = min(self.lengths) == max(self.lengths)
        if not self.is_even:
            self._rows = torch.arange(len(self.lengths), device=starts.device)[:, None]
            self._targets = starts + torch.arange(after, after + new_tokens, device=starts.device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (b, H, T, D or fewer) keys and values; return all that the pass may attend to."""
        device, index = self._place[layer]
        d_keys, d_values = keys.shape[3], values.shape[3]
        if device not in self._stores:
            layers = sum(where == device for where, _ in self._place)
            shape = (layers, 2, self.rows, keys.shape[1], self.capacity, max(d_keys, d_values))
            self._stores[device] = torch.zeros(shape, dtype=keys.dtype, device=keys.device)
        store = self._stores[device][index]
        heads, width = store.shape[2::2]
        if (keys.shape[1], values.shape[1], max(d_keys, d_values)) != (heads, heads, width):
            raise Unsupported("The cache needs the same number and width of key heads in all layers.")
        stored_keys, stored_values = store[0, ..., :d_keys], store[1, ..., :d_values]
        if self._prefilled is not None:
            stored_keys[self._prefilled, :, : self.new_tokens] = keys
            stored_values[self._prefilled, :, : self.new_tokens] = values
            return keys, values
        b, n = len(self.lengths), self.columns
        if self.is_even:
            stored_keys[:b, :, n - self.new_tokens : n] = keys
            stored_values[:b, :, n - self.new_tokens : n] = values
        else:
            rows, targets = self._rows.to(store.device), self._targets.to(store.device)
            stored_keys[rows, :, targets] = keys.transpose(1, 2)
            stored_values[rows, :, targets] = values.transpose(1, 2)
        return stored_keys[:b, :, :n], stored_values[:b, :, :n]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the nodes on the path of every live row, root first, in place; what is there already is not touched."""
        moves = [
            (row, start + place, start + node)
            for row, (start, path) in enumerate(zip(self.lengths, paths, strict=True))
            for place, node in enumerate(path)
            if place != node
        ]
        for store in self._stores.values() if moves else ():
            if len(moves) <= FEW_MOVES:  # no place is needed once it is written: nodes only move down
                for row, place, node in moves:
                    store[:, :, row, :, place] = store[:, :, row, :, node]
            else:
                rows, places, nodes = torch.tensor(moves, device=store.device).unbind(1)
                store[:, :, rows, :, places] = store[:, :, rows, :, nodes]
        self.lengths[:] = [start + len(path) for start, path in zip(self.lengths, paths, strict=True)]

    def keep(self, order: Sequence[int]) -> None:
        rows = [row for row, old in enumerate(order) if row != old]
        moved = [order[row] for row in rows]
        n = max((self.lengths[old] for old in moved), default=0)
        for store in self._stores.values() if rows else ():
            store[:, :, rows, :, :n] = store[:, :, moved, :, :n]
        self.lengths = [self.lengths[old] for old in order]

    def clear(self) -> None:
        self.lengths.clear()


def tree_mask(cache: TreeCache, starts: Tensor, ancestors: Tensor, depths: Tensor, window: int | None) -> Tensor | None:
    """Which columns every new row may attend to: (b or 1, 1, T, n) bool; None for all of them.

    starts    : (b, 1)  committed tokens of each row
    ancestors : (T, A) or (b, T, A)  of the rows of this step, those written before this pass and its own T, which may be seen
    depths    : (A,) or (b, A)  position of each of them beyond the start
    window    : attend to positions less than ``window`` back only (sliding window), by position
    """
    even, n, (t, step) = cache.is_even, cache.columns, ancestors.shape[-2:]
    if window is not None and n <= window:
        window = None
    if t == step == 1 and even and window is None:
        return None
    ancestors = ancestors[None] if ancestors.ndim == 2 else ancestors
    if even and window is None:
        return F.pad(ancestors, (n - step, 0), value=True)[:, None]
    rows, column = torch.arange(len(starts), device=starts.device)[:, None], torch.arange(n, device=starts.device)
    offset = column - starts  # (b, n) column of the step's own mask, where inside
    inside = (offset >= 0) & (offset < step)
    index = offset.clamp(0, step - 1)
    seen = ancestors.transpose(1, 2).expand(len(starts), -1, -1)[rows, index].transpose(1, 2)  # (b, T, n)
    mask = torch.where(inside[:, None], seen, (offset < 0)[:, None])
    if window is not None:
        beyond = depths.expand(len(starts), -1)  # (b, A)
        position = torch.where(inside, starts + beyond.gather(1, index), column)  # (b, n)
        mask &= (starts + beyond[:, -t:])[:, :, None] - position[:, None] < window
    return mask[:, None]
