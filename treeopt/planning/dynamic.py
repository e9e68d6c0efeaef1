"""Choose the fastest dynamic tree for each batch size, or one for a mix of them, beside the fixed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from treeopt.growth.adaptive import fit_rule
from treeopt.growth.dynamic import DynamicRates, dynamic_rates
from treeopt.growth.heldout import folds
from treeopt.growth.source import Source
from treeopt.latency.dynamic import DynamicCosts
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates, Floats
from treeopt.planning.request import PlanRequest
from treeopt.planning.select import Selection, select
from treeopt.records.bootstrap import SEED, conversation_draws, drawn_rates, interval95, stderr
from treeopt.records.expected import AdaptiveFigures, DynamicFigures
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace
from treeopt.trees.dynamic import MOST_ROWS, DynamicTree, pool_size
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray

Rivals = tuple[DynamicFigures | None, AdaptiveFigures | None]
Choice = tuple[Candidates, IntArray, int]  # settings with their noise, their places in the rates, and which was chosen
MOST_COMPARED = 64  # settings, the fastest by estimate, whose noise is looked at
ADAPTED = 3  # levels and topk, the fastest by estimate, that adaptive trees are made of
MOST_ADAPTED = 2**17  # states that they are judged on: the first conversations


def dynamic_rivals(
    source: Source,
    options: Sequence[Candidates],
    selections: Sequence[Selection],
    profile: LatencyProfile | None,
    costs: Mapping[int, StepCosts],
    limits: Limits,
    request: PlanRequest,
) -> list[Rivals]:
    """For each of the ``options`` the fastest dynamic and the fastest adaptive tree; None where nothing is known of any.

    Figures are compared with the fixed tree of the same place in ``selections``, on the same draws. For a mix it is one
    dynamic tree; of an engine's plan none is adaptive.
    """
    trace, wanted = source.pooled, request.dynamic
    nothing: list[Rivals] = [(None, None) for _ in options]
    if trace is None or trace.num_conversations < 2 or profile is None or not profile.dynamic or wanted is None:
        return nothing
    levels = min(wanted.levels, limits.max_depth or wanted.levels)
    rates = dynamic_rates(trace, replace(wanted, levels=levels, rows=min(wanted.rows, limits.budget)))
    if rates is None:
        return nothing
    rivalries = [
        Rivalry(
            trace, rates, c, selection.chosen, DynamicCosts.of(costs[c.batch_size], profile, redrafts=wanted.redrafts)
        )
        for c, selection in zip(options, selections, strict=True)
    ]
    found: list[DynamicFigures | None] = [r.figures(r.own) for r in rivalries]
    if request.mix:
        found = _together(rivalries, [request.mix[r.fixed.batch_size] for r in rivalries])
    if len(rivalries) > 1:
        found = [one and replace(one, elsewhere=_losses(rivalries, one.tree)) for one in found]
    alone = request.mix is not None or request.engine is not None
    return [(one, None if alone else r.adaptive(limits.budget)) for one, r in zip(found, rivalries, strict=True)]


def _together(rivalries: Sequence[Rivalry], shares: Sequence[float]) -> list[DynamicFigures | None]:
    """Of each batch size what the fastest dynamic tree over all of them reaches there, each for its share of the time."""
    total = np.sum([w / sum(shares) * r.throughput for w, r in zip(shares, rivalries, strict=True)], axis=0)
    known = np.flatnonzero(~np.isnan(total))
    if not len(known):
        return [None] * len(rivalries)
    known = known[np.argsort(-total[known], kind="stable")][:MOST_COMPARED]
    options = [r.candidates(known) for r in rivalries]
    chosen = select(options, [w / sum(shares) for w in shares]).chosen
    return [r.figures((c, known, chosen)) for r, c in zip(rivalries, options, strict=True)]


def _losses(rivalries: Sequence[Rivalry], tree: DynamicTree) -> dict[int, float]:
    """Batch size -> share of the throughput that a dynamic tree loses against that one's own, where its latency is known."""
    place = rivalries[0].rates.trees.index(tree)
    losses = {r.fixed.batch_size: r.loss(place) for r in rivalries}
    return {batch_size: loss for batch_size, loss in losses.items() if not np.isnan(loss)}


