"""Steps and tokens of drafts by conversation, and from these tokens per step with their errors.

S sequences · C conversations, of which they are the turns · n drafts · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.records.estimate import Estimate
from treeopt.records.trace import Answers
from treeopt.trees.tree import IntArray


@dataclass(frozen=True, eq=False)
class Rates:
    """Steps and tokens of one draft by conversation.

    steps, tokens : (C,) of every conversation, or of every sequence; the first token of a sequence is emitted without a step
    is_counted    : False where there are accuracies alone: a step and the tokens that it emits on average stand for all

    >>> Rates(np.array([2, 3]), np.array([4, 6])).tokens_per_step
    2.0
    """

    steps: IntArray
    tokens: NDArray[Any]
    is_counted: bool = True

    @classmethod
    def expected(cls, tokens_per_step: float = 1.0) -> Rates:
        return cls(np.ones(1, dtype=np.int64), np.array([tokens_per_step]), is_counted=False)

    @property
    def tokens_per_step(self) -> float:
        taken = self.steps.sum()
        return float(self.tokens.sum() / taken) if taken else 1.0

    @cached_property
    def estimate(self) -> Estimate:
        """The tokens per step; their error is not known for a single conversation, or where nothing was counted."""
        count = len(self.steps)
        draws = drawn_rates(self.tokens, self.steps, conversation_draws(count)) if count > 1 else None
        return Estimate(self.tokens_per_step, None if draws is None else stderr(draws, count))

    def on(self, conversations: IntArray) -> Rates:
        """The rates on some of the conversations."""
        return Rates(self.steps[conversations], self.tokens[conversations])


def drawn(rates: Sequence[Rates]) -> NDArray[np.float64]:
    """(n, B) tokens per step of drafts, by resampled conversations, the same for all; (n, 1) where nothing was counted."""
    if not rates[0].is_counted:
        return np.array([[rate.tokens_per_step] for rate in rates])
    steps, tokens = np.stack([rate.steps for rate in rates]), np.stack([rate.tokens for rate in rates])
    shared = tokens[0] if (tokens == tokens[0]).all() else tokens
    return drawn_rates(shared, steps, conversation_draws(steps.shape[1]))


def rates_by_group(rates: Rates, answers: Answers) -> dict[str, Estimate]:
    """Tokens per step on the conversations of each group; the error is not known for one conversation."""
    groups = np.array(answers.conversation_groups())
    among = {name: np.flatnonzero(groups == name) for name in answers.group_names}
    return {name: rates.on(conversations).estimate for name, conversations in among.items() if len(conversations)}


def by_conversation(answers: Answers, of_sequences: IntArray) -> IntArray:
    """(..., C) sums over the turns of every conversation of (..., S) numbers."""
    order = np.argsort(answers.clusters, kind="stable")
    begins = np.searchsorted(answers.clusters[order], np.arange(answers.num_conversations))
    return np.asarray(np.add.reduceat(of_sequences[..., order], begins, axis=-1), dtype=np.int64)
