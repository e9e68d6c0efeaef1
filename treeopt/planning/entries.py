"""What a plan says of the draft that was chosen for a batch size: its figures, their errors, and what to beware of."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treeopt.growth.heldout import rates_by_group
from treeopt.growth.source import Source
from treeopt.planning.candidates import AS_IT_COMES, Candidate, Candidates
from treeopt.planning.select import Selection
from treeopt.records.bootstrap import BOOTSTRAPS, interval95, stderr
from treeopt.records.figure import Errors, Figure, Intervals
from treeopt.records.plan import EXACT, Basis, MixErrors, PlanEntry
from treeopt.records.trace import Answers
from treeopt.trees.draft import ANEW, COPYING, TreeSize
from treeopt.trees.tree import Choice, Tree

# kind of draft to groups of candidates
KINDS = {"tree": ("grown", "chain"), "chain": ("chain",), **{kind: (kind,) for kind in (*ANEW, *COPYING)}}


def figure_of(c: Candidates, i: int, *, chosen: int | None = None, whole: bool = True) -> Figure:
    """What a candidate reaches, with its errors.

    chosen : the candidate that it is compared with
    whole  : whether the draft itself is kept, and not its size alone
    """
    one, is_timed = c.all[i], c.context is not None
    n, draws = one.conversations or BOOTSTRAPS, c.throughput_draws[i]
    samples = {"tokens_per_step": c.rate_draws[i]} if one.conversations else {}
    is_sure = c.is_noisy and bool(c.sure[i])
    if is_timed and is_sure:
        samples["tokens_per_s"] = draws
    if is_timed and (is_sure or i == c.plain):
        samples["speedup"] = c.rate_draws[i] * c.ms_draws[c.plain] / c.ms_draws[i]
    ends = {name: interval95(values, n) for name, values in samples.items()}
    if chosen is not None and is_sure and c.sure[chosen]:
        ends["over_chosen"] = interval95(draws / c.throughput_draws[chosen], n)
    return Figure(
        draft=one.draft if whole else TreeSize(one.size, one.depth),
        batch_size=c.batch_size,
        tokens_per_step=float(c.rates[i]),
        step_ms=float(c.ms[i]) if is_timed else None,
        plain_ms=float(c.ms[c.plain]) if is_timed else None,
        rows_per_step=None if one.rates.rows is None else float(one.rates.rows @ np.arange(len(one.rates.rows))),
        stderr=Errors(
            step_ms=float(c.ms_stderr[i]) if is_timed and c.sure[i] else None,
            **{name: stderr(values, n) for name, values in samples.items()},
        ),
        interval95=Intervals(**ends),
    )


def entry_of(
    source: Source,
    options: Sequence[Candidates],
    selection: Selection,
    b: int,
    free: tuple[Candidates, int] | None,
    *,
    budget: int,
    own: bool,
) -> PlanEntry:
    """The chosen candidate and its rivals at the b-th batch size.

    free   : the best without the limits, or of this batch size alone
    budget : rows that were asked for
    own    : whether it was chosen for this batch size alone; ties of a mix are those of all
    """
    c, i = options[b], selection.chosen
    one, rates, runner_up = c.all[i], c.all[i].rates, selection.runner_up
    best = i if one.held_out else c.best_of("grown")  # of the fixed trees
    order, tree, most = _growth_order(None if best is None else c.all[best])
    if (shares := rates.accepted) is None:
        shares = source.held_out_shares(one.held_out, one.size) if one.held_out else source.guess_shares(one.draft)
    chosen, beside = figure_of(c, i), None if free is None else figure_of(free[0], free[1])
    return PlanEntry(
        batch_size=c.batch_size,
        context_tokens=c.context,
        chosen=chosen,
        others=_others(c, chosen, i),
        growth_order=order,
        basis=Basis(
            product=rates.product if one.held_out else None,
            joint=rates.joint if one.held_out else None,
            sequences=source.answers.num_sequences if source.answers else None,
            conversations=one.conversations or None,
            steps=None if rates.steps is None else int(rates.steps.sum()),
        ),
        sizes95=selection.sizes95 if own and c.context is not None and c.is_noisy and c.sure[i] else None,
        tied_sizes=tied_sizes(c, selection) if own else [],
        runner_up=figure_of(c, runner_up, chosen=i) if own and runner_up is not None else None,
        prompts_to_separate=selection.prompts if own else None,
        accepted=shares.tolist(),
        unconstrained=beside if own else None,
        own=None if own else beside,
        warnings=[*c.warnings, *source.caveats(tree, budget=budget, most=most)],
        elsewhere=[
            figure_of(other, other.places[one.key], whole=False)
            for other in options
            if other is not c and other.context is not None and one.key in other.places
        ],
        groups=groups_of(source.answers, one, chosen),
        curve=_curve(c),
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


def _others(c: Candidates, chosen: Figure, i: int) -> dict[str, Figure]:
    """The best of each other kind of draft than the chosen one's."""
    best = {kind: c.best_of(*groups) for kind, groups in KINDS.items() if kind != chosen.draft.kind}
    found = {kind: figure_of(c, j, chosen=i) for kind, j in best.items() if j is not None}
    # The best tree may be a chain.
    found = {one.draft.kind: one for one in found.values() if one.draft.kind != chosen.draft.kind}
    exact = c.places.get(("grown", 1, 0, 0))
    if exact is not None and c.all[c.plain].group == AS_IT_COMES:
        found[EXACT] = figure_of(c, exact, chosen=i)
    return found


