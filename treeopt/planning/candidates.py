"""Candidates for the draft of a batch size: fixed trees, chains and dynamic trees in one table.

throughput = batch_size x tokens per step / step latency. Tokens per step come from a sample of conversations,
latencies from a sample of rounds: both are drawn again, the same draws for all candidates.

grown    the best fixed tree of every size under every depth limit, judged on answers that it was not grown on
chain    the likeliest guess of each head: fixed beforehand, so that its replay is held-out
dynamic  three numbers, fixed beforehand too; of very many those that are fastest by estimate are in the table

n candidates · C conversations · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.heldout import HeldOut
from treeopt.growth.replay import DynamicRates, dynamic_rates
from treeopt.growth.source import Source, objective_for
from treeopt.latency.dynamic import DynamicCosts
from treeopt.latency.estimate import StepCosts
from treeopt.planning.request import PlanRequest
from treeopt.records.bootstrap import BOOTSTRAPS, SEED, conversation_draws, drawn_rates
from treeopt.records.profile import LatencyProfile
from treeopt.trees.draft import Draft
from treeopt.trees.dynamic import DynamicTree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray, Tree

ROUNDING = 1e-9  # of a latency without noise, one that was computed
MOST_DYNAMIC = 64  # dynamic trees, the fastest by estimate, that are in the table

Floats = NDArray[np.float64]
Key = tuple[str, int, int, int]  # group of candidates, rows, depth, topk


@dataclass(frozen=True, eq=False)
class Candidate:
    """A draft that can be chosen: its group, size and depth, and how it is made.

    held_out      : of a grown tree the family that it comes from
    steps, tokens : (C,) of every conversation; None where nothing can be replayed
    """

    group: str
    size: int
    depth: int
    topk: int = 0
    held_out: HeldOut | None = None
    steps: IntArray | None = None
    tokens: IntArray | None = None

    @property
    def key(self) -> Key:
        """What tells it from the others at every batch size."""
        return self.group, self.size, self.depth, self.topk

    @cached_property
    def draft(self) -> Draft:
        """What is decoded with."""
        if self.held_out is not None:
            return self.held_out.family.tree(self.size)
        return DynamicTree(self.depth, self.topk, self.size) if self.topk else Tree.chain(self.depth)

    @property
    def conversations(self) -> int:
        """How many there are to draw again; 0 where nothing can be replayed."""
        return 0 if self.tokens is None else len(self.tokens)


@dataclass(frozen=True, eq=False)
class Candidates:
    """All that can be chosen at one batch size.

    rates : (n,) held-out tokens per step, rate_draws (n, B)
    ms    : (n,) latency of a step, ms_draws (n, B), ms_stderr (n,); plain_ms (1 + B,) of a plain step
            first the estimate. All None without a profile.
    """

    batch_size: int
    context: int | None
    all: Sequence[Candidate]
    rates: Floats
    rate_draws: Floats
    ms: Floats | None = None
    ms_draws: Floats | None = None
    ms_stderr: Floats | None = None
    plain_ms: Floats | None = None

    @cached_property
    def sizes(self) -> IntArray:
        """(n,) rows."""
        return np.array([candidate.size for candidate in self.all], dtype=np.int64)

    @cached_property
    def groups(self) -> NDArray[np.str_]:
        """(n,) the group of each."""
        return np.array([candidate.group for candidate in self.all])

    @cached_property
    def places(self) -> dict[Key, int]:
        """Where each candidate is."""
        return {candidate.key: i for i, candidate in enumerate(self.all)}

    @cached_property
    def throughput(self) -> Floats:
        """(n,) tokens per second; tokens per step where no latency is known."""
        return self.rates if self.ms is None else 1e3 * self.batch_size * self.rates / self.ms

    @cached_property
    def throughput_draws(self) -> Floats:
        """(n, B) tokens per second, or per step, with other conversations and rounds."""
        if self.ms_draws is None:
            return self.rate_draws
        found: Floats = 1e3 * self.batch_size * self.rate_draws / self.ms_draws
        return found

    def only(self, which: IntArray) -> Candidates:
        """The table of some of the candidates."""

        def part(values: Floats | None) -> Floats | None:
            return None if values is None else values[which]

        parts = {name: part(getattr(self, name)) for name in ("rates", "rate_draws", "ms", "ms_draws", "ms_stderr")}
        return replace(self, all=[self.all[i] for i in which], **parts)  # type: ignore[arg-type]

    def best_of(self, *groups: str) -> int | None:
        """The fastest of some groups by estimate, more than a lone root; None where there is none."""
        among = np.flatnonzero(np.isin(self.groups, groups) & (self.sizes > 1))
        return int(among[self.throughput[among].argmax()]) if len(among) else None


@dataclass(frozen=True, eq=False)
class DraftPool:
    """All drafts that are looked at, with their tokens per step, before any batch size.

    families : grown under the depth limits 1, 2, ...; without latencies under the deepest alone
    dynamic  : None where nothing is known of dynamic trees
    """

    families: list[HeldOut]
    chains: list[Candidate]
    chain_rates: Floats
    dynamic: DynamicRates | None = None

    @classmethod
    def of(cls, source: Source, limits: Limits, request: PlanRequest, profile: LatencyProfile | None) -> DraftPool:
        """The drafts within the limits of a request."""
        families = families_of(source, limits, request.objective, timed=profile is not None)
        longest = 0 if limits.shape == "chain" else min(limits.depth(source.num_heads), limits.budget - 1)
        found = source.chains(longest)
        chains = [Candidate("chain", d + 1, d, 0, None, r.steps, r.tokens) for d, r in enumerate(found, 1)]
        rates, dynamic = np.array([r.tokens_per_step for r in found]), None
        trace, wanted = source.pooled, request.dynamic
        if trace is not None and trace.num_conversations > 1 and profile and profile.dynamic and wanted:
            levels = min(wanted.levels, limits.max_depth or wanted.levels)
            rows = min(wanted.rows, limits.budget)
            dynamic = dynamic_rates(trace, replace(wanted, levels=levels, rows=rows, chains=False))
        return cls(families, chains, rates, dynamic)

    def fastest_dynamic(self, costs: Mapping[int, DynamicCosts]) -> IntArray:
        """Places of the dynamic trees that are fastest by estimate at some batch size, in their order."""
        if self.dynamic is None:
            return np.zeros(0, dtype=np.int64)
        found = []
        for cost in costs.values():
            throughput = self.dynamic.tokens_per_step / cost.ms(self.dynamic.trees)
            known = np.flatnonzero(~np.isnan(throughput))
            found.append(known[np.argsort(-throughput[known], kind="stable")][:MOST_DYNAMIC])
        return np.unique(np.concatenate(found))


def families_of(source: Source, limits: Limits, objective: str, *, timed: bool) -> list[HeldOut]:
    """The trees of depth limits 1, 2, ..., and what they reach on answers that they were not grown on.

    timed : whether there are latencies; without them the deepest limit is all that is looked at
    """
    objective, deepest = objective_for(source, objective), limits.depth(source.num_heads)
    depths = range(1 if timed else deepest, deepest + 1)
    return [source.crossfit(replace(limits, max_depth=depth), objective) for depth in depths]


def tables_of(
    drafts: DraftPool, batch_sizes: Sequence[int], costs: Mapping[int, StepCosts], request: PlanRequest
) -> list[Candidates]:
    """What can be chosen at each batch size; without latencies every size of the deepest family, and chains.

    costs : batch size to what steps cost; empty without a profile
    """
    if not costs:
        grown = _grown(drafts.families[-1], np.arange(len(drafts.families[-1].family.sizes)))
        return [_table(size, None, [grown, _chains(drafts)]) for size in batch_sizes]
    profile, redrafts = next(iter(costs.values())).profile, bool(request.dynamic and request.dynamic.redrafts)
    dynamic = {b: DynamicCosts.of(costs[b], profile, redrafts=redrafts) for b in batch_sizes} if drafts.dynamic else {}
    which = drafts.fastest_dynamic(dynamic)
    tables = [_priced(drafts, costs[b], dynamic.get(b), which) for b in batch_sizes]
    return [_timed(c, costs[c.batch_size]) for c in tables] if request.measured_only else tables


Part = tuple[list[Candidate], Floats, Floats]  # candidates with their rates (m,) and draws (m, B)


def _grown(held_out: HeldOut, rows: IntArray) -> Part:
    """Some trees of a family."""
    family, steps, tokens = held_out.family, held_out.steps, held_out.tokens
    depths = family.depths()
    every = None if steps is None or tokens is None else np.broadcast_to(tokens, steps.shape)
    found = [
        Candidate(
            "grown",
            int(family.sizes[i]),
            int(depths[i]),
            0,
            held_out,
            None if steps is None else steps[i],
            None if every is None else every[i],
        )
        for i in rows
    ]
    return found, held_out.tokens_per_step[rows], held_out.draws[rows]


def _chains(drafts: DraftPool, known: IntArray | None = None) -> Part:
    """All chains, or some of them."""
    which = np.arange(len(drafts.chains)) if known is None else known
    found, rates = [drafts.chains[i] for i in which], drafts.chain_rates[which]
    if found and found[0].steps is not None and found[0].tokens is not None:
        steps = np.stack([candidate.steps for candidate in found if candidate.steps is not None])
        return found, rates, drawn_rates(found[0].tokens, steps, conversation_draws(steps.shape[1]))
    width = drafts.families[-1].draws.shape[1]
    return found, rates, np.repeat(rates[:, None], width, axis=1)


def _dynamic(rates: DynamicRates, which: IntArray) -> Part:
    """Some of the dynamic trees."""
    found = [
        Candidate("dynamic", tree.rows, tree.levels, tree.topk, None, rates.steps[i], rates.tokens)
        for i, tree in ((i, rates.trees[i]) for i in which)
    ]
    return found, rates.tokens_per_step[which], rates.draws(which)


def _table(batch_size: int, context: int | None, parts: Sequence[Part]) -> Candidates:
    """A table without latencies."""
    some = [part for part in parts if part[0]]
    everything = [candidate for candidates, _, _ in some for candidate in candidates]
    rates, draws = (np.concatenate([part[i] for part in some]) for i in (1, 2))
    return Candidates(batch_size, context, everything, rates, draws)


def _priced(drafts: DraftPool, costs: StepCosts, dynamic: DynamicCosts | None, which: IntArray) -> Candidates:
    """The table of a batch size with latencies: every draft whose latency is known."""
    parts: list[Part] = []
    for max_depth, held_out in enumerate(drafts.families, 1):
        sizes, depths = held_out.family.sizes, held_out.family.depths()
        own = np.maximum(depths, 1) == max_depth  # a shallower tree was seen under its own limit
        parts.append(_grown(held_out, np.flatnonzero(own & ~np.isnan(costs.ms(sizes, depths)))))
    if sum(len(part[0]) for part in parts) == 1:
        _refuse_untimed(drafts.families, costs)
    lengths = np.arange(1, len(drafts.chains) + 1)
    parts.append(_chains(drafts, np.flatnonzero(~np.isnan(costs.ms(lengths + 1, lengths)))))
    n_fixed = sum(len(part[0]) for part in parts)
    trees: list[DynamicTree] = []
    if drafts.dynamic is not None and dynamic is not None:
        trees = [drafts.dynamic.trees[i] for i in which]
        known = ~np.isnan(dynamic.ms(trees))
        which, trees = which[known], [tree for tree, is_known in zip(trees, known, strict=True) if is_known]
        parts.append(_dynamic(drafts.dynamic, which))
    c = _table(costs.batch_size, costs.context_tokens, parts)
    count = c.rate_draws.shape[1] if c.rate_draws.shape[1] > 1 else BOOTSTRAPS
    fixed = c.sizes[:n_fixed], np.array([candidate.depth for candidate in c.all[:n_fixed]])
    ms, ms_draws = costs.ms(*fixed), costs.draws_ms(*fixed, count, np.random.default_rng([SEED, costs.batch_size]))
    if trees and dynamic is not None:
        ms = np.append(ms, dynamic.ms(trees))
        drawn = dynamic.draws_ms(trees, count, np.random.default_rng([SEED, costs.batch_size]))
        ms_draws = np.concatenate([ms_draws, drawn])
    spread, lone = ms_draws.std(axis=1), c.sizes.tolist().index(1)
    return replace(
        c,
        ms=ms,
        ms_draws=ms_draws,
        ms_stderr=np.where(spread > ROUNDING * ms, spread, 0.0),
        plain_ms=np.append(ms[lone], ms_draws[lone]),
    )


def _timed(c: Candidates, costs: StepCosts) -> Candidates:
    """The candidates with sizes and depths that were timed themselves, and plain decoding."""
    return c.only(np.flatnonzero(costs.is_timed(c.sizes, [one.depth for one in c.all]) | (c.sizes == 1)))


def _refuse_untimed(families: Sequence[HeldOut], costs: StepCosts) -> None:
    """Raise OutOfRange where the profile has timed nothing that could be chosen but a plain step."""
    known: list[Any] = sorted({int(n) for held_out in families for n in held_out.family.sizes if n > 1})
    if known:
        raise OutOfRange(
            f"The profile must have timed some of the trees that can be planned, but at batch size {costs.batch_size} "
            f"it has none: time sizes {', '.join(map(str, known[:4]))}."
        )


def common(options: list[Candidates]) -> list[Candidates]:
    """The candidates that every batch size has, in the same order."""
    shared = set(options[0].places).intersection(*(c.places for c in options[1:]))
    keys = [key for key in options[0].places if key in shared]
    return [c.only(np.array([c.places[key] for key in keys])) for c in options]
