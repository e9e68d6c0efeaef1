"""Choose the fastest dynamic tree for each batch size, beside the fixed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from treeopt.growth.dynamic import DynamicRates, dynamic_rates
from treeopt.growth.source import Source
from treeopt.latency.dynamic import DynamicCosts
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates
from treeopt.planning.select import Selection, select
from treeopt.records.bootstrap import SEED, interval95, stderr
from treeopt.records.expected import DynamicFigures
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits


def best_dynamic(
    source: Source,
    options: Sequence[Candidates],
    selections: Sequence[Selection],
    profile: LatencyProfile,
    costs: Mapping[int, StepCosts],
    limits: Limits,
) -> list[DynamicFigures | None]:
    """For each of the ``options`` the fastest dynamic tree within the budget; None where nothing is known of any.

    Figures are compared with the fixed tree of the same place in ``selections``, on the same draws.
    """
    record = source.answers
    if not isinstance(record, RankTrace) or record.pools is None or not profile.dynamic or record.clusters.max() < 1:
        return [None] * len(options)
    rates = dynamic_rates(record, budget=limits.budget)
    if rates is None:
        return [None] * len(options)
    return [
        _figures(rates, c, selection.chosen, DynamicCosts.of(costs[c.batch_size], profile))
        for c, selection in zip(options, selections, strict=True)
    ]


def _figures(rates: DynamicRates, fixed: Candidates, chosen: int, costs: DynamicCosts) -> DynamicFigures | None:
    """The fastest dynamic tree beside a chosen fixed one."""
    assert fixed.ms is not None
    assert fixed.ms_draws is not None
    assert fixed.plain_ms is not None
    ms = costs.ms(rates.trees)
    known = np.flatnonzero(~np.isnan(ms))
    if not len(known):
        return None
    known = known[np.argsort(-rates.tokens_per_step[known] / ms[known])[:MOST_COMPARED]]
    trees, draws = [rates.trees[i] for i in known], rates.draws(known)
    rng = np.random.default_rng([SEED, fixed.batch_size])
    ms_draws = costs.draws_ms(trees, draws.shape[1], rng)
    c = Candidates(
        fixed.batch_size,
        fixed.context,
        [],
        sizes=np.array([tree.rows for tree in trees]),
        depths=np.array([tree.levels for tree in trees]),
        rates=rates.tokens_per_step[known],
        rate_draws=draws,
        ms=ms[known],
        ms_draws=ms_draws,
    )
    i, n = select([c], [1.0]).chosen, len(rates.tokens)
    tree, speedups = trees[i], draws[i] * fixed.plain_ms[1:] / ms_draws[i]
    over = c.throughput_draws[i] / fixed.throughput_draws[chosen]
    return DynamicFigures(
        size=tree.rows,
        depth=tree.levels,
        topk=tree.topk,
        tokens_per_step=float(c.rates[i]),
        tokens_per_step_stderr=stderr(draws[i], n),
        step_ms=float(ms[known][i]),
        tokens_per_s=float(c.throughput[i]),
        speedup=float(c.rates[i] * fixed.plain_ms[0] / ms[known][i]),
        speedup_stderr=stderr(speedups, n),
        over_fixed=float(c.throughput[i] / fixed.throughput[chosen]),
        over_fixed95=interval95(over, n),
    )


MOST_COMPARED = 64  # settings, the fastest by estimate, whose noise is looked at
