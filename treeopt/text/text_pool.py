"""TensorRT-LLM's SA with its global pool: the longest suffix of a text, up to 64 tokens, that stood in any of the pool's texts.

The pool has the prompts and answers of the requests that run and of those that finished last, in slots; without a free one the
request that finished first goes. Of equally long matches the request's own is copied, then that behind which most tokens stand;
which of others that are equal in this, too, depends on slots, and here it is the latest.

places : (rows, 5) of all tokens in columns: the token, the places of the one before it and of the last equal one, whose text it is
         and where in it; row 0 stands for none
latest : (tokens,) the last place of each token · sizes : (texts,) tokens of each text of the pool, 0 for one that is gone

Source: TensorRT-LLM ecd0a15, cpp/tensorrt_llm/kernels/speculativeDecoding/suffixAutomaton/, _torch/speculative/suffix_automaton.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.text.rules import Draft, TextDrafter
from treeopt.text.tries import Ints, compiled

TOKEN, BEFORE, EQUAL, TEXT, AT = range(5)
MOST = 64  # tokens of a suffix


@compiled
def append(places: Ints, latest: Ints, sizes: Ints, text: int, last: int, tokens: Ints, row: int) -> None:
    """Lengthen a text whose last place is given, in rows from ``row`` on."""
    for token in tokens:
        place = places[row]
        place[TOKEN], place[BEFORE], place[EQUAL] = token, last, latest[token]
        place[TEXT], place[AT] = text, sizes[text]
        latest[token] = last = row
        sizes[text] += 1
        row += 1


@compiled
def search(places: Ints, latest: Ints, sizes: Ints, last: int, first: int, most: int) -> int:
    """The last place of the match of what ends at a place, of those from ``first`` on that have a token behind; 0 for none."""
    best, found, other = (0, 0, 0), 0, int(latest[places[last, TOKEN]]) if last else 0
    while other >= first:
        text, behind = places[other, TEXT], sizes[places[other, TEXT]] - places[other, AT] - 1
        if behind > 0:
            matched, a, b = 0, last, other
            while matched < most and a and b and places[a, TOKEN] == places[b, TOKEN]:
                matched, a, b = matched + 1, int(places[a, BEFORE]), int(places[b, BEFORE])
            value = (matched, int(text == places[last, TEXT]), int(behind))
            if value > best:
                best, found = value, other
        other = int(places[other, EQUAL])
    return found


@dataclass(eq=False)
class PoolText:
    """A request's number and text, and its first and last places."""

    number: int
    tokens: list[int]
    first: int
    last: int = 0


@dataclass
class TextPool(TextDrafter):
    """A drafter by SA's global pool.

    length, longest : K, and most tokens of a match
    slots           : most texts of the pool
    pool, finished  : its texts by number, and the numbers of requests that finished, the oldest first
    """

    length: int
    longest: int | None = None
    slots: int = MOST
    pool: dict[int, PoolText] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.most, self.begun, self.rows = min(self.longest or MOST, MOST), 0, 1
        if min(self.length, self.most, self.slots) < 1:
            raise InvalidInput(
                "SA's pool drafts at least 1 token behind matches of at least 1 from at least 1 text, but got "
                f"{self.length} behind {self.longest} from {self.slots}."
            )
        self.places, self.latest, self.sizes = (np.zeros(shape, np.int32) for shape in ((1, 5), 1, 1))

    def start(self, prompt: Sequence[int]) -> PoolText:
        if len(self.pool) == self.slots:
            if not self.finished:
                raise InvalidInput(
                    f"SA's pool has {self.slots} slots, but more requests ran at once: set `global_pool_size` higher."
                )
            gone = self.finished.pop(0)
            self.sizes[gone] = 0
            del self.pool[gone]
        state = self.pool[self.begun] = PoolText(self.begun, [], self.rows)
        self.begun += 1
        self.commit(state, prompt, 0)
        return state

    def draft(self, state: PoolText, left: int) -> Draft:
        first = next(iter(self.pool.values())).first
        place = search(self.places, self.latest, self.sizes, state.last, first, self.most)
        text, at = self.places[place, TEXT:].tolist()
        return Draft(self.pool[text].tokens[at + 1 : at + 1 + self.length] if place else [], 1 + self.length)

    def commit(self, state: PoolText, tokens: Sequence[int], accepted: int) -> None:
        sizes = (self.rows + len(tokens), max(tokens, default=0) + 1, self.begun)
        for array, size in zip((self.places, self.latest, self.sizes), sizes, strict=True):
            if size > len(array):
                array.resize((2 * size, *array.shape[1:]), refcheck=False)
        append(self.places, self.latest, self.sizes, state.number, state.last, np.array(tokens, np.int32), self.rows)
        self.rows += len(tokens)
        state.last = self.rows - 1 if len(tokens) else state.last
        state.tokens += tokens

    def stop(self, state: PoolText) -> None:
        self.finished.append(state.number)
