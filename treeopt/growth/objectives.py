"""Grow nested families of speculation trees, the best of every size first.

independent   gain of a node = product of the marginal accuracies along its path (Medusa, section 2.3.3)
joint         gain of a node = share of all states whose ranks begin with its path; the N most frequent
              prefixes are the best N-node tree, since events of distinct paths are nested or disjoint
replay        gain of a node = tokens per step it adds at the states that decoding with the current
              tree really visits (Hydra, section 4); decoding jumps over the easy runs

Counts of rare paths are noise: `joint` and `replay` mix them with those of commoner ones (`shrinkage`).

Within a ``shape`` (`shapes`) that an engine needs, `independent` and `joint` find the best tree of every size,
which need not be nested (`knapsack`); `replay` adds only nodes that keep it.

accept : (K, R)  P(head k has the true token at rank r)
ranks  : (P, K)  rank of the true token at every state
budget           most nodes, root included
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.knapsack import best_trees
from treeopt.growth.shrinkage import NONE, PathCounts, Strengths, mixed, strengths_of
from treeopt.growth.walk import Walk
from treeopt.records.calibration import Calibration
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import check_shape
from treeopt.trees.tree import MAX_RANK, Choice, TreeFamily

SAVINGS = 0.1  # strength for the mean saving of a node, as a share of that for its children
DIGITS = 6  # of expected counts that are told apart, so that equal ones stay equal
TIE = 1e-7  # weight of a tie-breaker: less than any difference of counts that are told apart

Value = tuple[float, float]  # compared in this order; a child's value never exceeds its parent's
Children = Callable[[Choice, Value], list[Value]]  # of a path and its value those of its ranks 0, 1, ...


def grow_independent(
    accept: NDArray[np.float64],
    *,
    budget: int,
    max_depth: int | None = None,
    max_rank: int = MAX_RANK,
    shape: str = "any",
) -> TreeFamily:
    """The trees that maximise expected tokens per step if heads erred independently.

    The product never rises along a path, so taking the largest products one by one is optimal for
    every size; accuracies need not fall with rank.

    >>> grow_independent(np.array([[0.6, 0.2], [0.5, 0.1]]), budget=4).paths
    ((), (0,), (0, 0), (1,))
    """
    return products(accept, max_depth=max_depth, max_rank=max_rank, shape=shape).best(budget, shape)


def grow_joint(
    trace: RankTrace,
    *,
    budget: int,
    max_depth: int | None = None,
    max_rank: int = MAX_RANK,
    shape: str = "any",
    strengths: Strengths = NONE,
) -> TreeFamily:
    """The trees that maximise tokens of a step averaged over all states of the trace.

    Without ``strengths`` plain counts, and the trees are optimal for every size; paths that are equally
    frequent (never seen, for one) go by the product of marginals. With them rare paths are shrunk
    towards common ones (`treeopt.growth.shrinkage`), which is better on answers not seen.
    Time O(P x K + budget x ranks), memory O(P x K).
    """
    top = min(_top(max_rank, shape), trace.top_k)
    ranks = trace.ranks[trace.has_step][:, :max_depth]
    return frequencies(ranks, top, strengths).best(budget, shape)


def grow_replay(
    trace: RankTrace,
    *,
    budget: int,
    max_depth: int | None = None,
    max_rank: int = MAX_RANK,
    shape: str = "any",
    strengths: Strengths = NONE,
) -> TreeFamily:
    """Trees grown node by node, each saving the most steps at the states visited with the tree so far.

    How often a child is accepted there is counted, and with ``strengths`` mixed with its chance over all
    states; what an accepted guess saves is a mean over its parent (`Walk.ends`). Where nothing would be
    saved, nodes are added as `grow_joint` would. Nested by construction; the best trees of every
    size are not nested in general, so this is a heuristic (a test bounds its loss against brute force).
    Time O(budget x P) at most, memory O(P x K).
    """
    depth, top = min(max_depth or trace.num_heads, trace.num_heads), min(_top(max_rank, shape), trace.top_k)
    ranks = trace.ranks[trace.has_step][:, :depth]
    joint, _ = _best_first(frequencies(ranks, top, strengths).row, (len(ranks), 1.0), budget, shape)
    walk = Walk(trace, depth, top)
    known = PathCounts(ranks, top, strengths)
    paths: list[Choice] = [()]
    index: dict[Choice, int] = {(): 0}
    parents, above = [0], [known.chances(())]  # of every node its parent, its children's chances
    tokens, steps = int((trace.lengths - 1).sum()), [walk.steps()]
    while len(paths) < len(joint):
        saved = _saved(walk, paths, parents, np.array(above), strengths.path)
        for path, parent in zip(paths[1:], parents[1:], strict=True):
            saved[parent, path[-1]] = -1.0  # is there already
        if shape != "any":
            next_rank = np.bincount(parents[1:], minlength=len(paths))
            saved[np.arange(top) != next_rank[:, None]] = -1.0
        if shape == "low-rank-expands":
            waiting = [i for i, path in enumerate(paths) if (first := _needed(path)) and first not in index]
            saved[waiting] = -1.0
        parent, rank = divmod(int(saved.argmax()), top)
        path = (*paths[parent], rank)
        if saved.max() <= 0:
            path = next(p for p in joint if p not in index)
            parent, rank = index[path[:-1]], path[-1]
        index[path] = len(paths)
        walk.add(parent, rank, len(paths))
        known.open(paths[parent], rank)
        paths.append(path)
        parents.append(parent)
        above.append(known.chances(path) if len(path) < depth else np.zeros(top))
        steps.append(walk.steps())
    curve = tokens / np.maximum(steps, 1)
    return TreeFamily(tuple(paths), np.diff(curve, prepend=0.0))


def _saved(
    walk: Walk, paths: list[Choice], parents: list[int], above: NDArray[np.float64], strength: float
) -> NDArray[np.float64]:
    """(nodes, R) steps that each child of each node would save at the states now visited.

    above : (nodes, R)  chances of the children over all states, mixed in as ``strength`` states
    """
    counts, saving = walk.ends(len(paths), SAVINGS * strength)
    top = walk.top
    reached = counts.sum(1)  # visited states at which each node is accepted, its descendants' too
    for node in range(len(paths) - 1, 0, -1):
        counts[parents[node], paths[node][-1]] = reached[node]
        reached[parents[node]] += reached[node]
    tried = counts[:, : top + 1].sum(1)
    chances = mixed(np.column_stack([counts[:, :top], tried]), strength, above)
    share = np.where(reached > 0, tried / np.maximum(reached, 1), 1.0)
    expected = np.zeros(len(paths))  # the same as reached, by the mixed chances
    expected[0] = reached[0]
    for node in range(1, len(paths)):
        parent = parents[node]
        expected[node] = expected[parent] * share[parent] * chances[parent, paths[node][-1]]
    found: NDArray[np.float64] = (expected * share * saving)[:, None] * chances
    return found


OBJECTIVES: dict[str, Callable[..., TreeFamily]] = {
    "independent": lambda trace, **limits: grow_independent(Calibration.from_trace(trace).accept, **limits),
    "joint": grow_joint,
    "replay": grow_replay,
}


def grow(trace: RankTrace, *, objective: str, **limits: Any) -> TreeFamily:
    """The family of one of `OBJECTIVES` on the whole trace (in-sample; see `heldout.crossfit`).

    Rare paths are shrunk as much as held-out conversations of the trace ask for.
    """
    check_objective(objective)
    if not trace.has_step.any():
        raise OutOfRange("Growing needs answers of more than one token, but the trace has none: calibrate on others.")
    if objective != "independent" and "strengths" not in limits:
        limits["strengths"] = _strengths(trace, limits.get("max_rank", MAX_RANK), limits.get("max_depth"))
    return OBJECTIVES[objective](trace, **limits)


def _strengths(trace: RankTrace, max_rank: int, max_depth: int | None) -> Strengths:
    """As much shrinkage as held-out conversations of the trace ask for."""
    return strengths_of(trace, min(max_rank + 1, trace.top_k), max_depth)


def check_objective(objective: str) -> None:
    """Raise InvalidInput for a name that is not one of `OBJECTIVES`."""
    if objective not in OBJECTIVES:
        raise InvalidInput(f"--objective must be one of {', '.join(OBJECTIVES)}, but got {objective!r}.")


def product_values(accept: NDArray[np.float64], paths: tuple[Choice, ...]) -> NDArray[np.float64]:
    """(N,) product of marginals along each path, 1 for the root.

    >>> product_values(np.array([[0.6, 0.2], [0.5, 0.1]]), ((), (0,), (0, 1))).round(3).tolist()
    [1.0, 0.6, 0.06]
    """
    return np.array([np.prod([accept[d, rank] for d, rank in enumerate(p)]) for p in paths])


def _top(max_rank: int, shape: str) -> int:
    """How many ranks a tree of the shape can have."""
    check_shape(shape)
    return 1 if shape == "chain" else max_rank + 1


class Worth:
    """What nodes bring in where that only adds up: counted when first asked for, then remembered.

    children : of a path and its value the values of its ranks 0, 1, ..., asked of a parent first
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
        """The best trees of a shape up to ``budget`` nodes; gains are tokens per step."""

        def values(path: Choice) -> list[float]:
            return [first + TIE * second for first, second in self.row(path)]

        scale = max(self.root[0], 1)
        paths, pairs = _best_first(self.row, self.root, budget, "any")
        if shape in ("any", "chain") or _keeps(paths, shape):
            return TreeFamily(paths, np.array([first for first, _ in pairs]) / scale)
        paths, pairs = _best_first(self.row, self.root, budget, shape)
        greedy = TreeFamily(paths, np.array([first + TIE * second for first, second in pairs]))
        found = best_trees(values, greedy, low_rank_expands=shape == "low-rank-expands")
        return TreeFamily(found.paths, found.gains / scale, found.members)


