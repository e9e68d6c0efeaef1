"""Medusa's tree buffers, as its own builder makes them of any list, right or wrong (medusa/model/utils.py).

Hydra, Neuron and Model Optimizer's benchmark build theirs the same way, EAGLE-1 its mask. All candidates lie in one row:
the root's token, then ten of every head. A node points at candidate 1 + rank + 10 x (depth - 1), so that
rank 10 of one head is rank 0 of the next. Nothing of it is checked.

n nodes, root included · c candidates
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.trees.tree import MAX_RANK, Choice, Tree

P = TypeVar("P", bound=Sequence[int])
TOPK = MAX_RANK + 1  # candidates of a head, and the stride between heads


@dataclass(frozen=True, eq=False)
class Buffers:
    """What the decoder gets.

    tree_indices     : (n,)    candidate that each node verifies
    position_ids     : (n,)    depth of each node
    attention_mask   : (n, n)  whether node i attends to node j
    """

    tree_indices: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    attention_mask: NDArray[np.bool_]


def in_order(paths: Iterable[P]) -> list[P]:
    """Paths by depth, those of a depth by rank: the order that engines sort them into."""
    return sorted(paths, key=lambda path: (len(path), path))


def medusa_buffers(choices: Sequence[Sequence[int]]) -> Buffers:
    """The buffers of a list of choices; ValueError or IndexError where the engine's builder raises them.

    Duplicates, negative ranks and ranks from 10 on pass, and make buffers of another tree.

    >>> medusa_buffers([[0], [1], [0, 0], [0, 1]]).tree_indices.tolist()
    [0, 1, 2, 11, 12]
    >>> medusa_buffers([[0], [10], [0, 0]]).tree_indices.tolist()  # the last two are one token
    [0, 1, 11, 11]
    """
    paths = in_order(choices)
    counts: list[int] = []  # nodes of every depth
    for path in paths:
        if not path:
            raise IndexError("the root is among the choices")
        if len(path) > len(counts) + 1:
            raise IndexError("a whole depth is missing")
        if len(path) > len(counts):
            counts.append(0)
        counts[len(path) - 1] += 1
    if not paths:
        raise ValueError("the list is empty")
    n = len(paths) + 1
    mask = np.eye(n, dtype=bool)
    mask[:, 0] = True
    indices = np.zeros(n, dtype=np.int64)
    places: dict[tuple[Any, ...], int] = {}  # of lists and tuples apart, as Python compares them
    for i, path in enumerate(paths, 1):
        indices[i] = 1 + path[-1] + TOPK * (len(path) - 1)
        places.setdefault((type(path), *path), i)
        if len(path) > 1:
            parent = places.get((type(path), *path[:-1]))
            if parent is None:
                raise ValueError(f"{path[:-1]!r} is not in list")
            mask[i] |= mask[parent]
    return Buffers(indices, np.repeat(np.arange(len(counts) + 1), [1, *counts]), mask)


def decoded(buffers: Buffers) -> Tree:
    """The tree that a decoder with these buffers verifies.

    Raises InvalidInput where a node's candidate is not of its depth's head, or two nodes verify the same.

    >>> decoded(medusa_buffers([[0], [0, 1]])).choices
    [[0], [0, 1]]
    >>> decoded(medusa_buffers([[0], [10], [0, 0]]))
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: Node 2 at depth 1 would verify rank 0 of head 2.
    """
    paths: list[Choice] = [()]
    for i in range(1, len(buffers.tree_indices)):
        head, rank = divmod(int(buffers.tree_indices[i]) - 1, TOPK)
        depth = int(buffers.position_ids[i])
        if head != depth - 1:
            raise InvalidInput(f"Node {i} at depth {depth} would verify rank {rank} of head {head + 1}.")
        above = [j for j in np.flatnonzero(buffers.attention_mask[i]) if j != i]
        paths.append((*paths[max(above, key=lambda j: len(paths[j]))], rank))
    return Tree.from_choices(paths[1:])
