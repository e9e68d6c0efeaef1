"""A table: drafts that can be chosen at one batch size, with tokens per step, milliseconds per step, and draws of both.

throughput = batch_size x tokens per step / step latency. Tokens per step come from a sample of conversations, latencies from a
sample of rounds: both are drawn again, the same draws for all candidates.

n candidates · C conversations · B bootstrap draws · N rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.heldout import HeldOut
from treeopt.growth.rates import Rates
from treeopt.latency.costs import StepCosts
from treeopt.records.bootstrap import BOOTSTRAPS, SEED
from treeopt.trees.draft import Draft
from treeopt.trees.tree import BoolArray, Cost, IntArray

ROUNDING = 1e-9  # relative error of a latency that was computed, not timed
PASSES = 4096  # batches that are drawn at random to find how many rows a pass verifies
UNTIMED = "No profile was used, so this is {}. What a step costs was not considered."
# Groups of candidates. Those of drafts that are built anew are called by their kind, those of copied text by their drafter.
GROWN, CHAIN = "grown", "chain"
AS_IT_COMES = "as it comes"  # plain decoding by an engine with nothing forced, beside an exact one
IDLE = "idle"  # a step by an engine that has a drafter and guesses nothing, as a schedule may ask of it
FIXED_BEFOREHAND = (GROWN, CHAIN, AS_IT_COMES, IDLE)  # the same nodes at every step, which is less to run

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A draft that can be chosen, and what it reaches on answers that it was not made for.

    outline    : the draft; of a grown tree its rows and depth, since making the trees of all sizes takes long
    held_out   : the family of a grown tree
    accepted   : (D+1,) how many steps of its replay accepted 0, 1, ... guesses; None where that was not counted
    row_counts : (N+1,) how many of them verified 0, 1, ... rows; None where each verifies all that it may
    """

    group: str
    outline: Draft
    rates: Rates
    held_out: HeldOut | None = None
    accepted: IntArray | None = None
    row_counts: IntArray | None = None

    @property
    def size(self) -> int:
        return len(self.outline)

    @property
    def depth(self) -> int:
        return self.outline.depth

    @cached_property
    def draft(self) -> Draft:
        return self.outline if self.held_out is None else self.held_out.grown.tree(self.size)

    @property
    def rows_per_step(self) -> float | None:
        """Rows verified on average; None where each step verifies all that it may."""
        counts = self.row_counts
        return None if counts is None else float(counts @ np.arange(len(counts)) / max(counts.sum(), 1))

    def passes(self, batch_size: int) -> dict[Cost, float]:
        """What its passes cost, with the share of them that costs so."""
        cost = self.outline.cost
        if self.row_counts is None:
            return {cost: 1.0}
        counts = self.row_counts if self.row_counts.any() else np.array([0, 1])  # nothing was replayed: one plain step
        shares = row_shares(counts, batch_size)
        return {cost._replace(rows=n): float(shares[n]) for n in np.flatnonzero(shares).tolist()}

    @property
    def conversations(self) -> int:
        """How many there are to draw again; 0 where nothing can be replayed."""
        return len(self.rates.tokens) if self.rates.is_counted else 0


@dataclass(frozen=True, eq=False)
class Table:
    """All that can be chosen at one batch size, whoever drafts it.

    context  : tokens that sequences have; None without latencies
    rates    : (n,) held-out tokens per step, rate_draws (n, B)
    ms       : (n,) latency of a step, ms_draws (n, B); without latencies all the same
    timed    : (n,) whether this number of rows was timed; False where its latency is estimated between two that were
    is_sure  : whether the errors of latencies are known
    warnings : what the latencies do not tell
    """

    batch_size: int
    context: int | None
    candidates: Sequence[Candidate]
    rates: Floats
    rate_draws: Floats
    ms: Floats
    ms_draws: Floats
    timed: BoolArray
    is_sure: bool = True
    warnings: tuple[str, ...] = ()

    @cached_property
    def sizes(self) -> IntArray:
        return np.array([candidate.size for candidate in self.candidates], dtype=np.int64)

    @cached_property
    def steps(self) -> IntArray:
        """(n, C) steps of every candidate in each conversation."""
        return np.stack([candidate.rates.steps for candidate in self.candidates])

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """(n, C) tokens of every candidate in each conversation."""
        return np.stack([candidate.rates.tokens for candidate in self.candidates])

    @cached_property
    def groups(self) -> NDArray[np.str_]:
        return np.array([candidate.group for candidate in self.candidates])

    @cached_property
    def places(self) -> dict[Candidate, int]:
        """Where each candidate is; the tables of all batch sizes have the same ones."""
        return {candidate: i for i, candidate in enumerate(self.candidates)}

    @cached_property
    def plain(self) -> int:
        """Where the lone root is; of an exact engine and the same one as it comes the faster one's."""
        roots = np.flatnonzero((self.sizes == self.sizes.min()) & (self.groups != IDLE))
        return int(roots[self.throughput[roots].argmax()])

    @cached_property
    def idle(self) -> int | None:
        """Where the lone root of an engine that has a drafter is; None where that costs what plain decoding does."""
        return next(iter(np.flatnonzero(self.groups == IDLE).tolist()), None)

    @cached_property
    def ms_stderr(self) -> Floats:
        spread = self.ms_draws.std(axis=1)
        return np.asarray(np.where(spread > ROUNDING * self.ms, spread, 0.0))

    @cached_property
    def is_noisy(self) -> bool:
        """Whether anything is known of how uncertain throughputs are."""
        return self.candidates[0].rates.is_counted or bool(self.ms_stderr.any())

    @cached_property
    def throughput(self) -> Floats:
        """(n,) tokens per second; tokens per step where no latency is known."""
        return np.asarray(1e3 * self.batch_size * self.rates / self.ms)

    @cached_property
    def throughput_draws(self) -> Floats:
        """(n, B) tokens per second, or per step, with other conversations and rounds."""
        return np.asarray(1e3 * self.batch_size * self.rate_draws / self.ms_draws)

    def only(self, which: IntArray) -> Table:
        names = ("rates", "rate_draws", "ms", "ms_draws", "timed")
        return replace(
            self, candidates=[self.candidates[i] for i in which], **{name: getattr(self, name)[which] for name in names}
        )

    def best_of(self, *groups: str) -> int | None:
        """The fastest of some groups by estimate, more than a lone root; None where there is none."""
        among = np.flatnonzero(np.isin(self.groups, groups) & (self.sizes > 1))
        return int(among[self.throughput[among].argmax()]) if len(among) else None