def products(
    accept: NDArray[np.float64], *, max_depth: int | None = None, max_rank: int = MAX_RANK, shape: str = "any"
) -> Worth:
    """Values of paths: the product of the marginals along them."""
    table = accept[:max_depth, : _top(max_rank, shape)].tolist()

    def children(path: Choice, value: Value) -> list[Value]:
        row = table[len(path)] if len(path) < len(table) else []
        return [(value[0] * share, 0.0) for share in row]

    return Worth(children, (1.0, 0.0))


def frequencies(ranks: NDArray[np.int16], top: int, strengths: Strengths) -> Worth:
    """Values of paths: how many states begin with them, and the product of marginals where that is equal."""
    paths = PathCounts(ranks, top, strengths)

    def children(path: Choice, value: Value) -> list[Value]:
        if len(path) == ranks.shape[1]:
            return []
        if path:
            paths.open(path[:-1], path[-1])
        reached = round(value[0] * paths.trial_share(path), DIGITS)
        counts = np.round(reached * paths.chances(path), DIGITS)
        return list(zip(counts.tolist(), (value[1] * paths.marginals[len(path)]).tolist(), strict=True))

    return Worth(children, (len(ranks), 1.0))


def _needed(path: Choice) -> Choice | None:
    """Under low-rank-expands the node that must be there before the first child of ``path`` is."""
    return (*path[:-1], path[-1] - 1, 0) if path and path[-1] > 0 else None


