"""Decoding, measured beside what was predicted: a benchmark's contenders; over batch sizes kinds of drafts and drafters
beside each other, and what batching trades.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.planning.compared import DrafterFigure, DraftersCompared
from treeopt.records.benchmark import Benchmark
from treeopt.records.figure import Figure, Ratio
from treeopt.records.plan import Plan
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Estimates, Panel, Series, plain_line, wilson
from treeopt.report.figures.style import Look
from treeopt.report.verdict import CONTENDERS
from treeopt.report.wording import count, kinds_of, setting_name
from treeopt.trees.draft import ANEW

OVER = "over plain decoding"
LOOKS = {  # colour, marker, hatch
    "predicted, product": (style.GREY, "^", ""),
    "predicted, joint": (style.GREY, "v", ""),
    "predicted": (style.ORANGE, "D", "///"),
    "replayed": (style.BLUE, "s", ""),
    "measured": (style.VERMILLION, "o", "..."),
}
TOGETHER = 0.7  # width that the marks of one batch size share
MOST_TOTALS = 12  # ratio of the totals above which their axis is logarithmic
HOLLOW: Look = {"linestyle": "none", "markersize": 7, "markerfacecolor": "none"}
RATES: dict[str, Look] = {
    "the plan's trees": {"color": style.BLUE, "marker": "o", "linestyle": "-"},
    "plain decoding": {"color": style.BLACK, "marker": "s", "linestyle": (0, (2, 3))},
    "the plan's trees, measured": {"color": style.VERMILLION, "marker": "D", **HOLLOW},
    "plain decoding, measured": {"color": style.BLACK, "marker": "s", **HOLLOW},
}


def accepted_chart(bench: Benchmark, name: str = "chosen") -> Chart:
    """Share of the steps that accepted 0, 1, ... guesses: predicted before the run, replayed on its prompts, and measured.

    Raises OutOfRange where the benchmark has none of them.
    """
    of = bench.contender(name)
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
    rows = [f"{style.short(CONTENDERS.get(c.name, c.name), 24)} ({c.size}{', stopped' * c.stopped})" for c in cs]
    rates: dict[str, list[float | None]] = {
        "predicted, product": [c.predicted.product for c in cs],
        "predicted, joint": [c.predicted.joint for c in cs],
        "predicted": [c.predicted.replayed for c in cs],
        "replayed": [c.replayed_tokens_per_step for c in cs],
        "measured": [c.tokens_per_step for c in cs],
    }
    marks = []
    for i, (kind, values) in enumerate(rates.items()):
        look = {"marker": LOOKS[kind][1], "color": LOOKS[kind][0], "linestyle": "none"}
        x = [rate for rate in values if rate is not None]
        y = [row + (i - 2) * 0.14 for row, rate in enumerate(values) if rate is not None]
        marks += [Series(kind, x, y, look=look)] if x else []
    height, speedups = max(2.2, 0.34 * len(cs) + 0.6), [None if c.stopped else bench.speedup(c.name) for c in cs]
    left = Panel(_ratios(speedups), OVER, "contender (rows per step)", "Speedup", rows=rows, **_to(speedups, height))
    panels = [[left, Panel(marks, "tokens per step", title="Tokens per step", rows=rows, height=height)]]
    if groups := bench.groups if "chosen" in [c.name for c in cs] else []:
        found = [bench.speedup("chosen", group=group) for group in groups]
        names, size = [style.short(group or "(no group)") for group in groups], _to(found, 0.8 + 0.22 * len(groups))
        title = "Speedup of the chosen tree by group"
        panels.append([Panel(_ratios(found), OVER, "group", title, rows=names, is_wide=True, **size)])
    sure = all(ratio is None or ratio.low is not None for ratio in speedups)
    bar = "95 % interval over blocks of prompts" if sure else "too few blocks of prompts for intervals"
    return Chart("Real decoding", style.sentence(_about(bench), bar), panels)


def _to(ratios: Sequence[Ratio | None], height: float) -> Look:
    """The size of a panel of ratios, from 0 to the greatest."""
    top = max([1.0, *(ratio.high or ratio.value for ratio in ratios if ratio)])
    return {"xlim": (0, 1.06 * top), "height": height}


def _ratios(ratios: Sequence[Ratio | None]) -> list[Series]:
    """One mark a row, from the top; a row without a ratio stays empty."""
    known = [(row, ratio) for row, ratio in enumerate(ratios) if ratio is not None]
    marks = Estimates.of((ratio.value, (ratio.low, ratio.high), None) for _, ratio in known)
    plain = Series("", [], [1.0], look={"color": style.GREY, "linestyle": (0, (2, 3)), "zorder": 0}, kind="across")
    look = {"color": style.BLUE, "marker": "o", "markersize": 5, "elinewidth": 2}
    return [marks.along("", [row for row, _ in known], **look), plain]


def kinds_chart(plan: Plan, benches: Mapping[int, Benchmark] | None = None) -> Chart:
    """What a plan expects of the best draft of each kind, and what its benchmarks measured of these.

    benches : batch size -> its benchmark

    Raises OutOfRange for a plan without dynamic trees.
    """
    marks = []
    for entry in plan.entries:
        bench = (benches or {}).get(entry.batch_size)
        measured = {c.draft: bench.figure(c.name) for c in reversed(bench.contenders)} if bench else {}
        for name, best in kinds_of(entry).items() if any(map(entry.best, ANEW)) else ():
            for figure in filter(None, (best, measured.get(best.draft))):
                marks.append(DrafterFigure(drafter=name, figure=figure, setting="", is_measured=figure is not best))
    if not marks:
        raise OutOfRange(
            "The plan has no dynamic trees. They need treeopt calibrate --topk, treeopt profile, then treeopt search"
        )
    about = style.known(plan.runtime, "name", "version")
    return _beside(marks, "The best draft of each kind", about, style.rule(plan.acceptance))


def drafters_chart(result: DraftersCompared) -> Chart:
    """What each drafter reaches at each batch size with its own best draft."""
    return _beside(result.settings, "Drafters, each with its own best tree", result.about)


def _beside(marks: Sequence[DrafterFigure], title: str, *about: str | None) -> Chart:
    """Speedups on the left, tokens per step on the right; predicted ones are hollow."""
    sizes = sorted({mark.batch_size for mark in marks})
    names = list(dict.fromkeys(mark.drafter for mark in marks))
    width = TOGETHER / len(names)
    left, right = [plain_line(1.0)], []
    for i, name in enumerate(names):
        for is_measured in (True, False):
            mine = [m.figure for m in marks if (m.drafter, m.is_measured) == (name, is_measured)]
            look = {**style.series(i), "linestyle": "none", "fillstyle": "full" if is_measured else "none"}
            aside = width * (i - (len(names) - 1) / 2 + (0.12 if is_measured else -0.12))
            x = [sizes.index(figure.batch_size) + aside for figure in mine]
            noted = {m.batch_size for m in marks if m.drafter == name and is_measured and not m.is_measured}
            timed = [(at, f.speedup_ratio, f) for at, f in zip(x, mine, strict=True) if f.speedup_ratio]
            notes = ["" if f.batch_size in noted else setting_name(f.draft) for *_, f in timed]
            speedups = Estimates.of((ratio.value, (ratio.low, ratio.high), None) for _, ratio, _ in timed)
            left.append(replace(speedups.over("", [at for at, *_ in timed], **look), notes=notes))
            rates = [(f.tokens_per_step, f.interval95.tokens_per_step, f.stderr.tokens_per_step) for f in mine]
            right.append(Estimates.of(rates).over(style.short(name) if mine else "", x, **look))
    axes: Look = {"scale": [str(size) for size in sizes], "ylim": (0, None)}
    panels = [
        Panel(left, "batch size", "speedup over plain decoding", **axes),
        Panel(right, "batch size", "tokens per step", **axes),
    ]
    hollow = "hollow: predicted" if any(not mark.is_measured for mark in marks) else None
    said = "numbers: rows a step, of dynamic trees levels/topk/rows"
    return Chart(title, style.sentence(*about, hollow, said, "bars: 95 % intervals"), [panels])


def pareto_chart(plan: Plan, benches: Mapping[int, Benchmark] | None = None) -> Chart:
    """Tokens per second for each user against those of the whole batch: the plan's trees and plain decoding.

    Predicted ones as lines, and as marks those that were measured. Raises OutOfRange for fewer than two batch sizes with
    latencies.
    """
    timed = [entry for entry in plan.entries if entry.chosen.speedup is not None]
    if len(timed) < 2:
        raise OutOfRange(
            "The picture needs at least two batch sizes with latencies. Make them with: treeopt profile --batch-size "
            "1,4, then treeopt search"
        )
    decoded = [bench for _, bench in sorted((benches or {}).items())]

    def measured(name: str) -> list[Figure]:
        found = [bench.figure(name) for bench in decoded if name in {c.name for c in bench.contenders}]
        return [figure for figure in found if figure.tokens_per_s]

    drawn = [[e.chosen for e in timed], [e.plain for e in timed], measured("chosen"), measured("plain")]
    series, most_user, ends_of_all = [], 0.0, list[float]()
    for (kind, look), figures in zip(RATES.items(), drawn, strict=True):
        if not figures:
            continue
        sizes = [figure.batch_size for figure in figures]
        total = Estimates.of((f.tokens_per_s or 0.0, f.interval95.tokens_per_s, f.stderr.tokens_per_s) for f in figures)
        each = total.value / sizes
        notes = [] if look["linestyle"] == "none" else [str(size) for size in sizes]
        side: Literal["left", "right"] = "left" if kind == "plain decoding" else "right"
        series.append(replace(total.over(kind, each, **look), notes=notes, side=side))
        most_user = max(most_user, float(each.max()))
        ends_of_all += [*total.value, *total.ends.ravel()]
    totals = [total for total in ends_of_all if total > 0]
    log = max(totals) > MOST_TOTALS * min(totals)
    ylim = (0.7 * min(totals), 1.5 * max(totals)) if log else (0.0, 1.12 * max(totals))
    xlabel, ylabel = "tokens per second for each user", "tokens per second of the batch"
    panel = Panel(series, xlabel, ylabel, log=log, xlim=(0, 1.12 * most_user), ylim=ylim)
    caption = style.sentence(
        f"lines: predicted, latencies of {style.known(plan.runtime, 'name', 'version')}".rstrip(),
        style.rule(plan.acceptance),
        "numbers: batch sizes",
        "bars: 95 % intervals",
        "better is further up and to the right",
    )
    return Chart("What batching trades: speed for each user against the sum", caption, [[panel]])
