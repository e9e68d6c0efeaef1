"""Candidates for the draft of a batch size: fixed trees, chains and dynamic trees in one table.

throughput = batch_size x tokens per step / step latency. Tokens per step come from a sample of conversations,
latencies from a sample of rounds: both are drawn again, the same draws for all candidates.

grown    the best fixed tree of every size under every depth limit, judged on answers that it was not grown on
chain    the likeliest guess of each head: fixed beforehand, so that its replay is held-out
dynamic  three numbers, fixed beforehand too, as those of a ddtree are; of very many those that are fastest by estimate
         are in the table

n candidates · C conversations · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.heldout import HeldOut
from treeopt.growth.rates import Rates, drawn
from treeopt.growth.replay import dynamic_rates, marginal_rates
from treeopt.growth.source import Source
from treeopt.latency.costs import StepCosts
from treeopt.planning.request import PlanRequest
from treeopt.records.bootstrap import BOOTSTRAPS, SEED
from treeopt.trees.draft import Draft
from treeopt.trees.shapes import GROWN, SHAPES, Limits
from treeopt.trees.tree import FIXED, BoolArray, Cost, IntArray, Tree

ROUNDING = 1e-9  # of a latency without noise, one that was computed
PASSES = 4096  # random ones, whose mean rows say what a pass of a batch verifies
MOST_ANEW = 64  # dynamic trees, or those over marginals, the fastest by estimate, that are in the table
UNTIMED = "No profile was used, so this is the largest tree of the budget. What a step costs was not considered."

Floats = NDArray[np.float64]
AS_IT_COMES = "as it comes"  # group of plain decoding by an engine with nothing forced, beside an exact one
IDLE = "idle"  # group of a step by an engine that has a drafter and guesses nothing, as a schedule may ask of it
Key = tuple[str, Cost]  # group of a fixed tree, or name of a draft that is built anew; what its step costs
ROOT = Cost(FIXED, 1, 0)
NOTHING = Rates()


@dataclass(frozen=True, eq=False)
class Candidate:
    """A draft that can be chosen: its group, size and depth, and of a grown tree its family, else what it reaches.

    anew       : a draft that is built anew at every step; None for a fixed tree
    row_counts : (N+1,) how many of its steps verified 0, 1, ... rows; None where each verifies all that it may
    replay_us  : processor time of a step of the replay [µs]
    """

    group: str
    size: int
    depth: int
    held_out: HeldOut | None = None
    reached: Rates = NOTHING
    anew: Draft | None = None
    row_counts: IntArray | None = None
    replay_us: float | None = None

    @property
    def cost(self) -> Cost:
        return self.anew.cost if self.anew else Cost(FIXED, self.size, self.depth)

    @property
    def key(self) -> Key:
        """What tells it from the others at every batch size."""
        return self.anew.name if self.anew else self.group, self.cost

    @cached_property
    def draft(self) -> Draft:
        if self.held_out is not None:
            return self.held_out.grown.tree(self.size)
        return self.anew or Tree.chain(self.depth)

    @cached_property
    def rates(self) -> Rates:
        return self.held_out.rates(self.size) if self.held_out else self.reached

    @property
    def rows_per_step(self) -> float | None:
        """Rows verified on average; None where each step verifies all that it may."""
        counts = self.row_counts
        return None if counts is None else float(counts @ np.arange(len(counts)) / max(counts.sum(), 1))

    def passes(self, batch_size: int) -> dict[Cost, float]:
        """What its passes cost, with the share of them that costs so."""
        if self.row_counts is None:
            return {self.cost: 1.0}
        shares = row_shares(
            self.row_counts if self.row_counts.any() else np.array([0, 1]), batch_size
        )  # no step is plain
        return {self.cost._replace(rows=n): float(shares[n]) for n in np.flatnonzero(shares).tolist()}

    @property
    def conversations(self) -> int:
        """How many there are to draw again; 0 where nothing can be replayed."""
        return 0 if self.rates.tokens is None else len(self.rates.tokens)


@dataclass(frozen=True, eq=False)
class Candidates:
    """All that can be chosen at one batch size.

    context  : tokens that sequences have; None without latencies
    rates    : (n,) held-out tokens per step, rate_draws (n, B)
    ms       : (n,) latency of a step, ms_draws (n, B); without latencies all the same
    timed    : (n,) whether as many rows were timed, and are not between two
    is_sure  : whether the errors of latencies are known
    warnings : what the latencies do not tell
    """

    batch_size: int
    context: int | None
    all: Sequence[Candidate]
    rates: Floats
    rate_draws: Floats
    ms: Floats
    ms_draws: Floats
    timed: BoolArray
    is_sure: bool = True
    warnings: tuple[str, ...] = ()

    @cached_property
    def sizes(self) -> IntArray:
        return np.array([candidate.size for candidate in self.all], dtype=np.int64)

    @cached_property
    def groups(self) -> NDArray[np.str_]:
        return np.array([candidate.group for candidate in self.all])

    @cached_property
    def anew(self) -> BoolArray:
        return np.array([candidate.anew is not None for candidate in self.all])

    @cached_property
    def places(self) -> dict[Key, int]:
        return {candidate.key: i for i, candidate in enumerate(self.all)}

    @cached_property
    def plain(self) -> int:
        """Where the lone root is; of an exact engine and the same one as it comes the faster one's."""
        roots = np.flatnonzero((self.sizes == self.sizes.min()) & (self.groups != IDLE))
        return int(roots[self.throughput[roots].argmax()])

    @cached_property
    def idle(self) -> int | None:
        """Where the lone root of an engine that has a drafter is; None where that costs what plain decoding does."""
        return self.places.get((IDLE, ROOT))

    @cached_property
    def ms_stderr(self) -> Floats:
        spread = self.ms_draws.std(axis=1)
        return np.asarray(np.where(spread > ROUNDING * self.ms, spread, 0.0))

    @cached_property
    def is_noisy(self) -> bool:
        """Whether anything is known of how uncertain throughputs are."""
        return self.all[0].rates.steps is not None or bool(self.ms_stderr.any())

    @cached_property
    def throughput(self) -> Floats:
        """(n,) tokens per second; tokens per step where no latency is known."""
        return np.asarray(1e3 * self.batch_size * self.rates / self.ms)

    @cached_property
    def throughput_draws(self) -> Floats:
        """(n, B) tokens per second, or per step, with other conversations and rounds."""
        return np.asarray(1e3 * self.batch_size * self.rate_draws / self.ms_draws)

    def only(self, which: IntArray) -> Candidates:
        names = ("rates", "rate_draws", "ms", "ms_draws", "timed")
        return replace(self, all=[self.all[i] for i in which], **{name: getattr(self, name)[which] for name in names})

    def without(self, i: int) -> Candidates:
        return self.only(np.delete(np.arange(len(self.all)), i))

    def best_of(self, *groups: str) -> int | None:
        """The fastest of some groups by estimate, more than a lone root; None where there is none."""
        among = np.flatnonzero(np.isin(self.groups, groups) & (self.sizes > 1))
        return int(among[self.throughput[among].argmax()]) if len(among) else None


