"""What a search weighs: tokens per step against size, and throughput against size.

N sizes (1 ... budget)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.source import objective_for, source_of
from treeopt.planning.comparison import MOST_DENSE, compare
from treeopt.records.inputs import Accuracies
from treeopt.records.plan import Plan, PlanEntry
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Estimates, Panel, Series, plain_line
from treeopt.report.figures.style import Look
from treeopt.report.wording import count
from treeopt.trees.shapes import Limits

LIMITS = Limits()
MOST_LINEAR = 6  # ratio of the throughputs above which their axis is logarithmic


def sizes_chart(
    record: Accuracies, limits: Limits = LIMITS, *, objective: str = "replay", most_dense: int = MOST_DENSE
) -> Chart:
    """Cross-fitted tokens per step of every size for all objectives, beside chains and dense trees (a sample of many).

    A probe has one objective, coverage; of the other trees those are shown that were probed.
    Raises OutOfRange for a record with a single sequence, which has nothing to hold out.
    """
    source = source_of(record)
    objective = objective_for(source, objective)
    found = compare(source, replace(limits, shape="sibling-closed"), most_dense=most_dense)
    series = []
    for i, (name, held_out) in enumerate(found.held_out.items()):
        look, rates = style.series(i), held_out.tokens_per_step
        sizes = np.arange(1, len(rates) + 1)
        series.append(Series(f"grown: {name}", sizes, rates, look={**look, "markevery": 0.15}))
        if name == objective:
            ends = np.quantile(held_out.draws, [0.025, 0.975], axis=1)
            shade = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            series.append(Series("", sizes, rates, ends, shade, "area"))
    chains = [one for one in found.fixed if one[0].startswith("chain")]
    star = {"marker": "*", "markersize": 10, "color": "black", "linestyle": "none"}
    cross = {"marker": "x", "markersize": 3, "color": "#A0A0A0", "linestyle": "none", "zorder": 1}
    sample = "" if len(found.dense) == found.n_dense else f"\n({len(found.dense)} of {found.n_dense:,})"
    others: list[tuple[str, Sequence[tuple[object, int, float]], Look]] = [("chains of top-1", chains, style.series(4))]
    others += [(one[0], [one], star) for one in found.fixed if one not in chains]
    others += [(f"dense trees{sample}", found.dense, cross)]
    for name, trees, look in others:
        if trees:
            series.append(Series(name, [size for _, size, _ in trees], [rate for *_, rate in trees], look=look))
    sequences = count(source.answers.num_sequences, "sequence") + ", " if source.answers else ""
    caption = style.about(
        source.meta,
        sequences + count(*source.observed),
        "grown trees are cross-fitted: replayed on sequences that they were not grown on",
        source.approximate,
        f"shaded: 95 % interval of {objective}",
    )
    rows = "rows per step and sequence (tree size)"
    panel = Panel(series, rows, "tokens per step", scale="sizes", ylim=(0.95, None))
    return Chart("Tokens per step over tree size", caption, [[panel]])


def throughput_chart(plan: Plan) -> Chart:
    """Predicted tokens per second of every size, from the plan's own curves, and over plain decoding.

    Raises OutOfRange where the plan was made without a profile.
    """
    drawn = [entry for entry in plan.entries if entry.chosen.tokens_per_s and any(p.tokens_per_s for p in entry.curve)]
    if not drawn:
        raise OutOfRange("The plan has no latencies. Make them with: treeopt profile, then treeopt search")
    left, right = list[Series](), [plain_line(1.0)]
    for i, entry in enumerate(drawn):
        look, plain = {**style.series(i), "marker": ""}, entry.plain.tokens_per_s
        left += _curve(entry, 1.0, look)
        if plain:
            right += _curve(entry, plain, look)
            left.append(plain_line(plain, look["color"]))
    every = [point.tokens_per_s for entry in drawn for point in entry.curve if point.tokens_per_s]
    log = max(every) > MOST_LINEAR * min(every)
    rows, ylim = "rows per step (tree size)", (None if log else 0, None)
    panels = [
        Panel(left, rows, "tokens per second", "Throughput (dashed: plain)", "sizes", log=log, ylim=ylim),
        Panel(right, rows, "speedup", "Over plain decoding", "sizes"),
    ]
    sequences = plan.entries[0].basis.sequences
    contexts = [e.context_tokens for e in drawn if e.context_tokens is not None]
    caption = style.sentence(
        "Predicted: held-out tokens per step over measured latency",
        count(sequences, "sequence") if sequences is not None else "from accuracies alone",
        f"context {style.span(contexts)} tokens" if contexts else None,
        style.known(plan.runtime, "name", "version"),
        f"objective {plan.objective}" if plan.objective else None,
        style.rule(plan.acceptance),
        "★ chosen, with 95 % interval; broad: tied sizes",
    )
    return Chart("Throughput over tree size", caption, [panels], "batch size")


def _curve(entry: PlanEntry, unit: float, look: dict[str, object]) -> list[Series]:
    """The line over sizes, in the ``unit``, its tied sizes as broad pieces, and the chosen draft as a star."""
    points = sorted((p.size, p.tokens_per_s / unit) for p in entry.curve if p.tokens_per_s)
    sizes, rates = np.transpose(points)
    broad = {**look, "linewidth": 9, "alpha": 0.25, "solid_capstyle": "butt", "zorder": 1, "linestyle": "-"}
    star = {**look, "marker": "*", "markersize": 10, "mec": "black", "mew": 0.6, "zorder": 4}
    rate, error = (each or 0.0 for each in (entry.chosen.tokens_per_s, entry.chosen.stderr.tokens_per_s))
    return [
        Series(str(entry.batch_size), sizes, rates, look=look),
        *(Series("", x, y, look=broad) for x, y in bands(sizes, rates, entry.tied_sizes)),
        Estimates.of([(rate / unit, None, error / unit)]).over("", [entry.chosen.size], **star),
    ]


def bands(
    sizes: NDArray[np.float64], rates: NDArray[np.float64], tied: Sequence[int]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Where a curve is tied, run by run: sizes and rates, half of the way to the next sizes included; none of one size."""
    logs, found = np.log2(sizes), []
    middle = np.concatenate([logs[:1], (logs[1:] + logs[:-1]) / 2, logs[-1:]])
    which = np.isin(sizes, tied) if len(tied) > 1 else np.zeros(len(sizes), bool)
    for first, last in style.runs(which.tolist()):
        x = np.unique([middle[first], *logs[first : last + 1], middle[last + 1]])
        found.append((2**x, np.interp(x, logs, rates)))
    return found
