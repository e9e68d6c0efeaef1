"""What a plan says of the draft that was chosen for a batch size: its figures, their errors, and what to beware of."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from treeopt.growth.rates import rates_by_group
from treeopt.growth.source import Source
from treeopt.planning.select import Selection
from treeopt.planning.table import AS_IT_COMES, CHAIN, GROWN, Candidate, Floats, Table
from treeopt.records.bootstrap import BOOTSTRAPS
from treeopt.records.estimate import Estimate
from treeopt.records.figure import Figure
from treeopt.records.plan import EXACT, Basis, PlanEntry
from treeopt.records.trace import Answers
from treeopt.trees.draft import ANEW, TreeSize
from treeopt.trees.tree import Choice, Tree

KINDS = {"tree": (GROWN, CHAIN), "chain": (CHAIN,), **{kind: (kind,) for kind in ANEW}}  # to groups of candidates
USUAL = "usual"  # how an engine's usual setting is called


def figure_of(table: Table, i: int, *, chosen: int | None = None) -> Figure:
    """What a candidate reaches, with its errors.

    chosen : the candidate that it is compared with
    """
    candidate, plain, is_timed = table.candidates[i], table.plain, table.context is not None
    is_sure, rates, draws = table.is_noisy and table.is_sure, table.throughput, table.throughput_draws

    def estimate(value: float, draws: Floats, is_known: bool) -> Estimate:
        return Estimate.of_draws(value, draws, candidate.conversations or BOOTSTRAPS) if is_known else Estimate(value)

    over_plain, over_chosen = table.rate_draws[i] * table.ms_draws[plain] / table.ms_draws[i], None
    if chosen is not None:
        over_chosen = estimate(rates[i] / rates[chosen], draws[i] / draws[chosen], is_sure)
    return Figure(
        draft=candidate.draft,
        batch_size=table.batch_size,
        tokens_per_step=estimate(table.rates[i], table.rate_draws[i], candidate.conversations > 0),
        step_ms=Estimate(table.ms[i], table.ms_stderr[i] if table.is_sure else None) if is_timed else None,
        plain_ms=float(table.ms[plain]) if is_timed else None,
        rows_per_step=candidate.rows_per_step,
        tokens_per_s=estimate(rates[i], draws[i], is_sure),
        speedup=estimate(rates[i] / rates[plain], over_plain, is_sure or i == plain),
        over_chosen=over_chosen,
    )


def entry_of(table: Table, selection: Selection, answers: Answers | None) -> PlanEntry:
    """The chosen candidate at one batch size, whoever drafts it, as judged on the answers."""
    i, runner_up = selection.chosen, selection.runner_up
    candidate, chosen = table.candidates[i], figure_of(table, i)
    rates, accepted = candidate.rates, candidate.accepted
    return PlanEntry(
        **vars(chosen),
        context_tokens=table.context,
        basis=Basis(
            sequences=answers.num_sequences if answers else None,
            conversations=candidate.conversations or None,
            steps=int(rates.steps.sum()) if rates.is_counted else None,
        ),
        tied_sizes=sorted({int(size) for size in table.sizes[selection.tied]}),
        runner_up=None if runner_up is None else figure_of(table, runner_up, chosen=i),
        accepted=[] if accepted is None else (accepted / accepted.sum()).tolist(),
        groups=_groups(answers, candidate, chosen),
        warnings=[*table.warnings],
    )


def tree_entry(source: Source, table: Table, selection: Selection, budget: int) -> PlanEntry:
    """The chosen candidate beside the best trees of other kinds.

    budget : rows that were asked for
    """
    i, entry = selection.chosen, entry_of(table, selection, source.answers)
    candidate = table.candidates[i]
    best = i if candidate.held_out else table.best_of(GROWN)  # of the fixed trees
    order, tree, most = _growth_order(None if best is None else table.candidates[best])
    if candidate.held_out:
        shares = source.held_out_shares(candidate.held_out, candidate.size)
    else:
        shares = source.guess_shares(candidate.draft)
    return replace(
        entry,
        others=_others(table, entry.chosen, i),
        growth_order=order,
        accepted=shares.tolist(),
        warnings=[*entry.warnings, *source.caveats(tree, budget=budget, most=most)],
        curve=_curve(table),
    )


def text_entry(
    table: Table, selection: Selection, answers: Answers, *, usual: Candidate | None, others: Mapping[str, Figure]
) -> PlanEntry:
    """The chosen setting of a drafter that copies text, beside the engine's usual one and all that were compared.

    others : by drafter, the best setting of each other one
    """
    entry, usual_place = entry_of(table, selection, answers), table.places.get(usual) if usual else None
    warnings, beside = entry.warnings, dict(others)
    if usual_place is not None:
        beside[USUAL] = figure_of(table, usual_place, chosen=selection.chosen)
    elif usual:
        rows = f"it verifies up to {usual.size} rows, more than were timed."
        warnings = [*warnings, f"The usual setting of {usual.group} is not compared: {rows}"]
    curve = [figure_of(table, j) for j in np.lexsort((table.throughput, table.sizes)).tolist()]
    return replace(entry, others=beside, curve=curve, warnings=warnings)


def _groups(answers: Answers | None, candidate: Candidate, chosen: Figure) -> dict[str, Figure]:
    """What the chosen candidate reaches on the conversations of each group, in steps of the same latency."""
    rates = rates_by_group(candidate.rates, answers) if answers else {}
    size = TreeSize(candidate.size, candidate.depth)
    return {
        name: replace(chosen, draft=size, tokens_per_step=rate, tokens_per_s=None, speedup=None)
        for name, rate in rates.items()
    }


def _others(table: Table, chosen: Figure, i: int) -> dict[str, Figure]:
    """The best of each other kind of draft than the chosen one's."""
    places = [table.best_of(*groups) for groups in KINDS.values()]
    best = [figure_of(table, j, chosen=i) for j in places if j is not None]
    others = {figure.draft.kind: figure for figure in best}  # the best tree may be a chain
    others.pop(chosen.draft.kind, None)
    if table.candidates[table.plain].group == AS_IT_COMES:
        exact = int(np.flatnonzero((table.groups == GROWN) & (table.sizes == 1))[0])
        others[EXACT] = figure_of(table, exact, chosen=i)
    return others


def _growth_order(best: Candidate | None) -> tuple[list[tuple[Choice, float]], Tree, int]:
    """The paths of the best fixed tree with their gains, on to the whole budget; the tree, and how many rows were grown."""
    if best is None or best.held_out is None:
        return [], Tree.chain(0), 1
    family = best.held_out.grown.family(best.size)
    order = list(zip(family.paths[1:], family.gains[1:].tolist(), strict=True))
    return order, best.held_out.grown.tree(best.size), len(best.held_out.grown)


def _curve(table: Table) -> list[Figure]:
    """The best grown tree of every size."""
    best, has_errors = dict[int, int](), table.context is not None and table.is_sure
    for i in np.flatnonzero(table.groups == GROWN).tolist():
        size = table.candidates[i].size
        if size not in best or table.throughput[i] > table.throughput[best[size]]:
            best[size] = i
    return [
        Figure(
            draft=table.candidates[i].outline,
            batch_size=table.batch_size,
            tokens_per_step=Estimate(table.rates[i]),
            step_ms=None if table.context is None else Estimate(table.ms[i]),
            tokens_per_s=Estimate(table.throughput[i], table.throughput_draws[i].std()) if has_errors else None,
        )
        for _, i in sorted(best.items())
    ]
