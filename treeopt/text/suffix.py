"""Suffix decoding (Oliaro et al. 2024) as ArcticInference and vLLM have it: what followed most often, by counts of all suffixes.

A tree counts the suffixes of its sequences, cut at D tokens: every token lengthens the D suffixes that are open. One tree is of
the request alone, prompt and answer; one is of all answers, of which the oldest requests' go first. For every length m < D of
the last tokens that is in a tree, its likeliest continuation is drafted, at most m times the factor, plus the offset, tokens;
the draft with the greatest sum of probabilities wins, then the longer match, then the request's own tree.

Of equally frequent children the order decides, which goes by how they came to their counts: see `raise_count`.

A suffix that no other shares is one leaf with a place of the text (`TAIL`), and grows with it without work. So a tree has a
leaf for every token, and else nodes for what stood there twice.

following : of every place of the text the next one of its sequence, -1 for none
cursors   : (sequences at a time, D, 2) nodes and depths of the open suffixes that are not in leaves

Source: ArcticInference 9d46438, csrc/suffix_decoding/suffix_tree.cc and arctic_inference/suffix_decoding/cache.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.text import tries
from treeopt.text.rules import Guesses, TextDrafter
from treeopt.text.tries import ONES, TAIL, Ints

CHUNK = 256  # tokens for which there is room at a time
AT_ONCE = 256  # requests that run at once for which there is room at first
FLOAT = np.float32


class Suffixes(NamedTuple):
    """trie, text (places,), following (places,), cursors, and of every sequence (number of cursors, last place)."""

    trie: tries.Trie
    text: Ints
    following: Ints
    cursors: Ints
    open: Ints


class Limits(NamedTuple):
    """most D, budgets (D+1,) tokens by length of the match, least probability."""

    most: int
    budgets: Ints
    least: np.float32


@tries.compiled
def raise_count(nodes: Ints, node: int) -> None:
    """Add 1 to a count: who led those of the same count goes before those of the next, others behind them."""
    parent, before, same = nodes[node, tries.PARENT], nodes[node, tries.PREVIOUS], 0
    nodes[node, tries.COUNT] += 1
    if parent == 0:
        return
    if nodes[parent, ONES] == node:
        nodes[parent, ONES] = nodes[node, tries.NEXT]
    if before and nodes[before, tries.COUNT] <= nodes[node, tries.COUNT]:
        same = nodes[before, tries.COUNT]
        if same == 1:
            before = nodes[nodes[parent, ONES], tries.PREVIOUS]
        while before and nodes[before, tries.COUNT] == same:
            before = nodes[before, tries.PREVIOUS]
        tries.unlink(nodes, node)
        tries.link(nodes, node, before)


@tries.compiled
def lower_count(nodes: Ints, node: int) -> None:
    """Take 1 from a count: the node goes behind the siblings that have as many as it had, unless none is left of it."""
    parent, behind, same = nodes[node, tries.PARENT], nodes[node, tries.NEXT], nodes[node, tries.COUNT]
    nodes[node, tries.COUNT] -= 1
    if parent == 0:
        return
    if same > 1 and behind and nodes[behind, tries.COUNT] == same:
        while nodes[behind, tries.NEXT] and nodes[nodes[behind, tries.NEXT], tries.COUNT] == same:
            behind = nodes[behind, tries.NEXT]
        tries.unlink(nodes, node)
        tries.link(nodes, node, behind)
    if same == 2:
        nodes[parent, ONES] = node
    elif nodes[parent, ONES] == node:
        nodes[parent, ONES] = behind


@tries.compiled
def add_leaf(trie: tries.Trie, parent: int, token: int, place: int) -> None:
    """A leaf for a place of the text, behind its siblings. The root's have no list: nothing is drafted from it."""
    node = tries.add(trie, parent, token)
    trie.nodes[node, TAIL] = place + 1
    if parent != 0:
        tries.link(trie.nodes, node, trie.nodes[parent, tries.LAST])
        if trie.nodes[parent, ONES] == 0:
            trie.nodes[parent, ONES] = node


@tries.compiled
def expand(tree: Suffixes, leaf: int, depth: int, most: int) -> None:
    """Make a leaf an inner node: what stood behind it gets a leaf of its own."""
    place = int(tree.trie.nodes[leaf, TAIL]) - 1
    tree.trie.nodes[leaf, TAIL] = 0
    if depth == most:
        return
    behind = int(tree.following[place])
    if behind >= 0:
        add_leaf(tree.trie, leaf, int(tree.text[behind]), behind)
        return
    for i in range(len(tree.open)):  # the suffix ends here: it is open if its sequence is
        if tree.open[i, 1] == place:
            tree.cursors[i, tree.open[i, 0], 0], tree.cursors[i, tree.open[i, 0], 1] = leaf, depth
            tree.open[i, 0] += 1


