"""Hydra: Medusa's list, of which it keeps only how many children a node has and how many of them expand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from treeopt.engines.base import Choices, Method, Request, ServingEngine, Written
from treeopt.engines.lists import decoded, in_python, medusa_buffers, once
from treeopt.trees.tree import MAX_RANK, Choice, Tree


def write(request: Request) -> Written:
    """``hydra_choices.py`` for hydra/model/hydra_choices.py."""
    return in_python(request, "hydra")


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


def read(choices: Choices, _: Tree) -> Tree:
    """The tree that is drafted of what the buffers, which are Medusa's, verify."""
    return drafted(once(decoded(medusa_buffers(once(choices))).choices))


ENGINE = ServingEngine(name="hydra", title="Hydra", readers={"Hydra": read}, methods=(
    Method(name="choices", checked="main 3f39fbd of 2024-02", drafters=("hydra", "hydra++"), shape="low-rank-expands",
           rules=("greedy", "typical"), max_rank=MAX_RANK, max_batch_size=1,
           carrier="hydra/model/hydra_choices.py, hydra_generate(hydra_choices=...), --hydra-choices",
           syntax="[[0], [1], [0, 0]]", source="zankner/Hydra hydra/model/utils.py", write=write),
))  # fmt: skip
