"""What all drafters that copy text have in common: a draft after every step, from the tokens so far and what was kept.

A drafter keeps what one request leaves behind for the next; what it keeps of one request is the state that `start` makes. A
step drafts, the target verifies, and `commit` says what came of it. The first token of an answer is the prefill's: it is
committed without a draft before it, unless an engine drafts behind the prompt alone (`First`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any, Literal, NamedTuple

First = Literal["no draft", "draft", "step"]  # before the first token: none, one behind the prompt's pass, or a step
MANY = 2**31  # tokens that a request without a limit may still emit


class Draft(NamedTuple):
    """What a step verifies.

    tokens  : guesses, those that an engine pads with included where they can be accepted
    rows    : verified, the root and all padding included
    """

    tokens: Sequence[int]
    rows: int

    def accepted(self, true: Sequence[int]) -> int:
        """How many guesses greedy verification accepts.

        >>> Draft([7, 8, 9], 4).accepted([7, 8, 6])
        2
        """
        return sum(1 for _ in takewhile(bool, map(eq, self.tokens, true)))


NO_DRAFT = Draft([], 1)


class TextDrafter:
    """A drafter that copies text, by the rule of one engine at one setting. first: what it does before the first token."""

    first: First = "no draft"

    def start(self, prompt: Sequence[int]) -> Any:
        """The state of a request."""
        raise NotImplementedError

    def draft(self, state: Any, left: int) -> Draft:
        """What the next step verifies, where the request may emit ``left`` more tokens."""
        raise NotImplementedError

    def commit(self, state: Any, tokens: Sequence[int], accepted: int) -> None:
        """Take in what a step emitted, of which the first were ``accepted`` guesses."""
        raise NotImplementedError

    def stop(self, state: Any) -> None:
        """End the request; most drafters keep nothing of it."""
