"""Suffix decoding (Oliaro et al. 2024) as in ArcticInference and vLLM: the likeliest continuation, by counts of all suffixes.

Suffixes of up to D tokens are counted twice: in the text of the request, prompt and answer, and in the latest answers together.
For every length m < D of the last tokens that stood before, the likeliest continuation is drafted, of at most m times the
factor, plus the offset, tokens. The draft with the greatest sum of probabilities wins, then the longer match, then the
request's own text. Equally frequent tokens have the order in which `SuffixCounts` keeps them.

Source: ArcticInference 9d46438, csrc/suffix_decoding/suffix_tree.cc and arctic_inference/suffix_decoding/cache.py
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.text.matches import SuffixAutomaton
from treeopt.text.rules import Guesses, TextDrafter

Steps = dict[int, tuple[int, int, float]]  # state -> its likeliest next token, the state behind that, its probability


@dataclass
class CountedText:
    """A text whose suffixes are counted.

    whole : the state of the text
    cut   : the state of its last D - 1 tokens, or of more
    """

    tokens: list[int] = field(default_factory=list)
    whole: int = 0
    cut: int = 0


class SuffixCounts(SuffixAutomaton):
    """How often every n-gram of up to ``depth`` tokens stands in some texts, and which tokens follow it.

    counts : of each state
    orders : of each state, the tokens that follow, the most frequent first; empty for state 0, as nothing is drafted behind it
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.counts: list[int] = [0]
        self.orders: list[list[int]] = [[]]

    def extend(self, text: CountedText, tokens: Sequence[int]) -> None:
        """Append tokens to one of the texts."""
        text.tokens += tokens
        for token in tokens:
            text.whole = self.append(text.whole, token)
            text.cut = self._change(text.cut, token, 1)

    def remove(self, text: CountedText) -> None:
        """Take one of the texts out."""
        cut = 0
        for token in text.tokens:
            cut = self._change(cut, token, -1)

    def shortened(self, state: int) -> int:
        """The state of the last D - 1 tokens, by a state of as many or more tokens."""
        while self.lengths[state] >= self.depth and self.lengths[self.links[state]] >= self.depth - 1:
            state = self.links[state]
        return state

    def _change(self, cut: int, token: int, by: int) -> int:
        """Add ``by`` to the count of a token behind all suffixes of the state ``cut``. Returns the state behind the token."""
        links, counts = self.links, self.counts
        cut = suffix = self.shortened(cut)
        while suffix:
            order = self.orders[suffix]
            if by < 0:
                self._lower(suffix, token)
            elif not order or order[0] != token:  # the first token stays first
                self._raise(suffix, token)
            suffix = links[suffix]
        longest = suffix = self.moves[cut][token]
        while suffix:
            counts[suffix] += by
            suffix = links[suffix]
        return longest

    def _raise(self, state: int, token: int) -> None:
        """Move a token whose count rises by one to its place among the tokens with the new count, as ArcticInference does."""
        order, moves, counts = self.orders[state], self.moves[state], self.counts
        count = counts[moves[token]]
        if count == 0:
            order.append(token)
        else:
            i = order.index(token)
            before = counts[moves[order[i - 1]]]
            if before <= count + 1:
                first = bisect_left(order, -before, 0, i, key=lambda other: -counts[moves[other]])
                order.insert(first, order.pop(i))

    def _lower(self, state: int, token: int) -> None:
        """Move a token whose count falls by one behind the tokens with its old count, or remove it at 0."""
        order, moves, counts = self.orders[state], self.moves[state], self.counts
        count, i = counts[moves[token]], order.index(token)
        del order[i]
        if count > 1:
            last = bisect_right(order, -count, i, key=lambda other: -counts[moves[other]])
            order.insert(last, token)

    def _add(self, length: int, moves: dict[int, int], original: int = -1) -> int:
        self.counts.append(self.counts[original] if original >= 0 else 0)
        self.orders.append(self.orders[original].copy() if original >= 0 else [])
        return super()._add(length, moves)

    def longest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of some tokens that is in the texts."""
        state = length = 0
        for token in tokens:
            while state and token not in self.moves[state]:
                state = self.links[state]
                length = self.lengths[state]
            if token in self.moves[state]:
                state, length = self.moves[state][token], length + 1
        return state, length

    def likeliest(self, state: int, most: int, least: float, steps: Steps) -> tuple[list[int], list[float]]:
        """The likeliest path behind a state, of at most ``most`` tokens, and sums of its probabilities, in float32 as in C++.

        least : probability of a path, below which it ends
        steps : those that were looked up since a text changed; new ones are added
        """
        tokens, sums = list[int](), [0.0]
        cell = array("f", (1, 0))  # probability of the path, sum of them
        for _ in range(most):
            step = steps.get(state)
            if step is None:
                if not self.orders[state]:
                    break
                token = self.orders[state][0]
                child = self.moves[state][token]
                step = steps[state] = token, child, array("f", [self.counts[child] / self.counts[state]])[0]
            token, state, share = step
            cell[0] *= share
            if cell[0] < least:
                break
            cell[1] += cell[0]
            tokens.append(token)
            sums.append(cell[1])
        return tokens, sums


@dataclass
class Running:
    """A request: its number, and the counts of its text."""

    number: int
    counts: SuffixCounts
    text: CountedText


@dataclass
class SuffixDecoding(TextDrafter):
    """A drafter by suffixes.

    length : most tokens of a draft; D where it is None
    depth  : D
    factor, offset : a match of m tokens has a draft of at most factor x m + offset tokens
    least  : probability of a path, below which it ends
    cached : most requests whose answers are counted together, the running ones included
    """

    length: int | None = None
    depth: int = 24
    factor: float = 1.0
    offset: float = 0.0
    least: float = 0.1
    cached: int = 10000
    started: int = 0
    answers: dict[int, CountedText] = field(default_factory=dict)  # by the request's number

    def __post_init__(self) -> None:
        length = self.length or self.depth
        if min(length, self.depth - 1) < 1 or self.cached < 0:
            raise InvalidInput(
                "Suffix decoding drafts at least 1 token from trees of depth 2 or more, and keeps 0 or more requests, but "
                f"got `length` {length}, `depth` {self.depth} and `cached` {self.cached}."
            )
        matched = np.arange(self.depth + 1)
        budgets = matched.astype(np.float32) * np.float32(self.factor) + np.float32(self.offset)
        whole = np.clip((budgets.astype(float) + 1e-6).astype(np.int32), 0, length)
        self.budgets: list[int] = np.minimum(
            whole, self.depth - matched
        ).tolist()  # tokens of a draft, by length of the match
        self.threshold = float(np.float32(self.least))
        self.together = SuffixCounts(self.depth)

    def start(self, prompt: Sequence[int]) -> Running:
        request = Running(self.started, SuffixCounts(self.depth), CountedText())
        request.counts.extend(request.text, prompt)
        self.started += 1
        if self.cached:
            self.answers[request.number] = CountedText()
        while len(self.answers) > self.cached:
            oldest = next(iter(self.answers))
            self.together.remove(self.answers.pop(oldest))
        return request

    def draft(self, state: Running, left: int) -> Guesses:
        text = state.text
        cut = state.counts.shortened(text.cut)
        guesses, score = self._best(state.counts, cut, min(state.counts.lengths[cut], self.depth - 1))
        most = min(len(text.tokens), self.depth) - 1
        others, other_score = self._best(self.together, *self.together.longest(text.tokens[len(text.tokens) - most :]))
        if other_score > score:
            guesses = others
        return Guesses(guesses, 1 + len(guesses))

    def _best(self, counts: SuffixCounts, state: int, matched: int) -> tuple[list[int], float]:
        """Tokens of the best draft behind the matched tokens, or fewer of these, and the sum of their probabilities."""
        best, score, steps = list[int](), 0.0, Steps()
        while state:
            shorter = counts.links[state]
            least = counts.lengths[shorter] + 1
            tokens, sums = counts.likeliest(state, max(self.budgets[least : matched + 1]), self.threshold, steps)
            if sums[-1] > score:
                score = sums[-1]
                lengths = [min(self.budgets[n], len(tokens)) for n in range(matched, least - 1, -1)]
                best = tokens[: next(length for length in lengths if sums[length] == score)]
            state, matched = shorter, least - 1
        return best, score

    def commit(self, state: Running, tokens: Sequence[int], accepted: int) -> None:
        state.counts.extend(state.text, tokens)
        if state.number in self.answers:
            self.together.extend(self.answers[state.number], tokens)
