"""Which batch sizes get which tree: ranges, merged where the data cannot tell the difference.

A range has one tree for all its batch sizes. It may be another than the best of some of them as long as it
is tied with it there; what it costs by the estimates is the range's loss.
"""

from __future__ import annotations

from treeopt.planning.candidates import Candidates, Key
from treeopt.planning.select import Selection
from treeopt.records.ranges import BatchRange


def schedule_of(options: list[Candidates], selections: list[Selection]) -> list[BatchRange]:
    """The fewest ranges of batch sizes; entry i is what was selected for options[i].

    A batch size that was not asked for belongs with the next smaller one that was.
    """
    chosen = [c.key(s.chosen) for c, s in zip(options, selections, strict=True)]
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
    begins = [1, *(options[first].batch_size for first, _, _ in starts[1:])]
    ends = [*(begin - 1 for begin in begins[1:]), None]
    return [
        BatchRange(first=begin, last=end, entry=entry, loss=None if options[0].ms is None else loss)
        for begin, end, (_, entry, loss) in zip(begins, ends, starts, strict=True)
    ]


def one_for_all() -> list[BatchRange]:
    """The schedule of a single tree, whatever it costs at each batch size."""
    return [BatchRange(first=1, last=None, entry=0)]


def _losses(c: Candidates, selection: Selection, chosen: list[Key]) -> dict[int, float]:
    """Of every entry whose tree is tied with the fastest at this batch size what it costs there."""
    own = float(c.throughput[selection.chosen])
    tied = {c.key(i): float(c.throughput[i]) for i in (*selection.tied.tolist(), selection.chosen)}
    return {i: max(0.0, 1 - tied[key] / own) for i, key in enumerate(chosen) if key in tied}
