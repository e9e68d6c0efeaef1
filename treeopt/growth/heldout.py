"""Tokens per step that trees of every size reach on answers which they were not grown on.

Trees are grown on all folds of conversations but one and replayed on that one, so that no figure is
in-sample. The trees that are delivered are grown on all of them. In a trace the text is fixed, so a tree changes
how many steps it takes; in a probe the steps are fixed, so it changes how many tokens they emit.

n sizes of a family
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.rates import Rates
from treeopt.records.trace import Answers, fold_numbers
from treeopt.trees.tree import GrownTrees, IntArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Trees of every size up to a depth limit, and what they reach on sequences they never saw.

    grown   : on all sequences; these trees are the ones delivered
    every   : what each size reaches, cross-fitted
    by_fold : of every fold the sequences held out, and the trees grown on the others
    """

    grown: GrownTrees
    every: Sequence[Rates]
    by_fold: Sequence[tuple[IntArray, GrownTrees]] = ()

    @property
    def tokens_per_step(self) -> Floats:
        """(n,) of each size."""
        return np.array([rates.tokens_per_step for rates in self.every])

    def rates(self, size: int) -> Rates:
        return self.every[min(size, len(self.every)) - 1]


def folds(trace: Answers) -> Iterator[tuple[IntArray, IntArray]]:
    """Sequences to grow on and sequences to replay on, for every fold of conversations.

    Raises OutOfRange for a record of a single conversation, which has nothing to hold out.
    """
    fold = fold_numbers(trace)
    if fold.max() < 1:
        raise OutOfRange("Held-out figures need at least 2 sequences: treeopt calibrate --num-prompts 64")
    for f in np.unique(fold):
        yield np.flatnonzero(fold != f), np.flatnonzero(fold == f)
