"""Choose the fastest dynamic tree for each batch size, beside the fixed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from treeopt.growth.adaptive import Rule, fit_rule
from treeopt.growth.dynamic import DynamicRates, dynamic_rates
from treeopt.growth.heldout import folds
from treeopt.growth.source import Source
from treeopt.latency.dynamic import DynamicCosts
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates, Floats
from treeopt.planning.select import Selection, select
from treeopt.records.bootstrap import SEED, conversation_draws, drawn_rates, interval95, stderr
from treeopt.records.expected import AdaptiveFigures, DynamicFigures
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace
from treeopt.trees.dynamic import DynamicTree, pool_size
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray

Rivals = tuple[DynamicFigures | None, AdaptiveFigures | None]
MOST_COMPARED = 64  # settings, the fastest by estimate, whose noise is looked at
ADAPTED = 3  # levels and topk, the fastest by estimate, that adaptive trees are made of


def dynamic_rivals(
    source: Source,
    options: Sequence[Candidates],
    selections: Sequence[Selection],
    profile: LatencyProfile,
    costs: Mapping[int, StepCosts],
    limits: Limits,
) -> list[Rivals]:
    """For each of the ``options`` the fastest dynamic and the fastest adaptive tree; None where nothing is known of any.

    Figures are compared with the fixed tree of the same place in ``selections``, on the same draws.
    """
    record = source.answers
    if not isinstance(record, RankTrace) or record.pools is None or not profile.dynamic or record.clusters.max() < 1:
        return [(None, None)] * len(options)
    rates = dynamic_rates(record, budget=limits.budget)
    if rates is None:
        return [(None, None)] * len(options)
    found = []
    for c, selection in zip(options, selections, strict=True):
        timed = sorted({p.size for p in profile.fixed if p.batch_size == c.batch_size})
        rivals = Rivalry(record, rates, c, selection.chosen, DynamicCosts.of(costs[c.batch_size], profile))
        found.append((rivals.dynamic(), rivals.adaptive([n for n in timed if n <= limits.budget])))
    return found


@dataclass(frozen=True, eq=False)
class Rivalry:
    """Dynamic trees beside the fixed tree that was chosen at a batch size: place ``chosen`` of ``fixed``."""

    trace: RankTrace
    rates: DynamicRates
    fixed: Candidates
    chosen: int
    costs: DynamicCosts

    @cached_property
    def known(self) -> IntArray:
        """Places of the fastest settings by estimate, the fastest first."""
        ms = self.costs.ms(self.rates.trees)
        known = np.flatnonzero(~np.isnan(ms))
        return known[np.argsort(-self.rates.tokens_per_step[known] / ms[known], kind="stable")]

    def _figures(self, throughput: float, draws: Floats, ms_noise: Floats) -> dict[str, Any]:
        """What both kinds say, by tokens per second, (B,) of drawn conversations, and the relative noise of latencies."""
        fixed, i, n = self.fixed, self.chosen, len(self.rates.tokens)
        assert fixed.plain_ms is not None
        plain = 1e3 * fixed.batch_size / fixed.plain_ms
        drawn = draws / ms_noise
        return {
            "tokens_per_s": throughput,
            "speedup": float(throughput / plain[0]),
            "speedup_stderr": stderr(drawn / plain[1:], n),
            "over_fixed": float(throughput / fixed.throughput[i]),
            "over_fixed95": interval95(drawn / fixed.throughput_draws[i], n),
        }

    def dynamic(self) -> DynamicFigures | None:
        """The fastest dynamic tree, or a smaller one that the noise does not tell from it."""
        if not len(known := self.known[:MOST_COMPARED]):
            return None
        trees, draws = [self.rates.trees[i] for i in known], self.rates.draws(known)
        ms, ms_draws = self.costs.ms(trees), self._ms_draws(trees)
        c = Candidates(
            self.fixed.batch_size,
            self.fixed.context,
            [],
            sizes=np.array([tree.rows for tree in trees]),
            depths=np.array([tree.levels for tree in trees]),
            rates=self.rates.tokens_per_step[known],
            rate_draws=draws,
            ms=ms,
            ms_draws=ms_draws,
        )
        i = select([c], [1.0]).chosen
        tree, per_s = trees[i], 1e3 * c.batch_size / ms[i]
        return DynamicFigures(
            size=tree.rows,
            depth=tree.levels,
            topk=tree.topk,
            tokens_per_step=float(c.rates[i]),
            tokens_per_step_stderr=stderr(draws[i], len(self.rates.tokens)),
            step_ms=float(ms[i]),
            **self._figures(float(c.rates[i] * per_s), draws[i] * per_s, ms_draws[i] / ms[i]),
        )

    def _ms_draws(self, trees: Sequence[DynamicTree]) -> Floats:
        count = self.fixed.rate_draws.shape[1]
        return self.costs.draws_ms(trees, count, np.random.default_rng([SEED, self.fixed.batch_size]))

    def adaptive(self, sizes: Sequence[int]) -> AdaptiveFigures | None:
        """The fastest adaptive tree of those rows that were timed, judged on answers that its rule was not fitted to."""
        best: AdaptiveFigures | None = None
        pairs = dict.fromkeys((self.rates.trees[i].levels, self.rates.trees[i].topk) for i in self.known)
        for levels, topk in list(pairs)[:ADAPTED]:
            most = pool_size(levels, topk) + 1
            rows = [
                n for n in sizes if levels < n <= most and not np.isnan(self.costs.ms([DynamicTree(levels, topk, n)]))
            ]
            if len(rows) > 1:
                found = self._adaptive(levels, topk, rows)
                best = found if best is None or found.rate > best.rate else best
        return best

    def _adaptive(self, levels: int, topk: int, rows: list[int]) -> AdaptiveFigures:
        trace, b = self.trace, self.fixed.batch_size
        trees = [DynamicTree(levels, topk, n) for n in rows]
        cost_ms = self.costs.ms(trees)
        taken = np.zeros((4, int(trace.clusters.max()) + 1))  # of every conversation, by the rule of the others
        for train, judged in folds(trace):
            found = self._rule(train, rows, levels, topk, cost_ms).walk(trace.select(judged), batch_size=b)
            taken[:, np.unique(trace.clusters[judged])] = found.tokens, found.steps, found.ms, found.rows
        tokens, steps, ms, verified = taken
        rule = self._rule(np.arange(trace.num_sequences), rows, levels, topk, cost_ms)
        weights = conversation_draws(len(tokens))
        drawn = 1e3 * drawn_rates(tokens, ms, weights)
        noise = self._ms_draws(trees[len(trees) // 2 :][:1])[0] / cost_ms[len(trees) // 2]
        return AdaptiveFigures(
            size=rows[-1],
            depth=levels,
            topk=topk,
            tokens_per_step=float(tokens.sum() / steps.sum()),
            tokens_per_step_stderr=stderr(drawn_rates(tokens, steps, weights), len(tokens)),
            step_ms=float(ms.sum() * b / steps.sum()),
            rows=rows,
            mean_rows=float(verified.sum() / steps.sum()),
            intercepts=list(rule.promise.intercepts),
            slopes=list(rule.promise.slopes),
            cost_ms=cost_ms.tolist(),
            tokens_per_ms=rule.rate,
            **self._figures(float(1e3 * tokens.sum() / ms.sum()), drawn, noise),
        )

    def _rule(self, sequences: IntArray, rows: list[int], levels: int, topk: int, cost_ms: Floats) -> Rule:
        """The rule that some of the answers say."""
        return fit_rule(self.trace.select(sequences), rows, levels, topk, cost_ms, batch_size=self.fixed.batch_size)
