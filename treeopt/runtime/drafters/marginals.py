"""Trees over marginals: which nodes there are, and the best of them by one step's probabilities (DDTree, algorithm 1).

Taking nodes one by one from a heap, the likeliest path next, gives the first nodes of all by (score descending, path of ranks
ascending): the parent and the better siblings of a node are never behind it. So of a tree of N nodes a node has at most N - 1
others that are before it whatever the probabilities, those whose ranks are nowhere higher. The nodes of which that is so are
few, and the same at every step.

b rows · D depths · W ranks of each · M nodes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.runtime.acceptance.rules import Greedy
from treeopt.runtime.drafters.levels import Drafting, LevelDraft, Pool, check_fits, drafting_by, drafting_of
from treeopt.runtime.drafters.protocol import Drafter, Mark
from treeopt.trees.draft import DDTree
from treeopt.trees.tree import Choice


class MarginalDraft(LevelDraft):
    """The base of drafts whose guesses at all depths are there at once. A subclass says what `marginals` computes."""

    def marginals(self, roots: Tensor, depth: int) -> Tensor:
        """(b, D, V) logits of every depth behind the (b,) roots, as the drafter's own ids."""
        raise NotImplementedError

    def products(self, nodes: Products, roots: Tensor, mark: Mark) -> Pool:
        """The nodes behind the (b,) roots, with tokens and scores."""
        guesses, own = self.likeliest(self.marginals(roots, nodes.ranks.shape[1]).float(), nodes.width)
        tokens = self.named(guesses, 0).flatten(1)[:, nodes.own]
        mark("draft")
        return Pool(tokens, nodes.parents.expand(len(roots), -1), nodes.scores(own), nodes.depths)


@dataclass(frozen=True, eq=False)
class Products:
    """The nodes that can be among the first so many of a tree over marginals, by path in lexicographic order.

    ranks   : (M, D) of each one's path, W below it
    own     : (M,) place of its guess among the D W of all depths
    parents : (M,) -1 for the root
    depths  : (M,) from 1
    widths  : (M,) least width of a tree that has the node
    """

    width: int
    ranks: Tensor
    own: Tensor
    parents: Tensor
    depths: Tensor
    widths: Tensor

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, depth: int, width: int, count: int, device: torch.device) -> Products:
        width = min(width, count)
        paths = list(paths_within(depth, width, count))
        place = {path: i for i, path in enumerate(paths)}
        of_each = (
            [[*path, *[width] * (depth - len(path))] for path in paths],
            [(len(path) - 1) * width + path[-1] for path in paths],
            [place.get(path[:-1], -1) for path in paths],
            [len(path) for path in paths],
            [1 + max(path) for path in paths],
        )
        return cls(width, *(torch.tensor(numbers, device=device) for numbers in of_each))

    def scores(self, logs: Tensor) -> Tensor:
        """(b, M) float64 sums of the (b, D, W) log-probabilities along each path, from the root on."""
        logs = torch.nn.functional.pad(logs.double(), (0, 1))  # nothing is added below the path
        found = logs[:, 0, self.ranks[:, 0]]
        for depth in range(1, logs.shape[1]):
            found = found + logs[:, depth, self.ranks[:, depth]]
        return found


def paths_within(depth: int, width: int, count: int) -> Iterator[Choice]:
    """Paths of ranks, in lexicographic order, that have fewer than ``count`` others before them in any tree.

    >>> list(paths_within(2, 2, 3))
    [(0,), (0, 0), (0, 1), (1,)]
    """

    def below(path: Choice, paths: int, before: int) -> Iterator[Choice]:
        for rank in range(width if len(path) < depth else 0):
            same = paths * (1 + rank)  # paths of that depth whose ranks are nowhere higher
            if before + same > count:
                return
            yield (*path, rank)
            yield from below((*path, rank), same, before + same)

    return below((), 1, 0)


@drafting_of.register
def _(tree: DDTree, drafter: Drafter, state: object, acceptance: Greedy, device: torch.device) -> Drafting:
    if not isinstance(state, MarginalDraft):
        raise InvalidInput(
            f"A tree over marginals needs a drafter whose guesses do not depend on one another, but this is {drafter.kind}."
        )
    check_fits(drafter, tree.depth, tree.width - 1)
    nodes = Products.of(tree.depth, tree.width, tree.rows - 1, device)
    return drafting_by(lambda roots, mark: state.products(nodes, roots, mark), tree, acceptance)
