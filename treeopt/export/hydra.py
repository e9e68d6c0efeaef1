"""Hydra: Medusa's list, of which it keeps only how many children a node has and how many of them expand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from treeopt.errors import InvalidInput
from treeopt.export.buffers import decoded, medusa_buffers
from treeopt.export.engine import Request, Written
from treeopt.export.lists import lists_of, same
from treeopt.export.medusa import in_python
from treeopt.trees.tree import Choice, Tree


def write(request: Request) -> Written:
    """``hydra_choices.py`` for hydra/model/hydra_choices.py."""
    return in_python(request, "hydra")


def parse(files: Mapping[str, str]) -> Tree:
    """The tree that is drafted; InvalidInput where it is another than the one verified."""
    lists = list(lists_of(files))
    verified = same(decoded(medusa_buffers(choices)) for choices in lists)
    drafts = same(drafted(choices) for choices in lists)
    if drafts != verified:
        raise InvalidInput("Hydra would draft another tree than it verifies.")
    return verified


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
