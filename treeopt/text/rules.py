"""The protocol of drafters that copy text: guesses for every step, from the request's tokens and from kept text.

`start` makes the state of a request; a drafter itself may keep text for later requests. At each step `draft` guesses, the
target verifies, and `commit` takes in the emitted tokens. The prefill emits the first token of an answer: it is committed
without guesses before it, unless an engine drafts behind the prompt alone (`First`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any, Literal, NamedTuple

First = Literal["no draft", "draft", "step"]  # before the first token: none, one behind the prompt's pass, or a step
MANY = 2**31  # tokens that a request without a limit may still emit


class Guesses(NamedTuple):
    """The guesses of a step.

    tokens : guesses, and padding that can be accepted
    rows   : rows that the step verifies, the root and all padding included
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
    """A drafter that copies text: the rule of one engine with some options.

    first : what it does before the first token of an answer
    """

    first: First = "no draft"

    def start(self, prompt: Sequence[int]) -> Any:
        """The state of a request."""
        raise NotImplementedError

    def draft(self, state: Any, left: int) -> Guesses:
        """The guesses of the next step; the request may emit ``left`` more tokens."""
        raise NotImplementedError

    def commit(self, state: Any, tokens: Sequence[int], accepted: int) -> None:
        """Take in the tokens that a step emitted. The first ``accepted`` of them are guesses."""
        raise NotImplementedError
