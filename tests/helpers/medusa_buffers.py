"""Medusa's own builder of buffers, and the tree that a decoder verifies with them: the oracle of exports."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.engines.medusa import TOPK
from treeopt.errors import InvalidInput
from treeopt.trees.tree import Choice, Tree


@dataclass(frozen=True, eq=False)
class Buffers:
    """The arrays that the decoder gets.

    tree_indices     : (n,)    candidate that each node verifies
    position_ids     : (n,)    depth of each node
    attention_mask   : (n, n)  whether node i attends to node j
    """

    tree_indices: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    attention_mask: NDArray[np.bool_]


def medusa_buffers(choices: Sequence[Sequence[int]]) -> Buffers:
    """The buffers of a list of choices; ValueError or IndexError where the engine's builder raises them.

    Duplicates, negative ranks and ranks from 10 on pass, and make buffers of another tree.

    >>> medusa_buffers([[0], [1], [0, 0], [0, 1]]).tree_indices.tolist()
    [0, 1, 2, 11, 12]
    >>> medusa_buffers([[0], [10], [0, 0]]).tree_indices.tolist()  # the last two are one token
    [0, 1, 11, 11]
    """
    paths = sorted(choices, key=lambda path: (len(path), path))
    if not paths:
        raise ValueError("the list is empty")
    depths = [0, *map(len, paths)]
    if 0 in depths[1:]:
        raise IndexError("the root is among the choices")
    if any(below > above + 1 for above, below in pairwise(depths)):
        raise IndexError("a whole depth is missing")
    mask = np.eye(len(depths), dtype=bool)
    mask[:, 0] = True
    places: dict[tuple[Any, ...], int] = {}  # of lists and tuples apart, as Python compares them
    for i, path in enumerate(paths, 1):
        places.setdefault((type(path), *path), i)
        if len(path) > 1:
            parent = places.get((type(path), *path[:-1]))
            if parent is None:
                raise ValueError(f"{path[:-1]!r} is not in list")
            mask[i] |= mask[parent]
    indices = [0, *(1 + path[-1] + TOPK * (len(path) - 1) for path in paths)]
    return Buffers(np.array(indices), np.array(depths), mask)


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
    for i, (index, depth) in enumerate(zip(buffers.tree_indices[1:], buffers.position_ids[1:], strict=True), 1):
        head, rank = divmod(int(index) - 1, TOPK)
        if head != depth - 1:
            raise InvalidInput(f"Node {i} at depth {depth} would verify rank {rank} of head {head + 1}.")
        parent = max((j for j in np.flatnonzero(buffers.attention_mask[i]) if j != i), key=lambda j: len(paths[j]))
        paths.append((*paths[parent], rank))
    return Tree.from_choices(paths[1:])
