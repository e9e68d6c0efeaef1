"""Which few sizes to build for an engine that needs a build for each.

What a step costs there is not known before the first build. So the sizes are those that lose least over many
ways in which hardware may charge for rows: free up to a ridge, where compute takes over from memory
(the roofline of Medusa, appendix G), in steps of a tile.

rows  batch_size x size, what one step verifies
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RIDGES = (8, 16, 32, 64, 128, 256, 512)  # rows from which a step costs in proportion to them
TILES = (1, 8, 16, 32, 64, 128)
BENDS = (1, 2, 4, 16)  # exponents: how sharply memory gives way to compute; the roofline itself is infinite
PER_ROW = 0.002  # of a plain step, for what is not a matrix product: sampling, the cache, the host


@dataclass(frozen=True)
class Rebuilds:
    """Sizes worth building, rising, and the share of the best throughput that is lost with only them."""

    sizes: tuple[int, ...]
    mean_loss: float
    worst_loss: float


def worth_building(
    rates: NDArray[np.float64], sizes: NDArray[np.int64], *, batch_size: int, count: int, first: int | None = None
) -> Rebuilds:
    """The ``count`` of the ``sizes`` that lose least on average over `RIDGES` x `TILES` x `BENDS`; plain decoding is there too.

    rates : (n,) tokens per step of each size
    first : a size to have among them in any case, such as the best one elsewhere

    Chosen one by one, each the one that saves most; the mean loss falls with every size less than with
    the one before, so this is within 1 - 1/e of the best choice (Nemhauser, Wolsey and Fisher, 1978).

    >>> sizes = np.arange(1, 65)
    >>> worth_building(1 + np.log2(sizes) / 4, sizes, batch_size=1, count=2).sizes
    (8, 32)
    """
    values = rates / overheads(sizes, batch_size)  # (curves, n)
    best = values.max(1)
    reached = np.ones(len(values))  # plain decoding: a token a step
    chosen: list[int] = []
    for _ in range(min(count, int((sizes > 1).sum()))):
        gained = np.maximum(values, reached[:, None]) / best[:, None]
        gained[:, [*chosen, *np.flatnonzero(sizes == 1)]] = -1.0
        if first is not None and first > 1 and not chosen and first in sizes:
            chosen.append(int(np.searchsorted(sizes, first)))
        else:
            chosen.append(int(gained.mean(0).argmax()))
        reached = np.maximum(reached, values[:, chosen[-1]])
    losses = 1 - reached / np.maximum(best, 1)
    return Rebuilds(tuple(sorted(int(sizes[i]) for i in chosen)), float(losses.mean()), float(losses.max()))


def overheads(sizes: NDArray[np.int64], batch_size: int) -> NDArray[np.float64]:
    """(curves, n) what a step may cost in plain steps."""
    curves = []
    for ridge, tile, bend in itertools.product(RIDGES, TILES, BENDS):
        rows = batch_size * np.append(1, sizes)
        compute = np.ceil(rows / tile) * tile / ridge
        cost = (1 + compute**bend) ** (1 / bend) + PER_ROW * rows
        if tile <= ridge:
            curves.append(cost[1:] / cost[0])
    return np.array(curves)
