"""Decoding, measured beside what was predicted: how many guesses steps accept, and a benchmark's contenders."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.records.benchmark import Benchmark
from treeopt.records.estimate import Estimate
from treeopt.records.origins import Provenance
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Estimates, Panel, Series, plain_line, wilson
from treeopt.report.figures.style import Look
from treeopt.report.verdict import CONTENDERS
from treeopt.report.wording import count

OVER = "over plain decoding"
LOOKS = {  # colour, marker, hatch
    "predicted": (style.ORANGE, "D", "///"),
    "replayed": (style.BLUE, "s", ""),
    "measured": (style.VERMILLION, "o", "..."),
}


def accepted_chart(bench: Benchmark) -> Chart:
    """Share of the steps that accepted 0, 1, ... guesses: predicted before the run, replayed on its prompts, and measured.

    Raises OutOfRange where the benchmark has none of them.
    """
    of = bench.contender("chosen")
    kinds = ("predicted", "replayed", "measured")
    counted = zip(kinds, map(np.array, (of.predicted_accepted, of.replayed_accepted, of.accepted)), strict=True)
    known = {kind: counts.astype(float) for kind, counts in counted if counts.sum()}
    if not known:
        raise OutOfRange("The benchmark did not count accepted guesses. Measure again with: treeopt bench")
    width, series = 0.8 / len(known), []
    for i, (kind, counts) in enumerate(known.items()):
        share, (colour, _, hatch) = wilson(counts, counts.sum()), LOOKS[kind]
        places = np.arange(len(counts))
        look = {"width": width, "color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        ends = share.ends if kind == "measured" else None
        label = f"{kind}\n({share.value @ places:.2f} a step)"
        series.append(Series(label, places + (i - (len(known) - 1) / 2) * width, share.value, ends, look, "bar"))
    steps = sum(of.accepted)
    caption = style.sentence(
        count(steps, "measured step") if steps else None,
        _about(bench),
        "95 % interval, steps as independent" if "measured" in known else None,
    )
    lengths = [str(n) for n in range(max(map(len, known.values())))]
    title = f"Accepted guesses per step: {CONTENDERS['chosen']}"
    return Chart(title, caption, [[Panel(series, "accepted guesses in a step", "share of steps", scale=lengths)]])


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
    cs = bench.contenders
    rows = [f"{style.short(CONTENDERS.get(c.name, c.name), 24)} ({c.size}{', stopped' * c.stopped})" for c in cs]
    rates: dict[str, list[float | None]] = {
        "predicted": [c.predicted.tokens_per_step for c in cs],
        "replayed": [c.replayed_tokens_per_step for c in cs],
        "measured": [c.tokens_per_step for c in cs],
    }
    marks = []
    for i, (kind, values) in enumerate(rates.items()):
        look = {"marker": LOOKS[kind][1], "color": LOOKS[kind][0], "linestyle": "none"}
        x = [rate for rate in values if rate is not None]
        y = [row + (i - 1) * 0.2 for row, rate in enumerate(values) if rate is not None]
        marks += [Series(kind, x, y, look=look)] if x else []
    height, speedups = max(2.2, 0.34 * len(cs) + 0.6), [None if c.stopped else bench.speedup(c.name) for c in cs]
    left = Panel(_ratios(speedups), OVER, "contender (rows per step)", "Speedup", rows=rows, **_to(speedups, height))
    panels = [[left, Panel(marks, "tokens per step", title="Tokens per step", rows=rows, height=height)]]
    if groups := bench.groups if "chosen" in [c.name for c in cs] else []:
        found = [bench.speedup("chosen", group=group) for group in groups]
        names, size = [style.short(group or "(no group)") for group in groups], _to(found, 0.8 + 0.22 * len(groups))
        title = "Speedup of the chosen tree by group"
        panels.append([Panel(_ratios(found), OVER, "group", title, rows=names, **size)])
    sure = all(ratio is None or ratio.low is not None for ratio in speedups)
    bar = "95 % interval over blocks of prompts" if sure else "too few blocks of prompts for intervals"
    return Chart("Real decoding", style.sentence(_about(bench), bar), panels)


def _to(ratios: Sequence[Estimate | None], height: float) -> Look:
    top = max([1.0, *(ratio.high or ratio for ratio in ratios if ratio)])
    return {"xlim": (0, 1.06 * top), "height": height}


def _ratios(ratios: Sequence[Estimate | None]) -> list[Series]:
    """One mark a row, from the top; a row without a ratio stays empty."""
    known = [(row, ratio) for row, ratio in enumerate(ratios) if ratio is not None]
    marks = Estimates.of(ratio for _, ratio in known)
    look = {"color": style.BLUE, "marker": "o", "markersize": 5, "elinewidth": 2}
    return [marks.along("", [row for row, _ in known], **look), plain_line(1.0)]