def tables_of(source: Source, limits: Limits, request: PlanRequest, costs: Mapping[int, StepCosts]) -> list[Candidates]:
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


def unpriced(batch_size: int, found: Sequence[Candidate], rates: Floats, draws: Floats) -> Candidates:
    """A table without latencies, of (n,) tokens per step and (n, B) draws of them."""
    ms = np.full(len(found), 1e3 * batch_size)
    count = draws.shape[1] if draws.shape[1] > 1 else BOOTSTRAPS
    ms_draws = np.broadcast_to(ms[:, None], (len(found), count))
    return Candidates(
        batch_size, None, found, rates, draws, ms, ms_draws, np.ones(len(found), bool), warnings=(UNTIMED,)
    )


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


def row_shares(counts: IntArray, batch_size: int) -> Floats:
    """(N+2,) share of the passes that verify 0, 1, ... rows a sequence, where (N+1,) steps of a sequence do.

    Engines put the rows of a batch into one pass, so their mean counts; one between two numbers is split between these.
    """
    means, shares = np.arange(len(counts), dtype=float), counts / counts.sum()
    if batch_size > 1:
        drawn_rows = np.random.default_rng(SEED).choice(len(counts), (PASSES, batch_size), p=shares)
        means, shares = drawn_rows.mean(axis=1), np.full(PASSES, 1 / PASSES)
    low, found = means.astype(int), np.zeros(len(counts) + 1)
    np.add.at(found, low, shares * (1 - means + low))
    np.add.at(found, low + 1, shares * (means - low))
    return found


def mean_ms(candidates: Sequence[Candidate], costs: StepCosts) -> Floats:
    """(n,) latency of a step on average [ms]; NaN where some of its passes were not timed."""
    passes = [candidate.passes(costs.batch_size) for candidate in candidates]
    each = list(dict.fromkeys(cost for some in passes for cost in some))
    ms = dict(zip(each, costs.ms(each).tolist(), strict=True))
    return np.array([sum(share * ms[cost] for cost, share in some.items()) for some in passes])


