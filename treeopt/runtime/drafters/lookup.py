"""Guesses from the text itself: what followed the earliest place where its last tokens stood before (prompt lookup, Saxena 2023).

The longest n-gram that stood before counts, of 3 tokens down to 1, the root being the last of them: so look up transformers,
OpenVINO GenAI and the first runner of vLLM. A draft is one chain.

N tokens of an answer · K guesses at most
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.records.drafters import LOOKED_UP
from treeopt.records.trace import MISS
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH, Drafter, GivenText, TreeTensors
from treeopt.runtime.target import Target
from treeopt.text.matches import Ngrams


@dataclass(frozen=True)
class PromptLookup(Drafter):
    """A drafter without weights.

    vocab_size : the target's
    num_heads  : deepest guess
    longest    : tokens of the longest n-gram that is looked up
    """

    vocab_size: int
    num_heads: int = DRAFT_DEPTH
    longest: int = LOOKED_UP

    kind = "ngram"
    draft_vocab_size = 1  # ranks

    def start(self, batch_size: int, capacity: int) -> LookupDraft:
        return LookupDraft(self)

    def text(self, prompt: Sequence[int]) -> Ngrams:
        return Ngrams(1, self.longest, tokens=list(prompt))

    def guesses(self, text: Ngrams, count: int) -> list[int]:
        """At most so many tokens that followed the place where the text's last tokens stood before.

        >>> lookup = PromptLookup(9, longest=2)
        >>> lookup.guesses(lookup.text([7, 5, 8, 5, 7, 5]), 3)
        [8, 5, 7]
        """
        length, end = text.match(self.longest)
        return text.tokens[end : end + count] if length else []

    def ranks(self, answers: Sequence[GivenText], top_k: int) -> list[NDArray[np.int16]]:
        return [self._ranks(answer) for answer in answers]

    def _ranks(self, answer: GivenText) -> NDArray[np.int16]:
        """(N, K); a guess below a wrong one is a miss."""
        labels = answer.labels(self.num_heads).numpy()
        ranks = np.where(labels < 0, labels, MISS).astype(np.int16)
        text = self.text(answer.prompt)
        for state, root in enumerate(answer.tokens[:-1]):
            text.extend([root])
            for k, guess in enumerate(self.guesses(text, self.num_heads)):
                if guess != labels[state, k]:
                    break
                ranks[state, k] = 0
        return ranks


def open_lookup(name: str, target: Target, num_heads: int) -> PromptLookup:
    return PromptLookup(target.vocab_size, num_heads)


class LookupDraft:
    """The rows of a decoder: the text of each."""

    def __init__(self, lookup: PromptLookup) -> None:
        self.lookup = lookup
        self.texts: list[Ngrams] = []

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        self.texts += map(self.lookup.text, prompts)

    def extend(self, tokens: Sequence[Sequence[int]], hidden: Tensor, paths: Sequence[Sequence[int]]) -> None:
        for text, committed in zip(self.texts, tokens, strict=True):
            text.extend(committed)

    def propose(self, plan: TreeTensors, roots: Tensor) -> Tensor:
        depth, rows = plan.tree.depth, []
        for text, root in zip(self.texts, roots.tolist(), strict=True):
            text.extend([root])
            guesses = self.lookup.guesses(text, depth)
            rows.append([root, *guesses, *[-1] * (depth - len(guesses))])
            text.tokens.pop()  # it is committed with the step's other tokens
        return torch.tensor(rows, device=roots.device)

    def keep(self, order: Sequence[int]) -> None:
        self.texts = [self.texts[i] for i in order]

    def clear(self) -> None:
        self.texts = []
