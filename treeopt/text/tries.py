"""A trie in flat arrays, with children in lists whose order the caller keeps, and its loops compiled by numba where it is there.

Without numba the same functions run as they are: the same drafts, some 50 times slower.

node  : a row of ``nodes``; the root is row 0, and 0 says "none" wherever another node is named
TAIL  : of a leaf, the place of its token in the text, plus 1; 0 for other nodes
ONES  : the first child with count 1
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

TOKEN, PARENT, COUNT, FIRST, LAST, PREVIOUS, NEXT, TAIL, ONES = range(9)  # columns
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
    trie.nodes.resize((rows, 9), refcheck=False)
    if len(trie.table) > rows * 3 // 2:
        return trie
    table = np.zeros(2 ** (rows * 3 // 2).bit_length(), dtype=np.int32)
    _fill(trie := trie._replace(table=table))
    return trie


@compiled
def _fill(trie: Trie) -> None:
    for node in range(1, int(trie.spare[0])):
        if trie.nodes[node, COUNT] > 0:
            enter(trie, node)


@compiled
def slot_of(trie: Trie, parent: int, token: int) -> int:
    """Where the table has the child of a node with a token, or room for it."""
    nodes, table = trie.nodes, trie.table
    code = parent * FACTORS[0] + token * FACTORS[1]
    slot = (code ^ (code >> 17) ^ (code >> 31)) & (len(table) - 1)
    while table[slot] and (nodes[table[slot], TOKEN] != token or nodes[table[slot], PARENT] != parent):
        slot = (slot + 1) & (len(table) - 1)
    return slot


@compiled
def find(trie: Trie, parent: int, token: int) -> int:
    """The child of a node with a token, or 0."""
    return int(trie.table[slot_of(trie, parent, token)])


@compiled
def enter(trie: Trie, node: int) -> None:
    """Put a node into the table."""
    trie.table[slot_of(trie, int(trie.nodes[node, PARENT]), int(trie.nodes[node, TOKEN]))] = node


@compiled
def add(trie: Trie, parent: int, token: int) -> int:
    """A new child with count 1, in no list yet."""
    nodes, spare = trie.nodes, trie.spare
    node = int(spare[1] or spare[0])
    if spare[1]:
        spare[1] = nodes[node, NEXT]
    else:
        spare[0] += 1
    nodes[node] = 0
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, COUNT] = token, parent, 1
    enter(trie, node)
    return node


@compiled
def drop(trie: Trie, node: int) -> None:
    """Give a node back that is in no list and has no children."""
    nodes, table = trie.nodes, trie.table
    slot, other = slot_of(trie, int(nodes[node, PARENT]), int(nodes[node, TOKEN])), node
    while other:  # what stands behind it in the table may come back
        table[slot] = 0
        if other != node:
            enter(trie, other)
        slot = (slot + 1) & (len(table) - 1)
        other = int(table[slot])
    nodes[node, COUNT], nodes[node, NEXT], trie.spare[1] = 0, trie.spare[1], node


@compiled
def join(nodes: Ints, parent: int, before: int, behind: int) -> None:
    """Make two children neighbours; 0 stands for an end of the list."""
    nodes[before or parent, NEXT if before else FIRST] = behind
    nodes[behind or parent, PREVIOUS if behind else LAST] = before


@compiled
def unlink(nodes: Ints, node: int) -> None:
    """Take a node out of its parent's list."""
    join(nodes, nodes[node, PARENT], nodes[node, PREVIOUS], nodes[node, NEXT])


@compiled
def link(nodes: Ints, node: int, before: int) -> None:
    """Put a node into its parent's list, behind a sibling, or first (0)."""
    parent = nodes[node, PARENT]
    behind = nodes[before, NEXT] if before else nodes[parent, FIRST]
    join(nodes, parent, before, node)
    join(nodes, parent, node, behind)