@dataclass(frozen=True, eq=False)
class Rivalry:
    """Dynamic trees beside the fixed tree that was chosen at a batch size: place ``chosen`` of ``fixed``."""

    trace: RankTrace
    rates: DynamicRates
    fixed: Candidates
    chosen: int
    costs: DynamicCosts

    @cached_property
    def throughput(self) -> Floats:
        """(n,) tokens per second of every setting, by estimate; NaN where its latency is not known."""
        found: Floats = 1e3 * self.fixed.batch_size * self.rates.tokens_per_step / self.costs.ms(self.rates.trees)
        return found

    @cached_property
    def known(self) -> IntArray:
        """Places of the fastest settings by estimate, the fastest first."""
        known = np.flatnonzero(~np.isnan(self.throughput))
        return known[np.argsort(-self.throughput[known], kind="stable")]

    @cached_property
    def own(self) -> Choice | None:
        """The fastest dynamic tree, or a smaller one that the noise does not tell from it."""
        if not len(known := self.known[:MOST_COMPARED]):
            return None
        c = self.candidates(known)
        return c, known, select([c], [1.0]).chosen

    def loss(self, place: int) -> float:
        """Share of the throughput that a setting loses against the fastest one and plain decoding."""
        assert self.fixed.plain_ms is not None
        plain = 1e3 * self.fixed.batch_size / self.fixed.plain_ms[0]
        own = float(self.throughput[self.own[1][self.own[2]]]) if self.own else 0.0
        return float(1 - self.throughput[place] / max(own, plain))

    def candidates(self, known: IntArray) -> Candidates:
        """Some of the settings, with their noise."""
        trees = [self.rates.trees[i] for i in known]
        return Candidates(
            self.fixed.batch_size,
            self.fixed.context,
            [],
            sizes=np.array([tree.rows for tree in trees]),
            depths=np.array([tree.levels for tree in trees]),
            rates=self.rates.tokens_per_step[known],
            rate_draws=self.rates.draws(known),
            ms=self.costs.ms(trees),
            ms_draws=self._ms_draws(trees),
        )

    def _figures(self, throughput: float, draws: Floats, ms_noise: Floats, n: int) -> dict[str, Any]:
        """What both kinds say, by tokens per second, (B,) of n drawn conversations, and the relative noise of latencies."""
        fixed, i = self.fixed, self.chosen
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

    def figures(self, choice: Choice | None) -> DynamicFigures | None:
        """What a setting that was chosen of some candidates reaches."""
        if choice is None:
            return None
        c, known, i = choice
        assert c.ms is not None
        assert c.ms_draws is not None
        tree, per_s = self.rates.trees[known[i]], 1e3 * c.batch_size / c.ms[i]
        return DynamicFigures(
            size=tree.rows,
            depth=tree.levels,
            topk=tree.topk,
            tokens_per_step=float(c.rates[i]),
            tokens_per_step_stderr=stderr(c.rate_draws[i], len(self.rates.tokens)),
            step_ms=float(c.ms[i]),
            **self._figures(
                float(c.rates[i] * per_s), c.rate_draws[i] * per_s, c.ms_draws[i] / c.ms[i], len(self.rates.tokens)
            ),
        )

    def _ms_draws(self, trees: Sequence[DynamicTree]) -> Floats:
        count = self.fixed.rate_draws.shape[1]
        return self.costs.draws_ms(trees, count, np.random.default_rng([SEED, self.fixed.batch_size]))

    def adaptive(self, budget: int) -> AdaptiveFigures | None:
        """The fastest adaptive tree of those rows that were timed, judged on answers that its rule was not fitted to."""
        best: AdaptiveFigures | None = None
        sizes = sorted(n for n in self.costs.timed if n <= budget)
        trees = (self.rates.trees[i] for i in self.known)
        pairs = dict.fromkeys((tree.levels, tree.topk) for tree in trees if tree.topk > 1)
        for levels, topk in list(pairs)[:ADAPTED]:
            most = min(pool_size(levels, topk) + 1, MOST_ROWS)
            rows = [
                n for n in sizes if levels < n <= most and not np.isnan(self.costs.ms([DynamicTree(levels, topk, n)]))
            ]
            if len(rows) > 1:
                found = self._adaptive(levels, topk, rows)
                best = found if best is None or found.rate > best.rate else best
        return best

    def _adaptive(self, levels: int, topk: int, rows: list[int]) -> AdaptiveFigures:
        trace, b = self._some, self.fixed.batch_size
        trees = [DynamicTree(levels, topk, n) for n in rows]
        cost_ms = self.costs.adaptive_ms(trees)
        taken = np.zeros((4, trace.num_conversations))  # of every conversation, by the rule of the others
        for train, judged in folds(trace):
            rule = fit_rule(trace.select(train), rows, levels, topk, cost_ms, batch_size=b)
            found = rule.walk(trace.select(judged), batch_size=b)
            taken[:, np.unique(trace.clusters[judged])] = found.tokens, found.steps, found.ms, found.rows
        tokens, steps, ms, verified = taken
        rule = fit_rule(trace, rows, levels, topk, cost_ms, batch_size=b)
        weights = conversation_draws(len(tokens), count=self.fixed.rate_draws.shape[1])
        drawn = 1e3 * drawn_rates(tokens, ms, weights)
        middle = trees[len(trees) // 2 :][:1]
        noise = self._ms_draws(middle)[0] / self.costs.ms(middle)[0]
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
            **self._figures(float(1e3 * tokens.sum() / ms.sum()), drawn, noise, len(tokens)),
        )

    @cached_property
    def _some(self) -> RankTrace:
        """Whole conversations with at most `MOST_ADAPTED` states, or the first one."""
        order = np.argsort(self.trace.clusters, kind="stable")
        states = np.cumsum(self.trace.lengths[order])
        if states[-1] <= MOST_ADAPTED:
            return self.trace
        last = self.trace.clusters[order[np.searchsorted(states, MOST_ADAPTED)]]
        return self.trace.select(np.flatnonzero(self.trace.clusters < max(last, 2)))