def priced(table: Candidates, costs: StepCosts) -> Candidates:
    """The candidates whose latency is known, with it: errors that their steps share are the same in each draw."""
    known = np.flatnonzero(~np.isnan(mean_ms(table.all, costs)))
    c, rng = table.only(known), np.random.default_rng([SEED, costs.batch_size])
    passes = [candidate.passes(costs.batch_size) for candidate in c.all]
    each = list(dict.fromkeys(cost for some in passes for cost in some))
    count = table.rate_draws.shape[1] if table.rate_draws.shape[1] > 1 else BOOTSTRAPS
    places, draws, timed = (
        {cost: i for i, cost in enumerate(each)},
        costs.draws_ms(each, count, rng),
        costs.was_timed(each),
    )
    which = [[places[cost] for cost in some] for some in passes]
    ms, ms_draws = mean_ms(c.all, costs), np.empty((len(known), count))
    for i, some in enumerate(passes):
        ms_draws[i] = np.array(list(some.values())) @ draws[which[i]]
    if costs.twin:
        alone = np.isin(c.groups, (AS_IT_COMES, IDLE))
        ms[alone], ms_draws[alone] = costs.twin.ms, costs.twin.draws_ms(count, rng)
    were_timed = np.array([timed[some].all() for some in which])
    context = costs.context_tokens
    return replace(c, context=context, is_sure=costs.is_sure, ms=ms, ms_draws=ms_draws, timed=were_timed)


def _priced_trees(table: Candidates, costs: StepCosts, deepest: int, request: PlanRequest) -> Candidates:
    """The same with what the profile does not tell; OutOfRange where nothing that could be chosen was timed but a plain step."""
    c = priced(table, costs)
    wanted, found = (set(some.sizes[some.groups == "grown"].tolist()) for some in (table, c))
    if found == {1} != wanted:
        some = ", ".join(map(str, sorted(wanted - {1})[:4]))
        raise OutOfRange(
            "The profile must have timed some of the trees that can be planned, but at batch size "
            f"{costs.batch_size} it has none: time sizes {some}."
        )
    c = replace(c, warnings=_warnings(costs, request, sorted(wanted - found), max(wanted), deepest))
    return c.only(np.flatnonzero(c.timed)) if request.measured_only else c


def _warnings(costs: StepCosts, request: PlanRequest, untimed: list[int], most: int, deepest: int) -> tuple[str, ...]:
    """What a profile does not tell: sizes and depths that it does not cover, the context that is wanted."""
    largest, timed_depth = costs.reach
    gaps = [size for size in untimed if size <= largest]
    some = ", ".join(map(str, gaps[:8])) + " ..." * (len(gaps) > 8)
    here, context, budget = costs.context_tokens, request.context, request.limits.budget
    twin, name = costs.twin, costs.profile.runtime.get("name")
    price, error = (twin.ms / costs.plain.ms, 1.96 * twin.stderr_ms / costs.plain.ms) if twin else (1.0, 0.0)
    said = {
        f"With nothing forced the engine decodes plainly {1 / price:.2f} times as fast as when it is told to be exact. To plan "
        f"for that: treeopt profile --engine {name}-default, in another run.": price < 1 and not costs.is_idle,
        f"Where {name} has a drafter and guesses nothing, as a schedule does at length 0, a step takes {price:.2f} "
        f"[{price - error:.2f}, {price + error:.2f}] of one without a drafter.": bool(twin and costs.is_idle),
        "Steps with some trees are faster than plain ones, beyond what noise explains, and are taken to be.": costs.is_faster,
        f"The profile has no latency for trees of {some} rows, so they were left out.": bool(gaps),
        f"The profile has no context of {context} tokens. The nearest measured one was taken: {here}.": context
        not in (None, here),
        f"The profile covers sizes up to {largest}, so larger trees were left out, although the budget is {budget:,}: time "
        "larger sizes to have them considered.": largest < most,
        f"The profile covers depths up to {timed_depth}, so deeper trees (to {deepest}) were left out.": timed_depth
        < deepest,
    }
    return tuple(warning for warning, is_so in said.items() if is_so)


def common(options: list[Candidates]) -> list[Candidates]:
    """The candidates that every batch size has, in the same order."""
    shared = set(options[0].places).intersection(*(c.places for c in options[1:]))
    keys = [key for key in options[0].places if key in shared]
    return [c.only(np.array([c.places[key] for key in keys])) for c in options]


def mixed(options: list[Candidates], shares: Sequence[float]) -> Candidates:
    """The table of a mix: throughputs are those of the batch sizes together, each for its share of the time."""
    first = options[0]
    total, draws = (
        np.sum([share * getattr(c, name) for share, c in zip(shares, options, strict=True)], axis=0)
        for name in ("throughput", "throughput_draws")
    )
    timed, tokens = np.all([c.timed for c in options], axis=0), 1e3 * first.batch_size
    ms, ms_draws = tokens * first.rates / total, tokens * first.rate_draws / draws
    return replace(first, ms=ms, ms_draws=ms_draws, timed=timed, is_sure=all(c.is_sure for c in options))
