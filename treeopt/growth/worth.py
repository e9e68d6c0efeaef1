"""Trees of every size where nodes have values that add up.

A tree is worth the sum of its nodes' values, and no node is worth more than its parent. Best-first search takes the
most valuable of the nodes that may come next. Siblings come in order of rank, because most engines keep only how many
there are. Where values fall with rank no tree of that size is worth more; where they do not, an unlikely sibling may
hold a likelier one back.

value     of a node: (first, second), compared in this order. The first is what adds up; the second tells apart nodes
          whose first is equal. A child's value never exceeds its parent's
children  gives for a path and its value the values of the path's ranks 0, 1, ...
"""

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.shrinkage import PathCounts
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, TreeFamily

# Expected counts are products of fractions: without rounding, equal ones would differ in their last bits, and these
# would decide which node comes first.
DIGITS = 6

Value = tuple[float, float]
Children = Callable[[Choice, Value], list[Value]]


def best_first(children: Children, root: Value, budget: int) -> TreeFamily:
    """The trees of up to ``budget`` nodes, in order of (value descending, depth, path); gains are tokens per step.

    Only the next sibling and the first child of a taken node wait in the heap, so N nodes cost O(N log N).
    """
    paths: list[Choice] = []
    firsts: list[float] = []
    siblings: dict[Choice, list[Value]] = {}  # of a node its children's values
    heap: list[tuple[float, float, int, Choice]] = [(-root[0], -root[1], 0, ())]

    def offer(parent: Choice, rank: int) -> None:
        if rank < len(siblings[parent]):
            first, second = siblings[parent][rank]
            heapq.heappush(heap, (-first, -second, len(parent) + 1, (*parent, rank)))

    while heap and len(paths) < budget:
        first, second, _, path = heapq.heappop(heap)
        paths.append(path)
        firsts.append(-first)
        if path:
            offer(path[:-1], path[-1] + 1)
        siblings[path] = children(path, (-first, -second))
        offer(path, 0)
    return TreeFamily(tuple(paths), np.array(firsts) / max(root[0], 1))


def by_products(accept: NDArray[np.float64], limits: Limits) -> TreeFamily:
    """The trees by the product of the marginals along each path."""
    table = accept[: limits.max_depth, : limits.num_ranks].tolist()

    def children(path: Choice, value: Value) -> list[Value]:
        row = table[len(path)] if len(path) < len(table) else []
        return [(value[0] * share, 0.0) for share in row]

    return best_first(children, (1.0, 0.0), limits.budget)


def by_frequencies(paths: PathCounts, budget: int) -> TreeFamily:
    """The trees by how many states begin with each path, and by the product of marginals where that is equal."""

    def children(path: Choice, value: Value) -> list[Value]:
        if len(path) == paths.depth:
            return []
        if path:
            paths.open(path[:-1], path[-1])
        reached = round(value[0] * paths.trial_share(path), DIGITS)
        counts = np.round(reached * paths.chances(path), DIGITS)
        return list(zip(counts.tolist(), (value[1] * paths.marginals[len(path)]).tolist(), strict=True))

    return best_first(children, (paths.states, 1.0), budget)


def product_values(accept: NDArray[np.float64], paths: tuple[Choice, ...]) -> NDArray[np.float64]:
    """(N,) product of marginals along each path, 1 for the root.

    >>> product_values(np.array([[0.6, 0.2], [0.5, 0.1]]), ((), (0,), (0, 1))).round(3).tolist()
    [1.0, 0.6, 0.06]
    """
    return np.array([np.prod([accept[d, rank] for d, rank in enumerate(p)]) for p in paths])


def chain_tokens_per_step(accept: float, chain: int) -> float:
    """Tokens per step of a chain under p/q rejection, by the acceptance rate (Leviathan et al., ICML 2023, equation 1).

    accept : P(a drafted token is accepted | those before it were), taken as the same at every token

    >>> chain_tokens_per_step(0.5, 2), chain_tokens_per_step(1.0, 4)
    (1.75, 5.0)
    """
    return float(sum(accept**k for k in range(chain + 1)))  # holds where accept is 1, too
