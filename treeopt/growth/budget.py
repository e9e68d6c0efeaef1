"""A budget over the guesses of all sequences of a step, chosen anew at every step by their confidences: vLLM's adaptive verification.

The survival of a guess is the product of the confidences up to it. A step of B sequences verifies the M guesses that survive
likeliest, a prefix of each block, with the M of most (B + their survivals) / ms(M). M is chosen by the survivals of the step before, 1 where
a sequence has just begun, and which M by the step's own (vllm/v1/worker/gpu/spec_decode/adaptive_verification.py).

What one sequence verifies depends on the others, so a load is simulated: B at a time go through their recorded answers, and
where one ends the next begins.

P states · B sequences of a step · K guesses
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.records.figure import Ratio
from treeopt.records.trace import FOLDS, RankTrace, fold_numbers
from treeopt.trees.tree import IntArray

T_QUANTILE = 2.776  # of Student's distribution with a degree less than there are folds, for 95 %
Floats = NDArray[np.float64]


def budget_gain(trace: RankTrace, ms: Floats, batch_size: int) -> Ratio | None:
    """Tokens per second with a budget over those with the one length for all that has most; the interval is over folds of conversations.

    None where there are too few conversations for one.

    ms : (B K + 1,) of a step that verifies so many guesses of all sequences together
    """
    if trace.num_conversations < FOLDS:
        return None
    load = Load.of(trace.repeated())
    every = np.flatnonzero(load.begin < load.end)  # sequences that have a step
    best = max(range(1 + trace.num_heads), key=lambda length: load.rate(every, ms, batch_size, length))
    folds = [every[load.fold[every] == f] for f in range(FOLDS)]
    ratios = [load.rate(own, ms, batch_size) / load.rate(own, ms, batch_size, best) for own in folds if len(own)]
    value, off = float(np.mean(ratios)), T_QUANTILE * float(np.std(ratios, ddof=1)) / len(ratios) ** 0.5
    return Ratio(value=value, low=max(value - off, 0.0), high=value + off)


@dataclass(frozen=True, eq=False)
class Load:
    """Recorded answers to be served.

    survival    : (P, K) of each guess
    right       : (P,) guesses that are right before one is not
    begin, end  : (S,) first state of each sequence, and the one behind its last step
    fold        : (S,) which fifth of the conversations it is in
    """

    survival: Floats
    right: IntArray
    begin: IntArray
    end: IntArray
    fold: IntArray

    @classmethod
    def of(cls, trace: RankTrace) -> Load:
        assert trace.confidences is not None, "the trace must have confidences"
        right = np.logical_and.accumulate(trace.ranks == 0, axis=1).sum(1)
        survival = trace.confidences.astype(np.float64).cumprod(1)
        return cls(survival, right, trace.starts[:-1], trace.starts[1:] - 1, fold_numbers(trace))

    def rate(self, sequences: IntArray, ms: Floats, batch_size: int, length: int | None = None) -> float:
        """Tokens per ms of so many sequences at a time, with one length for all of them, or with a budget."""
        queue = np.resize(sequences, len(sequences) + batch_size)  # the last are begun again, so that no step has fewer
        at, end, next_up = self.begin[queue[:batch_size]], self.end[queue[:batch_size]], batch_size
        before, tokens, total = np.ones((batch_size, self.survival.shape[1])), 0, 0.0
        while next_up < len(queue):
            now = self.survival[at]
            kept = np.full(batch_size, length) if length is not None else admitted(now, before, ms)
            gained = 1 + np.minimum(self.right[at], kept)
            tokens, total = tokens + int(gained.sum()), total + float(ms[kept.sum()])
            at, before = at + gained, now
            ended = np.flatnonzero(at >= end)[: len(queue) - next_up]
            begun = queue[next_up : next_up + len(ended)]
            at[ended], end[ended], before[ended], next_up = (
                self.begin[begun],
                self.end[begun],
                1.0,
                next_up + len(ended),
            )
        return tokens / total


def admitted(now: Floats, before: Floats, ms: Floats) -> IntArray:
    """(B,) guesses of each sequence that are verified, by the (B, K) survivals of this step and of the one before.

    >>> admitted(np.array([[0.9, 0.8], [0.3, 0.1]]), np.array([[0.9, 0.5], [0.6, 0.1]]), 3 + np.arange(5) ** 2)
    array([1, 0])
    """
    worth = len(before) + np.concatenate([[0.0], np.sort(before, axis=None)[::-1].cumsum()])
    budget = int((worth / ms).argmax())
    likeliest = np.argsort(-now, axis=None, kind="stable")[:budget]  # a block's earlier guesses come first
    return np.bincount(likeliest // now.shape[1], minlength=len(now))
