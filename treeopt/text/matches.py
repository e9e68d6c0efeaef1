"""Where the last tokens of a text stood before: n-grams up to a length, or the longest suffix that did.

end : place behind an n-gram, that of the token that followed it; an n-gram is known once a token did
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Gram = tuple[int, ...]
FEW = 8  # n-grams that are made one by one


@dataclass
class Ngrams:
    """The tokens of a text, and where its n-grams end.

    shortest, longest : n
    keep : which ends of an n-gram are kept
    lag  : how many tokens must have followed besides the first
    skip : tokens at the beginning that are in no n-gram

    >>> text = Ngrams(1, 2, tokens=[7, 5, 8, 5, 7, 5])
    >>> text.match(2)
    (2, 2)
    """

    shortest: int
    longest: int
    keep: Literal["earliest", "latest", "all"] = "earliest"
    lag: int = 0
    skip: int = 0
    tokens: list[int] = field(default_factory=list)
    ends: dict[Gram, int] = field(default_factory=dict)
    every: dict[Gram, list[int]] = field(default_factory=dict)  # in order, where all are kept
    _indexed: int = 0

    def __post_init__(self) -> None:
        self.index(len(self.tokens))

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens
        self.index(len(self.tokens))

    def index(self, count: int) -> None:
        """Note the n-grams of the first ``count`` tokens, so far as they are known."""
        last = count - 1 - self.lag
        if last <= self._indexed:
            return
        tokens, ends, every = self.tokens, self.ends, self.every
        for n in range(self.shortest, self.longest + 1):
            first = max(self._indexed + 1, self.skip + n)
            if first > last:
                break
            if last - first < FEW:
                grams = [tuple(tokens[end - n : end]) for end in range(first, last + 1)]
            else:
                grams = list(zip(*(tokens[first - n + i : last - n + i + 1] for i in range(n)), strict=True))
            if self.keep == "all":
                for end, gram in enumerate(grams, first):
                    every.setdefault(gram, []).append(end)
            elif self.keep == "latest":
                ends.update(zip(grams, range(first, last + 1), strict=True))
            elif self._indexed:
                for end, gram in enumerate(grams, first):
                    ends.setdefault(gram, end)
            else:  # the last that is written stays
                ends.update(zip(reversed(grams), range(last, first - 1, -1), strict=True))
        self._indexed = last

    def chain(self, count: int) -> list[int]:
        """At most ``count`` tokens, each looked up behind the ones before, by the longest n-gram alone."""
        gram, found = tuple(self.tokens[-self.longest :]), list[int]()
        while len(found) < count and (end := self.ends.get(gram)) is not None:
            found.append(self.tokens[end])
            gram = (*gram[1:], found[-1])
        return found

    def match(self, longest: int) -> tuple[int, int]:
        """Length and end of the longest of the last n-grams, up to ``longest``, that is known; (0, 0) where none is."""
        tokens, ends = self.tokens, self.ends
        for n in range(min(longest, len(tokens)), self.shortest - 1, -1):
            end = ends.get(tuple(tokens[-n:]))
            if end is not None:
                return n, end
        return 0, 0


class Hashes:
    """Of every n-gram of a text that grows, its tokens as digits to the base ``factor``, modulo 2**bits.

    >>> Hashes([1, 2, 3], 2, 10, 8).of(range(0, 2))
    [12, 23]
    """

    def __init__(self, tokens: list[int], n: int, factor: int, bits: int) -> None:
        size: int = 2**bits
        self.tokens, self.n, self.factor, self.mask = tokens, n, factor % size, size - 1
        self.leading = pow(factor, n, size)
        self.codes: list[int] = []

    def of(self, starts: range) -> list[int]:
        tokens, n, codes = self.tokens, self.n, self.codes
        if not codes and len(tokens) >= n:
            text, code = np.array(tokens), np.zeros(len(tokens) - n + 1, dtype=np.int64)
            for i in range(n):
                code = code * self.factor + text[i : i + len(code)] & self.mask
            codes += code.tolist()
        for at in range(len(codes), starts.stop):
            codes.append(self.next(codes[-1], tokens[at - 1], tokens[at + n - 1]))
        return codes[starts.start : starts.stop]

    def next(self, code: int, first: int, last: int) -> int:
        """Of the n-gram without its first token and with one more."""
        return code * self.factor + last - first * self.leading & self.mask


class Automaton:
    """The suffix automaton of a text (Blumer et al. 1985): its longest suffix that stood before, of whatever length.

    >>> text = Automaton()
    >>> text.extend([7, 5, 8, 7, 5, 9, 7, 5])
    >>> text.match()
    (2, 2)
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.follow: list[dict[int, int]] = [{}]  # of each state; the first is the empty text's
        self.link, self.length, self.end = [-1], [0], [0]  # end: of its earliest occurrence
        self.last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._add(token)

    def match(self) -> tuple[int, int]:
        """Length of the longest suffix that stood before, and the end of where it did first; (0, 0) where none did."""
        state = max(self.link[self.last], 0)
        return self.length[state], self.end[state]

    def _add(self, token: int) -> None:
        follow, link, length = self.follow, self.link, self.length
        self.tokens.append(token)
        state, before = len(follow), self.last
        follow.append({})
        length.append(length[before] + 1)
        link.append(0)
        self.end.append(len(self.tokens))
        self.last = state
        while before >= 0 and token not in follow[before]:
            follow[before][token] = state
            before = link[before]
        if before < 0:
            return
        found = follow[before][token]
        if length[found] > length[before] + 1:  # part what is shorter from it
            clone = len(follow)
            follow.append(follow[found].copy())
            length.append(length[before] + 1)
            link.append(link[found])
            self.end.append(self.end[found])
            link[found] = clone
            while before >= 0 and follow[before].get(token) == found:
                follow[before][token] = clone
                before = link[before]
            found = clone
        link[state] = found
