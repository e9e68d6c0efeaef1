"""The best trees of every size where nodes have values that add up.

A tree is worth the sum of its nodes' values, and no node is worth more than its parent. So the best tree of N nodes
has the N largest values, and takes each node after its parent by itself: best-first search with a heap. Within a
shape a node may need other nodes too, and only a knapsack over the subtrees (`knapsack`) is sure to find the best.

value     of a node: (first, second), compared in this order. The first is what adds up; the second tells apart nodes
          whose first is equal. A child's value never exceeds its parent's
children  gives for a path and its value the values of the path's ranks 0, 1, ...
"""

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.knapsack import best_trees
from treeopt.growth.shrinkage import PathCounts
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, TreeFamily

# Expected counts are products of fractions: without rounding, equal ones would differ in their last bits, and these
# would decide which node comes first.
DIGITS = 6
# The knapsack adds single numbers, so a node counts first + TIE x second there. The seconds of a tree are products of
# marginals, and those of one depth sum to at most 1: 1e-7 times all of them stays below a difference of counts, 1e-6,
# in trees up to 8 deep.
TIE = 1e-7

Value = tuple[float, float]
Children = Callable[[Choice, Value], list[Value]]


class Worth:
    """Values of nodes, worked out when they are first asked for, then remembered.

    children : see above; a node is asked for after its parent
    root     : value of the root
    """

    def __init__(self, children: Children, root: Value) -> None:
        self._children, self.root = children, root
        self._rows: dict[Choice, list[Value]] = {}

    def value(self, path: Choice) -> Value:
        return self.row(path[:-1])[path[-1]] if path else self.root

    def row(self, path: Choice, value: Value | None = None) -> list[Value]:
        """The values of a node's children; ``value`` is its own, where that is at hand."""
        if path not in self._rows:
            self._rows[path] = self._children(path, value or self.value(path))
        return self._rows[path]

    def best(self, budget: int, shape: str) -> TreeFamily:
        """The best trees of a shape up to ``budget`` nodes; gains are tokens per step.

        Of a shape the trees without one are best too, where they happen to have it. Else the knapsack finds the
        best: it begins from the trees that best-first search finds within the shape, which bound what is worth
        looking at.
        """
        scale = max(self.root[0], 1)
        paths, values = self.best_first(budget, "any")
        if keeps(paths, shape):
            return TreeFamily(paths, np.array([first for first, _ in values]) / scale)
        paths, values = self.best_first(budget, shape)
        within = TreeFamily(paths, np.array([first + TIE * second for first, second in values]))
        found = best_trees(
            lambda path: [first + TIE * second for first, second in self.row(path)],
            within,
            low_rank_expands=shape == "low-rank-expands",
        )
        return TreeFamily(found.paths, found.gains / scale, found.members)

    def best_first(self, budget: int, shape: str) -> tuple[tuple[Choice, ...], list[Value]]:
        """Up to ``budget`` nodes in order of (value descending, depth, path), each after those that it needs.

        Only the next sibling and the first child of a taken node wait in the heap, so N nodes cost O(N log N).
        Within a shape siblings go in order of rank, so an unlikely one may hold a likelier one back.
        """
        paths: list[Choice] = []
        found: list[Value] = []
        parked: dict[Choice, list[Choice]] = {}  # parents whose first child waits until another node is there
        siblings: dict[Choice, tuple[list[Value], list[int]]] = {}  # of a node its children's values, their order
        heap: list[tuple[float, float, int, Choice, int]] = [(-self.root[0], -self.root[1], 0, (), 0)]

        def offer(parent: Choice, place: int) -> None:
            values, order = siblings[parent]
            if place < len(order):
                first, second = values[order[place]]
                path = (*parent, order[place])
                heapq.heappush(heap, (-first, -second, len(path), path, place))

        while heap and len(paths) < budget:
            first, second, _, path, place = heapq.heappop(heap)
            paths.append(path)
            found.append((-first, -second))
            if path:
                offer(path[:-1], place + 1)
            values = self.row(path, (-first, -second))
            ranks = range(len(values))
            order = list(ranks) if shape != "any" else sorted(ranks, key=lambda r: (-values[r][0], -values[r][1], r))
            siblings[path] = values, order
            before = expands_after(path, shape)
            if before and before not in siblings:
                parked.setdefault(before, []).append(path)
            else:
                offer(path, 0)
            for waiting in parked.pop(path, []):
                offer(waiting, 0)
        return tuple(paths), found


def products(accept: NDArray[np.float64], limits: Limits) -> Worth:
    """Values of paths: the product of the marginals along them."""
    table = accept[: limits.max_depth, : limits.num_ranks].tolist()

    def children(path: Choice, value: Value) -> list[Value]:
        row = table[len(path)] if len(path) < len(table) else []
        return [(value[0] * share, 0.0) for share in row]

    return Worth(children, (1.0, 0.0))


def frequencies(paths: PathCounts) -> Worth:
    """Values of paths: how many states begin with them, and the product of marginals where that is equal."""

    def children(path: Choice, value: Value) -> list[Value]:
        if len(path) == paths.depth:
            return []
        if path:
            paths.open(path[:-1], path[-1])
        reached = round(value[0] * paths.trial_share(path), DIGITS)
        counts = np.round(reached * paths.chances(path), DIGITS)
        return list(zip(counts.tolist(), (value[1] * paths.marginals[len(path)]).tolist(), strict=True))

    return Worth(children, (paths.states, 1.0))


def product_values(accept: NDArray[np.float64], paths: tuple[Choice, ...]) -> NDArray[np.float64]:
    """(N,) product of marginals along each path, 1 for the root.

    >>> product_values(np.array([[0.6, 0.2], [0.5, 0.1]]), ((), (0,), (0, 1))).round(3).tolist()
    [1.0, 0.6, 0.06]
    """
    return np.array([np.prod([accept[d, rank] for d, rank in enumerate(p)]) for p in paths])


def expands_after(path: Choice, shape: str) -> Choice | None:
    """The node that a shape asks for before ``path`` may have children; None for none.

    >>> expands_after((0, 2), "low-rank-expands")
    (0, 1, 0)
    """
    return (*path[:-1], path[-1] - 1, 0) if shape == "low-rank-expands" and path and path[-1] > 0 else None


def keeps(paths: tuple[Choice, ...], shape: str) -> bool:
    """Whether every tree of nested ones has the shape; those of a chain have rank 0 alone already."""
    if shape in ("any", "chain"):
        return True
    known = {paths[0]}
    for path in paths[1:]:
        before, above = (*path[:-1], path[-1] - 1), expands_after(path[:-1], shape)
        if (path[-1] > 0 and before not in known) or (above and above not in known):
            return False
        known.add(path)
    return True


def chain_tokens_per_step(accept: float, chain: int) -> float:
    """Tokens per step of a chain under p/q rejection, by the acceptance rate (Leviathan et al., ICML 2023, equation 1).

    accept : P(a drafted token is accepted | those before it were), taken as the same at every token

    >>> chain_tokens_per_step(0.5, 2), chain_tokens_per_step(1.0, 4)
    (1.75, 5.0)
    """
    return float(sum(accept**k for k in range(chain + 1)))  # holds where accept is 1, too
