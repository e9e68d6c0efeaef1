"""Copy what followed one match: the earliest or the latest place where the last tokens stood before.

                          n-grams         match      where less is found
vLLM, runner V1           min to max      earliest   less is verified
vLLM, runner V2           min to max      latest     the last token fills up, and is verified as a guess
transformers              1 to max        earliest   less is verified; nothing behind an end of sequence is drafted; with the prompt too
OpenVINO GenAI            1 to max        earliest   blanks fill up; one token is spared where the limit is near
ExLlamaV3                 min to any      earliest   less is verified; adaptive.py has how much of both

Sources: vllm 0.33.0 v1/spec_decode/ngram_proposer.py and v1/worker/gpu/spec_decode/ngram/speculator.py · transformers 5.23.0
generation/candidate_generator.py · openvino.genai prompt_lookup/ · exllamav3 generator
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from treeopt.errors import InvalidInput
from treeopt.text.matches import Ngrams, Places
from treeopt.text.rules import Draft, First, TextDrafter

# How many of K tokens are drafted where so many are left.
CUTS: Mapping[str, Callable[[int, int], int]] = {
    "never": lambda length, left: length,
    "last": lambda length, left: length if left > 1 else 0,
    "spare": lambda length, left: min(length, left - 1),
}


@dataclass(frozen=True)
class PromptLookup(TextDrafter):
    """A drafter that copies one match.

    length   : K
    shortest, longest : tokens of the n-grams that are looked up, the longest first; None for matches of any length
    latest   : of several matches the latest, not the earliest
    fill     : what stands where less than K was found, up to K rows; nothing, blanks or the last token
    cut      : of `CUTS`
    halved   : longer n-grams than the text are looked up from half the text on
    ends     : tokens that end a sequence, and a draft
    """

    length: int
    longest: int | None = None
    shortest: int = 1
    latest: bool = False
    fill: Literal["nothing", "blank", "last"] = "nothing"
    cut: str = "never"
    halved: bool = False
    ends: Collection[int] = ()
    first: First = "no draft"

    def __post_init__(self) -> None:
        if min(self.length, self.shortest) < 1 or (self.longest is not None and self.longest < self.shortest):
            raise InvalidInput(
                "A look-up drafts at least 1 token behind n-grams of at least 1 token, the longest not shorter than the "
                f"shortest, but got {self.length} tokens behind n-grams of {self.shortest} to {self.longest}."
            )

    def start(self, prompt: Sequence[int]) -> Any:
        keep: Literal["latest", "earliest"] = "latest" if self.latest else "earliest"
        text = Places() if self.longest is None else Ngrams(self.shortest, self.longest, keep)
        text.extend(prompt)
        return text

    def draft(self, state: Any, left: int) -> Draft:
        found = self.behind(state, max(CUTS[self.cut](self.length, left), 0))
        rows = 1 + (len(found) if self.fill == "nothing" else self.length)
        if self.fill == "last":
            found += state.tokens[-1:] * (self.length - len(found))
        return Draft(found, rows)

    def commit(self, state: Any, tokens: Sequence[int], accepted: int) -> None:
        state.extend(tokens)

    def behind(self, text: Ngrams | Places, length: int) -> list[int]:
        """What followed the match, up to a length."""
        tokens = text.tokens
        whole = self.halved and text.longest >= len(tokens)
        n, end = text.match(len(tokens) // 2 if whole else text.longest)
        found = tokens[end : end + length] if n >= self.shortest else []
        return list(takewhile(lambda token: token not in self.ends, found))
