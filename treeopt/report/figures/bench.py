"""What real decoding measured, beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.records.benchmark import Benchmark
from treeopt.records.figure import Ratio
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Panel, Series, intervals, wilson
from treeopt.report.verdict import CONTENDERS
from treeopt.report.wording import count

LOOKS = {  # colour, marker, hatch
    "predicted, product": (style.GREY, "^", ""),
    "predicted, joint": (style.GREY, "v", ""),
    "predicted": (style.ORANGE, "D", "///"),
    "replayed": (style.BLUE, "s", ""),
    "measured": (style.VERMILLION, "o", "..."),
}


def accepted_chart(bench: Benchmark, name: str = "chosen") -> Chart:
    """Share of the steps that accepted 0, 1, ... guesses: predicted before the run, replayed on its prompts, and measured.

    Raises OutOfRange where the benchmark has none of them.
    """
    contender = bench.contender(name)
    counted: dict[str, Sequence[float]] = {
        "predicted": contender.predicted_accepted,
        "replayed": contender.replayed_accepted,
        "measured": contender.accepted,
    }
    known = {kind: np.asarray(counts, dtype=float) for kind, counts in counted.items() if sum(counts)}
    if not known:
        raise OutOfRange("The benchmark did not count accepted guesses. Measure again with: treeopt bench")
    width, series = 0.8 / len(known), []
    for i, (kind, counts) in enumerate(known.items()):
        share, (colour, _, hatch) = wilson(counts, counts.sum()), LOOKS[kind]
        places = np.arange(len(counts))
        look = {"width": width, "color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        ends = np.stack([share.low, share.high]) if kind == "measured" else None
        label = f"{kind}\n({share.value @ places:.2f} a step)"
        series.append(Series(label, places + (i - (len(known) - 1) / 2) * width, share.value, ends, look, "bar"))
    steps = sum(contender.accepted)
    caption = style.sentence(
        count(steps, "measured step") if steps else None,
        _about(bench),
        "95 % interval, steps as independent" if "measured" in known else None,
    )
    lengths = [str(n) for n in range(max(map(len, known.values())))]
    title = f"Accepted guesses per step: {style.short(CONTENDERS.get(name, name), 40)}"
    return Chart(title, caption, [[Panel(series, "accepted guesses in a step", "share of steps", scale=lengths)]])


def _about(bench: Benchmark) -> str:
    first = bench.contenders[0]
    return style.sentence(
        count(first.compared, "held-out prompt" if bench.prompts == "held out" else "calibration prompt"),
        count(bench.rounds, "round"),
        f"batch size {first.batch_size}",
        style.origin({**(bench.provenance or {}), "dtype": bench.dtype}),
        style.rule(bench.acceptance),
    )


def contenders_chart(bench: Benchmark) -> Chart:
    """Speedups with their 95 % intervals, and tokens per step predicted, replayed and measured; below them the groups."""
    cs = bench.contenders
    rows = [f"{style.short(CONTENDERS.get(c.name, c.name), 24)} ({c.size})" for c in cs]
    rates: dict[str, list[float | None]] = {
        "predicted, product": [c.predicted.product for c in cs],
        "predicted, joint": [c.predicted.joint for c in cs],
        "predicted": [c.predicted.replayed for c in cs],
        "replayed": [c.replayed_tokens_per_step for c in cs],
        "measured": [c.tokens_per_step for c in cs],
    }
    marks = []
    for i, (kind, values) in enumerate(rates.items()):
        shown = [(rate, row + (i - 2) * 0.14) for row, rate in enumerate(values) if rate is not None]
        colour, marker, _ = LOOKS[kind]
        if shown:
            marks.append(
                Series(
                    kind,
                    [rate for rate, _ in shown],
                    [row for _, row in shown],
                    look={"marker": marker, "color": colour, "linestyle": "none"},
                )
            )
    height, speedups = max(2.2, 0.34 * len(cs) + 0.6), [bench.speedup(c.name) for c in cs]
    left = _ratios(speedups, rows, "Speedup", "contender (rows per step)", height=height)
    panels = [[left, Panel(marks, "tokens per step", title="Tokens per step", rows=rows, height=height)]]
    if groups := bench.groups if "chosen" in [c.name for c in cs] else []:
        found = [bench.speedup("chosen", group=group) for group in groups]
        names, height = [style.short(group or "(no group)") for group in groups], 0.8 + 0.22 * len(groups)
        panels.append(
            [_ratios(found, names, "Speedup of the chosen tree by group", "group", height=height, is_wide=True)]
        )
    sure = all(ratio is None or ratio.low is not None for ratio in speedups)
    bar = "95 % interval over blocks of prompts" if sure else "too few blocks of prompts for intervals"
    return Chart("Real decoding", style.sentence(_about(bench), bar), panels)


def _ratios(
    ratios: Sequence[Ratio | None],
    rows: Sequence[str],
    title: str,
    ylabel: str,
    *,
    height: float,
    is_wide: bool = False,
) -> Panel:
    """One mark a row, from the top; a row without a ratio stays empty."""
    known = [(row, ratio) for row, ratio in enumerate(ratios) if ratio is not None]
    values, places = [ratio.value for _, ratio in known], [row for row, _ in known]
    ends = intervals([(ratio.value, (ratio.low, ratio.high), None) for _, ratio in known])
    look = {"color": style.BLUE, "marker": "o", "markersize": 5, "linestyle": "none", "elinewidth": 2}
    plain = Series("", [], [1.0], look={"color": style.GREY, "linestyle": (0, (2, 3)), "zorder": 0}, kind="across")
    top = max((ratio.high or ratio.value for _, ratio in known), default=1.0)
    return Panel(
        [Series("", values, places, ends, look), plain],
        "over plain decoding",
        ylabel,
        title,
        rows=rows,
        xlim=(0, 1.06 * max(top, 1.0)),
        height=height,
        is_wide=is_wide,
    )
