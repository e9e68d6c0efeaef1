"""Prompt lookup of ExLlamaV3: copy the tokens behind the longest suffix that stood before, up to a width.

A request's window lies above a moving average of its accepted tokens. The prompt's last token is the first step's.

Source: exllamav3 00c091e, generator/generator.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from treeopt.text.matches import LongestSuffix
from treeopt.text.rules import First, Guesses, TextDrafter

UP, DOWN, TOO_LOW, PROBE, PROBED = 1.3, 0.65, 0.3, 2, 16  # weights; mean of no window, but one every so many steps


@dataclass(eq=False)
class Job:
    """A request of ExLlamaV3.

    window : tokens that it would draft
    mean   : of accepted tokens; None before the first draft
    low    : rounds for which the window was 0
    width  : of the last draft
    """

    text: LongestSuffix
    window: int
    mean: float | None = None
    low: int = 0
    width: int = 0


@dataclass(frozen=True)
class WindowLookup(TextDrafter):
    """ExLlamaV3's lookup.

    length   : K
    shortest : fewest tokens of a suffix
    dynamic  : whether the window moves below K
    """

    length: int = 4
    shortest: int = 1
    dynamic: bool = False
    first: First = "step"

    def start(self, prompt: Sequence[int]) -> Job:
        job = Job(LongestSuffix(), self.length)
        job.text.extend(prompt)
        return job

    def draft(self, state: Job, left: int) -> Guesses:
        if state.mean is not None:
            state.low = (state.low + 1) % PROBED if state.mean < TOO_LOW else 0
            low = 0 if state.low else min(PROBE, self.length)
            state.window = low if state.mean < TOO_LOW else max(1, min(self.length, ceil(state.mean)))
        n, end = state.text.match()
        guesses = state.text.tokens[end : end + state.window] if n >= self.shortest else []
        state.width = len(guesses)
        return Guesses(guesses, 1 + state.width)

    def commit(self, state: Job, tokens: Sequence[int], accepted: int) -> None:
        state.text.extend(tokens)
        if self.dynamic and state.width:
            sample = accepted + (accepted == state.width)
            weight = UP if state.mean is not None and sample > state.mean else DOWN
            state.mean = float(sample) if state.mean is None else weight * sample + (1 - weight) * state.mean
