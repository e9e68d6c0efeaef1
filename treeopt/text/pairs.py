"""The pair of copied text and a neural drafter: of every step one of the two is verified, by the engine's own rule.

               copied text is verified                         the neural drafter
TensorRT-LLM   where the longest suffix that stood before is   drafts at every step, and is overwritten
               as long as the threshold, from the second step
llama.cpp      where a drafter of text finds some              drafts at the other steps alone

TensorRT-LLM's automaton lacks the first token of every answer, which no step emits. What it does not overwrite of a draft is
what stood there before; here it is taken to be wrong.

K : guesses of the neural drafter's chain

Sources: TensorRT-LLM 1a487b3f2, tensorrt_llm/_torch/speculative/sa_enhancer.py · llama.cpp 0c1e57098, common/speculative.cpp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.text.engines import text_drafter
from treeopt.text.prompt_lookup import PromptLookup
from treeopt.text.rules import Draft, TextDrafter
from treeopt.trees.draft import CopiedOr, CopiedText

AUTOMATON = "tensorrt-llm:sa"
THRESHOLD = "threshold"  # the option of sa_config


@dataclass
class Pair(TextDrafter):
    """llama.cpp's pair: copied text where there is some, else a chain that ends with the request.

    text : the drafter of text · length : K
    """

    text: TextDrafter
    length: int

    def start(self, prompt: Sequence[int]) -> Any:
        return self.text.start(prompt)

    def draft(self, state: Any, left: int) -> Draft:
        found = self.text.draft(state, left)
        length = max(min(self.length, left - 1), 0)
        return found if found.tokens else Draft([], 1 + length, neural=length)

    def commit(self, state: Any, tokens: Sequence[int], accepted: int) -> None:
        self.text.commit(state, tokens, accepted)

    def stop(self, state: Any) -> None:
        self.text.stop(state)


class Overwritten(Pair):
    """TensorRT-LLM's pair, which verifies K guesses at every step. A request's state: that of the text, and commits so far."""

    def start(self, prompt: Sequence[int]) -> list[Any]:
        return [self.text.start(prompt), 0]

    def draft(self, state: list[Any], left: int) -> Draft:
        own, commits = state
        found = self.text.draft(own, left) if commits > 1 else Draft([], 1)
        return found if found.tokens else Draft([], 1 + self.length, neural=self.length)

    def commit(self, state: list[Any], tokens: Sequence[int], accepted: int) -> None:
        own, commits = state
        if commits:  # the first is the prefill's
            self.text.commit(own, tokens, accepted)
        state[1] += 1


def drafter_of(draft: CopiedText) -> TextDrafter:
    """A fresh drafter by what a plan says of it, alone or paired.

    >>> drafter_of(CopiedOr.of("tensorrt-llm:sa", {"threshold": 4}, 4, 3, 3)).length
    3
    """
    options = draft.options
    if not isinstance(draft, CopiedOr):
        return text_drafter(draft.drafter, options)
    if draft.drafter != AUTOMATON:
        return Pair(text_drafter(draft.drafter, options), draft.length)
    if options.keys() != {THRESHOLD}:
        raise InvalidInput(f"{AUTOMATON} beside a drafter takes the option {THRESHOLD}, but got {', '.join(options)}.")
    return Overwritten(PromptLookup(draft.length, shortest=options[THRESHOLD], fill="blank"), draft.length)
