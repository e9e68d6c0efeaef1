"""Where the last tokens of a text stood before: n-grams up to a length, or the longest suffix that did.

end : place behind an n-gram, that of the token that followed it; an n-gram is known once a token did
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Gram = tuple[int, ...]
FEW = 8  # n-grams that are made one by one, and hashes


@dataclass
class Ngrams:
    """The tokens of a text, and where its n-grams end.

    An n-gram that ends where the earliest of its own endings does is found by comparing. So where the earliest are kept, a token
    that comes later adds at most the shortest n-gram that is new.

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
        tokens, ends, first, longest = self.tokens, self.ends, self._indexed + 1, min(self.longest, count - 1)
        self._indexed = max(count - 1, self._indexed)
        if first > 1 and self.keep == "earliest":
            for end in range(max(first, self.shortest), count):
                n = max(self.match(self.longest, end)[0] + 1, self.shortest)
                if n <= min(self.longest, end):
                    ends[tuple(tokens[end - n : end])] = end
        elif first > 1 and self.keep == "latest" and count - first < FEW:
            for end in range(first, count):
                for n in range(self.shortest, min(longest, end) + 1):
                    ends[tuple(tokens[end - n : end])] = end
        else:
            order = -1 if self.keep == "earliest" else 1
            for n in range(self.shortest, longest + 1):
                begin = max(first, n)
                grams = list(zip(*(tokens[begin - n + i : count - n + i] for i in range(n)), strict=True))
                if self.keep != "all":
                    ends.update(zip(grams[::order], range(begin, count)[::order], strict=True))
                for end, gram in enumerate(grams, begin) if self.keep == "all" else ():
                    self.every.setdefault(gram, []).append(end)

    def match(self, longest: int, at: int | None = None) -> tuple[int, int]:
        """Length and end of the longest n-gram, up to ``longest``, before a place, or the end, that is known; (0, 0) for none."""
        tokens, ends, n = self.tokens, self.ends, self.shortest
        at = len(tokens) if at is None else at
        found = ends.get(tuple(tokens[at - n : at])) if n <= min(longest, at) else None
        if found is None:
            return 0, 0
        while n < longest and n < at:
            if n == found or tokens[found - n - 1] != tokens[at - n - 1]:
                if (other := ends.get(tuple(tokens[at - n - 1 : at]))) is None:
                    break
                found = other
            n += 1
        return n, found


class SuffixAutomaton:
    """The n-grams of some texts, in time that grows with the texts alone (Blumer et al. 1985).

    A state stands for n-grams that end at the same places: the longest of them, and suffixes of it.

    lengths : tokens of the longest
    links   : the state of the longest suffix that also ends elsewhere; -1 of the empty n-gram, state 0
    moves   : states behind one more token
    """

    def __init__(self) -> None:
        self.lengths, self.links = [0], [-1]
        self.moves: list[dict[int, int]] = [{}]

    def append(self, state: int, token: int) -> int:
        """The state of a text with one more token; ``state`` is that of the text."""
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
        """The state whose longest n-gram is that of a state with one more token."""
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
        """A new state, for n-grams that another had (``original``) or for new ones."""
        self.lengths.append(length)
        self.links.append(-1)
        self.moves.append(moves)
        return len(self.links) - 1


class LongestSuffix(SuffixAutomaton):
    """The tokens of a text, and the longest of its suffixes that stood before.

    whole : the state of the text
    ends  : where the n-grams of each state end first

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
    """Hashes of every n-gram of a text that grows: its tokens as digits to the base ``factor``, modulo 2**bits.

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
        if count - len(codes) > (FEW if codes else 0):
            part, new = np.array(tokens[len(codes) : count + n - 1], np.uint64), np.zeros(count - len(codes), np.uint64)
            for i in range(n):
                new = new * np.uint64(self.factor) + part[i : i + len(new)]
            codes += (new & np.uint64(self.mask)).tolist()
        for at in range(len(codes), count):
            codes.append(self.next(codes[-1], tokens[at - 1], tokens[at + n - 1]))
        return codes

    def alike(self, at: int, first: int) -> list[int]:
        """Starts from ``first`` to ``at`` of the n-grams whose hash is that of the n-gram at ``at``.

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
        """The hash of the n-gram behind one: without its first token, and with one more."""
        return code * self.factor + last - first * self.leading & self.mask