@tries.compiled
def append(tree: Suffixes, sequence: int, tokens: Ints, at: int, most: int) -> None:
    """Lengthen an open sequence by tokens, which come to places of the text from ``at`` on."""
    nodes, cursors, state = tree.trie.nodes, tree.cursors[sequence], tree.open[sequence]
    for i in range(len(tokens)):
        token, place = int(tokens[i]), at + i
        tree.text[place], tree.following[place] = token, -1
        if state[1] >= 0:
            tree.following[state[1]] = place
        state[1] = place
        count, kept = int(state[0]), 0
        cursors[count, 0], cursors[count, 1] = 0, 0  # the suffix that begins here
        for k in range(count + 1):
            parent, depth = int(cursors[k, 0]), int(cursors[k, 1]) + 1
            node = tries.find(tree.trie, parent, token)
            if node == 0:
                add_leaf(tree.trie, parent, token, place)
                continue
            raise_count(nodes, node)
            if nodes[node, TAIL] > 0:
                expand(tree, node, depth, most)
            if depth < most:
                cursors[kept, 0], cursors[kept, 1] = node, depth
                kept += 1
        state[0] = kept


@tries.compiled
def remove(tree: Suffixes, first: int, most: int) -> None:
    """Take out a sequence that begins at a place of the text."""
    trie, nodes = tree.trie, tree.trie.nodes
    while first >= 0:
        node, depth, place = 0, 0, first
        while place >= 0 and depth < most:
            node, depth = tries.find(trie, node, int(tree.text[place])), depth + 1
            lower_count(nodes, node)
            place = int(tree.following[place]) if nodes[node, TAIL] == 0 else -1
        while node and nodes[node, tries.COUNT] == 0:
            gone, node = node, int(nodes[node, tries.PARENT])
            if node:
                tries.unlink(nodes, gone)
            tries.drop(trie, gone)
        first = int(tree.following[first])


@tries.compiled
def walk(tree: Suffixes, tokens: Ints) -> tuple[int, int]:
    """Where tokens lead: a node, and the place of the text that it has grown to if it is a leaf, or -1; node 0 for nowhere."""
    node, at = 0, -1
    for token in tokens:
        if at >= 0:
            at = int(tree.following[at])
            if at < 0 or tree.text[at] != token:
                return 0, -1
            continue
        node = tries.find(tree.trie, node, int(token))
        if node == 0:
            return 0, -1
        at = int(tree.trie.nodes[node, TAIL]) - 1
    return node, at


@tries.compiled
def draft_from(tree: Suffixes, node: int, at: int, depth: int, limits: Limits, out: Ints) -> tuple[int, np.float32]:
    """Tokens of the likeliest path from where a match of a length (``depth``) leads, and the sum of their probabilities."""
    nodes, budget = tree.trie.nodes, int(limits.budgets[depth])
    one, score, count = FLOAT(1), FLOAT(0), 0
    while count < budget:
        if at >= 0:
            at = int(tree.following[at]) if depth + count < limits.most else -1
            if at < 0:
                break
            token = int(tree.text[at])
        else:
            child = int(nodes[node, tries.FIRST])
            if child == 0:
                break
            one *= FLOAT(nodes[child, tries.COUNT]) / FLOAT(nodes[node, tries.COUNT])
            token, node, at = int(nodes[child, tries.TOKEN]), child, int(nodes[child, TAIL]) - 1
        if one < limits.least:
            break
        out[count] = token
        score += one
        count += 1
    return count, score


@tries.compiled
def draft(trees: tuple[Suffixes, Suffixes], context: Ints, limits: Limits, out: Ints) -> int:
    """The best draft of the request's own tree and the common one into the first row of ``out`` (2, most); its length."""
    best, count = FLOAT(0), 0
    for tree in trees:
        rival, most = best, FLOAT(0)
        for depth in range(1, len(context)):
            node, at = walk(tree, context[len(context) - depth :])
            if node == 0 or (at >= 0 and tree.following[at] < 0):  # longer ones end there as well
                break
            found, score = draft_from(tree, node, at, depth, limits, out[1])
            if score >= most:
                most = score
                if score > rival:
                    best, count, out[0] = score, found, out[1]
    return count


