"""How engines of trees read lists: ports of their readers, by which what treeopt writes is read back."""

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import or_

from tests.helpers.medusa_buffers import medusa_buffers
from treeopt.engines.medusa import TOPK
from treeopt.errors import InvalidInput
from treeopt.trees.tree import Choice, Tree

MOST_DEPTH, RANK_BITS = 16, 4  # of a path in TensorRT-LLM's C++, four bits a rank


def verified(choices: Sequence[Sequence[int]]) -> Tree:
    """The tree that is verified. Raises InvalidInput where a node's candidate is another node's child.

    >>> verified([[0], [10], [0, 0]])
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: EAGLE-1 would verify rank 0 below [0] for [10].
    """
    medusa_buffers(choices)  # the mask is Medusa's, and fails where that does
    ordered = sorted(map(tuple, choices), key=lambda path: (len(path), path))
    parents = list(dict.fromkeys(path[:-1] for path in ordered))  # each has ten candidates
    for path in ordered:
        block, rank = divmod(parents.index(path[:-1]) * TOPK + path[-1], TOPK)
        if rank != path[-1]:
            owner = list(parents[block]) if block < len(parents) else "no node"
            raise InvalidInput(f"EAGLE-1 would verify rank {rank} below {owner} for {list(path)}.")
    return Tree.from_choices(ordered)


def drafting_levels(choices: Sequence[Sequence[int]]) -> list[int]:
    """Nodes that expand at depths 1, 2, ...; KeyError and IndexError where EAGLE's drafting side raises them.

    A choice that comes twice counts once there, although the verifying side counts it twice.

    >>> drafting_levels([[0], [1], [0, 0]])
    [1]
    >>> drafting_levels([[0], [1]])
    Traceback (most recent call last):
    IndexError: EAGLE-1 has no buffers for a tree of depth 1
    """
    paths = {(), *map(tuple, choices)}
    for path in sorted(paths, key=lambda path: (len(path), path)):
        if path[:-1] not in paths:
            raise KeyError(path[:-1])
    expanding = {path[:-1] for path in paths} - {()}
    if not expanding:
        raise IndexError("EAGLE-1 has no buffers for a tree of depth 1")
    return [sum(len(path) == depth for path in expanding) for depth in range(1, 1 + max(map(len, expanding)))]


def drafted(choices: Sequence[Sequence[int]]) -> Tree:
    """The tree that the heads' guesses are made for, from counts (hydra/model/utils.py).

    Of a node with c children, those of rank 0 ... c-1 are drafted; where e of these have children of their own,
    0 ... e-1 are expanded. Nodes get their counts by their place among those that are expanded.

    >>> drafted([[0], [1], [1, 0]]).choices
    [[0], [1], [0, 0]]
    """
    paths = {tuple(path) for path in choices}
    children = Counter(path[:-1] for path in paths)
    known: list[Choice] = []
    level: list[Choice] = [()]
    for depth in range(max(map(len, paths), default=0)):
        parents = sorted(path for path in children if len(path) == depth)
        following: list[Choice] = []
        for node, parent in zip(level, parents, strict=False):
            count = children[parent]
            expand = sum((*parent, rank) in children for rank in range(count))
            known += [(*node, rank) for rank in range(count)]
            following += [(*node, rank) for rank in range(expand)]
        level = following
    return Tree.from_choices(known)


def in_cpp(choices: Sequence[Sequence[int]], max_draft_len: int, num_heads: int) -> Tree:
    """The tree that the C++ runtime decodes with (cpp/tensorrt_llm/runtime/utils/speculativeChoicesUtils.cpp).

    Paths are packed four bits a rank. A node whose parent is missing is silently put below the root; rank 16
    passes its check but not its bits, and paths longer than 8 share them. InvalidInput where it fails a check of
    its own.

    >>> in_cpp([[0], [1], [0, 1]], 63, 4).choices
    [[0], [1], [0, 1]]
    >>> in_cpp([[0, 0], [1, 1]], 63, 4).choices  # no parents
    [[0], [1]]
    """
    if len(choices) > max_draft_len:
        raise InvalidInput(f"TensorRT-LLM checks numChoices <= {max_draft_len}, but there are {len(choices)}.")

    def packed(path: Sequence[int]) -> int:
        return reduce(or_, (rank << (RANK_BITS * i % 32) for i, rank in enumerate(reversed(path))), 0)

    before: dict[int, Choice] = {0: ()}
    level: dict[int, Choice] = {}
    found: list[Choice] = []
    depth = 0
    for path in sorted(choices, key=lambda path: (len(path), packed(path))):
        if max(path) > 2**RANK_BITS or len(path) > MOST_DEPTH:
            raise InvalidInput(f"TensorRT-LLM checks ranks and depths up to 16, but there is {list(path)}.")
        if len(path) > max(depth, 1) + 1:  # a list may begin at depth 2, all the same
            raise InvalidInput(f"TensorRT-LLM checks that no depth is left out, but {max(depth, 1) + 1} is.")
        if len(path) > num_heads:
            raise InvalidInput(f"TensorRT-LLM checks depths up to the heads, {num_heads}, but there is {list(path)}.")
        if len(path) != depth:
            before, level, depth = (level if depth else {0: ()}), {}, len(path)
        node = (*before.get(packed(path[:-1]), ()), path[-1])
        level[packed(path)] = node
        found.append(node)
    if len(set(found)) < len(found) == len({tuple(path) for path in choices}):
        raise InvalidInput("TensorRT-LLM's C++ packs paths into bits, and two of these paths share theirs.")
    return Tree.from_choices(found)


def in_python(choices: Sequence[Sequence[int]]) -> Tree:
    """The tree of the Python runtime (tensorrt_llm/runtime/medusa_utils.py), which adds parents that are missing.

    It numbers nodes of depth 1 by rank, so a gap there gives two nodes one number: InvalidInput.

    >>> in_python([[0, 0], [1]]).choices  # leaves alone
    [[0], [1], [0, 0]]
    """
    if len(first := {path[0] for path in choices}) <= max(first):
        raise InvalidInput("TensorRT-LLM's Python runtime gives two nodes one place: ranks have a gap at depth 1.")
    return Tree.from_choices({tuple(path[:depth]) for path in choices for depth in range(1, len(path) + 1)})
