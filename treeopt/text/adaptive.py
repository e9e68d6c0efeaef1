"""Prompt lookup of ExLlamaV3, whose length follows what was accepted: a window.

The window lies above a moving average of accepted tokens. Requests that run at once share a width: the widest window, but no
more than the shortest draft, so none where one request has found nothing. The prompt's last token is the first step's.

Source: exllamav3 00c091e, generator/generator.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from treeopt.text.matches import Ngrams, Places
from treeopt.text.prompt_lookup import PromptLookup
from treeopt.text.rules import Draft, First

UP, DOWN, TOO_LOW, PROBE, PROBED = 1.3, 0.65, 0.3, 2, 16  # weights; mean of no window, but one every so many steps


@dataclass(eq=False)
class Job:
    """A request of ExLlamaV3.

    found  : what is behind the text, before it is cut; None where it was not looked up yet
    mean   : of accepted tokens; None before the first draft
    window : tokens that it would draft · low : rounds for which it was 0 · width : of the last draft
    """

    text: Ngrams | Places
    window: int
    found: list[int] | None = None
    mean: float | None = None
    low: int = 0
    width: int = 0


@dataclass(frozen=True)
class WindowLookup(PromptLookup):
    """ExLlamaV3's lookup.

    dynamic : whether the window moves below K
    running : requests
    """

    dynamic: bool = False
    running: list[Job] = field(default_factory=list)
    first: First = "step"

    def start(self, prompt: Sequence[int]) -> Job:
        self.running.append(Job(super().start(prompt), self.length))
        return self.running[-1]

    def draft(self, state: Job, left: int) -> Draft:
        if state.mean is not None:
            state.low = (state.low + 1) % PROBED if state.mean < TOO_LOW else 0
            low = 0 if state.low else min(PROBE, self.length)
            state.window = low if state.mean < TOO_LOW else max(1, min(self.length, ceil(state.mean)))
        state.width = max(job.window for job in self.running)
        for job in self.running:
            if job.found is None:
                job.found = self.behind(job.text, self.length)
            state.width = min(state.width, len(job.found))
        return Draft((state.found or [])[: state.width], 1 + state.width)

    def commit(self, state: Job, tokens: Sequence[int], accepted: int) -> None:
        state.text.extend(tokens)
        state.found = None
        if self.dynamic and state.width:
            now = accepted + (accepted == state.width)
            weight = UP if state.mean is not None and now > state.mean else DOWN
            state.mean = float(now) if state.mean is None else weight * now + (1 - weight) * state.mean

    def stop(self, state: Job) -> None:
        self.running.remove(state)
