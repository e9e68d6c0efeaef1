"""Copy the tokens behind one match: the earliest or the latest place where the last tokens stood before.

                          n-grams         match      where less is found
vLLM, runner V1           min to max      earliest   less is verified
vLLM, runner V2           min to max      latest     the last token fills up, and is verified as a guess
transformers              1 to max        earliest   less is verified; nothing behind an end of sequence is drafted; with the prompt too
OpenVINO GenAI            1 to max        earliest   blanks fill up; one token is spared where the limit is near
ExLlamaV3                 min to any      earliest   less is verified; the prompt's last token is the first step's

Sources: vllm 0.33.0 v1/spec_decode/ngram_proposer.py and v1/worker/gpu/spec_decode/ngram/speculator.py · transformers 5.23.0
generation/candidate_generator.py · openvino.genai prompt_lookup/ · exllamav3 00c091e generator/generator.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from treeopt.errors import InvalidInput
from treeopt.text.matches import LongestSuffix, Ngrams
from treeopt.text.rules import First, Guesses, TextDrafter

# Tokens that are drafted, by K and by the tokens that may still be emitted.
CUTS: Mapping[str, Callable[[int, int], int]] = {
    "never": lambda length, left: length,
    "last": lambda length, left: length if left > 1 else 0,
    "spare": lambda length, left: min(length, left - 1),
}


@dataclass(frozen=True)
class Lookup(TextDrafter):
    """A drafter that copies one match. The state of a request is its `Ngrams`.

    length   : K
    longest, shortest : tokens of the n-grams that are looked up, the longest first
    latest   : whether the latest of several matches is copied, not the earliest
    fill     : what fills a draft of less than K tokens up to K
    cut      : a key of `CUTS`
    ends     : tokens that end a sequence, and a draft
    """

    length: int
    longest: int
    shortest: int = 1
    latest: bool = False
    fill: Literal["nothing", "blank", "last"] = "nothing"
    cut: str = "never"
    ends: Collection[int] = ()
    first: First = "no draft"

    def __post_init__(self) -> None:
        if self.longest < self.shortest:
            raise InvalidInput(
                "A look-up's longest n-grams must not be shorter than the shortest, but got "
                f"{self.longest} and {self.shortest} tokens."
            )

    def start(self, prompt: Sequence[int]) -> Ngrams:
        return Ngrams(self.shortest, self.longest, "latest" if self.latest else "earliest", tokens=list(prompt))

    def draft(self, state: Ngrams, left: int) -> Guesses:
        tokens = state.tokens
        n, end = state.match(self.longest)
        length = max(CUTS[self.cut](self.length, left), 0) if n else 0
        guesses = list(takewhile(lambda token: token not in self.ends, tokens[end : end + length]))
        rows = 1 + (len(guesses) if self.fill == "nothing" else self.length)
        if self.fill == "last":
            guesses += tokens[-1:] * (self.length - len(guesses))
        return Guesses(guesses, rows)

    def commit(self, state: Ngrams, tokens: Sequence[int], accepted: int) -> None:
        state.extend(tokens)


@dataclass(frozen=True)
class SuffixLookup(TextDrafter):
    """A drafter that copies what followed the longest suffix. The state of a request is its `LongestSuffix`.

    length   : K
    shortest : fewest tokens of a suffix
    """

    length: int = 4
    shortest: int = 1
    first: First = "step"

    def start(self, prompt: Sequence[int]) -> LongestSuffix:
        text = LongestSuffix()
        text.extend(prompt)
        return text

    def draft(self, state: LongestSuffix, left: int) -> Guesses:
        n, end = state.match()
        guesses = state.tokens[end : end + self.length] if n >= self.shortest else []
        return Guesses(guesses, 1 + len(guesses))

    def commit(self, state: LongestSuffix, tokens: Sequence[int], accepted: int) -> None:
        state.extend(tokens)
