"""Decoding, measured beside what was predicted: how many guesses steps accept, and a benchmark's contenders."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.records.benchmark import Benchmark
from treeopt.records.estimate import Estimate
from treeopt.records.origins import Provenance
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Panel, Series, along, intervals, plain_line, wilson
from treeopt.report.verdict import label
from treeopt.report.wording import count

HATCHES = {"predicted": "///", "replayed": "", "measured": "..."}


def accepted_chart(bench: Benchmark) -> Chart:
    """Share of the steps that accepted 0, 1, ... guesses: predicted before the run, replayed on its prompts, and measured.

    Raises OutOfRange where the benchmark has none of them.
    """
    of = bench.contender(bench.judged)
    counted = zip(style.KINDS, map(np.array, (of.predicted_accepted, of.replayed_accepted, of.accepted)), strict=True)
    known = {kind: counts.astype(float) for kind, counts in counted if counts.sum()}
    if not known:
        raise OutOfRange("The benchmark did not count accepted guesses. Measure again with: treeopt bench")
    width, series = 0.8 / len(known), []
    for i, (kind, counts) in enumerate(known.items()):
        share, colour = wilson(counts, counts.sum()), style.KINDS[kind]["color"]
        places = np.arange(len(counts))
        look = {"width": width, "color": colour, "hatch": HATCHES[kind], "edgecolor": "white", "linewidth": 0.5}
        ends = share[1:] if kind == "measured" else None
        legend = f"{kind}\n({share[0] @ places:.2f} a step)"
        series.append(Series(legend, places + (i - (len(known) - 1) / 2) * width, share[0], ends, look, "bar"))
    steps = sum(of.accepted)
    caption = style.sentence(
        count(steps, "measured step") if steps else None,
        _about(bench),
        "95 % interval, steps as independent" if "measured" in known else None,
    )
    lengths = [str(n) for n in range(max(map(len, known.values())))]
    title = f"Accepted guesses per step: {label(bench, bench.judged)}"
    return Chart(title, caption, [Panel(series, "accepted guesses in a step", "share of steps", scale=lengths)])


def _about(bench: Benchmark) -> str:
    first = bench.contenders[0]
    return style.sentence(
        count(first.compared, "held-out prompt" if bench.prompts == "held out" else "calibration prompt"),
        count(bench.rounds, "round"),
        f"batch size {first.batch_size}",
        style.origin(replace(bench.provenance or Provenance(), dtype=bench.dtype)),
        style.rule(bench.acceptance),
    )


def contenders_chart(bench: Benchmark) -> Chart:
    """Speedups with their 95 % intervals, and tokens per step predicted, replayed and measured; below them the groups."""
    contenders = bench.contenders
    rows = [f"{style.short(label(bench, contender.name))} ({contender.size})" for contender in contenders]
    rates: dict[str, list[float | None]] = {
        "predicted": [contender.predicted_tokens_per_step for contender in contenders],
        "replayed": [contender.replayed_tokens_per_step for contender in contenders],
        "measured": [contender.tokens_per_step for contender in contenders],
    }
    marks = []
    for i, (kind, values) in enumerate(rates.items()):
        known = [(row + (i - 1) * 0.2, rate) for row, rate in enumerate(values) if rate is not None]
        if known:
            y, x = zip(*known, strict=True)
            marks.append(Series(kind, x, y, look={**style.KINDS[kind], "linestyle": "none"}))
    speedups = [bench.speedup(contender.name) for contender in contenders]
    names = "contender (rows per step)"
    panels = [
        _speedups("Speedup", names, rows, speedups),
        Panel(marks, "tokens per step", names, "Tokens per step", rows=rows, height=_height(rows)),
    ]
    if groups := bench.groups if bench.judged in [contender.name for contender in contenders] else []:
        found = [bench.speedup(bench.judged, group=group) for group in groups]
        rows = [style.short(group or "(no group)") for group in groups]
        panels.append(_speedups("Chosen tree by group", "group", rows, found))
    sure = all(ratio is None or ratio.low is not None for ratio in speedups)
    bar = "95 % interval over blocks of prompts" if sure else "too few blocks of prompts for intervals"
    return Chart("Real decoding", style.sentence(_about(bench), bar), panels)


def _height(rows: Sequence[str]) -> float:
    return 0.7 + 0.28 * len(rows)


def _speedups(title: str, of: str, rows: Sequence[str], ratios: Sequence[Estimate | None]) -> Panel:
    """A mark in each row that has a ratio, from the top."""
    known = {row: ratio for row, ratio in enumerate(ratios) if ratio is not None}
    look = {**style.KINDS["measured"], "markersize": 5, "elinewidth": 2}
    marks = along("", list(known), intervals(known.values()), **look)
    most = max([1.0, *(ratio.high or ratio for ratio in known.values())])
    series = [marks, plain_line(1.0)]
    return Panel(series, "times plain (dashed)", of, title, rows=rows, xlim=(0, 1.06 * most), height=_height(rows))
