"""Steps and tokens of drafts by conversation, and from these tokens per step with their errors.

S sequences · C conversations, of which they are the turns · n drafts · B bootstrap draws
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.records.estimate import Estimate
from treeopt.records.trace import Answers
from treeopt.trees.tree import IntArray


@dataclass(frozen=True, eq=False)
class Rates:
    """Steps and tokens of one draft by conversation; a single rate if there are accuracies alone.

    steps, tokens : (C,) of every conversation, or of every sequence; the first token of a sequence is emitted without a step
    expected      : tokens per step where nothing was replayed

    >>> Rates(np.array([2, 3]), np.array([4, 6])).tokens_per_step
    2.0
    """

    steps: IntArray | None = None
    tokens: IntArray | None = None
    expected: float = 1.0

    @property
    def tokens_per_step(self) -> float:
        if self.steps is None or self.tokens is None:
            return self.expected
        taken = self.steps.sum()
        return float(self.tokens.sum() / taken) if taken else 1.0

    @cached_property
    def estimate(self) -> Estimate:
        """The tokens per step; their error is not known where nothing was replayed."""
        if self.steps is None or self.tokens is None:
            return Estimate(self.expected)
        count = len(self.steps)
        draws = drawn_rates(self.tokens, self.steps, conversation_draws(count))
        return Estimate(self.tokens_per_step, stderr(draws, count))


def drawn(rates: Sequence[Rates]) -> NDArray[np.float64]:
    """(n, B) tokens per step of drafts, by resampled conversations, the same for all; (n, 1) without conversations."""
    steps = [rate.steps for rate in rates if rate.steps is not None]
    if not steps:
        return np.array([[rate.tokens_per_step] for rate in rates])
    taken, emitted = np.stack(steps), np.stack([rate.tokens for rate in rates if rate.tokens is not None])
    shared = emitted[0] if (emitted == emitted[0]).all() else emitted
    return drawn_rates(shared, taken, conversation_draws(taken.shape[1]))


def rates_by_group(rates: Rates, answers: Answers) -> dict[str, Estimate]:
    """Tokens per step on the conversations of each group; the error is not known for one conversation."""
    groups, by_group = np.array(answers.conversation_groups()), dict[str, Estimate]()
    for name in answers.group_names:
        among = np.flatnonzero(groups == name)
        if len(among) and rates.steps is not None and rates.tokens is not None:
            part = Rates(rates.steps[among], rates.tokens[among])
            by_group[name] = part.estimate if len(among) > 1 else Estimate(part.tokens_per_step)
    return by_group


def by_conversation(answers: Answers, of_sequences: IntArray) -> IntArray:
    """(..., C) sums over the turns of every conversation of (..., S) numbers."""
    order = np.argsort(answers.clusters, kind="stable")
    begins = np.searchsorted(answers.clusters[order], np.arange(answers.num_conversations))
    return np.asarray(np.add.reduceat(of_sequences[..., order], begins, axis=-1), dtype=np.int64)
