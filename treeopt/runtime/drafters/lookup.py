"""Guesses from the text itself: what followed when its last tokens came before.

Prompt lookup (Saxena 2023) copies what followed one earlier place where the last n-gram stood. Here many such
places vote, and what followed them forms a trie, whose paths are the guesses:

match  an earlier place where the last n tokens of the text stood, the root being the last of all; its length is
       the greatest n, of ``longest`` down to ``shortest``, for which they did. Matches are taken longest first,
       then the most recent first, ``most_matches`` at most
rank   place of a node among its siblings: the one with more matches of length ``longest`` passing through first;
       of equal ones the one with more of the next length, and so on; of equal ones the one whose first match was
       taken first. No match passes through two siblings, so no two have the same place

Shorter matches come in behind the longer ones, because a tree has room for second opinions: with 16 nodes they accept
0.6 to 9 % more tokens per step than the longest alone; all lengths counted alike accept less than either (`docs/log.md`).

b live rows · T nodes of the tree · K guesses at most · N tokens of an answer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import InvalidInput, quoted
from treeopt.records.drafters import LOOKED_UP
from treeopt.records.trace import MISS
from treeopt.runtime.drafters.protocol import Drafter, GivenText, Mark, TreeTensors
from treeopt.runtime.target import Target
from treeopt.text.matches import Ngrams

NAMES = ("ngram", "ngram:earliest")  # as --drafter has them
Matches = list[tuple[int, int]]  # place of the token that followed, and weight, in the order they were taken


@dataclass(frozen=True)
class PromptLookup(Drafter):
    """A drafter without weights.

    vocab_size        : the target's
    num_heads         : deepest guess
    longest, shortest : tokens of the n-grams that are looked up
    most_children     : ranks per node that are told apart
    most_matches      : earlier places that are read in a step: bounds its time
    earliest          : one match alone, the earliest of the longest n-gram that has any, as transformers and OpenVINO GenAI
                        copy it
    """

    vocab_size: int
    num_heads: int = 5
    longest: int = LOOKED_UP
    shortest: int = 1
    most_children: int = 16
    most_matches: int = 64
    earliest: bool = False

    kind = "ngram"

    @property
    def draft_vocab_size(self) -> int:
        """Ranks that the children of a node can have, at most."""
        return 1 if self.earliest else self.most_children

    def start(self, batch_size: int, capacity: int) -> LookupDraft:
        return LookupDraft(self)

    def ranks(self, answers: Sequence[GivenText], top_k: int) -> list[NDArray[np.int16]]:
        return [self._ranks(answer, top_k) for answer in answers]

    def _ranks(self, answer: GivenText, top_k: int) -> NDArray[np.int16]:
        """(N, K); a guess below a token that was not guessed is a miss."""
        labels = answer.labels(self.num_heads).numpy()
        ranks = np.where(labels < 0, labels, MISS).astype(np.int16)
        text = IndexedText(self, list(answer.prompt))
        for state, (root, true) in enumerate(zip(answer.tokens[:-1], labels.tolist(), strict=False)):
            text.tokens.append(root)
            matches = text.matches()
            for k, token in enumerate(true):
                found = text.followers(matches)
                rank = next((i for i, (guess, _) in enumerate(found) if guess == token), None)
                if rank is None:  # labels past the end are negative, and so never found
                    break
                matches = found[rank][1]
                ranks[state, k] = rank if rank < top_k else MISS
        return ranks


def open_lookup(name: str, target: Target, num_heads: int) -> PromptLookup:
    """The look-up that one of `NAMES` asks for; ngram:earliest copies one match alone, as engines do."""
    if name not in NAMES:
        raise InvalidInput(f"`drafter` must be {' or '.join(NAMES)} for a look-up, but got {quoted(name)}.")
    return PromptLookup(target.vocab_size, num_heads=num_heads, earliest=name == NAMES[1])


class IndexedText(Ngrams):
    """The tokens of a sequence, and where every n-gram of them ends."""

    def __init__(self, lookup: PromptLookup, tokens: list[int]) -> None:
        super().__init__(lookup.shortest, lookup.longest, "earliest" if lookup.earliest else "all", tokens=tokens)
        self.lookup = lookup

    def matches(self) -> Matches:
        """Matches of the last tokens, with weights whose sums compare as the numbers of matches by length do.

        >>> IndexedText(PromptLookup(9, longest=2), [7, 5, 8, 5, 7, 5]).matches()
        [(2, 65), (4, 1)]
        """
        lookup, n = self.lookup, len(self.tokens)
        self.index(n)
        if lookup.earliest:
            length, end = self.match(lookup.longest)
            return [(end, 1)] if length else []
        found: dict[int, int] = {}
        for length in range(min(lookup.longest, n), lookup.shortest - 1, -1):
            weight = (lookup.most_matches + 1) ** (length - lookup.shortest)
            for at in reversed(self.every.get(tuple(self.tokens[n - length :]), ())):
                if len(found) == lookup.most_matches:
                    return list(found.items())
                found.setdefault(at, weight)  # a longer match ends there already
        return list(found.items())

    def followers(self, matches: Matches) -> list[tuple[int, Matches]]:
        """The children of the node that ``matches`` pass through, best first: tokens, and the matches of each.

        >>> text = IndexedText(PromptLookup(9, longest=2), [7, 5, 8, 5, 7, 5])
        >>> text.followers(text.matches())
        [(8, [(3, 65)]), (7, [(5, 1)])]
        """
        found: dict[int, Matches] = {}
        tokens, n = self.tokens, len(self.tokens)
        for at, weight in matches:
            if at < n:
                found.setdefault(tokens[at], []).append((at + 1, weight))
        # Sorting is stable: of equal weights the child whose first match was taken first.
        children = sorted(found.items(), key=lambda child: -sum([weight for _, weight in child[1]]))
        return children[: self.lookup.most_children]


class LookupDraft:
    def __init__(self, lookup: PromptLookup) -> None:
        self.lookup = lookup
        self.texts: list[IndexedText] = []

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        for prompt in prompts:
            self.texts.append(IndexedText(self.lookup, list(prompt)))

    def extend(self, tokens: Sequence[Sequence[int]], hidden: Tensor, paths: Sequence[Sequence[int]]) -> None:
        for text, committed in zip(self.texts, tokens, strict=True):
            text.tokens += committed

    def propose(self, plan: TreeTensors, roots: Tensor, mark: Mark) -> Tensor:
        nodes = list(zip(plan.tree.parents.tolist(), plan.tree.ranks.tolist(), strict=True))[1:]
        guesses = []
        for text, root in zip(self.texts, roots.tolist(), strict=True):
            text.tokens.append(root)
            guesses.append(_guesses(text, nodes))
            text.tokens.pop()
        found = torch.tensor(guesses, device=roots.device)
        mark("draft")
        return found

    def keep(self, order: Sequence[int]) -> None:
        self.texts = [self.texts[i] for i in order]

    def clear(self) -> None:
        self.texts = []


def _guesses(text: IndexedText, nodes: Sequence[tuple[int, int]]) -> list[int]:
    """(T,) the token of every node, by (parent, rank) of those behind the root; -1 where the trie has none."""
    tokens, matches = [text.tokens[-1]], [text.matches()]
    found: dict[int, list[tuple[int, Matches]]] = {}  # children of each parent
    for parent, rank in nodes:
        if parent not in found:
            found[parent] = text.followers(matches[parent])
        token, passing = found[parent][rank] if rank < len(found[parent]) else (-1, [])
        tokens.append(token)
        matches.append(passing)
    return tokens


def about_lookup(engine: str, drafter: Drafter) -> str:
    """What a prediction for an engine's own lookup lacks, in a sentence; empty where the drafter guesses alike."""
    if not isinstance(drafter, PromptLookup) or drafter.earliest:
        return ""
    return (
        f"{engine} copies what followed the earliest place where the last {LOOKED_UP} tokens, or fewer, stood before. The drafter "
        "ngram has all such places vote, so the prediction is not of these guesses; that of ngram:earliest is."
    )
