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
from treeopt.growth.growing import Growing, grow_together
from treeopt.growth.paths import Paths
from treeopt.growth.shrinkage import NONE, PathCounts, Strengths, strengths_of
from treeopt.growth.tally import of_trace
from treeopt.growth.walk import Walk
from treeopt.growth.worth import frequencies, products
from treeopt.records.calibration import Calibration
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import TreeFamily

OBJECTIVES = ("independent", "joint", "replay")
NO_STEP = "Growing needs answers of more than one token, but the trace has none: calibrate on others."


def grow(trace: RankTrace, limits: Limits, *, objective: str) -> TreeFamily:
    """The family of one of `OBJECTIVES` on the whole trace (in-sample; see `heldout.crossfit`).

    Rare paths are shrunk as much as held-out conversations of the trace ask for.
    """
    check_objective(objective)
    if not trace.has_step.any():
        raise OutOfRange(NO_STEP)
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
    Time O(P x K + budget x ranks), memory O(P).
    """
    _, known = _counted(trace, limits, strengths)
    return frequencies(known).best(limits.budget, limits.shape)


def grow_replay(trace: RankTrace, limits: Limits, *, strengths: Strengths = NONE) -> TreeFamily:
    """Trees grown node by node, each saving the most steps at the states visited with the tree so far.

    How often a child is accepted there is counted, and with ``strengths`` mixed with its chance over all
    states; what an accepted guess saves is a mean over its parent. Where nothing would be
    saved, nodes are added as `grow_joint` would. Nested by construction; the best trees of every
    size are not nested in general, so this is a heuristic (a test bounds its loss against brute force).
    Time O(budget x P) at most, memory O(P).
    """
    paths, known = _counted(trace, limits, strengths)
    everyone = np.zeros(trace.num_sequences, dtype=np.int64)
    one = Growing(known, limits)
    for _ in grow_together(Walk(trace, paths, paths.depth, everyone, len(one.joint)), [one]):
        pass
    return one.family(int((trace.lengths - 1).sum()))


def _counted(trace: RankTrace, limits: Limits, strengths: Strengths) -> tuple[Paths, PathCounts]:
    """The paths of a trace's states within the limits, and their chances."""
    paths = Paths.of_ranks(trace.ranks[:, : limits.max_depth], min(limits.num_ranks, trace.top_k))
    everyone = np.zeros((1, trace.num_sequences), dtype=np.int64)
    return paths, PathCounts(of_trace(trace, paths, everyone)[0], strengths)
