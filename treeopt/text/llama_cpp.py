"""llama.cpp's drafters of text: ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod, ngram-cache.

Rules keep their tables from request to request, as those of a server with one slot do. They have llama.cpp's defects: the tokens
around the end of a prompt are in no map, ngram-cache does not count n-grams over the borders of steps, and k4v drafts the tokens
behind the match, not the value that it counted.

tokens : the text of a request, the token that was just sampled last; L tokens stand before that one
n, m   : tokens of the key that is looked up, and of the value that is copied, at most

Source: llama.cpp 0c1e57098, common/ngram-map.cpp, common/ngram-cache.cpp, common/speculative.cpp, tools/server/server-context.cpp
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treeopt.text.matches import Gram, Hashes, Ngrams
from treeopt.text.rules import Guesses, TextDrafter

MOST_VALUES, MOST_HITS = 4, 16380  # of a key
MAP_FACTOR, MAP_BITS = 2654435761, 18
MOD_FACTOR, MOD_BITS = 6364136223846793005, 22
MOD_CHUNK, MOD_FULL = 32, 0.25  # tokens behind which new ones are taken in; how full a table is emptied
LOW, MOST_LOW = 0.25, 5  # accepted guesses of a draft; how many such drafts on end empty the table
CACHED, CACHE_DRAFT, BUCKETS = 4, 8, 13  # tokens of n-grams; guesses; buckets of a small std::unordered_map
SAMPLES, PERCENT = (2, 2, 1, 1), (66, 50, 50, 50)  # least, by the tokens of the n-gram


class Rule(TextDrafter):
    """A rule. The state of a request is its text.

    has_drafted : whether the last step had guesses
    """

    has_drafted = False

    def begin(self, tokens: list[int]) -> None:
        """Begin a request. ``tokens`` is its prompt, and grows with the answer."""

    def guesses(self, tokens: list[int]) -> list[int]:
        """Guesses of the next tokens."""
        raise NotImplementedError

    def accept(self, accepted: int) -> None:
        """Take the number of accepted guesses of the last draft in."""

    def start(self, prompt: Sequence[int]) -> list[int]:
        tokens, self.has_drafted = list(prompt), False
        self.begin(tokens)
        return tokens

    def draft(self, state: list[int], left: int) -> Guesses:
        guesses = self.guesses(state)[: left - 1] if left > 1 else []
        self.has_drafted = bool(guesses)
        return Guesses(guesses, 1 + len(guesses))

    def commit(self, state: list[int], tokens: Sequence[int], accepted: int) -> None:
        state += tokens
        if self.has_drafted:
            self.accept(accepted)


@dataclass
class Simple(Rule):
    """ngram-simple: the latest match, if at least n tokens followed it."""

    n: int = 12
    m: int = 48

    def begin(self, tokens: list[int]) -> None:
        self.text = Ngrams(self.n, self.n, "latest", tokens=tokens)

    def guesses(self, tokens: list[int]) -> list[int]:
        before = len(tokens) - 1
        self.text.index(before)
        _, end = self.text.match(self.n)
        guesses = tokens[end : min(end + self.m, before)]
        is_match = end > self.n and before > self.n + self.m + 1  # llama.cpp ignores a match at the text's beginning
        return guesses if is_match and len(guesses) >= self.n else []


@dataclass
class Value:
    """Tokens that followed a key, by their place. ``accepted`` guesses of the last draft are the most of the next draft."""

    at: int
    count: int
    accepted: int


@dataclass
class Key:
    """An n-gram that was looked up and found.

    counted : place up to which its occurrences are counted in the values
    hits    : number of look-ups
    """

    at: int
    values: list[Value]
    counted: int = 0
    hits: int = 0


@dataclass
class Map(Rule):
    """ngram-map-k, or with ``counts`` ngram-map-k4v: a table from hashes of n-grams to the place of the first with that hash.

    least_hits : look-ups of a key before k4v drafts
    """

    n: int = 12
    m: int = 48
    least_hits: int = 1
    counts: bool = False
    table: dict[int, int] = field(default_factory=dict, init=False)
    keys: list[Key] = field(default_factory=list, init=False)
    indexed: int = field(default=0, init=False)  # the last start that is in the table
    begun: int = field(default=0, init=False)  # tokens of the last prompt
    seen: int = field(default=0, init=False)  # L at the last draft
    last: Value | None = field(default=None, init=False)

    def begin(self, tokens: list[int]) -> None:
        size, common = len(tokens), self.begun  # llama.cpp takes the last prompt for the beginning of this one
        if common > size:
            common = max(size - self.n - self.m, 0)
        if size < self.seen:
            self.table = {code: at for code, at in self.table.items() if at < common}
            self.indexed = max(common - 1, 0)
            for key in self.keys:
                key.values = [value for value in key.values if value.at < common]
            self.keys = [key for key in self.keys if key.at < common and key.values]
        self.seen = self.begun = size
        self.key_of: dict[Gram, Key] = {}
        for key in self.keys:  # the tokens at the key's place may be others now
            self.key_of.setdefault(tuple(tokens[key.at : key.at + self.n]), key)
        self.hashes = Hashes(tokens, self.n, MAP_FACTOR, MAP_BITS)

    def guesses(self, tokens: list[int]) -> list[int]:
        n, m, before, self.last = self.n, self.m, len(tokens) - 1, None
        if before < 2 * n + m:
            return []
        self.seen = before
        if not (at := self._find(tokens)):
            return []
        if (gram := tuple(tokens[-n:])) not in self.key_of:
            self.key_of[gram] = Key(at, [] if self.counts else [Value(0, 0, m)])
            self.keys.append(self.key_of[gram])
        key = self.key_of[gram]
        key.hits += 1
        if self.counts and (key.hits < self.least_hits or not self._is_clear(tokens, key, at)):
            return []
        self.last = max(key.values, key=lambda value: value.count)
        return tokens[at + n : at + n + min(m, self.last.accepted)]

    def _find(self, tokens: list[int]) -> int:
        """The start of a match, 0 for none. Adds new n-grams to the table."""
        n, last, table = self.n, len(tokens) - 2 - self.n - self.m, self.table
        codes, gram = self.hashes.first(len(tokens) - n + 1), tokens[-n:]
        match = table.get(code := codes[len(tokens) - n], 0)
        if match >= last or tokens[match : match + n] != gram:
            match = 0
        prompt = range(self.begun - n - self.m - 1, self.indexed, -1)
        for at in (*prompt, *range(last, max(self.begun, self.indexed), -1)):
            if not match and codes[at] == code and tokens[at : at + n] == gram:
                match = at
            table.setdefault(codes[at], at)
        self.indexed = max(last, self.indexed)
        return match

    def _is_clear(self, tokens: list[int], key: Key, at: int) -> bool:
        """Count the values of a key up to a match. Returns whether one came at least twice as often as all others together."""
        n, m, gram = self.n, self.m, tokens[at : at + self.n]
        for start in self.hashes.alike(at, key.counted):
            if tokens[start : start + n] != gram:
                continue
            end = start + n
            following = tokens[end : end + m]
            value = next((value for value in key.values if tokens[value.at : value.at + m] == following), None)
            if value is None and len(key.values) < MOST_VALUES:
                key.values.append(value := Value(end, 0, m))
            if value:
                value.count = min(value.count + 1, MOST_HITS)
        key.counted = at
        counts = [value.count for value in key.values]
        return max(counts) >= 2 * (sum(counts) - max(counts))

    def accept(self, accepted: int) -> None:
        if self.last:
            self.last.accepted = accepted


@dataclass
class Mod(Rule):
    """ngram-mod: a table from hashes of n-grams to the token that followed last. N-grams with one hash share an entry.

    least, m : fewest and most tokens of a draft
    """

    n: int = 24
    least: int = 48
    m: int = 64
    table: dict[int, int] = field(default_factory=dict, init=False)
    indexed: int = field(default=0, init=False)
    drafted: int = field(default=0, init=False)
    low: int = field(default=0, init=False)

    def begin(self, tokens: list[int]) -> None:
        self.indexed = self.drafted = 0
        self.hashes = Hashes(tokens, self.n, MOD_FACTOR, MOD_BITS)
        if len(tokens) >= self.n:
            self._add(tokens, len(tokens) - self.n)
            if len(self.table) > MOD_FULL * 2**MOD_BITS:
                self.table.clear()

    def _add(self, tokens: list[int], stop: int) -> None:
        codes = self.hashes.first(stop)[self.indexed : stop]
        self.table.update(zip(codes, tokens[self.indexed + self.n : stop + self.n], strict=True))
        self.indexed = stop

    def guesses(self, tokens: list[int]) -> list[int]:
        n, before, text, self.drafted = self.n, len(tokens) - 1, tokens[-self.n :], 0
        if before < n:
            return []
        if self.indexed + MOD_CHUNK < before:
            self._add(tokens, before - n)
        code = self.hashes.first(before - n + 2)[before - n + 1]
        while len(text) < n + self.m and (token := self.table.get(code)) is not None:
            code = self.hashes.next(code, text[-n], token)
            text.append(token)
        self.drafted = len(text) - n if len(text) - n >= min(self.least, self.m) else 0
        return text[n : n + self.drafted]

    def accept(self, accepted: int) -> None:
        self.low = self.low + 1 if accepted < LOW * self.drafted else 0
        if self.low == MOST_LOW:
            self.table.clear()
            self.low = self.indexed = 0


@dataclass(slots=True)
class Followers:
    """Tokens that followed an n-gram. Equally frequent ones have the order of a small std::unordered_map, the newest first.

    ranks     : of each token its count, and the ages of its bucket and of itself; the token with the greatest leads
    buckets   : by age
    likeliest : the token that leads
    """

    ranks: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=list)
    total: int = 0
    likeliest: int = -1

    def add(self, token: int) -> None:
        if token in self.ranks:
            count, bucket, age = self.ranks[token]
        else:
            if token % BUCKETS not in self.buckets:
                self.buckets.append(token % BUCKETS)
            count, bucket, age = 0, self.buckets.index(token % BUCKETS), len(self.ranks)
        self.ranks[token] = count + 1, bucket, age
        self.total += 1
        if self.total == 1 or self.ranks[token] > self.ranks[self.likeliest]:
            self.likeliest = token


@dataclass
class Cache(Rule):
    """ngram-cache without files: counts of the tokens behind n-grams of up to 4 tokens."""

    followers: dict[Gram, Followers] = field(default_factory=dict, init=False)
    seen: int = field(default=0, init=False)

    def guesses(self, tokens: list[int]) -> list[int]:
        if self.seen < len(tokens):
            self._count(tokens[self.seen :])
            self.seen = len(tokens)
        text = tokens[-CACHED:]
        first = len(text)
        while first > 1 and len(text) < first + CACHE_DRAFT and (token := self._likeliest(text)) is not None:
            text.append(token)
        return text[first:]

    def _count(self, new: list[int]) -> None:
        for n in range(1, CACHED + 1):
            for end in range(n, len(new)):
                gram = tuple(new[end - n : end])
                if gram not in self.followers:
                    self.followers[gram] = Followers()
                self.followers[gram].add(new[end])

    def _likeliest(self, text: list[int]) -> int | None:
        for n in range(min(CACHED, len(text)), 0, -1):
            followers = self.followers.get(tuple(text[-n:]))
            if followers and followers.total >= SAMPLES[n - 1]:
                count, *_ = followers.ranks[followers.likeliest]
                if 100 * count >= PERCENT[n - 1] * followers.total:
                    return followers.likeliest
        return None
