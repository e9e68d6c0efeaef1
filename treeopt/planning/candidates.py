"""Which drafts can be chosen: fixed trees, chains, dynamic trees, trees over marginals and copied text, in tables of one form.

grown    the best fixed tree of every size under every depth limit, judged on answers that it was not grown on
chain    the likeliest guess of each head: fixed beforehand, so that its replay is held-out
dynamic  three numbers, fixed beforehand too, as those of a ddtree are; of very many those that are fastest by estimate
         are in the table
copied   settings of one drafter that copies text, sought on other conversations, beside plain decoding

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
from treeopt.planning.table import AS_IT_COMES, CHAIN, GROWN, IDLE, UNTIMED, Candidate, Table, priced, unpriced
from treeopt.trees.draft import Draft, TreeSize
from treeopt.trees.shapes import GROWN as GROWN_SHAPES
from treeopt.trees.shapes import SHAPES, Limits
from treeopt.trees.tree import Tree

MOST_ANEW = 64  # dynamic trees, or those over marginals, the fastest by estimate, that are in the table


def tree_tables(
    source: Source,
    limits: Limits,
    request: PlanRequest,
    costs: Mapping[int, StepCosts],
    *,
    served: Sequence[Candidate] = (),
) -> list[Table]:
    """The trees that can be chosen at each batch size; without latencies every size of the deepest ones, and chains.

    limits : with the deepest that the source can judge
    costs  : batch size to what steps cost; empty without a profile
    served : drafts that are compared with these, and stand behind them
    """
    deepest, candidates = limits.max_depth or 0, list[Candidate]()
    for depth in range(1 if costs else deepest, deepest + 1):  # each tree is seen under its own limit
        held_out = source.crossfit(replace(limits, max_depth=depth))
        candidates += _grown(held_out, depth if costs else None, request.takes)
    longest = 0 if limits.shape == "chain" else min(deepest, limits.budget - 1)
    chains = source.nested_rates(Tree.chain(longest).paths, np.arange(2, longest + 2))
    candidates += [Candidate(CHAIN, Tree.chain(depth), rates) for depth, rates in enumerate(chains, 1)]
    candidates = [replace(candidate, row_counts=source.row_counts(candidate.size)) for candidate in candidates]
    if request.dynamic is not None and any(cost.profile.anew for cost in costs.values()):
        levels, rows = min(request.dynamic.levels, deepest), min(request.dynamic.rows, limits.budget)
        within = replace(request.dynamic, levels=levels, rows=rows)
        if source.pooled is not None:
            candidates += _anew([*dynamic_rates(source.pooled, within).items()], costs)
        if source.pooled is not None and within.marginals:
            trees = marginal_rates(source.pooled, depth=deepest, rows=rows).items()
            candidates += _anew([(tree, rates) for tree, rates in trees if tree.ranks <= within.width], costs)
    if request.lengths:
        candidates = [candidate for candidate in candidates if candidate.depth in (0, *request.lengths)]
    twins = {IDLE if cost.is_idle else AS_IT_COMES for cost in costs.values() if cost.twin}
    candidates += [replace(candidates[0], group=group) for group in sorted(twins)]
    return tables_of([*candidates, *served], request, costs, deepest=deepest)


def text_tables(settings: Sequence[Candidate], request: PlanRequest, costs: Mapping[int, StepCosts]) -> list[Table]:
    """Plain decoding at each batch size, and those settings of one drafter that copies text whose latency is known."""
    tokens = settings[0].rates.tokens
    plain = Candidate(GROWN, Tree.chain(0), Rates(tokens, tokens), accepted=np.array([1]))
    return tables_of([plain, *settings], request, costs)


def tables_of(
    candidates: Sequence[Candidate], request: PlanRequest, costs: Mapping[int, StepCosts], *, deepest: int = 0
) -> list[Table]:
    """A table of the candidates for each batch size.

    deepest : of the trees that could be chosen, where a depth has its price
    """
    rates = np.array([candidate.rates.tokens_per_step for candidate in candidates])
    draws = drawn([candidate.rates for candidate in candidates])
    tables = [unpriced(batch_size, candidates, rates, draws) for batch_size in request.sizes]
    if costs:
        return [_priced(table, costs[table.batch_size], request, deepest) for table in tables]
    has_trees = any(candidate.group == GROWN and candidate.size > 1 for candidate in candidates)
    warning = UNTIMED.format("the largest tree of the budget" if has_trees else "what emits the most tokens per step")
    return [replace(table, warnings=(warning,)) for table in tables]


def _grown(held_out: HeldOut, only_depth: int | None, takes: str) -> list[Candidate]:
    """The grown trees of the shape that is taken; of those grown under a depth limit only the ones that are as deep."""
    candidates = [
        Candidate(GROWN, TreeSize(size, depth), held_out.rates(size), held_out)
        for size, depth in enumerate(held_out.grown.depths().tolist(), 1)
        if only_depth is None or max(depth, 1) == only_depth
    ]
    if takes in GROWN_SHAPES:
        return candidates
    return [candidate for candidate in candidates if SHAPES[takes](held_out.grown.tree(candidate.size))]


def _anew(trees: Sequence[tuple[Draft, Rates]], costs: Mapping[int, StepCosts]) -> list[Candidate]:
    """The trees that are fastest by estimate at some batch size, of such as are built anew at every step."""
    if not trees:
        return []
    steps, fastest = [tree.cost for tree, _ in trees], set[int]()
    tokens_per_step = np.array([rates.tokens_per_step for _, rates in trees])
    for cost in costs.values():
        throughput = tokens_per_step / cost.ms(steps)
        best = np.argsort(-throughput, kind="stable")[:MOST_ANEW]
        fastest.update(best[~np.isnan(throughput[best])].tolist())
    return [Candidate(tree.kind, tree, rates) for i, (tree, rates) in enumerate(trees) if i in fastest]


def _priced(table: Table, costs: StepCosts, request: PlanRequest, deepest: int) -> Table:
    """The table with latencies and with what the profile does not tell.

    Raises OutOfRange where trees can be planned, but none was timed.
    """
    timed = priced(table, costs)
    wanted, known = (set(some.sizes[some.groups == GROWN].tolist()) for some in (table, timed))
    if known == {1} != wanted:
        sizes = ", ".join(map(str, sorted(wanted - {1})[:4]))
        raise OutOfRange(
            "The profile must have timed some of the trees that can be planned, but at batch size "
            f"{costs.batch_size} it has none: time sizes {sizes}."
        )
    most = max(candidate.size for candidate in table.candidates if candidate.size == 1 or candidate not in timed.places)
    gaps = _gap_warnings(costs, request, sorted(wanted - known), most, deepest)
    timed = replace(timed, warnings=(*_engine_warnings(costs), *gaps))
    return timed.only(np.flatnonzero(timed.timed)) if request.measured_only else timed


def _engine_warnings(costs: StepCosts) -> Iterator[str]:
    """What the timed engine does beside decoding with guesses, and steps that were timed below a plain one."""
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
    elif rows := costs.raised_rows:
        yield (
            f"Steps of {', '.join(map(str, rows))} rows were timed below a plain step, which is noise: they are taken to be as "
            "long as a plain one."
        )


def _gap_warnings(
    costs: StepCosts, request: PlanRequest, untimed: Sequence[int], most: int, deepest: int
) -> Iterator[str]:
    """Sizes, depths and the context that the profile does not cover.

    untimed : sizes of trees without a latency, ascending · most : rows of a draft without one, 1 where all have one
    deepest : of the trees that could be chosen
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
            f"The profile covers sizes up to {largest}, so larger drafts were left out, although the budget is "
            f"{request.limits.budget:,}: time larger sizes to have them considered."
        )
    if timed_depth < deepest:
        yield f"The profile covers depths up to {timed_depth}, so deeper trees (to {deepest}) were left out."
