"""SGLang's NGRAM: one trie of the last D tokens at every step of every request, and a tree drafted from all that match.

A step drafts for the last D tokens, and when it is verified these D tokens and all their suffixes go into the trie. So the
trie lags a step behind, of a prompt it has the end alone, and what stays in view is counted at every step anew.

anchors : nodes that the last tokens lead to, for every length up to D; 0 for none. They go along with the text: a length that
          led nowhere does so until its tokens are out of view, unless a node of an anchor was given back
recency : children and all nodes have the last used first (NEWER, OLDER); without room the oldest goes, a leaf

BFS takes the most recent children, of deep anchors more, and fewer at every level; PROB the most frequent, the likeliest
path first. Rows that are left are tokens 0 below the root, and are verified as well.

Source: SGLang 0.5.23, kernels/jit/csrc/ngram_corpus/trie.cpp and srt/speculative/ngram_worker.py; without corpora
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.text import tries
from treeopt.text.rules import Draft, TextDrafter
from treeopt.text.tries import Ints

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
def use(nodes: Ints, node: int, is_new: bool) -> None:
    """Make a node the last used of all."""
    if not is_new:
        nodes[nodes[node, NEWER], OLDER] = nodes[node, OLDER]
        nodes[nodes[node, OLDER], NEWER] = nodes[node, NEWER]
    nodes[node, NEWER], nodes[node, OLDER] = 0, nodes[0, OLDER]
    nodes[nodes[0, OLDER], NEWER] = node
    nodes[0, OLDER] = node


@tries.compiled
def insert(recent: Recent, window: Ints, most: int) -> None:
    """Count all suffixes of a window, and all of their beginnings."""
    trie, nodes = recent.trie, recent.trie.nodes
    path, fresh = np.zeros(len(window), dtype=np.int32), np.zeros(len(window), dtype=np.bool_)
    for first in range(len(window)):
        while recent.room[0] < min(len(window) - first, most):
            oldest = int(nodes[0, NEWER])
            nodes[0, NEWER] = nodes[oldest, NEWER]
            nodes[nodes[oldest, NEWER], OLDER] = 0
            tries.unlink(nodes, oldest)
            tries.drop(trie, oldest)
            recent.births[oldest] += 1
            recent.room[0] += 1
        node, depth = 0, 0
        while depth < min(len(window) - first, most):
            token = int(window[first + depth])
            child = tries.find(trie, node, token)
            fresh[depth] = child == 0
            if child == 0:
                child = tries.add(trie, node, token)
                recent.room[0] -= 1
            else:
                nodes[child, tries.COUNT] += 1
                if nodes[child, tries.PREVIOUS]:
                    tries.unlink(nodes, child)
            if fresh[depth] or nodes[child, tries.PREVIOUS]:
                tries.link(nodes, child, 0)
            node, path[depth], depth = child, child, depth + 1
        for k in range(depth - 1, -1, -1):
            use(nodes, int(path[k]), fresh[k])


@tries.compiled
def advance(recent: Recent, window: Ints, new: int, anchors: Ints) -> None:
    """Take the anchors (D+1, 2), nodes and births by length, along ``new`` tokens at the end of a window."""
    trie, most = recent.trie, len(anchors) - 1
    stale = new > len(window)
    for depth in range(1, most + 1):
        node = int(anchors[depth, 0])
        stale = stale or (node > 0 and recent.births[node] != anchors[depth, 1])
    if not stale:
        for token in window[len(window) - new :]:
            for depth in range(most, 0, -1):
                node = int(anchors[depth - 1, 0]) if depth > 1 else 0
                node = tries.find(trie, node, int(token)) if depth == 1 or node else 0
                anchors[depth, 0], anchors[depth, 1] = node, recent.births[node]
        return
    for depth in range(1, most + 1):
        node = 0
        for k in range(depth):
            if depth > len(window) or (k and node == 0):
                node = 0
                break
            node = tries.find(trie, node, int(window[len(window) - depth + k]))
        anchors[depth, 0], anchors[depth, 1] = node, recent.births[node]


@tries.compiled
def grow(tree: Ints, size: int, parent: int, token: int) -> int:
    """The node of a drafted tree (rows+1, 2), tokens and parents, for a token below a parent; ``size`` where it is new."""
    for node in range(1, size):
        if tree[node, 0] == token and tree[node, 1] == parent:
            return node
    tree[size, 0], tree[size, 1] = token, parent
    return size


@tries.compiled
def recent_first(nodes: Ints, anchors: Ints, breadths: Breadths, tree: Ints) -> int:
    """BFS: the drafted tree's size, the root included."""
    levels = max(1, breadths.depth - 1)
    scale, size = (breadths.most - breadths.least) / levels, 1
    queue, widths = np.zeros((breadths.rows + 2, 2), dtype=np.int32), np.zeros(breadths.rows + 2)
    for depth in range(len(anchors) - 1, 0, -1):
        if anchors[depth, 0] == 0 or nodes[anchors[depth, 0], tries.FIRST] == 0:
            continue
        queue[0, 0], queue[0, 1], widths[0] = 0, anchors[depth, 0], (levels - depth) * scale + breadths.least
        head, tail = 0, 1
        while head < tail and size <= breadths.rows:
            parent, width = int(queue[head, 0]), widths[head]
            child, left = int(nodes[queue[head, 1], tries.FIRST]), max(1, int(width))
            head += 1
            while left > 0 and child and size <= breadths.rows:
                at = grow(tree, size, parent, int(nodes[child, tries.TOKEN]))
                size = max(size, at + 1)
                queue[tail, 0], queue[tail, 1], widths[tail] = at, child, width - scale
                child, left, tail = int(nodes[child, tries.NEXT]), left - 1, tail + 1
    return size


