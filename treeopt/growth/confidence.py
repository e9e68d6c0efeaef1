"""How well confidences say what is accepted, and the temperatures that mend it slot by slot (DSpark, sequential temperature scaling).

A guess survives where it and all before it are right. The confidences c of the slots are calibrated where the product c_1 ... c_j
is the share of chains that survive j guesses. With temperatures c_j = sigmoid(logit_j / T_j), fitted from the first slot on.

P states · K guesses
"""

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.heldout import folds
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.tree import BoolArray

BINS = 10  # of equal width, that survival is compared in
GRID = np.geomspace(0.2, 5.0, 65).tolist()  # temperatures that are tried; 1 is among them
CERTAIN = 1e-7  # nearest that a confidence is taken to be to 0 or 1
Slots = tuple[NDArray[np.float64], BoolArray, BoolArray]


def fit_temperatures(trace: RankTrace) -> dict[str, object]:
    """Temperatures fitted on four fifths of the conversations, and on the rest the errors of survival without and with them.

    In the form of SGLang's file. Raises OutOfRange for a trace of a single conversation.
    """
    train, test = (_slots(trace.select(part)) for part in next(folds(trace)))
    found, before, after = list[float](), list[float](), list[float]()
    for j in range(1, 1 + trace.num_heads):
        found.append(min(GRID, key=lambda one: survival_error(train, [*found, one])))
        before.append(survival_error(test, [1.0] * j))
        after.append(survival_error(test, found))
    return {"temperatures": found, "num_samples": len(train[0]), "ece_before": before, "ece_after": after}


def survival_error(slots: Slots, temperatures: list[float]) -> float:
    """Calibration error (ECE) of survival as far as there are temperatures: mean distance from what survives, bin by bin."""
    j = len(temperatures)
    logits, survives, known = (of[slots[2][:, j - 1]][:, :j] for of in slots)
    predicted = (1 / (1 + np.exp(logits / np.negative(temperatures)))).prod(1)
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    return float(np.abs(np.bincount(bins, predicted - survives[:, -1])).sum() / max(len(known), 1))


def _slots(trace: RankTrace) -> Slots:
    """(P, K) logits of the confidences, whether the guess survives, and whether there is a token to judge it by."""
    assert trace.confidences is not None, "the trace must have confidences"
    sure = trace.confidences[trace.has_step].astype(np.float64).clip(CERTAIN, 1 - CERTAIN)
    ranks = trace.ranks[trace.has_step]
    return np.log(sure) - np.log1p(-sure), np.logical_and.accumulate(ranks == 0, axis=1), ranks != NO_TRIAL
