"""Tokens per step that trees of every size reach on answers which they were not grown on.

Trees are grown on all folds of conversations but one and replayed on that one, so that no figure is
in-sample. The trees that are delivered are grown on all of them. In a trace the text is fixed, so a tree changes
how many steps it takes; in a probe the steps are fixed, so it changes how many tokens they emit.

S sequences · C conversations, of which they are the turns · n sizes of a family · B bootstrap draws
F folds
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.replay import TreeRates
from treeopt.records.bootstrap import conversation_draws, drawn_rates
from treeopt.records.trace import Answers, fold_numbers
from treeopt.trees.tree import GrownTrees, IntArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Trees of every size up to a depth limit, and what they reach on sequences they never saw.

    grown   : on all sequences; these trees are the ones delivered
    every   : of each size, cross-fitted, the product by held-out marginals
    by_fold : of every fold the sequences held out, and the trees grown on the others
    """

    grown: GrownTrees
    every: Sequence[TreeRates]
    by_fold: Sequence[tuple[IntArray, GrownTrees]] = ()

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


def folds(trace: Answers) -> Iterator[tuple[IntArray, IntArray]]:
    """Sequences to grow on and sequences to replay on, for every fold of conversations.

    Raises OutOfRange for a record of a single conversation, which has nothing to hold out.
    """
    fold = fold_numbers(trace)
    if fold.max() < 1:
        raise OutOfRange("Held-out figures need at least 2 sequences: treeopt calibrate --num-prompts 64")
    for f in np.unique(fold):
        yield np.flatnonzero(fold != f), np.flatnonzero(fold == f)