def _growth_order(best: Candidate | None) -> tuple[list[tuple[Choice, float]], Tree, int]:
    """The paths of the best fixed tree with their gains, on to the whole budget; the tree, and how many rows were grown."""
    if best is None or best.held_out is None:
        return [], Tree.chain(0), 1
    family = best.held_out.family
    order = list(zip(family.paths[1:], family.gains[1:].tolist(), strict=True))
    return order, family.tree(best.size), len(family)


def _curve(c: Candidates) -> list[Figure]:
    """The best grown tree of every size."""
    best: dict[int, int] = {}
    for i in np.flatnonzero(c.groups == "grown").tolist():
        size = c.all[i].size
        if size not in best or c.throughput[i] > c.throughput[best[size]]:
            best[size] = i
    return [
        Figure(
            draft=TreeSize(size, c.all[i].depth),
            batch_size=c.batch_size,
            tokens_per_step=float(c.rates[i]),
            step_ms=None if c.context is None else float(c.ms[i]),
            stderr=Errors(tokens_per_s=float(c.throughput_draws[i].std()) if c.context and c.sure[i] else None),
        )
        for size, i in sorted(best.items())
    ]


def tied_sizes(c: Candidates, selection: Selection) -> list[int]:
    """Sizes that the data cannot tell from the fastest."""
    return sorted({int(size) for size in c.sizes[selection.tied]})


def mix_errors(mix: Candidates, first: Candidates, selection: Selection) -> MixErrors | None:
    """How sure the figures of one draft for a mix are; None without latencies.

    The runner-up's share of the chosen one's throughput at the ``first`` batch size is that over the mix.
    """
    i, j = selection.chosen, selection.runner_up
    if mix.context is None:
        return None
    if not mix.is_noisy:
        return MixErrors(tied_sizes=tied_sizes(mix, selection))
    chosen, runner = figure_of(mix, i), None
    if j is not None:
        own = figure_of(mix, j, chosen=i)
        step_ms, over = float(mix.ms[j] * mix.throughput[i] / first.throughput[i]), own.interval95.over_chosen
        runner = replace(own, step_ms=step_ms, plain_ms=None, stderr=Errors(), interval95=Intervals(over_chosen=over))
    return MixErrors(
        tokens_per_s=chosen.stderr.tokens_per_s,
        speedup=chosen.stderr.speedup,
        tied_sizes=tied_sizes(mix, selection),
        runner_up=runner,
        prompts_to_separate=selection.prompts,
    )
