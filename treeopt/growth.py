"""Grow nested families of speculation trees, the best of every size first.

independent   gain of a node = product of the marginal accuracies along its path (Medusa, section 2.3.3)
joint         gain of a node = share of all states whose ranks begin with its path; the N most frequent
              prefixes are the best N-node tree, since events of distinct paths are nested or disjoint
replay        gain of a node = tokens per step it adds at the states that decoding with the current
              tree really visits (Hydra, section 4); decoding jumps over the easy runs

Counts of rare paths are noise: `joint` and `replay` mix them with those of commoner ones (`shrinkage`).

With ``gap_free`` a node's children have ranks 0...c-1 without a gap, which several engines need; ranks
are nearly always in order, and where they are not it is noise more often than not.

accept : (K, R)  P(head k has the true token at rank r)
ranks  : (P, K)  rank of the true token at every state
budget           most nodes, root included
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.shrinkage import NONE, PathCounts, Strengths, mixed, strengths_of
from treeopt.trace import RankTrace
from treeopt.tree import Choice, TreeFamily
from treeopt.walk import Walk

SAVINGS = 0.1  # strength for the mean saving of a node, as a share of that for its children
DIGITS = 6  # of expected counts that are told apart, so that equal ones stay equal
MAX_RANK = 9  # Medusa, Hydra, EAGLE and Neuron look at ten candidates per head

Value = tuple[float, float]  # compared in this order; a child's value never exceeds its parent's
Children = Callable[[Choice, Value], Iterator[tuple[Value, int]]]


def grow_independent(
    accept: NDArray[np.float64],
    *,
    budget: int,
    max_depth: int | None = None,
    max_rank: int = MAX_RANK,
    gap_free: bool = False,
) -> TreeFamily:
    """The trees that maximise expected tokens per step if heads erred independently.

    The product never rises along a path, so taking the largest products one by one is optimal for
    every size; accuracies need not fall with rank.

    >>> grow_independent(np.array([[0.6, 0.2], [0.5, 0.1]]), budget=4).paths
    ((), (0,), (0, 0), (1,))
    """
    accept = accept[:max_depth, : max_rank + 1]
    best = np.argsort(-accept, axis=1, kind="stable")
    order = (np.indices(accept.shape)[1] if gap_free else best).tolist()
    table = accept.tolist()

    def children(path: Choice, value: Value) -> Iterator[tuple[Value, int]]:
        depth = len(path)
        if depth < len(table):
            for rank in order[depth]:
                yield (value[0] * table[depth][rank], 0.0), rank

    paths, values = _best_first(children, (1.0, 0.0), budget)
    return TreeFamily(paths, np.array([value for value, _ in values]))


def grow_joint(
    trace: RankTrace,
    *,
    budget: int,
    max_depth: int | None = None,
    max_rank: int = MAX_RANK,
    gap_free: bool = False,
    strengths: Strengths = NONE,
) -> TreeFamily:
    """The trees that maximise tokens of a step averaged over all states of the trace.

    Without ``strengths`` plain counts, and the trees are optimal for every size; paths that are equally
    frequent (never seen, for one) go by the product of marginals. With them rare paths are shrunk
    towards common ones (`treeopt.shrinkage`), which is better on answers not seen.
    Time O(P x K + budget x ranks), memory O(P x K).
    """
    top = min(max_rank + 1, trace.top_k)
    ranks = trace.ranks[trace.has_step][:, :max_depth]
    paths = PathCounts(ranks, top, strengths)

    def children(path: Choice, value: Value) -> Iterator[tuple[Value, int]]:
        if len(path) == ranks.shape[1]:
            return
        reached = round(value[0] * paths.trial_share(path), DIGITS)
        counts = np.round(reached * paths.chances(path), DIGITS)
        products = value[1] * paths.marginals[len(path)]
        for rank in range(top) if gap_free else np.lexsort((-products, -counts)).tolist():
            paths.open(path, rank)
            yield (float(counts[rank]), float(products[rank])), rank

    found, values = _best_first(children, (len(ranks), 1.0), budget)
    return TreeFamily(found, np.array([count for count, _ in values]) / max(len(ranks), 1))


def grow_replay(
    trace: RankTrace,
    *,
    budget: int,
    max_depth: int | None = None,
    max_rank: int = MAX_RANK,
    gap_free: bool = False,
    strengths: Strengths = NONE,
) -> TreeFamily:
    """Trees grown node by node, each saving the most steps at the states visited with the tree so far.

    How often a child is accepted there is counted, and with ``strengths`` mixed with its chance over all
    states; what an accepted guess saves is a mean over its parent (`Walk.ends`). Where nothing would be
    saved, nodes are added in the order of `grow_joint`. Nested by construction; the best trees of every
    size are not nested in general, so this is a heuristic (a test bounds its loss against brute force).
    Time O(budget x P) at most, memory O(P x K).
    """
    limits: dict[str, Any] = {"max_depth": max_depth, "max_rank": max_rank, "gap_free": gap_free}
    joint = grow_joint(trace, budget=budget, strengths=strengths, **limits)
    depth, top = min(max_depth or trace.num_heads, trace.num_heads), min(max_rank + 1, trace.top_k)
    walk = Walk(trace, depth, top)
    known = PathCounts(trace.ranks[trace.has_step][:, :depth], top, strengths)
    paths: list[Choice] = [()]
    index: dict[Choice, int] = {(): 0}
    parents, above = [0], [known.chances(())]  # of every node its parent, its children's chances
    tokens, steps = int((trace.lengths - 1).sum()), [walk.steps()]
    while len(paths) < len(joint):
        saved = _saved(walk, paths, parents, np.array(above), strengths.path)
        for path, parent in zip(paths[1:], parents[1:], strict=True):
            saved[parent, path[-1]] = -1.0  # is there already
        if gap_free:
            next_rank = np.bincount(parents[1:], minlength=len(paths))
            saved[np.arange(top) != next_rank[:, None]] = -1.0
        parent, rank = divmod(int(saved.argmax()), top)
        path = (*paths[parent], rank)
        if saved.max() <= 0:
            path = next(p for p in joint.paths if p not in index)
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
        raise OutOfRange(
            "Growing needs answers of more than one token, but the trace has none: calibrate on others."
        )
    if objective != "independent" and "strengths" not in limits:
        top = min(limits.get("max_rank", MAX_RANK) + 1, trace.top_k)
        limits["strengths"] = strengths_of(trace, top, limits.get("max_depth"))
    return OBJECTIVES[objective](trace, **limits)


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


def _best_first(children: Children, root: Value, budget: int) -> tuple[tuple[Choice, ...], list[Value]]:
    """Up to ``budget`` nodes in order of (value descending, depth, path), parents first.

    ``children`` yields a node's children from the most valuable on (in order of rank where gaps are not
    allowed, so a less likely sibling may hold a likelier one back); only the next sibling and the first
    child of a taken node wait in the heap, so N nodes cost O(N log N).
    """
    if budget < 1:
        raise InvalidInput(f"--budget must be at least 1, but got {budget}.")
    paths: list[Choice] = [()]
    values = [root]
    heap: list[tuple[float, float, int, Choice, Iterator[tuple[Value, int]]]] = []

    def offer(siblings: Iterator[tuple[Value, int]], parent: Choice) -> None:
        for value, rank in siblings:
            path = (*parent, rank)
            heapq.heappush(heap, (-value[0], -value[1], len(path), path, siblings))
            return

    offer(children((), root), ())
    while heap and len(paths) < budget:
        first, second, _, path, siblings = heapq.heappop(heap)
        value = (-first, -second)
        paths.append(path)
        values.append(value)
        offer(siblings, path[:-1])
        offer(children(path, value), path)
    return tuple(paths), values
