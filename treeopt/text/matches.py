"""Where the last tokens of a text stood before: n-grams of some lengths, the longest suffix, hashes.

end : place behind an n-gram, that of the token that followed it
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

Gram = tuple[int, ...]


@dataclass
class Ngrams:
    """The tokens of a text, and where its n-grams end. An n-gram is indexed once a token follows it.

    shortest, longest : n
    keep : which end of an n-gram is kept
    ends : the kept end of each n-gram

    >>> text = Ngrams(1, 2, tokens=[7, 5, 8, 5, 7, 5])
    >>> text.match(2)
    (2, 2)
    """

    shortest: int
    longest: int
    keep: Literal["earliest", "latest"] = "earliest"
    tokens: list[int] = field(default_factory=list)
    ends: dict[Gram, int] = field(default_factory=dict)
    _indexed: int = 0

    def __post_init__(self) -> None:
        self.index(len(self.tokens))

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens
        self.index(len(self.tokens))

    def index(self, count: int) -> None:
        """Add the n-grams of the first ``count`` tokens that are not there yet."""
        for end in range(self._indexed + 1, count):
            for n in range(self.shortest, min(self.longest, end) + 1):
                gram = tuple(self.tokens[end - n : end])
                if self.keep == "latest":
                    self.ends[gram] = end
                else:
                    self.ends.setdefault(gram, end)
        self._indexed = max(count - 1, self._indexed)

    def match(self, longest: int) -> tuple[int, int]:
        """Length and kept end of the longest n-gram, up to ``longest``, that the text ends with; (0, 0) for none."""
        for n in range(min(longest, len(self.tokens)), self.shortest - 1, -1):
            if (end := self.ends.get(tuple(self.tokens[-n:]))) is not None:
                return n, end
        return 0, 0


class SuffixAutomaton:
    """The n-grams of some texts, in time that grows with the texts alone (Blumer et al. 1985).

    A state stands for n-grams that end at the same places: the longest of them, and suffixes of it. State 0 is the empty one.

    lengths : of each state, the tokens of the longest n-gram
    links   : of each state, the state of the longest suffix that also ends elsewhere; -1 of state 0
    moves   : of each state, the next state by the next token
    """

    def __init__(self) -> None:
        self.lengths, self.links = [0], [-1]
        self.moves: list[dict[int, int]] = [{}]

    def append(self, state: int, token: int) -> int:
        """The state of a text that is one token longer, by the state of the text."""
        moves, links = self.moves, self.links
        if token in moves[state]:
            return self._longer(state, token)
        new = self._add(self.lengths[state] + 1, {})
        while state >= 0 and token not in moves[state]:
            moves[state][token] = new
            state = links[state]
        links[new] = 0 if state < 0 else self._longer(state, token)
        return new

    def _longer(self, state: int, token: int) -> int:
        """The state whose longest n-gram is that of ``state`` and one more token."""
        moves, links, length = self.moves, self.links, self.lengths[state] + 1
        longer = moves[state][token]
        if self.lengths[longer] == length:
            return longer
        part = self._add(length, moves[longer].copy(), longer)
        links[part], links[longer] = links[longer], part
        while state >= 0 and moves[state].get(token) == longer:
            moves[state][token] = part
            state = links[state]
        return part

    def _add(self, length: int, moves: dict[int, int], original: int = -1) -> int:
        """A new state: for n-grams of the state ``original``, or for new ones."""
        self.lengths.append(length)
        self.links.append(-1)
        self.moves.append(moves)
        return len(self.links) - 1


class LongestSuffix(SuffixAutomaton):
    """The tokens of a text, and the longest of its suffixes that stood before.

    whole : the state of the text
    ends  : of each state, where its n-grams end first

    >>> text = LongestSuffix()
    >>> text.extend([7, 5, 8, 7, 5, 9, 7, 5])
    >>> text.match()
    (2, 2)
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.whole = 0
        self.ends = [0]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.whole = self.append(self.whole, token)

    def match(self) -> tuple[int, int]:
        """Length of the longest suffix that stood before, and its earliest end; (0, 0) where none did."""
        state = max(self.links[self.whole], 0)
        return self.lengths[state], self.ends[state]

    def _add(self, length: int, moves: dict[int, int], original: int = -1) -> int:
        self.ends.append(len(self.tokens) if original < 0 else self.ends[original])
        return super()._add(length, moves)


class Hashes:
    """Hashes of the n-grams of a text that grows. Tokens are digits to the base ``factor``, modulo 2**bits.

    >>> Hashes([1, 2, 3], 2, 10, 8).first(2)
    [12, 23]
    """

    def __init__(self, tokens: list[int], n: int, factor: int, bits: int) -> None:
        size: int = 2**bits
        self.tokens, self.n, self.factor, self.mask = tokens, n, factor % size, size - 1
        self.leading = pow(factor, n, size)
        self.codes: list[int] = []
        self.starts: dict[int, list[int]] = {}
        self._indexed = 0

    def first(self, count: int) -> list[int]:
        """Hashes of the first ``count`` n-grams or more, by their starts."""
        tokens, n, codes = self.tokens, self.n, self.codes
        if not codes and count:
            codes.append(reduce(lambda code, token: code * self.factor + token & self.mask, tokens[:n], 0))
        for start in range(len(codes), count):
            codes.append(self.next(codes[-1], tokens[start - 1], tokens[start + n - 1]))
        return codes

    def alike(self, at: int, first: int) -> list[int]:
        """Starts from ``first`` to ``at`` of the n-grams with the hash of the n-gram at ``at``.

        >>> Hashes([1, 1, 1, 1], 2, 10, 8).alike(2, 1)
        [1, 2]
        """
        codes = self.first(at + 1)
        for start in range(self._indexed, at + 1):
            self.starts.setdefault(codes[start], []).append(start)
        self._indexed = max(self._indexed, at + 1)
        starts = self.starts[codes[at]]
        return starts[bisect_left(starts, first) : bisect_right(starts, at)]

    def next(self, code: int, first: int, last: int) -> int:
        """The hash of the next n-gram: without the ``first`` token of this one, and with the token ``last``."""
        return code * self.factor + last - first * self.leading & self.mask
