"""Trees over marginals: the likeliest paths of one step's guesses, as if depths were independent (DDTree, algorithm 1).

A node is a path of ranks. Its score is the float64 sum of the float32 log-probabilities of its guesses, over the whole
vocabulary; of equal scores the path that comes first is taken first. So what is taken does not depend on how many are.

b rows · n states · D depths · W ranks of each that are tried
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice, takewhile

import torch
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.pools import NO_PLACE, columns_of
from treeopt.records.trace import MISS
from treeopt.runtime.acceptance.rules import Greedy
from treeopt.runtime.drafters.levels import Drafting, LevelDraft, Pool, check_fits, drafting_by, drafting_of
from treeopt.runtime.drafters.protocol import Drafter, Frontier, TreeTensors, top_candidates
from treeopt.trees.draft import MOST_ROWS, DDTree
from treeopt.trees.tree import Choice


class MarginalDraft(LevelDraft):
    """The base of drafts whose guesses at all depths are there at once. A subclass says what `marginals` computes."""

    def marginals(self, roots: Tensor, depth: int) -> Tensor:
        """(b, D, V) logits of every depth behind the (b,) roots, by the drafter's own ids."""
        raise NotImplementedError

    def propose(self, plan: TreeTensors, roots: Tensor) -> Tensor:
        guesses = top_candidates(self.marginals(roots, plan.tree.depth), plan.width)[:, plan.heads, plan.ranks]
        return torch.cat([roots[:, None], self.named(guesses, plan.heads)], 1)  # (b, T - 1) behind the roots

    def begin(self, roots: Tensor, depth: int) -> None:
        self._logits = self.marginals(roots, depth)

    def logits(self, level: Frontier, tokens: Tensor) -> Tensor:
        return self._logits[:, level.depth, None]

    def children(self, level: Frontier, tokens: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        if level.depth == 0:  # of all levels at once, since none depends on the guesses above
            self._children = self.likeliest(self._logits, topk)
        guesses, own = self._children
        return guesses[:, level.depth, None], own[:, level.depth, None]

    def guesses(self, roots: Tensor, depth: int, width: int) -> tuple[Tensor, Tensor]:
        """(b, D, W) likeliest tokens of every depth, and their float32 log-probabilities."""
        guesses, own = self.likeliest(self.marginals(roots, depth).float(), width)
        return self.named(guesses, torch.arange(depth, device=guesses.device)[:, None]), own

    def first_nodes(self, tree: DDTree, roots: Tensor) -> Pool:
        """The nodes of such a tree behind the (b,) roots, in the order in which they are taken."""
        count, found = tree.rows - 1, []
        guesses, logs = self.guesses(roots, tree.depth, width := min(tree.width, count))
        for of_row in logs.tolist():
            place = {path: i for i, (path, _) in enumerate(islice(best_first(of_row, count), count))}
            found.append([((len(path) - 1) * width + path[-1], place.get(path[:-1], -1), len(path)) for path in place])
        own, parents, depths = torch.tensor(found, device=roots.device).unbind(2)
        order = -torch.arange(count, device=roots.device).expand_as(own)
        return Pool(guesses.flatten(1).gather(1, own), parents, order, depths)

    def true_nodes(self, roots: Tensor, labels: Tensor, widths: Sequence[int]) -> Tensor:
        """(n, w, D (D + 1) / 2) uint8 places of the true paths' nodes, by the (n, D) tokens that come; below 0 for none."""
        guesses, logs = self.guesses(roots, labels.shape[1], max(widths))
        same = (guesses == labels[..., None]) & (labels >= 0)[..., None]
        ranks = torch.where(same.any(2), same.to(torch.uint8).argmax(2), MISS)
        states = zip(logs.tolist(), ranks.tolist(), strict=True)
        return torch.tensor([[cut_places(*one, width) for width in widths] for one in states], dtype=torch.uint8)


def best_first(logs: Sequence[Sequence[float]], count: int) -> Iterator[tuple[Choice, list[int]]]:
    """Paths from the likeliest on, each with how many before it were no deeper than 0, 1, ... D; by (D, W) log-probabilities.

    Those of a depth end where ``count`` were no deeper: they are not among the first so many of any depth cut.

    >>> [path for path, _ in best_first([[-0.1, -2.5], [-0.3, -2.0]], 4)]
    [(0,), (0, 0), (0, 1), (1,)]
    """
    taken = [0] * (1 + len(logs))
    waiting: list[tuple[float, Choice, float]] = [(-logs[0][0], (0,), 0.0)]  # -score, path, its parent's -score
    while waiting:
        score, path, above = heappop(waiting)
        depth, rank = len(path), path[-1] + 1
        if taken[depth] >= count:
            continue
        yield path, taken
        for cut in range(depth, len(taken)):
            taken[cut] += 1
        if rank < len(logs[depth - 1]):
            heappush(waiting, (above - logs[depth - 1][rank], (*path[:-1], rank), above))
        if depth < len(logs):
            heappush(waiting, (score - logs[depth][0], (*path, 0), score))


def cut_places(logs: Sequence[Sequence[float]], ranks: Sequence[int], width: int) -> list[int]:
    """Places of the nodes of one state's true path within every depth cut, as `treeopt.records.pools.Pools` has them."""
    found, most = [NO_PLACE] * columns_of(len(logs)).stop, MOST_ROWS - 1
    true, depth = tuple(takewhile(lambda rank: 0 <= rank < width, ranks)), 1
    for path, taken in best_first([of_depth[:width] for of_depth in logs], most):
        if depth > len(true) or taken[depth] >= most:
            break
        if path == true[:depth]:
            for cut in range(depth, len(taken)):
                found[columns_of(cut).start + depth - 1] = taken[cut] if taken[cut] < most else NO_PLACE
            depth += 1
    return found


@drafting_of.register
def _(tree: DDTree, drafter: Drafter, state: object, acceptance: Greedy, device: torch.device) -> Drafting:
    if not isinstance(state, MarginalDraft):
        raise InvalidInput(
            f"A tree over marginals needs guesses that do not depend on others, unlike {drafter.kind}'s."
        )
    check_fits(drafter, tree.depth, tree.width - 1)
    return drafting_by(lambda roots: state.first_nodes(tree, roots), tree, acceptance)