@tries.compiled
def add_frequent(nodes: Ints, node: int, entry: NDArray[np.float64], heap: NDArray[np.float64], state: Ints) -> None:
    """Put the most frequent children of a node, of equals the lesser token, onto a heap (., 3): probability, parent, node.

    entry : probability and parent of the node;  state : size of the heap, most children
    """
    best, count = np.zeros(state[1] + 1, dtype=np.int32), 0
    child = int(nodes[node, tries.FIRST])
    while child:
        at = count
        while at > 0 and (
            nodes[best[at - 1], tries.COUNT] < nodes[child, tries.COUNT]
            or (
                nodes[best[at - 1], tries.COUNT] == nodes[child, tries.COUNT]
                and nodes[best[at - 1], tries.TOKEN] > nodes[child, tries.TOKEN]
            )
        ):
            best[at] = best[at - 1]
            at -= 1
        best[at] = child
        count = min(count + 1, int(state[1]))
        child = int(nodes[child, tries.NEXT])
    total, item = 0.0, np.zeros(3)
    for k in range(count):
        total += nodes[best[k], tries.COUNT]
    for k in range(count):
        item[0], item[1], item[2] = nodes[best[k], tries.COUNT] / total * entry[0], entry[1], best[k]
        tries.heap_push(heap, int(state[0]), item)
        state[0] += 1


@tries.compiled
def likeliest_first(nodes: Ints, anchors: Ints, breadths: Breadths, tree: Ints) -> int:
    """PROB: the drafted tree's size, the root included."""
    heap = np.zeros(((breadths.rows + 2) * breadths.most, 3))
    state, entry, size = np.array([0, breadths.most], dtype=np.int32), np.zeros(3), 1
    for depth in range(len(anchors) - 1, 0, -1):
        if anchors[depth, 0] == 0 or size > breadths.rows:
            continue
        entry[0], entry[1] = 1.0, 0.0
        add_frequent(nodes, int(anchors[depth, 0]), entry, heap, state)
        while state[0] > 0 and size <= breadths.rows:
            tries.heap_pop(heap, int(state[0]), entry)
            state[0] -= 1
            child = int(entry[2])
            at = grow(tree, size, int(entry[1]), int(nodes[child, tries.TOKEN]))
            size = max(size, at + 1)
            entry[1] = at
            add_frequent(nodes, child, entry, heap, state)
    return size


@dataclass
class TrieState:
    """A request: the last D tokens, those new since the last draft, and the anchors."""

    window: list[int]
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
    """

    rows: int = 12
    depth: int = 18
    least: int = 1
    most: int = 10
    order: Literal["BFS", "PROB"] = "BFS"
    capacity: int = 10_000_000

    def __post_init__(self) -> None:
        if not (self.rows > 1 and 1 < self.depth < self.capacity and 1 <= self.least <= self.most):
            raise InvalidInput(
                "SGLang's trie drafts 2 rows or more from windows of 2 tokens or more, with breadths from `least` 1 up to `most`, and "
                f"has room for more than one window, but got {self}."
            )
        births, room = np.zeros(self.capacity, dtype=np.int32), np.array([self.capacity - 1], dtype=np.int32)
        self.recent = Recent(tries.new_trie(self.capacity), births, room)
        self.breadths = Breadths(self.depth, self.rows - 1, self.least, self.most)
        self.tree = np.zeros((self.rows + 1, 2), dtype=np.int32)

    def start(self, prompt: Sequence[int]) -> TrieState:
        return TrieState(list(prompt[-self.depth :]), self.depth + 1, np.zeros((self.depth + 1, 2), dtype=np.int32))

    def draft(self, state: TrieState, left: int) -> Draft:
        window = np.array(state.window, dtype=np.int32)
        advance(self.recent, window, state.new, state.anchors)
        draw = recent_first if self.order == "BFS" else likeliest_first
        size = draw(self.recent.trie.nodes, state.anchors, self.breadths, self.tree)
        state.new = 0
        tokens, parents = self.tree[1:size, 0].tolist(), (self.tree[1:size, 1] - 1).tolist()
        blanks = self.rows - size
        return Draft(tokens + [0] * blanks, self.rows, parents + [-1] * blanks)

    def commit(self, state: TrieState, tokens: Sequence[int], accepted: int) -> None:
        if state.new == 0:  # a step was drafted
            insert(self.recent, np.array(state.window, dtype=np.int32), self.depth)
        state.window = [*state.window, *tokens][-self.depth :]
        state.new += len(tokens)
