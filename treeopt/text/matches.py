"""Where the last tokens of a text stood before: n-grams up to a length, or the longest suffix that did.

end : place behind an n-gram, that of the token that followed it; an n-gram is known once a token did
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

Gram = tuple[int, ...]
FEW = 8  # n-grams that are made one by one


@dataclass
class Ngrams:
    """The tokens of a text, and where its n-grams end.

    shortest, longest : n
    keep : which ends of an n-gram are kept

    >>> text = Ngrams(1, 2, tokens=[7, 5, 8, 5, 7, 5])
    >>> text.match(2)
    (2, 2)
    """

    shortest: int
    longest: int
    keep: Literal["earliest", "latest", "all"] = "earliest"
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
        last, tokens = count - 1, self.tokens
        for n in range(self.shortest, min(self.longest, last) + 1):
            first = max(self._indexed + 1, n)
            if last - first < FEW:
                grams = [tuple(tokens[end - n : end]) for end in range(first, last + 1)]
            else:
                grams = list(zip(*(tokens[first - n + i : last - n + i + 1] for i in range(n)), strict=True))
            if self.keep == "latest":
                self.ends.update(zip(grams, range(first, last + 1), strict=True))
                continue
            for end, gram in enumerate(grams, first):
                if self.keep == "all":
                    self.every.setdefault(gram, []).append(end)
                else:
                    self.ends.setdefault(gram, end)
        self._indexed = max(last, self._indexed)

    def match(self, longest: int) -> tuple[int, int]:
        """Length and end of the longest of the last n-grams, up to ``longest``, that is known; (0, 0) where none is."""
        tokens, ends = self.tokens, self.ends
        for n in range(min(longest, len(tokens)), self.shortest - 1, -1):
            end = ends.get(tuple(tokens[-n:]))
            if end is not None:
                return n, end
        return 0, 0


class Places:
    """The tokens of a text, and where each stands: its longest suffix that stood before, of whatever length.

    >>> text = Places()
    >>> text.extend([7, 5, 8, 7, 5, 9, 7, 5])
    >>> text.match()
    (2, 2)
    """

    longest = 2**31  # n

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.places: dict[int, list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        for place, token in enumerate(tokens, len(self.tokens)):
            self.places.setdefault(token, []).append(place)
        self.tokens += tokens

    def match(self, longest: int = longest) -> tuple[int, int]:
        """Length of the longest suffix, up to ``longest``, that stood before, and its earliest end; (0, 0) where none did."""
        tokens, last, n = self.tokens, [-1], 0
        places = self.places[tokens[-1]][:-1] if tokens else []  # where the last token of the matches stands
        while places and n < longest:
            last, n = places, n + 1
            places = [at for at in places if at >= n and tokens[at - n] == tokens[-1 - n]]
        return n, last[0] + 1


class Hashes:
    """Hashes of every n-gram of a text that grows: its tokens as digits to the base ``factor``, modulo 2**bits.

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
        if not codes and starts.stop > 0:
            codes.append(reduce(lambda code, token: self.next(code, 0, token), tokens[:n], 0))
        for at in range(len(codes), starts.stop):
            codes.append(self.next(codes[-1], tokens[at - 1], tokens[at + n - 1]))
        return codes[starts.start : starts.stop]

    def next(self, code: int, first: int, last: int) -> int:
        """The hash of the n-gram behind one: without its first token, and with one more."""
        return code * self.factor + last - first * self.leading & self.mask
