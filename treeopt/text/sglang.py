"""SGLang's NGRAM: one trie of the last D tokens at every step of every request, and a tree drafted from all that match.

A step drafts for the last D tokens, and when it is verified these D tokens and all their suffixes go into the trie. So the
trie lags a step behind, of a prompt it has the end alone, and what stays in view is counted at every step anew.

anchors : nodes that the last tokens lead to, for every length up to D; 0 for none. They go along with the text: a length that
          led nowhere does so until its tokens are out of view, unless a node of an anchor was given back
recency : children and all nodes have the last used first (NEWER, OLDER); without room the oldest goes, a leaf

BFS takes the most recent children, of deep anchors more, and fewer at every level; PROB the most frequent, the likeliest
path first. Rows that are left are tokens 0 below the root, and are verified as well.

A corpus has a budget of these rows, and the trie the others. Its own tree grows likewise, from where the last tokens end in the
corpus, which are looked for at every step anew; what it has in common with the trie's is verified once, and no row goes back.

Source: SGLang 0.5.23, kernels/jit/csrc/ngram_corpus/{trie,ngram,result}.cpp and srt/speculative/ngram_worker.py; at most one corpus
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.text import tries
from treeopt.text.corpus import Automaton, match
from treeopt.text.rules import Draft, TextDrafter
from treeopt.text.tries import Ints

Floats = NDArray[np.float64]
NEWER, OLDER = tries.A, tries.B  # of all nodes in order of their last use, in a ring through the root


class Recent(NamedTuple):
    """trie, births (rows,) how often each row was given back, room (1,) rows that are free."""

    trie: tries.Trie
    births: Ints
    room: Ints


class Breadths(NamedTuple):
    """D, rows without the root, and the least and most children that a node drafts."""

    depth: int
    rows: int
    least: int
    most: int


@tries.compiled
def use(nodes: Ints, node: int) -> None:
    """Make a node the last used of all."""
    nodes[nodes[node, NEWER], OLDER], nodes[nodes[node, OLDER], NEWER] = nodes[node, OLDER], nodes[node, NEWER]
    nodes[node, NEWER], nodes[node, OLDER] = 0, nodes[0, OLDER]
    nodes[nodes[0, OLDER], NEWER] = nodes[0, OLDER] = node


@tries.compiled
def evict(recent: Recent) -> None:
    """Give the node back that was used longest ago."""
    nodes = recent.trie.nodes
    oldest = int(nodes[0, NEWER])
    nodes[0, NEWER], nodes[nodes[oldest, NEWER], OLDER] = nodes[oldest, NEWER], 0
    tries.unlink(nodes, oldest)
    tries.drop(recent.trie, oldest)
    recent.births[oldest] += 1
    recent.room[0] += 1


@tries.compiled
def insert(recent: Recent, window: Ints) -> None:
    """Count all suffixes of a window, and all of their beginnings."""
    trie, nodes = recent.trie, recent.trie.nodes
    for first in range(len(window)):
        while recent.room[0] < len(window) - first:
            evict(recent)
        node = 0
        for token in window[first:]:
            child = tries.find(trie, node, int(token))
            if child == 0:
                child = tries.add(trie, node, int(token))
                tries.link(nodes, child, 0)
                nodes[child, NEWER] = nodes[child, OLDER] = child
                recent.room[0] -= 1
            else:
                nodes[child, tries.COUNT] += 1
                if nodes[child, tries.PREVIOUS]:
                    tries.unlink(nodes, child)
                    tries.link(nodes, child, 0)
            node = child
        while node:
            use(nodes, node)
            node = int(nodes[node, tries.PARENT])


@tries.compiled
def advance(recent: Recent, window: Ints, new: int, anchors: Ints) -> None:
    """Take the anchors (D+1, 2), nodes and births by length, along ``new`` tokens at the end of a window."""
    stale = new > len(window)
    for depth in range(1, len(anchors)):
        stale = stale or recent.births[anchors[depth, 0]] != anchors[depth, 1]
    if stale:
        anchors[:] = 0
        new = len(window)
    for token in window[len(window) - new :]:
        for depth in range(len(anchors) - 1, 0, -1):
            node = int(anchors[depth - 1, 0])
            node = tries.find(recent.trie, node, int(token)) if node or depth == 1 else 0
            anchors[depth, 0], anchors[depth, 1] = node, recent.births[node]


@tries.compiled
def grow(tree: Ints, size: int, parent: int, token: int) -> int:
    """The place of a guess among those of a drafted tree (2, rows), tokens and parents; ``size`` where it is new."""
    for place in range(size):
        if tree[0, place] == token and tree[1, place] == parent:
            return place
    tree[0, size], tree[1, size] = token, parent
    return size


@tries.compiled
def recent_first(nodes: Ints, anchors: Ints, breadths: Breadths, tree: Ints) -> int:
    """BFS: how many guesses were drafted."""
    levels = max(1, breadths.depth - 1)
    scale, size = (breadths.most - breadths.least) / levels, 0
    queue, widths = np.zeros((breadths.rows + 2, 2), dtype=np.int32), np.zeros(breadths.rows + 2)
    for depth in range(len(anchors) - 1, 0, -1):
        if anchors[depth, 0] == 0 or nodes[anchors[depth, 0], tries.FIRST] == 0:
            continue
        queue[0, 0], queue[0, 1], widths[0] = -1, anchors[depth, 0], (levels - depth) * scale + breadths.least
        head, tail = 0, 1
        while head < tail and size < breadths.rows:
            parent, width = int(queue[head, 0]), widths[head]
            child, left = int(nodes[queue[head, 1], tries.FIRST]), max(1, int(width))
            head += 1
            while left > 0 and child and size < breadths.rows:
                at = grow(tree, size, parent, int(nodes[child, tries.TOKEN]))
                size = max(size, at + 1)
                queue[tail, 0], queue[tail, 1], widths[tail] = at, child, width - scale
                child, left, tail = int(nodes[child, tries.NEXT]), left - 1, tail + 1
    return size


@tries.compiled
def push(heap: Floats, hole: int, item: Floats) -> None:
    """Let a row rise from a hole of a heap whose first column decides, as std::push_heap does with ties."""
    while hole > 0 and heap[(hole - 1) // 2, 0] < item[0]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


@tries.compiled
def pop(heap: Floats, size: int) -> None:
    """Take the first row out of a heap that keeps ``size`` rows, as std::pop_heap does with ties."""
    hole, child = 0, 1
    while child < size:
        child += child + 1 < size and heap[child + 1, 0] >= heap[child, 0]
        heap[hole] = heap[child]
        hole, child = child, 2 * child + 1
    push(heap, hole, heap[size])


@tries.compiled
def push_children(nodes: Ints, item: Floats, heap: Floats, size: int, most: int) -> int:
    """Put a node's most frequent children, of equals the lesser token, onto a heap; its size.

    item, heap : probability, place in the drafted tree, and node; (3,) and (., 3), whose last row is free
    """
    best, count, total, row = np.empty((most + 1, 2), dtype=np.int64), 0, 0.0, heap[len(heap) - 1]
    child = int(nodes[int(item[2]), tries.FIRST])
    while child:
        key, at = int(nodes[child, tries.COUNT]) * 2**32 - int(nodes[child, tries.TOKEN]), count
        while at > 0 and best[at - 1, 0] < key:
            best[at, 0], best[at, 1] = best[at - 1, 0], best[at - 1, 1]
            at -= 1
        best[at, 0], best[at, 1] = key, child
        count, child = min(count + 1, most), int(nodes[child, tries.NEXT])
    for k in range(count):
        total += nodes[best[k, 1], tries.COUNT]
    for k in range(count):
        row[0], row[1], row[2] = nodes[best[k, 1], tries.COUNT] / total * item[0], item[1], best[k, 1]
        push(heap, size + k, row)
    return size + count


@tries.compiled
def likeliest_first(nodes: Ints, anchors: Ints, breadths: Breadths, tree: Ints) -> int:
    """PROB: how many guesses were drafted."""
    heap, waiting, size = np.empty(((breadths.rows + 2) * breadths.most + 2, 3)), 0, 0
    for depth in range(len(anchors) - 1, 0, -1):
        if anchors[depth, 0] == 0 or size == breadths.rows:
            continue
        item = np.array([1.0, -1.0, anchors[depth, 0]])
        waiting = push_children(nodes, item, heap, waiting, breadths.most)
        while waiting > 0 and size < breadths.rows:
            item[:], waiting = heap[0], waiting - 1
            pop(heap, waiting)
            item[1] = grow(tree, size, int(item[1]), int(nodes[int(item[2]), tries.TOKEN]))
            size = max(size, int(item[1]) + 1)
            waiting = push_children(nodes, item, heap, waiting, breadths.most)
    return size


@tries.compiled
def grow_tree(nodes: Ints, anchors: Ints, breadths: Breadths, by_count: bool, tree: Ints) -> int:
    """Draft behind anchors, by PROB or BFS; how many guesses."""
    if by_count:
        return int(likeliest_first(nodes, anchors, breadths, tree))
    return int(recent_first(nodes, anchors, breadths, tree))


@tries.compiled
def draft(recent: Recent, window: Ints, new: int, anchors: Ints, breadths: Breadths, by_count: bool, tree: Ints) -> int:
    """Draft behind a window into a tree (2, rows); how many guesses. Rows that are left are tokens 0 below the root."""
    advance(recent, window, new, anchors)
    size = int(grow_tree(recent.trie.nodes, anchors, breadths, by_count, tree))
    tree[0, size:], tree[1, size:] = 0, -1
    return size


@tries.compiled
def draft_more(corpus: Automaton, window: Ints, breadths: Breadths, by_count: bool, tree: Ints, size: int) -> None:
    """Draft from a corpus, too, and add the guesses that a tree of so many does not have yet."""
    anchors, own = np.zeros((breadths.depth + 1, 2), np.int32), np.zeros((2, breadths.rows), np.int32)
    match(corpus, window, anchors)
    for place in range(grow_tree(corpus.edges.nodes, anchors, breadths, by_count, own)):
        parent = int(own[1, place])
        at = grow(tree, size, int(own[0, parent]) if parent >= 0 else -1, int(own[0, place]))
        own[0, place], size = at, max(size, at + 1)  # where its children find it


@dataclass
class TrieState:
    """A request: the last D tokens, how many of them are new since the last draft, and the anchors."""

    window: Ints
    new: int
    anchors: Ints


@dataclass
class RecentTrie(TextDrafter):
    """A drafter by SGLang's trie.

    rows     : verified at every step, the root included
    depth    : D
    least, most : breadths
    order    : BFS or PROB
    capacity : rows of the trie, its root included
    budget   : of the rows, those for a corpus
    corpus   : its automaton; the name of a file, which nothing is drafted from, is checked alone
    """

    rows: int = 12
    depth: int = 18
    least: int = 1
    most: int = 10
    order: Literal["BFS", "PROB"] = "BFS"
    capacity: int = 10_000_000
    budget: int = 0
    corpus: Automaton | str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (self.rows > 1 and 1 < self.depth < self.capacity and 1 <= self.least <= self.most):
            raise InvalidInput(
                "SGLang's trie drafts 2 rows or more from windows of 2 tokens or more, with breadths from `least` 1 up to `most`, and "
                f"has room for more than one window, but got {self}."
            )
        if self.corpus is not None and not 0 < self.budget < self.rows:
            raise InvalidInput(
                f"SGLang drafts from a corpus with a SAM budget of 1 to {self.rows - 1}, one less than the rows, but got {self.budget}."
            )
        rows = self.rows - 1 - (self.budget if self.corpus is not None else 0)
        births, room = np.zeros(self.capacity, dtype=np.int32), np.array([self.capacity - 1], dtype=np.int32)
        self.recent = Recent(tries.new_trie(self.capacity), births, room)
        self.breadths = Breadths(self.depth, rows, self.least, self.most)
        self.tree = np.zeros((2, self.rows - 1), dtype=np.int32)

    def start(self, prompt: Sequence[int]) -> TrieState:
        if isinstance(self.corpus, str):
            raise InvalidInput(
                f"Drafts from {self.corpus} need its tokens, but a plan has its name alone: search again with `corpus`."
            )
        window = np.array(prompt[-self.depth :], dtype=np.int32)
        return TrieState(window, self.depth + 1, np.zeros((self.depth + 1, 2), dtype=np.int32))

    def draft(self, state: TrieState, left: int) -> Draft:
        window, by_count = state.window, self.order == "PROB"
        size = draft(self.recent, window, state.new, state.anchors, self.breadths, by_count, self.tree)
        if isinstance(self.corpus, Automaton):
            draft_more(self.corpus, window, self.breadths._replace(rows=self.budget), by_count, self.tree, size)
        state.new = 0
        tokens, parents = self.tree.tolist()
        return Draft(tokens, self.rows, parents)

    def commit(self, state: TrieState, tokens: Sequence[int], accepted: int) -> None:
        if state.new == 0:  # a step was drafted
            insert(self.recent, state.window)
        state.window = np.concatenate((state.window, np.array(tokens, np.int32)))[-self.depth :]
        state.new += len(tokens)
