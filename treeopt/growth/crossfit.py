"""Trees grown by replay on all folds of conversations but one, for every fold, and on all of them: in one go.

The counts of four folds are those of all five less one's, so all is counted once, and decoded once where trees are the same.

S sequences · C conversations · F folds · K heads · n sizes of a family · N nodes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.growing import Growing, grow_together
from treeopt.growth.heldout import HeldOut, folds
from treeopt.growth.objectives import NO_STEP
from treeopt.growth.paths import Paths
from treeopt.growth.shrinkage import PathCounts, Strengths, fitted_strengths
from treeopt.growth.tally import Tally, of_trace
from treeopt.growth.walk import Walk
from treeopt.growth.worth import product_values
from treeopt.records.trace import RankTrace, fold_numbers, folds_of
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray, TreeFamily


@dataclass(frozen=True, eq=False)
class Grown:
    """What trees of any depth are grown on, by the ranks told apart.

    tally     : of all answers, by fold
    strengths : of all answers and of those without each fold, for trees of depth 1, 2, ...
    """

    paths: Paths
    tally: Tally
    strengths: list[list[Strengths]]


class Ground:
    """A trace to grow on and to be judged by; trees of several depths have their counts in common."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._grown: dict[int, Grown] = {}

    def crossfit(self, limits: Limits) -> HeldOut:
        """The trees of one depth limit, and what they reach on answers that they were not grown on.

        Raises OutOfRange for a trace of a single conversation, or without a step.
        """
        trace, splits = self._trace, list(folds(self._trace))
        grown, depth = self._grown_of(min(limits.num_ranks, trace.top_k)), limits.depth(trace.num_heads)
        fold, clusters, tokens = fold_numbers(trace), trace.clusters, trace.lengths - 1
        growing = []
        for left_out, strengths in zip([None, *range(len(splits))], grown.strengths, strict=True):
            tally = grown.tally if left_out is None else grown.tally.without(left_out)
            growing.append(Growing(PathCounts(tally, strengths[depth - 1], depth), limits, left_out))
        walk = Walk(trace, grown.paths, depth, fold, len(growing[0].joint))
        members = [np.unique(clusters[test]) for _, test in splits]  # conversations of every fold
        steps = np.zeros((len(growing[0].joint), walk.conversations), dtype=np.int32)
        for row, decoded in zip(steps, grow_together(walk, growing), strict=True):
            taken = {id(tree): walk.steps(tree) for tree in decoded[1:]}
            for conversations, tree in zip(members, decoded[1:], strict=True):
                row[conversations] = taken[id(tree)][conversations]
        families = [one.family(int(one.seen(np.bincount(fold, tokens)).sum())) for one in growing]
        return self._held_out(grown.tally, families, [test for _, test in splits], steps)

    def _grown_of(self, top: int) -> Grown:
        """Counts and strengths for trees of so many ranks, of any depth; only the last asked for is kept."""
        if top not in self._grown:
            trace, clusters, fold = self._trace, self._trace.clusters, fold_numbers(self._trace)
            count = int(fold.max()) + 1
            parts = np.tile(fold, (1 + count, 1))  # of all answers, and of those without each fold
            conversations = [trace.num_conversations]
            for left_out in range(count):
                kept = fold != left_out
                parts[1 + left_out, ~kept] = -1
                numbers = np.unique(clusters[kept], return_inverse=True)[1]
                parts[1 + left_out, kept] = folds_of(numbers)
                conversations.append(int(numbers.max()) + 1)
            paths = Paths.of_ranks(trace.ranks, top)
            tallies = of_trace(trace, paths, parts)
            if not all(tally.states for tally in tallies):
                raise OutOfRange(NO_STEP)
            strengths = [fitted_strengths(*each) for each in zip(tallies, conversations, strict=True)]
            self._grown = {top: Grown(paths, tallies[0], strengths)}
        return self._grown[top]

    def _held_out(
        self, tally: Tally, families: list[TreeFamily], tests: list[IntArray], steps: NDArray[np.int32]
    ) -> HeldOut:
        """The figures of the families grown without each fold, on that fold; the first family is grown on all."""
        family, *others = families
        states, product, accepted = tally.states, [], []
        for f, other in enumerate(others):
            own, members = tally.of_part(f), other.members_of(other.sizes)
            hits = np.array([own.of_head(head)[0] for head in range(self._trace.num_heads)])
            share = hits[:, :-1] / np.maximum(hits[:, -1:], 1)
            product.append(own.states * (members @ product_values(share, other.paths)))
            accepted.append(members @ np.append(0, own.frequencies(other.paths[1:])))
        tokens = np.bincount(self._trace.clusters, self._trace.lengths - 1).astype(np.int64)
        return HeldOut(
            family,
            steps,
            tokens,
            np.sum(product, axis=0) / states,
            (states + np.sum(accepted, axis=0)) / states,
            tuple(zip(tests, others, strict=True)),
        )
