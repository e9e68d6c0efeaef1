"""TensorRT-LLM's NGram: a pool from patterns, the n-grams up to a length, to the texts that followed them.

Every step takes in all patterns of the end of the text with up to K tokens behind each, fewer where the text ends. So a match
is clipped when it is new, and a longer one of its pattern drops shorter ones, but of neighbours in the pool only every other.
A pool of all requests is never emptied.

Full matches, of K tokens, are never dropped, and the first or the last of them is drafted, whichever the setting says, unless a
short one stands before it or behind it. So of most patterns a place of the text is all that is kept.

at : place of the text behind a pattern, where its match begins

Source: TensorRT-LLM 0249976, tensorrt_llm/_torch/speculative/ngram.py, with ordered-set's list of items
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.text.rules import NO_DRAFT, Draft, TextDrafter
from treeopt.text.tries import Ints, compiled

AT, FIRST, LAST, HEAD, TAIL = range(5)  # columns of a pattern's row: where it stood, its full matches, its short ones
LENGTH, BEFORE, NEXT = 1, 2, 3  # of a short match's: its tokens, the full match before it, the short one behind it
FACTOR, MASK = 1181783497, 2**32 - 1
ROOM = 256  # places, rows and slots at first


class Pool(NamedTuple):
    """text (places,), patterns and fulls (N, slots), used (2, N) slots of them, rows (rows, 5), spare (2,) as of a trie

    patterns : hash tables of n-grams by n: where the full match begins that is drafted if it is one; minus a row where short ones are
    fulls    : hash tables of full matches with their patterns, where there are several of a pattern
    """

    text: Ints
    patterns: Ints
    fulls: Ints
    used: Ints
    rows: Ints
    spare: Ints


class Rule(NamedTuple):
    """K, N, whether all are kept, and whether the oldest is drafted."""

    length: int
    longest: int
    keep_all: bool
    oldest: bool


@compiled
def is_same(text: Ints, one: int, other: int, count: int) -> bool:
    """Whether the same tokens stand at two places."""
    i = 0
    while i < count and text[one + i] == text[other + i]:
        i += 1
    return i == count


@compiled
def slot_of(pool: Pool, table: Ints, at: int, n: int, behind: int) -> int:
    """Where a table has the n tokens before a place with those behind it, or room for them."""
    code = n
    for i in range(at - n, at + behind):
        code = (code * FACTOR + int(pool.text[i]) + 1) & MASK
    slot = (code ^ (code >> 15)) & (len(table) - 1)
    while table[slot]:
        value = int(table[slot])
        if is_same(pool.text, (value if value > 0 else int(pool.rows[-value, AT])) - n, at - n, n + behind):
            break
        slot = (slot + 1) & (len(table) - 1)
    return slot


@compiled
def refill(pool: Pool, old: Ints, new: Ints, behind: int) -> None:
    """Put what tables have into larger ones."""
    for i in range(len(old)):
        for value in old[i]:
            if value:
                at = int(value) if value > 0 else int(pool.rows[-value, AT])
                new[i, slot_of(pool, new[i], at, i + 1, behind)] = value


@compiled
def take(pool: Pool) -> int:
    """A row that is free."""
    row = int(pool.spare[1] or pool.spare[0])
    if pool.spare[1]:
        pool.spare[1] = pool.rows[row, NEXT]
    else:
        pool.spare[0] += 1
    pool.rows[row] = 0
    return row


@compiled
def give(pool: Pool, row: int) -> None:
    pool.rows[row, NEXT], pool.spare[1] = pool.spare[1], row


@compiled
def is_new(pool: Pool, last: int, at: int, n: int, length: int) -> bool:
    """Whether a full match is none of its pattern's, of which ``last`` came last; then it is noted."""
    if is_same(pool.text, last, at, length):
        return False
    table = pool.fulls[n - 1]
    slot = slot_of(pool, table, at, n, length)
    if table[slot]:
        return False
    table[slot] = at
    other = slot_of(pool, table, last, n, length)
    pool.used[1, n - 1] += 1 + (table[other] == 0)
    table[other] = last
    return True


@compiled
def drop(pool: Pool, row: int, length: int, every: bool) -> None:
    """Drop the short matches below a length, but of neighbours the second, unless ``every`` one goes."""
    rows, previous, passed = pool.rows, 0, -1
    one = int(rows[row, HEAD])
    while one:
        behind = int(rows[one, NEXT])
        if every or (rows[one, LENGTH] < length and rows[one, BEFORE] != passed):
            passed = rows[one, BEFORE]
            rows[previous or row, NEXT if previous else HEAD] = behind
            if behind == 0:
                rows[row, TAIL] = previous
            give(pool, one)
        else:
            passed, previous = -1, one
        one = behind


