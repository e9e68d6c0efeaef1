"""A trie in flat arrays, with children in lists whose order the caller keeps, and its loops compiled by numba where it is there.

Without numba the same functions run as they are: the same drafts, some 50 times slower.

node  : a row of ``nodes``; the root is row 0, and 0 says "none" wherever another node is named
table : hash table of all nodes but the root, by parent and token, with open addressing
spare : what is free: the number of rows that were ever used, and the first of those given back, chained by NEXT
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
F = TypeVar("F", bound=Callable[..., Any])

TOKEN, PARENT, COUNT, FIRST, LAST, PREVIOUS, NEXT, A, B = range(9)  # columns; A and B are of the kind of trie
FACTORS = 1540483477, 1181783497


def compiled(function: F) -> F:
    try:
        from numba import njit
    except ImportError:
        return function
    return njit(cache=True)(function)  # type: ignore[no-any-return]


class Trie(NamedTuple):
    """nodes (rows, 9), table (2**k,), spare (2,)"""

    nodes: Ints
    table: Ints
    spare: Ints


def new_trie(rows: int) -> Trie:
    """Room for ``rows`` nodes, the root included; untouched rows take no memory."""
    table = np.zeros(2 ** (rows * 3 // 2).bit_length(), dtype=np.int32)
    return Trie(np.zeros((rows, 9), dtype=np.int32), table, np.array([1, 0], dtype=np.int32))


def grown(trie: Trie, rows: int) -> Trie:
    """The trie with room for more rows."""
    trie.nodes.resize((rows, 9), refcheck=False)
    table = np.zeros(2 ** (rows * 3 // 2).bit_length(), dtype=np.int32)
    bigger = Trie(trie.nodes, table, trie.spare)
    _fill(bigger)
    return bigger


@compiled
def _fill(trie: Trie) -> None:
    for node in range(1, int(trie.spare[0])):
        if trie.nodes[node, COUNT] > 0:
            enter(trie, node)


@compiled
def home(trie: Trie, parent: int, token: int) -> int:
    """The slot of the table from which a node is looked for."""
    code = parent * FACTORS[0] + token * FACTORS[1]
    return (code ^ (code >> 17) ^ (code >> 31)) & (len(trie.table) - 1)


@compiled
def find(trie: Trie, parent: int, token: int) -> int:
    """The child of a node with a token, or 0."""
    nodes, table = trie.nodes, trie.table
    slot = home(trie, parent, token)
    while True:
        node = int(table[slot])
        if node == 0 or (nodes[node, TOKEN] == token and nodes[node, PARENT] == parent):
            return node
        slot = (slot + 1) & (len(table) - 1)


@compiled
def enter(trie: Trie, node: int) -> None:
    """Put a node into the table."""
    slot = home(trie, int(trie.nodes[node, PARENT]), int(trie.nodes[node, TOKEN]))
    while trie.table[slot] != 0:
        slot = (slot + 1) & (len(trie.table) - 1)
    trie.table[slot] = node


@compiled
def add(trie: Trie, parent: int, token: int) -> int:
    """A new child with count 1, in no list yet."""
    nodes, spare = trie.nodes, trie.spare
    node = int(spare[1])
    if node:
        spare[1] = nodes[node, NEXT]
    else:
        node = int(spare[0])
        spare[0] += 1
    nodes[node] = 0
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, COUNT] = token, parent, 1
    enter(trie, node)
    return node


@compiled
def drop(trie: Trie, node: int) -> None:
    """Give a node back that is in no list and has no children."""
    nodes, table = trie.nodes, trie.table
    last = len(table) - 1
    slot = home(trie, int(nodes[node, PARENT]), int(nodes[node, TOKEN]))
    while table[slot] != node:
        slot = (slot + 1) & last
    hole = slot
    while True:  # what was pushed on by the one that goes comes back
        slot = (slot + 1) & last
        other = int(table[slot])
        if other == 0:
            break
        wanted = home(trie, int(nodes[other, PARENT]), int(nodes[other, TOKEN]))
        if ((slot - wanted) & last) >= ((slot - hole) & last):
            table[hole] = other
            hole = slot
    table[hole] = 0
    nodes[node, COUNT] = 0
    nodes[node, NEXT] = trie.spare[1]
    trie.spare[1] = node


@compiled
def unlink(nodes: Ints, node: int) -> None:
    """Take a node out of its parent's list."""
    before, behind = nodes[node, PREVIOUS], nodes[node, NEXT]
    if before:
        nodes[before, NEXT] = behind
    else:
        nodes[nodes[node, PARENT], FIRST] = behind
    if behind:
        nodes[behind, PREVIOUS] = before
    else:
        nodes[nodes[node, PARENT], LAST] = before


@compiled
def link(nodes: Ints, node: int, before: int) -> None:
    """Put a node into its parent's list, behind a sibling, or first (0)."""
    parent = nodes[node, PARENT]
    behind = nodes[before, NEXT] if before else nodes[parent, FIRST]
    nodes[node, PREVIOUS], nodes[node, NEXT] = before, behind
    if before:
        nodes[before, NEXT] = node
    else:
        nodes[parent, FIRST] = node
    if behind:
        nodes[behind, PREVIOUS] = node
    else:
        nodes[parent, LAST] = node


@compiled
def heap_push(heap: NDArray[np.float64], hole: int, item: NDArray[np.float64]) -> None:
    """Let an item rise from a hole of a heap of rows whose first column decides, as std::push_heap does with ties."""
    while hole > 0 and heap[(hole - 1) // 2, 0] < item[0]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


@compiled
def heap_pop(heap: NDArray[np.float64], size: int, first: NDArray[np.float64]) -> None:
    """Take the first of a heap of ``size`` rows, as std::pop_heap does with ties; the heap has one row less then."""
    first[:] = heap[0]
    last, size, hole = heap[size - 1].copy(), size - 1, 0
    child = 0
    while child < (size - 1) // 2:
        child = 2 * (child + 1)
        if heap[child, 0] < heap[child - 1, 0]:
            child -= 1
        heap[hole] = heap[child]
        hole = child
    if size % 2 == 0 and child == (size - 2) // 2 and size > 0:
        child = 2 * (child + 1)
        heap[hole] = heap[child - 1]
        hole = child - 1
    if size > 0:
        heap_push(heap, hole, last)
