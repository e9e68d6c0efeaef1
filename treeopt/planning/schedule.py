"""Which batch sizes get which tree: ranges, merged where the data cannot tell the difference.

A range has one tree for all its batch sizes. It may be another than the best of some of them as long as it
is tied with it there; what it costs by the estimates is the range's loss.

Between two batch sizes that were searched, step latencies are interpolated on a straight line. A range ends there
where the next one's tree becomes faster by that estimate. What the trees lose there is an estimate too: `errors_between`
says how far such estimates were off at batch sizes that were searched. Of very many between two it is asked of `MOST`.

n candidates of two batch sizes · G batch sizes between them
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from treeopt.latency.interpolation import between_batch_sizes
from treeopt.planning.candidates import Candidates, Floats, Key
from treeopt.planning.select import Selection
from treeopt.records.plan import BatchRange
from treeopt.trees.tree import IntArray

MOST = 1000  # batch sizes between two that a loss is computed for
Losses = dict[Key, Floats]  # (G,) of each candidate whose latency is known on both sides


def schedule_of(options: list[Candidates], selections: list[Selection]) -> tuple[list[BatchRange], list[float]]:
    """The fewest ranges of batch sizes, where entry i is what was selected for options[i]; and `errors_between` of them.

    Above the largest batch size that was searched its tree goes on, and below the smallest one that one's.
    Without latencies a batch size between two belongs with the smaller one.
    """
    chosen = [c.all[s.chosen].key for c, s in zip(options, selections, strict=True)]
    gaps = [(low, high, _some(low.batch_size + 1, high.batch_size - 1)) for low, high in pairwise(options)]
    across = [(options[i - 1], options[i + 1], np.array([options[i].batch_size])) for i in range(1, len(options) - 1)]
    lost = [_lost(*gap) for gap in (*gaps, *across)]
    ranges = _fewest([_losses(c, s, chosen) for c, s in zip(options, selections, strict=True)])
    begins = [1]
    for (_, before), (first, after) in pairwise(ranges):
        sizes, losses = gaps[first - 1][2], lost[first - 1]
        unknown = np.full(len(sizes), np.inf)
        better = np.flatnonzero(losses.get(chosen[after], unknown) < losses.get(chosen[before], -unknown))
        begins.append(int(sizes[better[0]]) if len(better) else options[first].batch_size)
    found = []
    for (_, entry), begin, end in zip(ranges, begins, [*(begin - 1 for begin in begins[1:]), None], strict=True):
        between = [np.zeros(0)]
        for (_, _, sizes), losses in zip(gaps, lost, strict=False):
            inside = (sizes >= begin) & (sizes <= (end or sizes.max(initial=0)))
            between.append(losses.get(chosen[entry], np.full(len(sizes), np.nan))[inside])
        most = float(np.concatenate(between).max(initial=-1.0))  # NaN where one is not known
        found.append(BatchRange(first=begin, last=end, entry=entry, between=most if most >= 0 else None))
    return found, errors_between(options, chosen, lost[len(gaps) :])


def errors_between(options: list[Candidates], chosen: list[Key], lost: list[Losses]) -> list[float]:
    """How far interpolated losses are off: the errors at batch sizes that were searched, each left out in turn.

    Of the trees chosen on either side the one with the smaller interpolated loss is taken; where the two are one, nothing
    is tested. Shares of the throughput; empty where there are no three batch sizes, or no profile.

    lost : (1,) interpolated losses at each batch size but the first and the last
    """
    found = []
    for before, c, after, losses in zip(chosen, options[1:], chosen[2:], lost, strict=False):
        known = [(float(losses[key][0]), key) for key in (before, after) if key in losses and before != after]
        if known and (best := min(known, key=lambda one: one[0]))[1] in c.places:
            found.append(abs(best[0] - 1 + float(c.throughput[c.places[best[1]]] / c.throughput.max())))
    return found


def _fewest(losses: list[dict[int, float]]) -> list[tuple[int, int]]:
    """The first option and the entry of each range, by the losses of the entries that can serve each option."""
    found: list[tuple[int, int]] = []
    first = 0
    while first < len(losses):
        last, best = first, losses[first]
        while last + 1 < len(losses) and (both := best.keys() & losses[last + 1].keys()):
            last, best = last + 1, {i: max(best[i], losses[last + 1][i]) for i in both}
        # the least loss; of equals that which belongs to the range
        entry = min(best, key=lambda i: (round(best[i], 6), not first <= i <= last, i))
        found.append((first, entry))
        first = last + 1
    return found


def _losses(c: Candidates, selection: Selection, chosen: list[Key]) -> dict[int, float]:
    """Loss at this batch size of every entry whose draft is tied for best there."""
    own = float(c.throughput[selection.chosen])
    tied = {c.all[i].key: float(c.throughput[i]) for i in (*selection.tied.tolist(), selection.chosen)}
    return {i: max(0.0, 1 - tied[key] / own) for i, key in enumerate(chosen) if key in tied}


def _some(first: int, last: int) -> IntArray:
    """Batch sizes from the first to the last, at most `MOST` of them."""
    return np.asarray(np.linspace(first, last, min(max(last - first + 1, 0), MOST)).round().astype(np.int64))


def _lost(low: Candidates, high: Candidates, batch_sizes: IntArray) -> Losses:
    """Share of the throughput that candidates lose against the fastest, by interpolated latencies; none without latencies."""
    shared = [key for key in low.places if key in high.places] if low.context is not None else []
    here, there = ([c.places[key] for key in shared] for c in (low, high))
    ms = between_batch_sizes(low.ms[here], high.ms[there], batch_sizes, low.batch_size, high.batch_size)  # (n, G)
    rates = low.rates[here, None] / ms
    return dict(zip(shared, 1 - rates / rates.max(axis=0, initial=0.0), strict=True))
