"""What dynamic trees reach: every setting replayed on every answer of a trace.

A setting is three numbers that are not fitted to the answers one by one, so its replay is held-out as a chain's is.

n settings · S sequences · C conversations · B bootstrap draws
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.adaptive import Promise, Rule
from treeopt.growth.replay import accepted_lengths, replay_dynamic, replay_trees
from treeopt.records.bootstrap import conversation_draws, drawn_rates
from treeopt.records.trace import RankTrace
from treeopt.trees.dynamic import AnyTree, DynamicLimits, DynamicTree
from treeopt.trees.tree import IntArray, Tree

ANY = DynamicLimits()


@dataclass(frozen=True, eq=False)
class DynamicRates:
    """Dynamic trees and what they reach.

    steps : (n, C) of every conversation · tokens : (C,) emitted by them
    """

    trees: tuple[DynamicTree, ...]
    steps: IntArray
    tokens: IntArray

    @cached_property
    def tokens_per_step(self) -> NDArray[np.float64]:
        """(n,)"""
        rates: NDArray[np.float64] = self.tokens.sum() / np.maximum(self.steps.sum(1), 1)
        return rates

    def draws(self, which: IntArray) -> NDArray[np.float64]:
        """(m, B) tokens per step of some of the trees on resampled sets of conversations, the same as those of fixed trees."""
        return drawn_rates(self.tokens, self.steps[which], conversation_draws(len(self.tokens)))


def dynamic_rates(trace: RankTrace, limits: DynamicLimits = ANY) -> DynamicRates | None:
    """Every setting within the limits that a trace tells, of more rows than levels; None without pools.

    Chains are told by the ranks where no pools of topk 1 were recorded.
    """
    if trace.pools is None:
        return None
    deepest = min(trace.pools.levels, limits.levels)
    trees: list[DynamicTree] = []
    steps: list[IntArray] = []
    longest = min(deepest, trace.num_heads, limits.rows - 1)
    if limits.chains and 1 not in trace.pools.topks and longest > 0:
        trees += [DynamicTree(levels, 1, levels + 1) for levels in range(1, longest + 1)]
        members = np.tri(longest, longest + 1, 1, dtype=bool)  # the first two nodes of the chain, three, ...
        steps.append(_by_conversation(trace, replay_trees(trace, Tree.chain(longest).paths, members)))
    for topk in trace.pools.topks:
        if topk > limits.topk or (topk == 1 and not limits.chains):
            continue
        for levels in range(1, deepest + 1):
            rows = list(range(levels + 1, limits.most_rows(levels, topk) + 1))
            if rows:
                trees += [DynamicTree(levels, topk, n) for n in rows]
                steps.append(_by_conversation(trace, replay_dynamic(trace, levels, topk, rows)))
    if not trees:
        return None
    return DynamicRates(tuple(trees), np.concatenate(steps), _by_conversation(trace, trace.lengths[None] - 1)[0])


def _by_conversation(trace: RankTrace, of_sequences: IntArray) -> IntArray:
    """(n, C) sums over the turns of every conversation of (n, S) numbers."""
    found = np.zeros((len(of_sequences), trace.num_conversations), dtype=np.int64)
    np.add.at(found.T, trace.clusters, of_sequences.T)
    return found


def lengths_with(trace: RankTrace, tree: AnyTree) -> NDArray[Any] | None:
    """(P,) guesses that a step at each state accepts with any tree; None where the trace lacks its pools.

    An adaptive tree is taken to be alone: in a batch its rows depend on the other sequences.
    """
    if isinstance(tree, Tree):
        return accepted_lengths(trace, tree.paths)
    pools, most = trace.pools, tree.most
    if pools is None or most.topk not in pools.topks or most.levels > pools.levels:
        return None
    if isinstance(tree, DynamicTree):
        found: IntArray = (pools.places_in(most.levels, most.topk) <= most.rows - 2).sum(1)
        return found
    promise = Promise(tree.intercepts, tree.slopes)
    rule = Rule(most.levels, most.topk, tree.choices, np.array(tree.cost_ms), promise, tree.tokens_per_ms)
    return rule.lengths(trace)
