"""Which batch sizes get which of a plan's drafts: the ranges of its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from treeopt.errors import InvalidInput
from treeopt.files.fields import Count, Positive, Share


@dataclass(frozen=True, kw_only=True)
class BatchRange:
    """Batch sizes ``first`` to ``last`` (None: all from ``first`` on) get the draft of ``entries[entry]``.

    between : the largest share of the throughput that it costs at a batch size of the range between those that were
              searched, by interpolated latencies; None where there is none, or no profile
    """

    first: Positive
    last: Positive | None = None
    entry: Count
    between: Share | None = None

    def __str__(self) -> str:
        return f"from {self.first} to {'the end' if self.last is None else self.last}: entry {self.entry}"


def each_its_own(batch_sizes: list[int]) -> list[BatchRange]:
    """The schedule in which every entry serves the batch sizes from its own up to the next one's.

    >>> print(*each_its_own([2, 8]), sep="; ")
    from 1 to 7: entry 0; from 8 to the end: entry 1
    """
    first = {size: i for i, size in reversed(list(enumerate(batch_sizes)))}
    begins = [1, *sorted(first)[1:]]
    ends = [*(begin - 1 for begin in begins[1:]), None]
    return [
        BatchRange(first=begin, last=end, entry=first[size])
        for size, begin, end in zip(sorted(first), begins, ends, strict=True)
    ]


def check_schedule(schedule: list[BatchRange], n_entries: int) -> None:
    """Raise InvalidInput where ranges overlap, leave a gap, or name no entry."""
    begin: int | None = 1
    for part in schedule:
        if part.first != begin or (part.last is not None and part.last < part.first):
            raise InvalidInput(f"A schedule must have ranges from 1 on that follow each other, but has '{part}'.")
        if not 0 <= part.entry < n_entries:
            raise InvalidInput(f"A schedule must name entries 0 to {n_entries - 1}, but has '{part}'.")
        begin = None if part.last is None else part.last + 1
    if begin is not None:
        raise InvalidInput("The last range of a schedule must be open: its 'last' is null.")
