"""Tokens per step that trees of every size reach on answers which they were not grown on.

Trees are grown on all folds of conversations but one and replayed on that one, so that no figure is
in-sample. The trees that are delivered are grown on all of them. In a trace the text is fixed, so a tree changes
how many steps it takes; in a probe the steps are fixed, so it changes how many tokens they emit.

Trees grown by replay are grown for all folds in one go (`GrownTogether`): the counts of four folds are those of all five
less one's, so all is counted once, and decoded once where trees are the same.

S sequences · C conversations, of which they are the turns · n sizes of a family · B bootstrap draws
F folds · K heads · N nodes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.objectives import NO_STEP, GrowingFamily, grow_together
from treeopt.growth.paths import Paths, Tally, of_trace
from treeopt.growth.replay import TreeRates
from treeopt.growth.shrinkage import PathCounts, Strengths, fitted_strengths
from treeopt.growth.walk import Walk
from treeopt.records.bootstrap import conversation_draws, drawn_rates
from treeopt.records.trace import Answers, RankTrace, fold_numbers, folds_of
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray, TreeFamily


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Trees of every size up to a depth limit, and what they reach on sequences they never saw.

    family        : grown on all sequences; its trees are the ones delivered
    steps, tokens : (n, C) cross-fitted steps of every conversation, and the tokens emitted by them; None for accuracies alone
    product       : (n,) tokens per step by held-out marginals, None of a probe
    joint         : (n,) tokens per step averaged over all held-out states, None without a trace
    grown         : of every fold the sequences held out, and the trees grown on the others
    """

    family: TreeFamily
    steps: NDArray[Any] | None
    tokens: IntArray | None
    product: NDArray[np.float64] | None
    joint: NDArray[np.float64] | None
    grown: tuple[tuple[IntArray, TreeFamily], ...] = ()

    @property
    def tokens_per_step(self) -> NDArray[np.float64]:
        """(n,) the best figure that is known: replayed, or the product where nothing can be replayed."""
        if self.steps is None or self.tokens is None:
            return np.asarray(self.product)
        return np.asarray(self.tokens.sum(1) / np.maximum(self.steps.sum(1), 1))

    @cached_property
    def draws(self) -> NDArray[np.float64]:
        """(n, B) tokens per step of resampled sets of conversations; (n, 1) where nothing can be replayed."""
        if self.steps is None or self.tokens is None:
            return self.tokens_per_step[:, None]
        return draws_of(self.steps, self.tokens)

    def rates(self, size: int) -> TreeRates:
        """The held-out figures of one size."""
        i = self.family.index(size)
        product, joint = (None if rates is None else float(rates[i]) for rates in (self.product, self.joint))
        steps, tokens = (None if counts is None else counts[i] for counts in (self.steps, self.tokens))
        return TreeRates(product, joint, steps, tokens)


def draws_of(steps: IntArray, tokens: IntArray) -> NDArray[np.float64]:
    """(n, B) tokens per step of resampled sets of conversations, by (n, C) steps and tokens."""
    shared = tokens[0] if (tokens == tokens[0]).all() else tokens
    return drawn_rates(shared, steps, conversation_draws(steps.shape[1]))


def rates_by_group(steps: IntArray, tokens: IntArray, answers: Answers) -> dict[str, tuple[float, float | None]]:
    """Tokens per step on the conversations of each group, and its standard error (of one conversation: None).

    steps, tokens : (C,) of every conversation
    """
    of_conversation = np.array(answers.conversation_groups())
    found: dict[str, tuple[float, float | None]] = {}
    for name in answers.group_names:
        among = np.flatnonzero(of_conversation == name)
        if len(among):
            rates = TreeRates(steps=steps[among], tokens=tokens[among])
            found[name] = (rates.tokens_per_step, rates.stderr if len(among) > 1 else None)
    return found


class Reached(NamedTuple):
    """Steps and tokens of n trees on S recorded sequences. Of steps and tokens one is the same for all trees: (S,).

    product  : (n,) tokens per step by the marginals of these sequences; None where these are not known
    accepted : (n,) accepted nodes in all states together, likewise · states : that these were counted on
    """

    steps: IntArray
    tokens: IntArray
    product: NDArray[np.float64] | None = None
    accepted: NDArray[Any] | None = None
    states: int = 0


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

    def families(self, limits: Limits) -> list[TreeFamily]:
        """The trees of one depth limit: those grown on all answers, and those grown without each fold.

        Raises OutOfRange for a trace without a step.
        """
        trace, fold = self._trace, fold_numbers(self._trace)
        whole, all_strengths = self._grown_of(min(limits.num_ranks, trace.top_k))
        depth, tokens, growing = limits.depth(trace.num_heads), np.bincount(fold, trace.lengths - 1), []
        for left_out, strengths in zip([None, *range(len(tokens))], all_strengths, strict=True):
            tally = whole if left_out is None else whole.without(left_out)
            growing.append(GrowingFamily(PathCounts(tally, strengths[depth - 1], depth), limits, left_out))
        grow_together(Walk(trace, whole.paths, depth, fold, len(growing[0].joint)), growing)
        return [one.family(int(one.seen(tokens).sum())) for one in growing]

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
