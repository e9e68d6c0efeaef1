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

    def add(self, match: Gram, length: int) -> None:
        if match in self.known or (self.short and any(match == one for _, one in self.short)):
            return
        kept, passed = [], None  # what stands behind a dropped one is passed over
        for before, one in self.short:
            if len(one) < len(match) and passed != before:
                passed = before
                continue
            kept.append((before, one))
            passed = None
        self.short = kept
        if len(match) == length:
            self.known.add(match)
            self.full = [*self.full[:1], match]
        else:
            self.short.append((len(self.known), match))


Pool = dict[Gram, Gram | Matches]  # one match alone stands for itself


@dataclass
class PoolState:
    """A request's text, its pool, and how much of the text was taken in."""

    tokens: list[int]
    pool: Pool
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
    pool: Pool = field(default_factory=dict)

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
        first = max(state.seen - self.length - self.longest + 1, 0)
        texts = [tuple(tokens[at : at + self.length]) for at in range(first, len(tokens))]
        for size in sizes:
            # Where all are kept, patterns whose K tokens stood there at the step before have them.
            known = max(state.seen - self.length - size + 1, 0) if self.keep_all else first
            for at in range(known, len(tokens) - size):
                self._add(state.pool, tuple(tokens[at : at + size]), texts[at + size - first])
        state.seen = len(tokens)
        for size in sizes:
            matches = state.pool.get(tuple(tokens[-size:]))
            if matches:
                if isinstance(matches, Matches):
                    matches = matches.first() if self.oldest else matches.last()
                found = matches[: left - 1]
                return Draft(found, 1 + len(found))
        return Draft([], 1)

    def _add(self, pool: Pool, pattern: Gram, match: Gram) -> None:
        matches = pool.setdefault(pattern, match)
        if matches is match or matches == match:
            return
        first = matches.first() if isinstance(matches, Matches) else matches
        if len(match) > len(first) and (not self.keep_all or first is matches):
            pool[pattern] = match
            return
        if not isinstance(matches, Matches):
            pool[pattern] = matches = Matches()
            matches.add(first, self.length)
        matches.add(match, self.length)

    def commit(self, state: PoolState, tokens: Sequence[int], accepted: int) -> None:
        state.tokens += tokens
