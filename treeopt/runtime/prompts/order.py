"""The order in which conversations are asked: shuffled by a seed, every group spread evenly over it.

A conversation's place follows from the seed and its text, never from its place in the source. Any beginning of the
order, and the rest behind it, have of every group its share, to one conversation: so have the prompts that calibration
takes. Those of bench are drawn from all that are left, of every group its share.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from treeopt.records.options import Prompts

MOST_DRAWN = 2**14  # conversations of a source; the texts of a million rows are not held

T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """Which conversations of a source are taken: the first ``most`` in the order of a seed.

    seed : None takes them as they stand in the source
    """

    seed: int | None = None
    most: int = MOST_DRAWN


def order_of(prompts: Prompts, drawn: int = 0) -> Order:
    """The order of prompts: shuffled by their seed, or as they stand; so many of them are held at least."""
    return Order(None if prompts.in_order else prompts.seed or 0, max(drawn, MOST_DRAWN))


class Draw(Generic[T]):
    """The first things of an order, drawn from things that come one by one; of several with one text the first stays."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._kept: dict[int, tuple[int, T]] = {}  # by a hash of the text: place in the order, thing
        self._came = 0
        self.repeated = 0  # things with the text of one that is kept

    def add(self, text: str, thing: T) -> None:
        """Take a thing. Once there are twice as many as are wanted, the last in the order are let go."""
        self._came += 1
        key = hashed(self.order.seed, text)
        self.repeated += key in self._kept
        self._kept.setdefault(key, (self._came if self.order.seed is None else key, thing))
        if len(self._kept) >= 2 * self.order.most:
            self._kept = dict(self._first())

    def things(self) -> list[T]:
        """The drawn things in order; groups are not spread yet."""
        return [thing for _, (_, thing) in self._first()]

    def _first(self) -> list[tuple[int, tuple[int, T]]]:
        return sorted(self._kept.items(), key=lambda kept: kept[1][0])[: self.order.most]


def spread(groups: Sequence[str], seed: int | None) -> list[int]:
    """The order of things of these groups in which every group is spread evenly; within a group it stays.

    Of n things of a group the r-th comes at (r + start) / n of the way, with a start of the group's own. Without a seed all stay.

    >>> spread(["a", "a", "a", "a", "b", "b"], 0)
    [0, 4, 1, 2, 5, 3]
    """
    if seed is None:
        return list(range(len(groups)))
    sizes, seen, places = Counter(groups), Counter[str](), []
    starts = {group: hashed(seed, group) / 2**128 for group in sizes}
    for group in groups:
        places.append((seen[group] + starts[group]) / sizes[group])
        seen[group] += 1
    return sorted(range(len(places)), key=places.__getitem__)


def hashed(seed: int | None, text: str) -> int:
    """A number below 2**128 that follows from both.

    >>> hashed(0, "a") == hashed(0, "a"), hashed(0, "a") == hashed(1, "a")
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {text}".encode()).digest()[:16], "big")
