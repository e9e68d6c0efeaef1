"""Trees of every size, with their rates on answers that they were not grown on.

Trees are grown on all folds of conversations but one and replayed on that one, so no figure is in-sample. Plans have the
trees that are grown on all folds.

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
    """Trees of every size up to a depth limit, with their cross-fitted rates.

    grown   : trees grown on all sequences, which plans have
    every   : the rates of each size
    by_fold : for every fold the numbers of its sequences, and the trees grown on all others
    """

    grown: GrownTrees
    every: Sequence[Rates]
    by_fold: Sequence[tuple[IntArray, GrownTrees]] = ()

    @property
    def tokens_per_step(self) -> Floats:
        """(n,) tokens per step of each size."""
        return np.array([rates.tokens_per_step for rates in self.every])

    def rates(self, size: int) -> Rates:
        return self.every[min(size, len(self.every)) - 1]


def folds(trace: Answers) -> Iterator[tuple[IntArray, IntArray]]:
    """For every fold of conversations the sequences to grow on, and those to replay on.

    Raises OutOfRange for a single conversation, which leaves nothing to hold out.
    """
    fold = fold_numbers(trace)
    if fold.max() < 1:
        raise OutOfRange("Held-out figures need at least 2 sequences: treeopt calibrate --num-prompts 64")
    for f in np.unique(fold):
        yield np.flatnonzero(fold != f), np.flatnonzero(fold == f)
