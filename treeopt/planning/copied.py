"""Choose the setting of a drafter that copies text, for each batch size, by what its replay says and what its steps cost.

A step verifies what was found, so it costs what its rows do: engines put the rows of a batch into one pass, and of a batch the
mean is taken. Nothing is computed to draft, so a depth costs nothing. Settings are sought on one half of the conversations,
and what is said of them is of the other half.

N rows · D guesses · C held-out conversations · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log, prod

import numpy as np

from treeopt.engines.copied import KIND
from treeopt.errors import OutOfRange
from treeopt.growth.heldout import drawn
from treeopt.growth.replay import TreeRates
from treeopt.latency.costs import StepCosts
from treeopt.planning.candidates import Candidate, Candidates, Floats
from treeopt.planning.entries import figure_of, groups_of, tied_sizes
from treeopt.planning.planner import schedule_of
from treeopt.planning.request import PlanRequest
from treeopt.planning.select import Selection, select
from treeopt.records.bootstrap import BOOTSTRAPS, SEED
from treeopt.records.figure import Figure
from treeopt.records.plan import Basis, Constraint, Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.trees.draft import COPIED, CopiedText, Draft
from treeopt.trees.tree import Cost, IntArray

PLAIN = "grown"  # group of the lone root, as of other drafters
PASSES = 4096  # random ones, whose mean rows say what a pass verifies
USUAL = "usual"  # how an engine's usual setting is called
UNTIMED = "No profile was used, so this is what emits the most tokens per step. What a step costs was not considered."


def row_shares(steps: Floats, batch_size: int) -> Floats:
    """(N+1,) share of the passes that verify 0, 1, ... rows a sequence, where (N,) is that of a sequence's steps.

    A pass verifies the rows of all sequences, so their mean counts; one between two numbers is split between these.
    """
    means, found = np.arange(len(steps), dtype=float), steps
    if batch_size > 1:
        means = np.random.default_rng(SEED).choice(len(means), (PASSES, batch_size), p=found).mean(axis=1)
        found = np.full(PASSES, 1 / PASSES)
    low = means.astype(int)
    each = np.zeros(len(steps) + 1)
    np.add.at(each, low, found * (1 - means + low))
    np.add.at(each, low + 1, found * (means - low))
    return each


@dataclass(frozen=True, eq=False)
class Tried:
    """What a setting did in a replay of the held-out conversations.

    steps, tokens : (C,) of each conversation, and what these steps emitted
    rows          : (N+1,) steps that verified 0, 1, ... rows · accepted : (D+1,) steps that accepted 0, 1, ... guesses
    replay_us     : processor time of a step of the replay [µs] · is_usual : whether it is the engine's usual one
    """

    draft: CopiedText
    steps: IntArray
    tokens: IntArray
    rows: IntArray
    accepted: IntArray
    replay_us: float | None = None
    is_usual: bool = False

    @property
    def rows_per_step(self) -> float:
        return float(self.rows @ np.arange(len(self.rows)) / max(self.rows.sum(), 1))

    @cached_property
    def candidate(self) -> Candidate:
        rates = TreeRates(steps=self.steps, tokens=self.tokens)
        return Candidate(self.draft.drafter, self.draft.rows, self.draft.depth, None, rates, self.draft)


class RowCosts:
    """What steps cost by their rows, of all sequences alike, at one batch size.

    ms : (N,) latency of a step of 1, 2, ... rows [ms]; NaN beyond what was timed · plain_ms : of a plain one
    """

    def __init__(self, costs: StepCosts, most: int) -> None:
        self.costs, self.steps = costs, [Cost(COPIED, rows, min(rows - 1, 1)) for rows in range(1, most + 1)]
        self.ms = costs.ms(self.steps)
        self.plain_ms = self.ms[0]
        if costs.twin and costs.is_idle:  # where nothing is found the engine's drafter was still there
            self.ms[0] = costs.twin.ms

    def shares(self, rows: IntArray) -> Floats:
        """(N,) share of the passes that verify 1, 2, ... rows a sequence, where its steps verify (N+1,) times so many."""
        rows = rows if rows.any() else np.array([0, 1])  # no step is as a plain one
        found = row_shares(rows / rows.sum(), self.costs.batch_size)[1:]
        return np.pad(found, (0, max(len(self.ms) - len(found), 0)))

    def step_ms(self, rows: IntArray) -> float:
        """Latency of a step on average [ms]; NaN where some were not timed."""
        shares = self.shares(rows)
        used = np.flatnonzero(shares)
        return float(shares[used] @ self.ms[used]) if used[-1] < len(self.ms) else np.nan

    def priced(self, c: Candidates, rows: Sequence[IntArray]) -> Candidates:
        """The candidates whose steps were timed, with what these cost; the first is plain decoding.

        rows : (N+1,) of each of the others
        """
        rng, idle = np.random.default_rng([SEED, self.costs.batch_size]), self.costs.twin
        by_rows, timed = self.costs.draws_ms(self.steps, BOOTSTRAPS, rng), self.costs.was_timed(self.steps)
        plain_draws = by_rows[0].copy()
        if idle and self.costs.is_idle:
            by_rows[0] = idle.ms * np.exp(idle.stderr_ms / idle.ms * rng.standard_normal(BOOTSTRAPS))
        known = [i for i, one in enumerate(rows, 1) if not np.isnan(self.step_ms(one))]
        every = [self.shares(rows[i - 1])[: len(self.ms)] for i in known]
        used = [share > 0 for share in every]
        ms = [self.plain_ms, *(share[u] @ self.ms[u] for share, u in zip(every, used, strict=True))]
        draws = [plain_draws, *(share[u] @ by_rows[u] for share, u in zip(every, used, strict=True))]
        c = replace(c, context=self.costs.context_tokens, is_sure=self.costs.is_sure).only(np.array([0, *known]))
        were_timed = np.array([True, *(timed[u].all() for u in used)])
        return replace(c, ms=np.array(ms), ms_draws=np.array(draws), timed=were_timed)


def plan_copied(
    tried: Mapping[str, Sequence[Tried]],
    log: RequestLog,
    profile: LatencyProfile | None,
    costs: Mapping[int, StepCosts],
    request: PlanRequest,
    warnings: Sequence[str] = (),
) -> Plan:
    """The plan of the drafter whose settings are the fastest at all batch sizes together, of those that were ``tried``.

    log   : of the held-out conversations
    costs : as of `costs_of`

    Raises OutOfRange where the latency of no setting is known.
    """
    most = max(one.draft.rows for each in tried.values() for one in each)
    by_rows = {b: RowCosts(each, most) for b, each in costs.items()}
    tables = {name: [table_of(each, by_rows.get(b), b) for b in request.sizes] for name, each in tried.items()}
    unpriced = _unpriced(tables, costs)
    tables = {name: each for name, each in tables.items() if name not in unpriced}
    if not tables:
        raise OutOfRange(f"{' '.join(unpriced.values())} Time larger sizes.")
    warnings = [*warnings, *(f"{sentence} It is left out." for sentence in unpriced.values())]
    selections = {name: [_selected(c) for c in each] for name, each in tables.items()}
    speed = {name: prod(_speed(*pair) for pair in zip(tables[name], selections[name], strict=True)) for name in tables}
    best = max(speed, key=speed.__getitem__)
    entries = [_entry(best, tables, selections, b, log, tried, warnings) for b in range(len(request.sizes))]
    return Plan(
        entries=tuple(entries),
        schedule=schedule_of(tables[best], selections[best]),
        objective="replay",
        drafter={"kind": KIND, "id": best},
        constraint=Constraint(budget=request.limits.budget, engine=request.engine),
        runtime=(profile.runtime or None) if profile else None,
        part=profile.part if profile else None,
    )


def costs_of(profile: LatencyProfile | None, request: PlanRequest) -> dict[int, StepCosts]:
    """What steps cost at each batch size, by those of all depths; empty without a profile.

    Raises OutOfRange for a batch size at which none of two rows or more was timed.
    """
    found = {b: StepCosts(profile, b, request.context) for b in request.sizes if profile}
    for batch_size, costs in found.items():
        if costs.reach[0] < 2:
            raise OutOfRange(
                f"Copied text takes steps of 2 rows or more, but at batch size {batch_size} the profile has plain steps alone: "
                "time larger sizes."
            )
    return found


def table_of(tried: Sequence[Tried], costs: RowCosts | None, batch_size: int) -> Candidates:
    """Plain decoding and those settings of one drafter whose latency is known."""
    plain = Candidate(PLAIN, 1, 0, None, TreeRates(steps=tried[0].tokens, tokens=tried[0].tokens))
    every = [plain, *(one.candidate for one in tried)]
    ms, known = np.full(len(every), 1e3 * batch_size), np.ones(len(every), bool)
    rates, draws = np.array([one.rates.tokens_per_step for one in every]), drawn([one.rates for one in every])
    ms_draws = np.broadcast_to(ms[:, None], draws.shape)
    c = Candidates(batch_size, None, every, rates, draws, ms, ms_draws, known, warnings=() if costs else (UNTIMED,))
    return costs.priced(c, [one.rows for one in tried]) if costs else c


def _unpriced(tables: Mapping[str, Sequence[Candidates]], costs: Mapping[int, StepCosts]) -> dict[str, str]:
    """The drafters of which no setting has a known latency at some batch size, each with a sentence that says so."""
    found: dict[str, str] = {}
    for name, each in tables.items():
        for c in each:
            if len(c.all) == 1:
                timed = costs[c.batch_size].reach[0]
                found[name] = (
                    f"At batch size {c.batch_size} every setting of {name} verifies more than the {timed} rows that were timed."
                )
    return found


def _selected(c: Candidates) -> Selection:
    """The fastest that noise does not tell from it; without latencies what emits the most tokens, by the fewest rows."""
    if c.context is not None:
        return select(c)
    i = int(np.lexsort((c.sizes, -c.rates.round(3)))[0])
    return Selection(i, np.array([i]), None)


def _speed(c: Candidates, selection: Selection) -> float:
    return float(c.throughput[selection.chosen])


def _entry(
    best: str,
    tables: Mapping[str, Sequence[Candidates]],
    selections: Mapping[str, Sequence[Selection]],
    b: int,
    log: RequestLog,
    tried: Mapping[str, Sequence[Tried]],
    warnings: Sequence[str],
) -> PlanEntry:
    """The chosen setting at the b-th batch size, beside the engine's usual one and those of other drafters."""
    every = {name: tables[name][b] for name in tables}
    c, selection = every[best], selections[best][b]
    i, one = selection.chosen, c.all[selection.chosen]
    known: dict[Draft, Tried] = {each.draft: each for some in tried.values() for each in some}

    def figure(table: Candidates, j: int, chosen: int | None = None) -> Figure:
        found, one = figure_of(table, j, chosen=chosen), known.get(table.all[j].draft)
        return replace(found, rows_per_step=one.rows_per_step, replay_us=one.replay_us) if one else found

    chosen = figure(c, i)
    others = {n: figure(other, selections[n][b].chosen) for n, other in every.items() if n != best}
    if usual := [j for j, each in enumerate(c.all) if (t := known.get(each.draft)) and t.is_usual]:
        others[USUAL] = figure(c, usual[0], chosen=i)
    elif rows := [one.draft.rows for one in tried[best] if one.is_usual]:
        untimed = (
            f"The usual setting of {best} is not compared: it verifies up to {rows[0]} rows, more than were timed."
        )
        warnings = [*warnings, untimed]
    accepted = known[one.draft].accepted if one.draft in known else np.array([1])
    return PlanEntry(
        batch_size=c.batch_size,
        context_tokens=c.context,
        chosen=chosen,
        others=others,
        basis=Basis(
            sequences=log.num_sequences,
            conversations=one.conversations or None,
            steps=None if one.rates.steps is None else int(one.rates.steps.sum()),
        ),
        tied_sizes=tied_sizes(c, selection),
        runner_up=None if selection.runner_up is None else figure(c, selection.runner_up, i),
        accepted=(accepted / accepted.sum()).tolist(),
        groups=groups_of(log, one, chosen),
        curve=[figure(c, j) for j in np.lexsort((c.throughput, c.sizes)).tolist()],
        warnings=[*c.warnings, *warnings],
    )


def worth(tried: Sequence[Tried], costs: Mapping[int, StepCosts], request: PlanRequest) -> Floats:
    """(n, B) what settings are worth at each batch size: log tokens per second, or per step where no latency is known.

    Of equal ones that with fewer rows is worth a little more; of what was not timed, or is beyond the budget, nothing.
    """
    by_rows = {b: RowCosts(each, max(one.draft.rows for one in tried)) for b, each in costs.items()}
    found = np.full((len(tried), len(request.sizes)), -np.inf)
    for i, one in enumerate(tried):
        for j, b in enumerate(request.sizes):
            ms = by_rows[b].step_ms(one.rows) if by_rows else 1.0
            if one.draft.rows <= request.limits.budget and not np.isnan(ms):
                found[i, j] = log(one.candidate.rates.tokens_per_step / ms) - 1e-6 * one.rows_per_step
    return found
