"""Which measurements an estimate is made of: those that enclose what is asked, each with its weight.

way  of sizes: how far each is from the first to the last, in any unit; the staircase, or the sizes themselves

Nothing is extrapolated: what no measurements enclose has no estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Anchor = tuple[int, int, int, int]  # batch_size, context_tokens, size, depth of something measured
Weights = dict[Anchor, float]  # an estimate is a weighted mean of anchors
Setting = tuple[int, int]  # batch_size, context_tokens


def enclosing_contexts(contexts: Sequence[int], wanted: int) -> tuple[int, int] | None:
    """The measured contexts next to a length on either side; None where there is none.

    >>> enclosing_contexts([128, 512], 200)
    (128, 512)
    """
    low = max((c for c in contexts if c <= wanted), default=None)
    high = min((c for c in contexts if c >= wanted), default=None)
    return None if low is None or high is None else (low, high)


def between_contexts(
    enclosing: tuple[int, int] | None, wanted: int, at: Callable[[int], Weights | None]
) -> Weights | None:
    """The weights ``at`` the two contexts about the wanted one, mixed by distance."""
    if enclosing is None:
        return None
    low, high = enclosing
    ends = at(low), at(high)
    if ends[0] is None or ends[1] is None or low == high:
        return ends[0] if low == high else None
    w = context_share(enclosing, wanted)
    return {anchor: (1 - w) * part for anchor, part in ends[0].items()} | {
        anchor: w * part for anchor, part in ends[1].items()
    }


def context_share(enclosing: tuple[int, int], wanted: int) -> float:
    """How far a context is from the shorter to the longer one."""
    low, high = enclosing
    return (wanted - low) / (high - low) if high > low else 0.0


def between_sizes(
    setting: Setting,
    by_depth: Mapping[int, set[int]],
    size: int,
    depth: int,
    *,
    measured_only: bool,
    way: Callable[[NDArray[np.int64]], NDArray[np.float64]] | None,
) -> Weights | None:
    """The two trees about one of ``size`` rows, of its depth or the next deeper one that encloses it.

    by_depth : sizes that were measured of each depth · way : None is straight

    Failing these, a chain is between the next shorter and the next longer chain.
    """
    if size == 1:
        return {(*setting, 1, 0): 1.0}
    for measured in sorted(d for d in by_depth if d >= depth):
        sizes = by_depth[measured]
        low = max((s for s in sizes if s <= size), default=None)
        high = min((s for s in sizes if s >= size), default=None)
        if low is None or high is None or (measured_only and low != high):
            continue
        ends = [(*setting, s, 0 if s == 1 else measured) for s in (low, high)]
        if low == high:
            return {ends[0]: 1.0}
        far = np.array([low, size, high], dtype=np.float64)
        if way is not None and (stairs := way(np.array([low, size, high])))[2] > stairs[0]:
            far = stairs  # where they are flat nothing tells the sizes apart
        w = float((far[1] - far[0]) / (far[2] - far[0]))
        return {ends[0]: 1 - w, ends[1]: w}
    chains = [d for d, sizes in by_depth.items() if d + 1 in sizes]
    below, above = [d for d in chains if d < depth], [d for d in chains if d > depth]
    if measured_only or size != depth + 1 or not below or not above:
        return None
    low, high = max(below), min(above)
    w = (depth - low) / (high - low)
    return {(*setting, low + 1, low): 1 - w, (*setting, high + 1, high): w}