def unpriced(batch_size: int, candidates: Sequence[Candidate], rates: Floats, draws: Floats) -> Table:
    """A table without latencies, of (n,) tokens per step and (n, B) draws of them."""
    ms = np.full(len(candidates), 1e3 * batch_size)
    count = draws.shape[1] if draws.shape[1] > 1 else BOOTSTRAPS
    ms_draws = np.broadcast_to(ms[:, None], (len(candidates), count))
    return Table(batch_size, None, candidates, rates, draws, ms, ms_draws, np.ones(len(candidates), bool))


def row_shares(counts: IntArray, batch_size: int) -> Floats:
    """(N+2,) share of the passes that verify 0, 1, ... rows per sequence.

    counts : (N+1,) steps of one sequence that verified 0, 1, ... rows

    An engine verifies the rows of a whole batch in one pass, so a pass costs what the mean of its rows does. A mean between
    two numbers is divided between them.
    """
    means, shares = np.arange(len(counts), dtype=float), counts / counts.sum()
    if batch_size > 1:
        drawn_rows = np.random.default_rng(SEED).choice(len(counts), (PASSES, batch_size), p=shares)
        means, shares = drawn_rows.mean(axis=1), np.full(PASSES, 1 / PASSES)
    low, by_rows = means.astype(int), np.zeros(len(counts) + 1)
    np.add.at(by_rows, low, shares * (1 - means + low))
    np.add.at(by_rows, low + 1, shares * (means - low))
    return by_rows


def mean_ms(candidates: Sequence[Candidate], costs: StepCosts) -> Floats:
    """(n,) latency of a step on average [ms]; NaN where some of its passes were not timed."""
    passes, steps = _passes(candidates, costs.batch_size)
    ms = dict(zip(steps, costs.ms(steps).tolist(), strict=True))
    return np.array([sum(share * ms[step] for step, share in shares.items()) for shares in passes])


def _passes(candidates: Sequence[Candidate], batch_size: int) -> tuple[list[dict[Cost, float]], list[Cost]]:
    """What the passes of each candidate cost, with their shares, and every such cost once."""
    passes = [candidate.passes(batch_size) for candidate in candidates]
    return passes, list(dict.fromkeys(step for shares in passes for step in shares))


def priced(table: Table, costs: StepCosts) -> Table:
    """The candidates whose latency is known, with it: errors that their steps share are the same in each draw."""
    every_ms = mean_ms(table.candidates, costs)
    places = np.flatnonzero(~np.isnan(every_ms))
    known, ms = table.only(places), every_ms[places]
    passes, steps = _passes(known.candidates, costs.batch_size)
    rng, count = np.random.default_rng([SEED, costs.batch_size]), table.rate_draws.shape[1]
    count = count if count > 1 else BOOTSTRAPS
    step_draws, timed = costs.draws_ms(steps, count, rng), costs.was_timed(steps)
    rows = {step: i for i, step in enumerate(steps)}
    ms_draws, were_timed = np.empty((len(passes), count)), np.empty(len(passes), bool)
    for i, shares in enumerate(passes):
        here = [rows[step] for step in shares]
        ms_draws[i] = np.array(list(shares.values())) @ step_draws[here]
        were_timed[i] = timed[here].all()
    if costs.twin:
        alone = np.isin(known.groups, (AS_IT_COMES, IDLE))
        ms[alone], ms_draws[alone] = costs.twin.ms, costs.twin.draws_ms(count, rng)
    context, is_sure = costs.context_tokens, costs.is_sure
    return replace(known, context=context, is_sure=is_sure, ms=ms, ms_draws=ms_draws, timed=were_timed)


def common(tables: Sequence[Table]) -> list[Table]:
    """The candidates that every batch size has, in the same order."""
    shared = set(tables[0].places).intersection(*(table.places for table in tables[1:]))
    candidates = [candidate for candidate in tables[0].candidates if candidate in shared]
    return [table.only(np.array([table.places[candidate] for candidate in candidates])) for table in tables]


def mixed(tables: Sequence[Table], shares: Sequence[float]) -> Table:
    """The table of a mix: throughputs are those of the batch sizes together, each for its share of the time."""
    first = tables[0]
    total, draws = (
        np.sum([share * getattr(table, name) for share, table in zip(shares, tables, strict=True)], axis=0)
        for name in ("throughput", "throughput_draws")
    )
    timed, tokens = np.all([table.timed for table in tables], axis=0), 1e3 * first.batch_size
    ms, ms_draws = tokens * first.rates / total, tokens * first.rate_draws / draws
    return replace(first, ms=ms, ms_draws=ms_draws, timed=timed, is_sure=all(table.is_sure for table in tables))
