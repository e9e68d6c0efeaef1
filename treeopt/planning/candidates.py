"""Which drafts can be chosen: fixed trees, chains, dynamic trees and trees over marginals, in one table for each batch size.

grown    the best fixed tree of every size under every depth limit, judged on answers that it was not grown on
chain    the likeliest guess of each head: fixed beforehand, so that its replay is held-out
dynamic  three numbers, fixed beforehand too, as those of a ddtree are; of very many those that are fastest by estimate
         are in the table

n candidates · B bootstrap draws
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.growth.heldout import HeldOut
from treeopt.growth.rates import Rates, drawn
from treeopt.growth.replay import dynamic_rates, marginal_rates
from treeopt.growth.source import Source
from treeopt.latency.costs import StepCosts
from treeopt.planning.request import PlanRequest
from treeopt.planning.table import AS_IT_COMES, IDLE, Candidate, Table, priced, unpriced
from treeopt.trees.draft import Draft
from treeopt.trees.shapes import GROWN, SHAPES, Limits
from treeopt.trees.tree import Tree

MOST_ANEW = 64  # dynamic trees, or those over marginals, the fastest by estimate, that are in the table


def tables_of(source: Source, limits: Limits, request: PlanRequest, costs: Mapping[int, StepCosts]) -> list[Table]:
    """What can be chosen at each batch size; without latencies every size of the deepest trees, and chains.

    limits : with the deepest that the source can judge
    costs  : batch size to what steps cost; empty without a profile
    """
    deepest, found = limits.max_depth or 0, list[Candidate]()
    for depth in range(1 if costs else deepest, deepest + 1):  # each tree is seen under its own limit
        held_out = source.crossfit(replace(limits, max_depth=depth))
        found += _grown(held_out, depth if costs else None, request.takes)
    longest = 0 if limits.shape == "chain" else min(deepest, limits.budget - 1)
    chains = source.nested_rates(Tree.chain(longest).paths, np.arange(2, longest + 2))
    found += [Candidate("chain", d + 1, d, None, rates) for d, rates in enumerate(chains, 1)]
    if request.dynamic is not None and any(cost.profile.anew for cost in costs.values()):
        levels, rows = min(request.dynamic.levels, deepest), min(request.dynamic.rows, limits.budget)
        within = replace(request.dynamic, levels=levels, rows=rows, chains=False)
        if source.pooled is not None:
            found += _anew([*dynamic_rates(source.pooled, within).items()], costs)
        if source.pooled is not None and within.marginals:
            trees = marginal_rates(source.pooled, depth=deepest, rows=rows).items()
            found += _anew([one for one in trees if one[0].ranks <= within.width], costs)
    if request.whole_blocks:
        found = [one for one in found if one.size == 1 or one.depth == source.num_heads]
    twins = {IDLE if cost.is_idle else AS_IT_COMES for cost in costs.values() if cost.twin}
    found += [replace(found[0], group=group) for group in sorted(twins)]
    rates, draws = np.array([one.rates.tokens_per_step for one in found]), drawn([one.rates for one in found])
    tables = []
    for batch_size in request.sizes:
        table = unpriced(batch_size, found, rates, draws)
        tables.append(_priced_trees(table, costs[batch_size], deepest, request) if costs else table)
    return tables


def _grown(held_out: HeldOut, own: int | None, takes: str) -> list[Candidate]:
    """The grown trees that have the shape which is taken; of those grown under a depth limit that are as deep."""
    found = [
        Candidate("grown", size, depth, held_out)
        for size, depth in enumerate(held_out.grown.depths().tolist(), 1)
        if own is None or max(depth, 1) == own
    ]
    if takes in GROWN:
        return found
    return [candidate for candidate in found if SHAPES[takes](held_out.grown.tree(candidate.size))]


def _anew(trees: Sequence[tuple[Draft, Rates]], costs: Mapping[int, StepCosts]) -> list[Candidate]:
    """The trees that are fastest by estimate at some batch size, of such as are built anew at every step."""
    if not trees:
        return []
    steps, which = [tree.cost for tree, _ in trees], set[int]()
    tokens_per_step = np.array([one.tokens_per_step for _, one in trees])
    for cost in costs.values():
        throughput = tokens_per_step / cost.ms(steps)
        best = np.argsort(-throughput, kind="stable")[:MOST_ANEW]
        which.update(best[~np.isnan(throughput[best])].tolist())
    taken = [one for i, one in enumerate(trees) if i in which]
    return [Candidate(tree.kind, tree.rows, tree.depth, None, reached, tree) for tree, reached in taken]


def _priced_trees(table: Table, costs: StepCosts, deepest: int, request: PlanRequest) -> Table:
    """The table with latencies and with what the profile does not tell.

    Raises OutOfRange where nothing that could be chosen was timed but a plain step.
    """
    timed = priced(table, costs)
    wanted, known = (set(some.sizes[some.groups == "grown"].tolist()) for some in (table, timed))
    if known == {1} != wanted:
        sizes = ", ".join(map(str, sorted(wanted - {1})[:4]))
        raise OutOfRange(
            "The profile must have timed some of the trees that can be planned, but at batch size "
            f"{costs.batch_size} it has none: time sizes {sizes}."
        )
    warnings = _engine_warnings(costs), _gap_warnings(costs, request, sorted(wanted - known), max(wanted), deepest)
    timed = replace(timed, warnings=tuple(warning for some in warnings for warning in some))
    return timed.only(np.flatnonzero(timed.timed)) if request.measured_only else timed


def _engine_warnings(costs: StepCosts) -> Iterator[str]:
    """What the timed engine does beside decoding with guesses."""
    name = costs.profile.runtime.get("name")
    if costs.twin:
        price, error = costs.twin.ms / costs.plain.ms, 1.96 * costs.twin.stderr_ms / costs.plain.ms
        if costs.is_idle:
            yield (
                f"Where {name} has a drafter and guesses nothing, as a schedule does at length 0, a step takes {price:.2f} "
                f"[{price - error:.2f}, {price + error:.2f}] of one without a drafter."
            )
        elif price < 1:
            yield (
                f"With nothing forced the engine decodes plainly {1 / price:.2f} times as fast as when it is told to be exact. "
                f"To plan for that: treeopt profile --engine {name}-default, in another run."
            )
    if costs.is_faster:
        yield "Steps with some trees are faster than plain ones, beyond what noise explains, and are taken to be."


def _gap_warnings(
    costs: StepCosts, request: PlanRequest, untimed: Sequence[int], most: int, deepest: int
) -> Iterator[str]:
    """Sizes, depths and the context that the profile does not cover.

    untimed : sizes without a latency, ascending · most, deepest : of the trees that could be chosen
    """
    largest, timed_depth = costs.reach
    if gaps := [size for size in untimed if size <= largest]:
        sizes = ", ".join(map(str, gaps[:8])) + (" ..." if len(gaps) > 8 else "")
        yield f"The profile has no latency for trees of {sizes} rows, so they were left out."
    if request.context not in (None, costs.context_tokens):
        yield (
            f"The profile has no context of {request.context} tokens. The nearest measured one was taken: "
            f"{costs.context_tokens}."
        )
    if largest < most:
        yield (
            f"The profile covers sizes up to {largest}, so larger trees were left out, although the budget is "
            f"{request.limits.budget:,}: time larger sizes to have them considered."
        )
    if timed_depth < deepest:
        yield f"The profile covers depths up to {timed_depth}, so deeper trees (to {deepest}) were left out."