def _keeps(paths: tuple[Choice, ...], shape: str) -> bool:
    """Whether every tree of nested ones has the shape."""
    known = {paths[0]}
    for path in paths[1:]:
        before = (*path[:-1], path[-1] - 1)
        needed = _needed(path[:-1]) if shape == "low-rank-expands" else None
        if (path[-1] > 0 and before not in known) or (needed and needed not in known):
            return False
        known.add(path)
    return True


def _best_first(children: Children, root: Value, budget: int, shape: str) -> tuple[tuple[Choice, ...], list[Value]]:
    """Up to ``budget`` nodes in order of (value descending, depth, path), each after what it needs.

    Only the next sibling and the first child of a taken node wait in the heap, so N nodes cost O(N log N).
    Where gaps are not allowed siblings go in order of rank, so a less likely one may hold a likelier back.
    """
    if budget < 1:
        raise InvalidInput(f"--budget must be at least 1, but got {budget}.")
    paths: list[Choice] = []
    found: list[Value] = []
    parked: dict[Choice, list[Choice]] = {}  # first children that wait for another node to be there
    siblings: dict[Choice, tuple[list[Value], list[int]]] = {}  # of a node its children's values, their order
    heap: list[tuple[float, float, int, Choice, int]] = [(-root[0], -root[1], 0, (), 0)]

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
        values = children(path, (-first, -second))
        ranks = range(len(values))
        order = list(ranks) if shape != "any" else sorted(ranks, key=lambda r: (-values[r][0], -values[r][1], r))
        siblings[path] = values, order
        needed = _needed(path) if shape == "low-rank-expands" else None
        if needed and needed not in siblings:
            parked.setdefault(needed, []).append(path)
        else:
            offer(path, 0)
        for waiting in parked.pop(path, []):
            offer(waiting, 0)
    return tuple(paths), found
