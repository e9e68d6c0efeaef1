"""Choose the setting of a drafter that copies text, for each batch size, by what its replay says and what its steps cost.

A step verifies what was found, so it costs what its rows do; a depth costs nothing, since nothing is computed to draft. Settings
are sought on one half of the conversations, and what is said of them is of the other half.

n settings · G batch sizes · D guesses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from treeopt.engines.copied import KIND
from treeopt.errors import OutOfRange
from treeopt.growth.rates import Rates, drawn
from treeopt.latency.costs import StepCosts
from treeopt.planning.entries import figure_of, groups_of, tied_sizes
from treeopt.planning.planner import schedule_of
from treeopt.planning.request import PlanRequest
from treeopt.planning.select import Selection, select
from treeopt.planning.table import Candidate, Floats, Table, mean_ms, priced, unpriced
from treeopt.records.plan import Basis, Constraint, Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.trees.draft import CopiedText
from treeopt.trees.tree import IntArray

PLAIN = "grown"  # group of the lone root, as of other drafters
USUAL = "usual"  # how an engine's usual setting is called


@dataclass(frozen=True, eq=False)
class Tried:
    """A setting and what it did in a replay of the held-out conversations.

    accepted : (D+1,) how many of its steps accepted 0, 1, ... guesses
    is_usual : whether it is the engine's usual one
    """

    draft: CopiedText
    candidate: Candidate
    accepted: IntArray
    is_usual: bool = False


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
    tables = {name: tables_of(each, costs, request) for name, each in tried.items()}
    unpriced = _unpriced(tables, costs)
    tables = {name: each for name, each in tables.items() if name not in unpriced}
    if not tables:
        raise OutOfRange(f"{' '.join(unpriced.values())} Time larger sizes.")
    warnings = [*warnings, *(f"{sentence} It is left out." for sentence in unpriced.values())]
    selections = {name: [_selected(table) for table in each] for name, each in tables.items()}
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


def tables_of(tried: Sequence[Tried], costs: Mapping[int, StepCosts], request: PlanRequest) -> list[Table]:
    """At each batch size plain decoding and those settings of one drafter whose latency is known."""
    tokens = tried[0].candidate.rates.tokens
    plain = Candidate(PLAIN, 1, 0, None, Rates(tokens, tokens))
    every = [plain, *(setting.candidate for setting in tried)]
    rates, draws = np.array([one.rates.tokens_per_step for one in every]), drawn([one.rates for one in every])
    tables = [unpriced(batch_size, every, rates, draws) for batch_size in request.sizes]
    return [priced(table, costs[table.batch_size]) if costs else table for table in tables]


def _unpriced(tables: Mapping[str, Sequence[Table]], costs: Mapping[int, StepCosts]) -> dict[str, str]:
    """The drafters of which no setting has a known latency at some batch size, each with a sentence that says so."""
    found: dict[str, str] = {}
    for name, each in tables.items():
        for table in each:
            if len(table.all) == 1:
                timed = costs[table.batch_size].reach[0]
                found[name] = (
                    f"At batch size {table.batch_size} every setting of {name} verifies more than the {timed} rows that were timed."
                )
    return found


def _selected(table: Table) -> Selection:
    """The fastest that noise does not tell from it; without latencies what emits the most tokens, by the fewest rows."""
    if table.context is not None:
        return select(table)
    i = int(np.lexsort((table.sizes, -table.rates.round(3)))[0])
    return Selection(i, np.array([i]), None)


def _speed(table: Table, selection: Selection) -> float:
    return float(table.throughput[selection.chosen])


def _entry(
    best: str,
    tables: Mapping[str, Sequence[Table]],
    selections: Mapping[str, Sequence[Selection]],
    b: int,
    log: RequestLog,
    tried: Mapping[str, Sequence[Tried]],
    warnings: Sequence[str],
) -> PlanEntry:
    """The chosen setting at the b-th batch size, beside the engine's usual one and those of other drafters."""
    table, selection = tables[best][b], selections[best][b]
    i, candidate, runner_up = selection.chosen, table.all[selection.chosen], selection.runner_up
    others = {name: figure_of(tables[name][b], selections[name][b].chosen) for name in tables if name != best}
    usual = next((setting for setting in tried[best] if setting.is_usual), None)
    if usual and usual.candidate in table.all:
        others[USUAL] = figure_of(table, table.all.index(usual.candidate), chosen=i)
    elif usual:
        rows = f"it verifies up to {usual.draft.rows} rows, more than were timed."
        warnings = [*warnings, f"The usual setting of {best} is not compared: {rows}"]
    accepted = next((setting.accepted for setting in tried[best] if setting.candidate is candidate), np.array([1]))
    chosen = figure_of(table, i)
    return PlanEntry(
        batch_size=table.batch_size,
        context_tokens=table.context,
        chosen=chosen,
        others=others,
        basis=Basis(
            sequences=log.num_sequences,
            conversations=candidate.conversations or None,
            steps=None if candidate.rates.steps is None else int(candidate.rates.steps.sum()),
        ),
        tied_sizes=tied_sizes(table, selection),
        runner_up=None if runner_up is None else figure_of(table, runner_up, chosen=i),
        accepted=(accepted / accepted.sum()).tolist(),
        groups=groups_of(log, candidate, chosen),
        curve=[figure_of(table, j) for j in np.lexsort((table.throughput, table.sizes)).tolist()],
        warnings=[*table.warnings, *warnings],
    )


def worth(tried: Sequence[Tried], costs: Mapping[int, StepCosts], request: PlanRequest) -> Floats:
    """(n, G) what settings are worth at each batch size: log tokens per second, or per step where no latency is known.

    Of equal ones that with fewer rows is worth a little more; of what was not timed, or is beyond the budget, nothing.
    """
    candidates = [setting.candidate for setting in tried]
    rates = np.array([candidate.rates.tokens_per_step for candidate in candidates])
    rows = np.array([candidate.rows_per_step for candidate in candidates])
    ms = np.array([mean_ms(candidates, costs[b]) if costs else np.ones(len(tried)) for b in request.sizes])  # (G, n)
    found = np.log(rates / ms) - 1e-6 * rows
    fits = np.array([setting.draft.rows <= request.limits.budget for setting in tried])
    return np.where(fits & ~np.isnan(ms), found, -np.inf).T
