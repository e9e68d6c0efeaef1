"""Grow families of speculation trees, the best of every size, by one of three objectives.

independent   gain of a node = product of the marginal accuracies along its path (Medusa, section 2.3.3)
joint         gain of a node = share of all states whose ranks begin with its path; the N most frequent
              prefixes are the best N-node tree, since events of distinct paths are nested or disjoint
replay        gain of a node = tokens per step it adds at the states that decoding with the current
              tree really visits (Hydra, section 4); decoding jumps over the easy runs

Counts of rare paths are noise: `joint` and `replay` mix them with those of commoner ones (`shrinkage`).

Under `independent` and `joint` nodes have values that add up, and the trees are the best of every size within any
shape (`worth`); where a shape matters they need not be nested. `replay` adds one node at a time, only such as keep
the shape.

accept : (K, R)  P(head k has the true token at rank r)
ranks  : (P, K)  rank of the true token at every state
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.shrinkage import NONE, PathCounts, Strengths, mixed, strengths_of
from treeopt.growth.walk import Walk
from treeopt.growth.worth import expands_after, frequencies, products
from treeopt.records.calibration import Calibration
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, TreeFamily

OBJECTIVES = ("independent", "joint", "replay")
SAVINGS = 0.1  # strength for the mean saving of a node, as a share of that for its children


def grow(trace: RankTrace, limits: Limits, *, objective: str) -> TreeFamily:
    """The family of one of `OBJECTIVES` on the whole trace (in-sample; see `heldout.crossfit`).

    Rare paths are shrunk as much as held-out conversations of the trace ask for.
    """
    check_objective(objective)
    if not trace.has_step.any():
        raise OutOfRange("Growing needs answers of more than one token, but the trace has none: calibrate on others.")
    if objective == "independent":
        return grow_independent(Calibration.from_trace(trace).accept, limits)
    strengths = strengths_of(trace, min(limits.max_rank + 1, trace.top_k), limits.max_depth)
    return (grow_joint if objective == "joint" else grow_replay)(trace, limits, strengths=strengths)


def check_objective(objective: str) -> None:
    """Raise InvalidInput for a name that is not one of `OBJECTIVES`."""
    if objective not in OBJECTIVES:
        raise InvalidInput(f"--objective must be one of {', '.join(OBJECTIVES)}, but got {objective!r}.")


def grow_independent(accept: NDArray[np.float64], limits: Limits) -> TreeFamily:
    """The trees that maximise expected tokens per step if heads erred independently.

    The product never rises along a path, so taking the largest products one by one is optimal for
    every size; accuracies need not fall with rank.

    >>> grow_independent(np.array([[0.6, 0.2], [0.5, 0.1]]), Limits(4, shape="any")).paths
    ((), (0,), (0, 0), (1,))
    """
    return products(accept, limits).best(limits.budget, limits.shape)


def grow_joint(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """The trees that maximise tokens of a step averaged over all states of the trace.

    Without ``strengths`` plain counts, and the trees are optimal for every size; paths that are equally
    frequent (never seen, for one) go by the product of marginals. With them rare paths are shrunk
    towards common ones (`treeopt.growth.shrinkage`), which is better on answers not seen.
    Time O(P x K + budget x ranks), memory O(P x K).
    """
    ranks = trace.ranks[trace.has_step][:, : limits.max_depth]
    worth = frequencies(ranks, min(limits.num_ranks, trace.top_k), strengths)
    return worth.best(limits.budget, limits.shape)


def grow_replay(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """Trees grown node by node, each saving the most steps at the states visited with the tree so far.

    How often a child is accepted there is counted, and with ``strengths`` mixed with its chance over all
    states; what an accepted guess saves is a mean over its parent (`Walk.ends`). Where nothing would be
    saved, nodes are added as `grow_joint` would. Nested by construction; the best trees of every
    size are not nested in general, so this is a heuristic (a test bounds its loss against brute force).
    Time O(budget x P) at most, memory O(P x K).
    """
    depth, top = limits.depth(trace.num_heads), min(limits.num_ranks, trace.top_k)
    ranks = trace.ranks[trace.has_step][:, :depth]
    joint, _ = frequencies(ranks, top, strengths).best_first(limits.budget, limits.shape)
    walk = Walk(trace, depth, top)
    known = PathCounts(ranks, top, strengths)
    paths: list[Choice] = [()]
    index: dict[Choice, int] = {(): 0}
    parents, above = [0], [known.chances(())]  # of every node its parent, its children's chances
    tokens, steps = int((trace.lengths - 1).sum()), [walk.steps()]
    while len(paths) < len(joint):
        saved = _saved(walk, paths, parents, np.array(above), strengths.path)
        saved[~_addable(index, parents, top, limits.shape)] = -1.0
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


def _addable(index: dict[Choice, int], parents: list[int], top: int, shape: str) -> NDArray[np.bool_]:
    """(nodes, R) which children may be added next: those that are not there yet and keep the shape.

    index : of every path which node it is, in order
    """
    found = np.ones((len(index), top), dtype=bool)
    for (path, _), parent in zip(list(index.items())[1:], parents[1:], strict=True):
        found[parent, path[-1]] = False
    if shape != "any":
        next_rank = np.bincount(parents[1:], minlength=len(index))
        found &= np.arange(top) == next_rank[:, None]
    for path, node in index.items() if shape == "low-rank-expands" else ():
        before = expands_after(path, shape)
        found[node] &= before is None or before in index
    return found


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
