"""TensorRT-LLM's NGram: a pool from patterns, the n-grams up to a length, to the texts that followed them.

Every step takes in all patterns of the end of the text with up to K tokens behind each, fewer where the text ends. So a match
is clipped when it is new, and a longer one of its pattern drops shorter ones, but of neighbours in the pool only every other.
A pool of all requests is never emptied.

Source: TensorRT-LLM 0249976, tensorrt_llm/_torch/speculative/ngram.py, with ordered-set's list of items
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.text.matches import Gram
from treeopt.text.rules import NO_DRAFT, Draft, TextDrafter


@dataclass(slots=True)
class Matches:
    """What followed one pattern, in order.

    full  : matches of K tokens, which are never dropped
    short : shorter ones, each with how many of K tokens stand before it
    """

    full: dict[Gram, None] = field(default_factory=dict)
    short: dict[Gram, int] = field(default_factory=dict)

    def first(self, walk: Callable[[dict[Gram, Any]], Iterator[Gram]] = iter) -> Gram:
        """The first match, or the last where ``walk`` is reversed."""
        edge = 0 if walk is iter else len(self.full)
        found = next(walk(self.short), ())
        return found if self.short.get(found) == edge else next(walk(self.full))

    def add(self, match: Gram, length: int) -> None:
        if match in self.full or match in self.short:
            return
        passed = None  # what stands behind a dropped one is passed over
        for one, before in list(self.short.items()):
            if len(one) < len(match) and passed != before:
                passed = before
                del self.short[one]
            else:
                passed = None
        if len(match) == length:
            self.full[match] = None
        else:
            self.short[match] = len(self.full)


Pool = dict[Gram, Matches]


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
            return NO_DRAFT
        tokens, pool, sizes = state.tokens, state.pool, range(min(self.longest, len(state.tokens) - 1), 0, -1)
        first = max(state.seen - self.length - self.longest + 1, 0)
        texts = [tuple(tokens[at : at + self.length]) for at in range(first, len(tokens))]
        for size in sizes:
            # Where all are kept, patterns whose K tokens stood there at the step before have them.
            known = max(state.seen - self.length - size + 1, 0) if self.keep_all else first
            for at in range(known, len(tokens) - size):
                pattern, match = tuple(tokens[at : at + size]), texts[at + size - first]
                matches = pool.get(pattern)
                if matches is None or (not self.keep_all and len(match) > len(matches.first())):
                    matches = pool[pattern] = Matches()
                matches.add(match, self.length)
        state.seen = len(tokens)
        found = next((pool[pattern] for size in sizes if (pattern := tuple(tokens[-size:])) in pool), None)
        guesses = found.first(iter if self.oldest else reversed)[: left - 1] if found else ()
        return Draft(guesses, 1 + len(guesses))

    def commit(self, state: PoolState, tokens: Sequence[int], accepted: int) -> None:
        state.tokens += tokens
