"""Tokens per step that trees of every size reach on answers which they were not grown on.

Trees are grown on all folds of conversations but one and replayed on that one, so that no figure is
in-sample. The trees that are delivered are grown on all of them. In a trace the text is fixed, so a tree changes
how many steps it takes; in a probe the steps are fixed, so it changes how many tokens they emit.

Trees grown by replay are grown for all folds in one go (`GrownTogether`): the counts of four folds are those of all five
less one's, so all is counted once, and decoded once where trees are the same.

S sequences · C conversations, of which they are the turns · n sizes of a family · B bootstrap draws
F folds · K heads · N nodes
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.objectives import NO_STEP, GrowingFamily, grow_together
from treeopt.growth.paths import Paths, Tally, of_trace
from treeopt.growth.replay import TreeRates, by_conversation
from treeopt.growth.shrinkage import PathCounts, Strengths, fitted_strengths
from treeopt.growth.walk import Walk
from treeopt.records.bootstrap import conversation_draws, drawn_rates
from treeopt.records.trace import Answers, RankTrace, fold_numbers, folds_of
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray, TreeFamily

Floats = NDArray[np.float64]
NOTHING: Floats = np.zeros(0)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Trees of every size up to a depth limit, and what they reach on sequences they never saw.

    family : grown on all sequences; its trees are the ones delivered
    every  : of each size, cross-fitted, the product by held-out marginals
    grown  : of every fold the sequences held out, and the trees grown on the others
    """

    family: TreeFamily
    every: Sequence[TreeRates]
    grown: Sequence[tuple[IntArray, TreeFamily]] = ()

    @property
    def tokens_per_step(self) -> Floats:
        """(n,) the best figure that is known: replayed, or the product where nothing can be replayed."""
        return np.array([one.tokens_per_step for one in self.every])

    def rates(self, size: int) -> TreeRates:
        return self.every[min(size, len(self.every)) - 1]


def drawn(every: Sequence[TreeRates]) -> Floats:
    """(n, B) tokens per step of each with resampled sets of conversations, the same for all; (n, 1) where there are none."""
    steps, tokens = ([getattr(one, name) for one in every] for name in ("steps", "tokens"))
    if steps[0] is None:
        return np.array([[one.tokens_per_step] for one in every])
    taken, emitted = np.stack(steps), np.stack(tokens)
    shared = emitted[0] if (emitted == emitted[0]).all() else emitted
    return drawn_rates(shared, taken, conversation_draws(taken.shape[1]))


def rates_by_group(rates: TreeRates, answers: Answers) -> dict[str, tuple[float, float | None]]:
    """Tokens per step on the conversations of each group, and its standard error (of one conversation: None)."""
    of_conversation = np.array(answers.conversation_groups())
    found: dict[str, tuple[float, float | None]] = {}
    for name in answers.group_names:
        among = np.flatnonzero(of_conversation == name)
        if len(among) and rates.steps is not None and rates.tokens is not None:
            own = TreeRates(steps=rates.steps[among], tokens=rates.tokens[among])
            found[name] = (own.tokens_per_step, own.stderr if len(among) > 1 else None)
    return found


class Reached(NamedTuple):
    """Steps and tokens of n trees on S recorded sequences. Of steps and tokens one is the same for all trees: (S,).

    product : (n,) tokens that a step at each state emits by the marginals of these sequences, together
    joint   : (n,) those that it does emit, likewise · states : that these were counted on; of a probe none
    """

    steps: IntArray
    tokens: IntArray
    product: Floats = NOTHING
    joint: NDArray[Any] = NOTHING
    states: int = 0

    def rates(self, answers: Answers, n: int) -> list[TreeRates]:
        counts = (by_conversation(answers, rows) for rows in (self.steps, self.tokens))
        steps, tokens = (np.broadcast_to(each, (n, each.shape[-1])) for each in counts)
        known = [(sums / self.states).tolist() if self.states else [None] * n for sums in self[2:4]]
        return [TreeRates(*each) for each in zip(*known, steps, tokens, strict=True)]


def folds(trace: Answers) -> Iterator[tuple[IntArray, IntArray]]:
    """Sequences to grow on and sequences to replay on, for every fold of conversations.

    Raises OutOfRange for a record of a single conversation, which has nothing to hold out.
    """
    fold = fold_numbers(trace)
    if fold.max() < 1:
        raise OutOfRange("Held-out figures need at least 2 sequences: treeopt calibrate --num-prompts 64")
    for f in np.unique(fold):
        yield np.flatnonzero(fold != f), np.flatnonzero(fold == f)


class GrownTogether:
    """A trace to grow on by replay, whole and without each fold; trees of several depths have their counts in common."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._grown: dict[int, tuple[Tally, list[list[Strengths]]]] = {}

    def families(self, limits: Limits) -> tuple[list[TreeFamily], IntArray]:
        """The trees of one depth limit: those grown on all answers, and those grown without each fold.

        Beside them the (n, C) steps of every conversation with the trees grown without its fold, counted on the way.
        Raises OutOfRange for a trace without a step.
        """
        trace, fold = self._trace, fold_numbers(self._trace)
        whole, all_strengths = self._grown_of(min(limits.num_ranks, trace.top_k))
        depth, tokens, growing = limits.depth(trace.num_heads), np.bincount(fold, trace.lengths - 1), []
        for left_out, strengths in zip([None, *range(len(tokens))], all_strengths, strict=True):
            tally = whole if left_out is None else whole.without(left_out)
            growing.append(GrowingFamily(PathCounts(tally, strengths[depth - 1], depth), limits, left_out))
        walk = Walk(trace, whole.paths, depth, fold, len(growing[0].joint))
        members = [np.unique(trace.clusters[fold == f]) for f in range(len(tokens))]  # conversations of every fold
        steps = np.zeros((len(growing[0].joint), walk.conversations), dtype=np.int64)
        for row, decoded in zip(steps, grow_together(walk, growing), strict=True):
            taken = {id(tree): walk.steps(tree) for tree in decoded[1:]}
            for conversations, tree in zip(members, decoded[1:], strict=True):
                row[conversations] = taken[id(tree)][conversations]
        return [one.family(int(one.seen(tokens).sum())) for one in growing], steps

    def _grown_of(self, top: int) -> tuple[Tally, list[list[Strengths]]]:
        """Counts of all answers by fold, and strengths of all and of those without each fold for depth 1, 2, ...

        They are for trees of so many ranks; only the last asked for is kept.
        """
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
            self._grown = {top: (tallies[0], strengths)}
        return self._grown[top]
