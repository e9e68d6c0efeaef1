"""TensorRT-LLM's NGram: a pool from patterns, the n-grams up to a length, to the texts that followed them.

Every step takes in all patterns of the end of the text with up to K tokens behind each, fewer where the text ends. So a match
is clipped when it is new, and a longer one of its pattern drops shorter ones, but of neighbours in the pool only every other.
A pool of all requests is never emptied.

Source: TensorRT-LLM 0249976, tensorrt_llm/_torch/speculative/ngram.py, with ordered-set's list of items
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treeopt.errors import InvalidInput
from treeopt.text.matches import Gram
from treeopt.text.rules import Draft, TextDrafter


@dataclass
class Matches:
    """What followed one pattern, in order. Matches of K tokens are never dropped, so that of these the ends suffice.

    full  : the first and the last of K tokens
    known : those of K tokens
    short : shorter ones, each with how many of K tokens stand before it
    """

    full: list[Gram] = field(default_factory=list)
    known: set[Gram] = field(default_factory=set)
    short: list[tuple[int, Gram]] = field(default_factory=list)

    def first(self) -> Gram:
        return self.short[0][1] if self.short and not self.short[0][0] else self.full[0]

    def last(self) -> Gram:
        return self.short[-1][1] if self.short and self.short[-1][0] == len(self.known) else self.full[-1]

    def add(self, match: Gram, is_full: bool) -> None:
        if match in self.known or any(match == one for _, one in self.short):
            return
        kept, spared = [], None  # the place behind a dropped one is passed over
        for before, one in self.short:
            if len(one) < len(match) and spared != before:
                spared = before
                continue
            kept.append((before, one))
            spared = None
        self.short = kept
        if is_full:
            self.known.add(match)
            self.full = [*self.full[:1], match]
        else:
            self.short.append((len(self.known), match))


@dataclass
class PoolState:
    """A request's text, its pool, and how much of the text was taken in."""

    tokens: list[int]
    pool: dict[Gram, Matches]
    seen: int = 0


@dataclass
class MatchPool(TextDrafter):
    """A drafter that looks patterns up in a pool.

    length, longest : K, and tokens of the longest patterns
    keep_all : a longer match does not take the place of all others
    oldest   : of a pattern's matches the first is drafted, not the last
    public   : one pool for all requests
    """

    length: int
    longest: int = 2
    keep_all: bool = True
    oldest: bool = True
    public: bool = True
    pool: dict[Gram, Matches] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.length, self.longest) < 1:
            raise InvalidInput(
                f"A pool drafts at least 1 token behind patterns of at least 1, but got {self.length} behind {self.longest}."
            )

    def start(self, prompt: Sequence[int]) -> PoolState:
        return PoolState(list(prompt), self.pool if self.public else {})

    def draft(self, state: PoolState, left: int) -> Draft:
        if left <= 1:
            return Draft([], 1)
        tokens, sizes = state.tokens, range(min(self.longest, len(state.tokens) - 1), 0, -1)
        for size in sizes:
            # Where all are kept, patterns whose K tokens stood there at the step before have them.
            first = state.seen - self.length - (size if self.keep_all else self.longest) + 1
            for at in range(max(first, 0), len(tokens) - size):
                self._add(state.pool, tuple(tokens[at : at + size]), tuple(tokens[at + size : at + size + self.length]))
        state.seen = len(tokens)
        for size in sizes:
            matches = state.pool.get(tuple(tokens[-size:]))
            if matches:
                found = (matches.first() if self.oldest else matches.last())[: left - 1]
                return Draft(found, 1 + len(found))
        return Draft([], 1)

    def _add(self, pool: dict[Gram, Matches], pattern: Gram, match: Gram) -> None:
        matches = pool.get(pattern)
        if matches is None or (not self.keep_all and len(match) > len(matches.first())):
            matches = pool[pattern] = Matches()
        matches.add(match, len(match) == self.length)

    def commit(self, state: PoolState, tokens: Sequence[int], accepted: int) -> None:
        state.tokens += tokens
