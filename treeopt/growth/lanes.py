"""Greedy decoding of all sequences side by side, with many trees at once, a bit each: exact, and without the model.

Row t has the t-th state of every sequence. A step at a state of row t that accepts a guesses leads to row t + 1 + a, so all
sequences go on together; the trees that do so are one word of bits.

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
    """Sequences that are decoded side by side, the longest first. Row t has the t-th state of each, if a step can be taken.

    sequences : (W,) their numbers
    widths    : (T,) how many of them, from the first on, have a t-th state
    paths     : (n,) number of the rank path of each state, row by row
    """

    sequences: IntArray
    widths: IntArray
    paths: IntArray

    def rows(self) -> Iterator[slice]:
        """Where the states of row 0, 1, ... are."""
        return (slice(begin, end) for begin, end in pairwise([0, *self.widths.cumsum().tolist()]))


def lanes_of(trace: RankTrace, of: NDArray[Any] | None = None) -> list[Lanes]:
    """The sequences with a step, in blocks of `AT_ONCE` states; ``of`` has each state's path, by default its own number."""
    steps = trace.lengths - 1
    order = np.argsort(-steps, kind="stable")[: np.count_nonzero(steps)]
    cuts = np.flatnonzero(np.diff(steps[order].cumsum() // AT_ONCE)) + 1
    found = []
    for sequences in np.split(order, cuts) if len(order) else []:
        own, starts = steps[sequences], trace.starts[sequences]
        widths = np.searchsorted(-own, -np.arange(own[0]), side="left")
        states = np.concatenate([starts[:width] + t for t, width in enumerate(widths.tolist())])
        found.append(Lanes(sequences, widths, states if of is None else of[states]))
    return found


def visits_of(
    lanes: Lanes, order: NDArray[Any], has: NDArray[np.uint64], starts: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """(n,) which of up to 64 trees take a step at each state, a bit each.

    order : (N, D) the node of each prefix of every path, by any number
    has   : by number of a node, which trees have it · starts : (W,) which trees decode each sequence

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

    order : (N, D) the node of each prefix of every path, by any number · has : (numbers, n) trees that have it
    """
    steps = np.zeros((has.shape[1], trace.num_sequences), dtype=np.int64)
    for first in range(0, len(steps), 64):
        some, everyone = steps[first : first + 64], has[:, first : first + 64]
        for lanes in blocks:
            starts = np.full(len(lanes.sequences), as_bits(np.ones(len(some), dtype=bool)))
            visits = visits_of(lanes, order, as_bits(everyone), starts)
            some[:, lanes.sequences] = _column_sums(visits, lanes)[:, : len(some)].T
    return steps


def as_bits(flags: BoolArray) -> NDArray[np.uint64]:
    """(...) one number for (..., n) flags, n up to 64.

    >>> as_bits(np.array([[True, False], [True, True]])).tolist()
    [1, 3]
    """
    whole = np.zeros((*flags.shape[:-1], 64), dtype=bool)
    whole[..., : flags.shape[-1]] = flags
    return np.packbits(whole, axis=-1, bitorder="little").view(np.uint64)[..., 0]


def _column_sums(bits: NDArray[np.uint64], lanes: Lanes) -> IntArray:
    """(W, 64) how many states of each lane have each bit. Overwrites the bits.

    A word has one binary digit of 64 sums. Of three words of the same digit one is left, and a carry to the next digit.
    """
    digits: list[list[NDArray[np.uint64]]] = [[]]
    for row in lanes.rows():
        word = bits[row]
        for words in digits:
            words.append(word)
            if len(words) < 3:
                break
            first, second, third = words
            word, carry = _add(first, second), _add(first, third)
            word[: len(carry)] |= carry
            del words[1:]
        else:
            digits.append([word])
    sums = np.zeros((len(lanes.sequences), 64), dtype=np.int64)
    for place, words in enumerate(digits):
        for word in words:
            ones = np.unpackbits(word[:, None].view(np.uint8), axis=1, bitorder="little")
            sums[: len(word)] += ones.astype(np.int64) << place
    return sums


def _add(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Add a word, which may be shorter, to the first one in place. Returns the carry."""
    same = first[: len(second)]
    carry = same & second
    same ^= second
    return carry
