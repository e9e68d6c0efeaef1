"""Which batch sizes get which tree: ranges, merged where the data cannot tell the difference.

A range has one tree for all its batch sizes. It may be another than the best of some of them as long as it
is tied with it there; what it costs by the estimates is the range's loss.

Between two batch sizes that were searched, step latencies are interpolated on a straight line. A range ends there
where the next one's tree becomes faster by that estimate. What the trees lose there is an estimate too: `error_between`
says how far such estimates were off at batch sizes that were searched. Of very many between two it is asked of `MOST`.

n candidates of two batch sizes · G batch sizes between them
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from treeopt.latency.interpolation import between_batch_sizes
from treeopt.planning.candidates import Candidates, Floats, Key
from treeopt.planning.select import Selection
from treeopt.records.plan import BatchRange
from treeopt.trees.tree import IntArray

MOST = 1000  # batch sizes between two that a loss is computed for


def schedule_of(options: list[Candidates], selections: list[Selection]) -> list[BatchRange]:
    """The fewest ranges of batch sizes; entry i is what was selected for options[i].

    Above the largest batch size that was searched its tree goes on, and below the smallest one that one's.
    Without latencies a batch size between two belongs with the smaller one.
    """
    chosen = [c.all[s.chosen].key for c, s in zip(options, selections, strict=True)]
    losses = [_losses(c, s, chosen) for c, s in zip(options, selections, strict=True)]
    starts: list[tuple[int, int, float]] = []  # first option, entry, loss
    first = 0
    while first < len(options):
        serving = dict(losses[first])  # entries that can serve all options from the first on, and their loss
        last, best = first, serving
        while last + 1 < len(options):
            serving = {i: max(loss, losses[last + 1][i]) for i, loss in serving.items() if i in losses[last + 1]}
            if not serving:
                break
            last, best = last + 1, serving
        # the least loss; of equals that which belongs to the range
        entry = min(best, key=lambda i: (round(best[i], 6), not first <= i <= last, i))
        starts.append((first, entry, best[entry]))
        first = last + 1
    changes = [
        _change(options[first - 1], options[first], chosen[before], chosen[after])
        for (_, before, _), (first, after, _) in pairwise(starts)
    ]
    begins = [1, *changes]
    ends = [*(begin - 1 for begin in changes), None]
    return [
        BatchRange(first=begin, last=end, entry=entry, between=_loss_between(options, begin, end, chosen[entry]))
        for begin, end, (_, entry, _) in zip(begins, ends, starts, strict=True)
    ]


def errors_between(options: list[Candidates], selections: list[Selection]) -> list[float]:
    """How far interpolated losses are off: the errors at batch sizes that were searched, each left out in turn.

    Of the trees chosen on either side the one with the smaller interpolated loss is taken; where the two are one, nothing
    is tested. Shares of the throughput; empty where there are no three batch sizes, or no profile.
    """
    keys, found = [c.all[s.chosen].key for c, s in zip(options, selections, strict=True)], []
    for i in range(1, len(options) - 1):
        if keys[i - 1] == keys[i + 1]:
            continue
        low, left_out, high = options[i - 1 : i + 2]
        estimates = {key: _lost(low, high, [left_out.batch_size], key) for key in (keys[i - 1], keys[i + 1])}
        known = {key: float(losses[0]) for key, losses in estimates.items() if losses is not None}
        key = min(known, key=known.__getitem__, default=None)
        true = None if key is None else _lost(left_out, left_out, [left_out.batch_size], key)
        if key is not None and true is not None:
            found.append(abs(known[key] - float(true[0])))
    return found


def one_for_all() -> list[BatchRange]:
    """The schedule of a single tree, whatever it costs at each batch size."""
    return [BatchRange(first=1, last=None, entry=0)]


def _losses(c: Candidates, selection: Selection, chosen: list[Key]) -> dict[int, float]:
    """Loss at this batch size of every entry whose draft is tied for best there."""
    own = float(c.throughput[selection.chosen])
    tied = {c.all[i].key: float(c.throughput[i]) for i in (*selection.tied.tolist(), selection.chosen)}
    return {i: max(0.0, 1 - tied[key] / own) for i, key in enumerate(chosen) if key in tied}


def _change(low: Candidates, high: Candidates, before: Key, after: Key) -> int:
    """The first batch size at which the tree after is faster than the one before, by interpolated latencies."""
    between = _some(low.batch_size + 1, high.batch_size - 1)
    losses = [_lost(low, high, between, key) for key in (before, after)]
    if losses[0] is None or losses[1] is None:
        return high.batch_size
    better = np.flatnonzero(losses[1] < losses[0])
    return int(between[better[0]]) if len(better) else high.batch_size


def _loss_between(options: list[Candidates], first: int, last: int | None, key: Key) -> float | None:
    """What a tree loses at most at batch sizes of a range between those that were searched; None unless known for all."""
    found = []
    for low, high in pairwise(options):
        between = _some(max(first, low.batch_size + 1), min(last or high.batch_size, high.batch_size - 1))
        if len(between):
            if (losses := _lost(low, high, between, key)) is None:
                return None
            found.append(float(losses.max()))
    return max(found, default=None)


def _some(first: int, last: int) -> IntArray:
    """Batch sizes from the first to the last, at most `MOST` of them."""
    found: IntArray = np.linspace(first, last, min(max(last - first + 1, 0), MOST)).round().astype(np.int64)
    return found


def _lost(low: Candidates, high: Candidates, batch_sizes: Sequence[int] | IntArray, key: Key) -> Floats | None:
    """(G,) share of the throughput that a tree loses against the fastest, by interpolated latencies.

    None where a latency of the tree is not known.
    """
    if low.ms is None or high.ms is None:
        return None
    shared = [key for key in low.places if key in high.places]
    if key not in shared:
        return None
    here, there = ([c.places[one] for one in shared] for c in (low, high))
    ms = between_batch_sizes(low.ms[here], high.ms[there], batch_sizes, low.batch_size, high.batch_size)  # (n, G)
    rates = low.rates[here, None] / ms
    found: Floats = 1 - rates[shared.index(key)] / rates.max(axis=0)
    return found
