"""What trees of every size reach on answers that they were not grown on.

Trees are grown on all folds of conversations but one and replayed on that one, so that no figure is
in-sample. The trees that are delivered are grown on all of them. In a trace the text is fixed, so a tree changes
how many steps it takes; in a probe the steps are fixed, so it changes how many tokens they emit.

S sequences · C conversations, of which they are the turns · n sizes of a family · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.replay import tokens_per_step
from treeopt.records.bootstrap import conversation_draws, drawn_rates, stderr
from treeopt.records.trace import Answers, fold_numbers
from treeopt.trees.tree import Choice, IntArray, TreeFamily

Paths = tuple[Choice, ...]


@dataclass(frozen=True, eq=False)
class Rates:
    """Tokens per step of a tree, predicted in three ways.

    product  : as if guesses were right or wrong independently, by the marginals
    joint    : averaged over all states; None where there is no trace
    replayed : as decoding goes, with its standard error; None where there is neither trace nor probe
    steps    : (C,) replayed steps of every conversation, and the tokens that they emit
    """

    product: float
    joint: float | None
    replayed: float | None
    stderr: float | None
    steps: IntArray | None
    tokens: IntArray | None = None

    @property
    def tokens_per_step(self) -> float:
        """The best figure that is known: replayed, or the product where nothing can be replayed."""
        return self.product if self.replayed is None else self.replayed

    def document(self) -> dict[str, float | None]:
        return {"product": self.product, "joint": self.joint, "replayed": self.replayed, "replayed_stderr": self.stderr}


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Trees of every size up to a depth limit, and what they reach on sequences they never saw.

    family  : grown on all sequences; its trees are the ones delivered
    steps   : (n, C) cross-fitted replayed steps of every conversation, None without a trace or a probe
    tokens  : (C,)   tokens emitted by them; of a probe (n, C), and the steps are the same for all trees
    product : (n,)   tokens per step by held-out marginals
    joint   : (n,)   tokens per step averaged over all held-out states, None without a trace
    grown   : of every fold the sequences held out, and the trees grown on the others
    """

    family: TreeFamily
    steps: NDArray[Any] | None
    tokens: IntArray | None
    product: NDArray[np.float64]
    joint: NDArray[np.float64] | None
    grown: tuple[tuple[IntArray, TreeFamily], ...] = ()

    @property
    def tokens_per_step(self) -> NDArray[np.float64]:
        """(n,) the best figure that is known: replayed, or the product where nothing can be replayed."""
        if self.steps is None or self.tokens is None:
            return self.product
        rates: NDArray[np.float64] = self.tokens.sum(-1) / np.maximum(self.steps.sum(1), 1)
        return rates

    @property
    def conversations(self) -> int:
        """How many there are to draw again; 0 where nothing can be replayed."""
        return 0 if self.tokens is None else self.tokens.shape[-1]

    @cached_property
    def draws(self) -> NDArray[np.float64]:
        """(n, B) tokens per step of resampled sets of conversations; (n, 1) where nothing can be replayed."""
        if self.steps is None or self.tokens is None:
            return self.product[:, None]
        return drawn_rates(self.tokens, self.steps, conversation_draws(self.conversations))

    def rates(self, size: int) -> Rates:
        """The held-out figures of one size."""
        i = self.family.index(size)
        if self.steps is None:
            return Rates(float(self.product[i]), None, None, None, None)
        return Rates(
            product=float(self.product[i]),
            joint=None if self.joint is None else float(self.joint[i]),
            replayed=float(self.tokens_per_step[i]),
            stderr=stderr(self.draws[i], self.conversations),
            steps=self.steps[i],
        )

    def by_group(self, size: int, trace: Answers) -> dict[str, tuple[float, float | None]]:
        """Tokens per step on the conversations of each group, and its standard error (of one: None)."""
        if self.steps is None or self.tokens is None or trace.group is None:
            return {}
        row = self.family.index(size)
        all_tokens, all_steps = np.broadcast_to(self.tokens, self.steps.shape)[row], self.steps[row]
        group = trace.group[np.unique(trace.clusters, return_index=True)[1]]
        found: dict[str, tuple[float, float | None]] = {}
        for g, name in enumerate(trace.group_names):
            among = np.flatnonzero(group == g)
            if len(among):
                tokens, steps = all_tokens[among], all_steps[among]
                samples = drawn_rates(tokens, steps, conversation_draws(len(among)))
                error = stderr(samples, len(among)) if len(among) > 1 else None
                found[name] = (tokens_per_step(tokens.sum(), steps.sum()), error)
        return found


class Reached(NamedTuple):
    """What n trees reach on S recorded sequences. Of steps and tokens one is the same for all trees: (S,).

    product  : (n,) tokens per step by the marginals of these sequences
    accepted : (n,) accepted nodes in all states together, None where that is not known
    states   : states (or probed steps) that these were counted on
    """

    steps: IntArray
    tokens: IntArray
    product: NDArray[np.float64]
    accepted: NDArray[Any] | None
    states: int


def folds(trace: Answers) -> Iterator[tuple[IntArray, IntArray]]:
    """Sequences to grow on and sequences to replay on, for every fold of conversations.

    Raises OutOfRange for a record of a single conversation, which has nothing to hold out.
    """
    fold = fold_numbers(trace)
    if fold.max() < 1:
        raise OutOfRange(
            "Held-out figures need at least 2 sequences, but there is 1. "
            "Calibrate on more: treeopt calibrate --num-prompts 64"
        )
    for f in np.unique(fold):
        yield np.flatnonzero(fold != f), np.flatnonzero(fold == f)
