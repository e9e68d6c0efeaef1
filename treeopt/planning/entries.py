"""What a plan says of the draft that was chosen for a batch size: its figures, their errors, and what to beware of."""

from dataclasses import replace

import numpy as np

from treeopt.growth.rates import rates_by_group
from treeopt.growth.source import Source
from treeopt.planning.select import Selection
from treeopt.planning.table import AS_IT_COMES, ROOT, Candidate, Table
from treeopt.records.bootstrap import BOOTSTRAPS, interval95, stderr
from treeopt.records.figure import Errors, Figure, Intervals
from treeopt.records.plan import EXACT, Basis, PlanEntry
from treeopt.records.trace import Answers
from treeopt.trees.draft import ANEW, TreeSize
from treeopt.trees.tree import Choice, Tree

# kind of draft to groups of candidates
KINDS = {"tree": ("grown", "chain"), "chain": ("chain",), **{kind: (kind,) for kind in ANEW}}


def figure_of(table: Table, i: int, *, chosen: int | None = None) -> Figure:
    """What a candidate reaches, with its errors.

    chosen : the candidate that it is compared with
    """
    one, is_timed = table.all[i], table.context is not None
    n, draws = one.conversations or BOOTSTRAPS, table.throughput_draws[i]
    samples = {"tokens_per_step": table.rate_draws[i]} if one.conversations else {}
    is_sure = table.is_noisy and table.is_sure
    if is_timed and is_sure:
        samples["tokens_per_s"] = draws
    if is_timed and (is_sure or i == table.plain):
        samples["speedup"] = table.rate_draws[i] * table.ms_draws[table.plain] / table.ms_draws[i]
    ends = {name: interval95(values, n) for name, values in samples.items()}
    if chosen is not None and is_sure:
        ends["over_chosen"] = interval95(draws / table.throughput_draws[chosen], n)
    return Figure(
        draft=one.draft,
        batch_size=table.batch_size,
        tokens_per_step=float(table.rates[i]),
        step_ms=float(table.ms[i]) if is_timed else None,
        plain_ms=float(table.ms[table.plain]) if is_timed else None,
        stderr=Errors(
            step_ms=float(table.ms_stderr[i]) if is_timed and table.is_sure else None,
            **{name: stderr(values, n) for name, values in samples.items()},
        ),
        interval95=Intervals(**ends),
        rows_per_step=one.rows_per_step,
        replay_us=one.replay_us,
    )


def entry_of(
    source: Source, table: Table, selection: Selection, *, budget: int, alone: Figure | None = None
) -> PlanEntry:
    """The chosen candidate and its rivals at one batch size.

    budget : rows that were asked for
    alone  : of a draft for a mix, what the best for this batch size alone reaches; ties of a mix are those of all
    """
    i = selection.chosen
    one, rates, runner_up = table.all[i], table.all[i].rates, selection.runner_up
    best = i if one.held_out else table.best_of("grown")  # of the fixed trees
    order, tree, most = _growth_order(None if best is None else table.all[best])
    shares = source.held_out_shares(one.held_out, one.size) if one.held_out else source.guess_shares(one.draft)
    chosen = figure_of(table, i)
    return PlanEntry(
        batch_size=table.batch_size,
        context_tokens=table.context,
        chosen=chosen,
        others=_others(table, chosen, i),
        growth_order=order,
        basis=Basis(
            sequences=source.answers.num_sequences if source.answers else None,
            conversations=one.conversations or None,
            steps=None if rates.steps is None else int(rates.steps.sum()),
        ),
        tied_sizes=tied_sizes(table, selection),
        runner_up=None if alone or runner_up is None else figure_of(table, runner_up, chosen=i),
        accepted=shares.tolist(),
        own=alone,
        warnings=[*table.warnings, *source.caveats(tree, budget=budget, most=most)],
        groups=groups_of(source.answers, one, chosen),
        curve=_curve(table),
    )


def groups_of(answers: Answers | None, one: Candidate, chosen: Figure) -> dict[str, Figure]:
    """What the chosen candidate reaches on the conversations of each group, in steps of the same latency."""
    size, unknown = TreeSize(one.size, one.depth), Intervals()
    return {
        name: replace(
            chosen, draft=size, tokens_per_step=rate, stderr=Errors(tokens_per_step=error), interval95=unknown
        )
        for name, (rate, error) in (rates_by_group(one.rates, answers) if answers else {}).items()
    }


def _others(table: Table, chosen: Figure, i: int) -> dict[str, Figure]:
    """The best of each other kind of draft than the chosen one's."""
    best = {kind: table.best_of(*groups) for kind, groups in KINDS.items() if kind != chosen.draft.kind}
    found = {kind: figure_of(table, j, chosen=i) for kind, j in best.items() if j is not None}
    # The best tree may be a chain.
    found = {one.draft.kind: one for one in found.values() if one.draft.kind != chosen.draft.kind}
    exact = table.places.get(("grown", ROOT))
    if exact is not None and table.all[table.plain].group == AS_IT_COMES:
        found[EXACT] = figure_of(table, exact, chosen=i)
    return found


def _growth_order(best: Candidate | None) -> tuple[list[tuple[Choice, float]], Tree, int]:
    """The paths of the best fixed tree with their gains, on to the whole budget; the tree, and how many rows were grown."""
    if best is None or best.held_out is None:
        return [], Tree.chain(0), 1
    family = best.held_out.grown.family(best.size)
    order = list(zip(family.paths[1:], family.gains[1:].tolist(), strict=True))
    return order, family.tree(best.size), len(family)


def _curve(table: Table) -> list[Figure]:
    best: dict[int, int] = {}
    for i in np.flatnonzero(table.groups == "grown").tolist():
        size = table.all[i].size
        if size not in best or table.throughput[i] > table.throughput[best[size]]:
            best[size] = i
    return [
        Figure(
            draft=TreeSize(size, table.all[i].depth),
            batch_size=table.batch_size,
            tokens_per_step=float(table.rates[i]),
            step_ms=None if table.context is None else float(table.ms[i]),
            stderr=Errors(
                tokens_per_s=float(table.throughput_draws[i].std()) if table.context and table.is_sure else None
            ),
        )
        for size, i in sorted(best.items())
    ]


def tied_sizes(table: Table, selection: Selection) -> list[int]:
    return sorted({int(size) for size in table.sizes[selection.tied]})