@compiled
def add(pool: Pool, rule: Rule, n: int, at: int, count: int) -> None:
    """Take in the match of ``count`` tokens behind a pattern of n."""
    rows, table, is_full = pool.rows, pool.patterns[n - 1], count == rule.length
    slot = slot_of(pool, table, at, n, 0)
    value = int(table[slot])
    pool.used[0, n - 1] += value == 0
    if value > 0 and (rule.oldest or is_full):
        if not rule.oldest and is_new(pool, value, at, n, rule.length):
            table[slot] = at
        return
    if value == 0 and is_full:
        table[slot] = at
        return
    row = -value
    if value >= 0:
        row = take(pool)
        rows[row, AT], rows[row, FIRST], rows[row, LAST], table[slot] = value or at, value, value, -row
    one = int(rows[row, HEAD])
    if not rule.keep_all and one and rows[one, BEFORE] == 0 and count > rows[one, LENGTH]:
        drop(pool, row, 0, True)
        one = 0
    while one:
        if rows[one, LENGTH] == count and is_same(pool.text, int(rows[one, AT]), at, count):
            return
        one = int(rows[one, NEXT])
    if is_full and rows[row, LAST] and not is_new(pool, int(rows[row, LAST]), at, n, count):
        return
    drop(pool, row, count, False)
    if is_full:
        rows[row, LAST] = at
        rows[row, FIRST] = rows[row, FIRST] or at
    else:
        one, last = take(pool), int(rows[row, TAIL])
        rows[one, AT], rows[one, LENGTH], rows[one, BEFORE] = at, count, rows[row, LAST]
        rows[last or row, NEXT if last else HEAD] = one
        rows[row, TAIL] = one
    head, edge = rows[row, HEAD], rows[row, FIRST if rule.oldest else LAST]
    if edge and (head == 0 or (rule.oldest and rows[head, BEFORE])):
        table[slot] = edge
        drop(pool, row, 0, True)
        give(pool, row)


@compiled
def take_in(pool: Pool, rule: Rule, begin: int, seen: int, end: int) -> tuple[int, int]:
    """Take in what is new of a text, from ``begin`` to ``end``, and give the place and the length of its draft."""
    longest = min(rule.longest, end - begin - 1)
    for n in range(longest, 0, -1):
        # Where all are kept, patterns whose K tokens stood there at the step before have them.
        known = max(seen - rule.length - (n if rule.keep_all else rule.longest) + 1, 0)
        for at in range(begin + known + n, end):
            add(pool, rule, n, at, min(rule.length, end - at))
    for n in range(longest, 0, -1):
        value = int(pool.patterns[n - 1, slot_of(pool, pool.patterns[n - 1], end, n, 0)])
        if value > 0:
            return value, rule.length
        if value:
            row = pool.rows[-value]
            one, edge = (row[HEAD], 0) if rule.oldest else (row[TAIL], row[LAST])
            if one and pool.rows[one, BEFORE] == edge:
                return int(pool.rows[one, AT]), int(pool.rows[one, LENGTH])
            return int(row[FIRST if rule.oldest else LAST]), rule.length
    return 0, 0


class Matches:
    """A pool that makes room for what comes."""

    def __init__(self, rule: Rule) -> None:
        text, patterns, fulls = (
            np.zeros(shape, np.int32) for shape in (ROOM, (rule.longest, ROOM), (rule.longest, ROOM))
        )
        used, rows, spare = (
            np.zeros((2, rule.longest), np.int32),
            np.zeros((ROOM, 5), np.int32),
            np.array([1, 0], np.int32),
        )
        self.rule, self.pool, self.places = rule, Pool(text, patterns, fulls, used, rows, spare), 0

    def draft(self, window: Sequence[int], seen: int) -> list[int]:
        """Take in the end of a text, of which so many tokens were seen before, and draft behind it."""
        rule, pool, begin, more = self.rule, self.pool, self.places, 2 * len(window)
        self.places += len(window)
        if self.places > len(pool.text):
            pool.text.resize(self.places * 5 // 4, refcheck=False)
        pool.text[begin : self.places] = window
        if (rows := int(pool.spare[0]) + rule.longest * more) > len(pool.rows):
            pool.rows.resize((rows * 5 // 4, 5), refcheck=False)
        for name, used, behind in (("patterns", pool.used[0], 0), ("fulls", pool.used[1], rule.length)):
            old = getattr(pool, name)
            if (most := int(used.max()) + more) > old.shape[1] * 3 // 4:
                larger = np.zeros((rule.longest, 2 ** (most * 4 // 3).bit_length()), np.int32)
                refill(pool, old, larger, behind)
                self.pool = pool = pool._replace(**{name: larger})
        at, count = take_in(pool, rule, begin, seen, self.places)
        found: list[int] = pool.text[at : at + count].tolist()
        return found


@dataclass
class PoolState:
    """A request's text, its pool, and how much of the text was taken in."""

    tokens: list[int]
    pool: Matches
    seen: int = 0


@dataclass
class MatchPool(TextDrafter):
    """A drafter that looks patterns up in a pool.

    length, longest : K, and tokens of the longest patterns, N
    keep_all : a longer match does not take the place of all others
    oldest   : of a pattern's matches the first is drafted, not the last
    public   : one pool for all requests
    """

    length: int
    longest: int = 2
    keep_all: bool = True
    oldest: bool = True
    public: bool = True
    pool: Matches = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.length, self.longest) < 1:
            raise InvalidInput(
                f"A pool drafts at least 1 token behind patterns of at least 1, but got {self.length} behind {self.longest}."
            )
        self.pool = Matches(Rule(self.length, self.longest, self.keep_all, self.oldest))

    def start(self, prompt: Sequence[int]) -> PoolState:
        return PoolState(list(prompt), self.pool if self.public else Matches(self.pool.rule))

    def draft(self, state: PoolState, left: int) -> Draft:
        if left <= 1:
            return NO_DRAFT
        first = max(state.seen - self.length - self.longest + 1, 0)
        guesses = state.pool.draft(state.tokens[first:], state.seen - first)[: left - 1]
        state.seen = len(state.tokens)
        return Draft(guesses, 1 + len(guesses))

    def commit(self, state: PoolState, tokens: Sequence[int], accepted: int) -> None:
        state.tokens += tokens
