"""What all drafters that copy text have in common: guesses after every step, from the tokens so far and what was kept.

A drafter keeps what one request leaves behind for the next. The state that `start` makes belongs to one request. At each step
`draft` guesses, the target verifies, and `commit` takes in what was emitted. The first token of an answer is the prefill's: it
is committed without guesses before it, unless an engine drafts behind the prompt alone (`First`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any, Literal, NamedTuple

First = Literal["no draft", "draft", "step"]  # before the first token: none, one behind the prompt's pass, or a step
MANY = 2**31  # tokens that a request without a limit may still emit


class Guesses(NamedTuple):
    """What a step verifies.

    tokens : guesses, with those of an engine's padding that can be accepted
    rows   : verified, the root and all padding included
    """

    tokens: Sequence[int]
    rows: int

    def accepted(self, true: Sequence[int]) -> int:
        """How many guesses greedy verification accepts.

        >>> Guesses([7, 8, 9], 4).accepted([7, 8, 6])
        2
        """
        return sum(1 for _ in takewhile(bool, map(eq, self.tokens, true)))


NO_GUESSES = Guesses([], 1)


class TextDrafter:
    """A drafter that copies text: the rule of one engine at one setting.

    first : what it does before the first token
    """

    first: First = "no draft"

    def start(self, prompt: Sequence[int]) -> Any:
        """The state of a request."""
        raise NotImplementedError

    def draft(self, state: Any, left: int) -> Guesses:
        """What the next step verifies; the request may emit ``left`` more tokens."""
        raise NotImplementedError

    def commit(self, state: Any, tokens: Sequence[int], accepted: int) -> None:
        """Take in the tokens that a step emitted. The first ``accepted`` of them are guesses."""
        raise NotImplementedError

    def stop(self, state: Any) -> None:
        """End the request; most drafters keep nothing of it."""
