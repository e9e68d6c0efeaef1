"""Greedy decoding of all sequences side by side, with up to 64 trees at once: exact, and without the model.

Row t has the t-th state of every sequence. A step in row t that accepts a guesses leads to row t + 1 + a, so all sequences
go on together. Each tree has a bit of a word for each state: whether it takes a step there.

S sequences · N distinct rank paths · D depths · n trees · W sequences of a block · T states of its longest one
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.records.trace import RankTrace
from treeopt.trees.tree import BoolArray, IntArray

AT_ONCE = 2**20  # states that are decoded together


@dataclass(frozen=True, eq=False)
class Lanes:
    """Sequences that are decoded side by side, the longest first, and their states but for the last of each.

    sequences : (W,) numbers of the sequences
    widths    : (T,) number of sequences that have a t-th state; these come first
    paths     : (n,) number of the rank path of each state, row by row
    """

    sequences: IntArray
    widths: IntArray
    paths: IntArray

    def rows(self) -> Iterator[slice]:
        """The places of the states of row 0, 1, ..."""
        return (slice(begin, end) for begin, end in pairwise([0, *self.widths.cumsum().tolist()]))


def lanes_of(trace: RankTrace, of: NDArray[Any] | None = None) -> list[Lanes]:
    """The sequences with a step, in blocks of `AT_ONCE` states. ``of`` has the path of each state, by default its number."""
    steps = trace.lengths - 1
    order = np.argsort(-steps, kind="stable")[: np.count_nonzero(steps)]
    cuts = np.flatnonzero(np.diff(steps[order].cumsum() // AT_ONCE)) + 1
    blocks = []
    for sequences in np.split(order, cuts) if len(order) else []:
        lengths, starts = steps[sequences], trace.starts[sequences]
        widths = np.searchsorted(-lengths, -np.arange(lengths[0]), side="left")
        states = np.concatenate([starts[:width] + t for t, width in enumerate(widths.tolist())])
        blocks.append(Lanes(sequences, widths, states if of is None else of[states]))
    return blocks


def visits_of(
    lanes: Lanes, order: NDArray[Any], has: NDArray[np.uint64], starts: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """(n,) for each state a word with the bits of the trees that take a step there.

    order  : (N, D) number of the node of each prefix of every path
    has    : (numbers,) bits of the trees that have each node
    starts : (W,) bits of the trees that decode each sequence

    The trees that visit a state and accept exactly a of its guesses go on to the state 1 + a rows below.
    """
    nodes = [column.take(lanes.paths) for column in order.T]
    rows, widths = list(lanes.rows()), lanes.widths.tolist()
    visits = np.zeros(len(lanes.paths), dtype=np.uint64)
    visits[rows[0]] = starts
    for t, row in enumerate(rows):
        left = visits[row]
        for a, (there, width) in enumerate(zip(rows[t + 1 : t + 2 + len(nodes)], widths[t + 1 :], strict=False)):
            left = left[:width]
            if a == len(nodes):
                visits[there] |= left
            else:
                accept = has.take(nodes[a][row.start : row.start + width])
                accept &= left
                visits[there] |= left ^ accept
                left = accept
    return visits


def steps_of(trace: RankTrace, blocks: Sequence[Lanes], order: NDArray[Any], has: BoolArray) -> IntArray:
    """(n, S) steps of every sequence with each of n trees.

    order : (N, D) number of the node of each prefix of every path
    has   : (numbers, n) whether each tree has the node
    """
    steps = np.zeros((has.shape[1], trace.num_sequences), dtype=np.int64)
    for first in range(0, len(steps), 64):
        part, has_bits = steps[first : first + 64], as_bits(has[:, first : first + 64])
        for lanes in blocks:
            starts = np.full(len(lanes.sequences), as_bits(np.ones(len(part), dtype=bool)))
            visits = visits_of(lanes, order, has_bits, starts)
            part[:, lanes.sequences] = _column_sums(visits, lanes)[:, : len(part)].T
    return steps


def as_bits(flags: BoolArray) -> NDArray[np.uint64]:
    """(...) words whose bits are (..., n) flags, n up to 64.

    >>> as_bits(np.array([[True, False], [True, True]])).tolist()
    [1, 3]
    """
    whole = np.zeros((*flags.shape[:-1], 64), dtype=bool)
    whole[..., : flags.shape[-1]] = flags
    return np.packbits(whole, axis=-1, bitorder="little").view(np.uint64)[..., 0]


def _column_sums(bits: NDArray[np.uint64], lanes: Lanes) -> IntArray:
    """(W, 64) number of states of each lane that have each bit."""
    sums = np.zeros((len(lanes.sequences), 64), dtype=np.int64)
    counts = np.zeros(sums.shape, dtype=np.uint8)
    for number, row in enumerate(lanes.rows(), 1):
        flags = np.unpackbits(bits[row].view(np.uint8), bitorder="little").reshape(-1, 64)
        counts[: len(flags)] += flags
        if number % 255 == 0:  # the most that a byte can hold
            sums += counts
            counts[:] = 0
    return sums + counts
