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
from treeopt.report.figures.chart import Chart, Panel, Series, intervals, plain_line
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
        look, sizes = style.series(i), np.arange(1, len(held_out.tokens_per_step) + 1)
        series.append(Series(f"grown: {name}", sizes, held_out.tokens_per_step, look={**look, "markevery": 0.15}))
        if name == objective:
            ends = np.quantile(held_out.draws, [0.025, 0.975], axis=1)
            shade = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            series.append(Series("", sizes, held_out.tokens_per_step, ends, shade, "area"))
    chains = [(size, rate) for name, size, rate in found.fixed if name.startswith("chain")]
    if chains:
        series.append(
            Series("chains of top-1", [n for n, _ in chains], [rate for _, rate in chains], look=style.series(4))
        )
    star = {"marker": "*", "markersize": 10, "color": "black", "linestyle": "none"}
    series += [
        Series(name, [size], [rate], look=star) for name, size, rate in found.fixed if not name.startswith("chain")
    ]
    if dense := found.dense:
        sample = "" if len(dense) == found.n_dense else f"\n({len(dense)} of {found.n_dense:,})"
        cross = {"marker": "x", "markersize": 3, "color": "#A0A0A0", "linestyle": "none", "zorder": 1}
        x, y = [size for _, size, _ in dense], [rate for *_, rate in dense]
        series.append(Series(f"dense trees{sample}", x, y, look=cross))
    about = count(*source.observed)
    if source.answers is not None:
        about = f"{count(source.answers.num_sequences, 'sequence')}, {about}"
    caption = style.sentence(
        about,
        style.origin(source.meta.get("provenance")),
        style.rule(source.meta.get("acceptance")),
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
    left: list[Series] = []
    right: list[Series] = [plain_line(1.0)]
    every: list[float] = []
    drawn = [entry for entry in plan.entries if entry.chosen.tokens_per_s and any(p.tokens_per_s for p in entry.curve)]
    if not drawn:
        raise OutOfRange("The plan has no latencies. Make them with: treeopt profile, then treeopt search")
    for i, entry in enumerate(drawn):
        look, plain = {**style.series(i), "marker": ""}, entry.plain.tokens_per_s
        left += _curve(entry, 1.0, look)
        right += _curve(entry, plain, look) if plain else []
        left += [plain_line(plain, look["color"])] if plain else []
        every += [point.tokens_per_s for point in entry.curve if point.tokens_per_s]
    log = max(every) > MOST_LINEAR * min(every)
    rows = "rows per step (tree size)"
    panels = [
        Panel(
            left,
            rows,
            "tokens per second",
            "Throughput (dashed: plain)",
            "sizes",
            log=log,
            ylim=(None if log else 0, None),
        ),
        Panel(right, rows, "speedup", "Over plain decoding", "sizes"),
    ]
    sequences, contexts = (
        plan.entries[0].basis.sequences,
        [e.context_tokens for e in drawn if e.context_tokens is not None],
    )
    runtime = plan.runtime or {}
    caption = style.sentence(
        "Predicted: held-out tokens per step over measured latency",
        count(sequences, "sequence") if sequences is not None else "from accuracies alone",
        f"context {style.span(contexts)} tokens" if contexts else None,
        " ".join(filter(None, (runtime.get("name"), runtime.get("version")))) or None,
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
    chosen = entry.chosen
    rate, error = chosen.tokens_per_s or 0.0, chosen.stderr.tokens_per_s
    ends = intervals([(rate, None, error)]) / unit
    return [
        Series(str(entry.batch_size), sizes, rates, look=look),
        *(Series("", x, y, look=broad) for x, y in bands(sizes, rates, entry.tied_sizes)),
        Series("", [chosen.size], [rate / unit], ends, star),
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