@dataclass
class SuffixTree:
    """A tree that makes room for what comes.

    most   : D
    number : of its request among all requests
    """

    most: int
    sequences: int = 1
    number: int = -1
    places: int = 0

    def __post_init__(self) -> None:
        text, following, opened = (np.zeros(shape, np.int32) for shape in (CHUNK, CHUNK, (self.sequences, 2)))
        opened[:, 1] = -1
        cursors = np.zeros((self.sequences, self.most + 1, 2), np.int32)
        self.tree = Suffixes(tries.new_trie(CHUNK), text, following, cursors, opened)

    def extend(self, tokens: Sequence[int], sequence: int = 0) -> None:
        for first in range(0, len(tokens), CHUNK):
            part, trie = np.array(tokens[first : first + CHUNK], dtype=np.int32), self.tree.trie
            rows = int(trie.spare[0]) + 2 * (self.most + 1) * len(part)
            if rows > len(trie.nodes):
                self.tree = self.tree._replace(trie=tries.grown(trie, rows * 9 // 8))
            if self.places + len(part) > len(self.tree.text):
                for one in (self.tree.text, self.tree.following):
                    one.resize(2 * len(one) + len(part), refcheck=False)
            append(self.tree, sequence, part, self.places, self.most)
            self.places += len(part)

    def make_room(self) -> None:
        """Have twice as many sequences at a time."""
        cursors, opened = self.tree.cursors, self.tree.open
        opened = np.concatenate([opened, np.full_like(opened, -1)])
        opened[len(cursors) :, 0] = 0
        self.tree = self.tree._replace(cursors=np.concatenate([cursors, np.zeros_like(cursors)]), open=opened)


@dataclass
class SuffixDecoding(TextDrafter):
    """A drafter by suffixes, of which a request's state is its own tree.

    length : most tokens of a draft; D where it is None
    depth  : D
    factor, offset : of the length of the match, how long its draft may be
    least  : probability of a path, below which it ends
    cached : most requests whose answers the common tree has, the running ones included; 0 for no such tree
    """

    length: int | None = None
    depth: int = 24
    factor: float = 1.0
    offset: float = 0.0
    least: float = 0.1
    cached: int = 10000
    started: int = 0
    running: dict[int, int] = field(default_factory=dict)  # open sequences, by the request's number
    begun: dict[int, int] = field(default_factory=dict)  # first places in the common tree, by the request's number

    def __post_init__(self) -> None:
        length = self.length or self.depth
        if min(length, self.depth - 1) < 1 or self.cached < 0:
            raise InvalidInput(
                "Suffix decoding drafts at least 1 token from trees of depth 2 or more, and keeps 0 or more requests, but "
                f"got `length` {length}, `depth` {self.depth} and `cached` {self.cached}."
            )
        lengths = np.arange(self.depth + 1, dtype=FLOAT) * FLOAT(self.factor) + FLOAT(self.offset)
        budgets = np.clip((lengths.astype(float) + 1e-6).astype(np.int32), 0, length)
        self.limits = Limits(self.depth, budgets, FLOAT(self.least))
        self.others = SuffixTree(self.depth, AT_ONCE)
        self.out = np.zeros((2, max(int(budgets.max()), 1)), dtype=np.int32)

    def start(self, prompt: Sequence[int]) -> SuffixTree:
        own = SuffixTree(self.depth, number=self.started)
        own.extend(prompt)
        self.started += 1
        if self.cached:
            self.begun[own.number] = -1
            if len(self.running) == len(self.others.tree.open):
                self.others.make_room()
            self.running[own.number] = min(set(range(len(self.others.tree.open))) - set(self.running.values()))
        while len(self.begun) > self.cached:
            oldest = next(iter(self.begun))
            self._close(oldest)
            remove(self.others.tree, self.begun.pop(oldest), self.depth)
        return own

    def draft(self, state: SuffixTree, left: int) -> Guesses:
        context = state.tree.text[max(state.places - self.depth, 0) : state.places]
        count = draft((state.tree, self.others.tree), context, self.limits, self.out)
        return Guesses(self.out[0, :count].tolist(), 1 + count)

    def commit(self, state: SuffixTree, tokens: Sequence[int], accepted: int) -> None:
        state.extend(tokens)
        if state.number in self.running and len(tokens):
            if self.begun[state.number] < 0:
                self.begun[state.number] = self.others.places
            self.others.extend(tokens, self.running[state.number])

    def stop(self, state: SuffixTree) -> None:
        self._close(state.number)

    def _close(self, number: int) -> None:
        """End a request's sequence in the common tree, where it stays."""
        if number in self.running:
            self.others.tree.open[self.running.pop(number)] = 0, -1
