"""Prompt lookup whose length follows what was accepted: in ONNX Runtime GenAI K, and rests; in ExLlamaV3 a window.

ONNX Runtime GenAI keeps, for every K, a moving average of tokens, time and acceptance over the rounds that proposed all of K.
Where acceptance is low or high it tries K - 1 or K + 1 for two rounds, and stays there if tokens come no slower. Here every pass
lasts alike, whatever its rows: the engine's own times decide otherwise where rows cost much.

It drafts behind the prompt alone. Behind a round of two tokens or more the last token is the root of the next round's pass, else it
has a pass of its own (`Draft.apart`).

ExLlamaV3's window lies above a moving average of accepted tokens. Requests that run at once share a width: the widest window, but no
more than the shortest draft, so none where one request has found nothing. The prompt's last token is the first step's.

Sources: onnxruntime-genai 016cf0b, src/decoding/speculative_decoding_strategy.h and .cpp · exllamav3 00c091e, generator/generator.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray

from treeopt.text.matches import Ngrams, Places
from treeopt.text.prompt_lookup import PromptLookup
from treeopt.text.rules import Draft, First

MOST_K, NEWEST = 16, 0.25  # weight of the newest round in an average
LOW, HIGH, KEEP, STOP = 0.5, 0.75, 0.97, 0.8  # acceptance; rates beside that of the K from which another is tried
ROUNDS, AFTER_SUCCESS, AFTER_FAILURE = 2, 1, 6  # that a decision needs; without one behind a trial
FAILURES = 3  # rounds on end without an accepted token, behind which one rests
UP, DOWN, TOO_LOW, PROBE, PROBED = 1.3, 0.65, 0.3, 2, 16  # weights; mean of no window, but one every so many steps


@dataclass
class AdaptiveK:
    """K of a request, at ``least`` so many.

    averages    : by K, of tokens, passes and acceptance
    origin      : the K from which another is tried; 0 for none
    seen, waits : rounds since the last decision or its beginning; rounds to wait
    """

    least: int
    k: int
    averages: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    origin: int = 0
    seen: int = 0
    waits: int = 0

    def learn(self, accepted: int, emitted: int) -> None:
        """Take in a round that proposed all of K."""
        k = self.k
        passes = 2 if k == 1 else 1  # the last token has its own
        new = np.array([emitted, passes, accepted / min(accepted + 1, k)], np.float32)
        old = self.averages.get(k, new)
        self.averages[k] = old + NEWEST * (new - old)
        self.rounds[k] = self.rounds.get(k, 0) + 1
        self.seen += 1
        acceptance = self.averages[k][2]
        if self.origin:
            rate, before = (self.averages[one][0] / self.averages[one][1] for one in (k, self.origin))
            if rate < before * STOP or self.seen >= ROUNDS:
                kept = rate >= before * KEEP and (k < self.origin or acceptance >= HIGH)
                self.k, self.waits = (k, AFTER_SUCCESS) if kept else (self.origin, AFTER_FAILURE)
                self.origin = self.seen = 0
        elif self.waits:
            self.waits -= 1
        elif self.rounds[k] >= ROUNDS:
            step = -(k > self.least) if acceptance < LOW else k < MOST_K and acceptance >= HIGH and self.seen >= ROUNDS
            if step:
                self.origin, self.k, self.seen = k, k + step, 0


@dataclass(eq=False)
class Round:
    """A request of ONNX Runtime GenAI, and its next round: whether it rests, and whether its root has a pass of its own."""

    text: Ngrams | Places
    adaptive: AdaptiveK | None
    found: int = 0
    failures: int = 0
    rests: bool = False
    apart: bool = True


@dataclass(frozen=True)
class RoundLookup(PromptLookup):
    """ONNX Runtime GenAI's lookup.

    least_k  : K where it begins, and its least; 0 for K as it is
    cooldown : whether a step is plain behind three rounds of the least K without an accepted token
    """

    least_k: int = 0
    cooldown: bool = False
    first: First = "draft"

    def start(self, prompt: Sequence[int]) -> Round:
        return Round(self.text_of(prompt), AdaptiveK(self.least_k, self.least_k) if self.least_k else None)

    def draft(self, state: Round, left: int) -> Draft:
        length = min(state.adaptive.k if state.adaptive else self.length, left)
        found = [] if state.rests else self.behind(state.text, length)
        state.found = len(found)
        return Draft(found, 1 + len(found), apart=state.apart)

    def commit(self, state: Round, tokens: Sequence[int], accepted: int) -> None:
        state.text.extend(tokens)
        state.apart, state.rests = state.found < 2, False
        if not state.found:
            return
        failed = not accepted and state.found == (self.least_k or self.length)
        state.failures = state.failures + 1 if self.cooldown and failed else 0
        if state.failures == FAILURES:
            state.failures, state.rests = 0, True
        if state.adaptive and state.found == state.adaptive.k:
            state.adaptive.learn(accepted, len(tokens))


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
        self.running.append(Job(self.text_of(prompt), self.length))
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
