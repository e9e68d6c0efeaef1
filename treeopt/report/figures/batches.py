"""Pictures over batch sizes: kinds of drafts beside each other, drafters beside each other, and what batching trades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from treeopt.errors import OutOfRange
from treeopt.planning.compared import DraftersCompared
from treeopt.records.benchmark import Benchmark
from treeopt.records.figure import Figure
from treeopt.records.plan import Plan
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Estimates, Panel, plain_line
from treeopt.report.figures.style import Look
from treeopt.report.wording import kinds_of, setting_name

TOGETHER = 0.7  # width that the marks of one batch size share
MOST_LINEAR = 12  # ratio of the totals above which their axis is logarithmic
HOLLOW: Look = {"linestyle": "none", "markersize": 7, "markerfacecolor": "none"}
LOOKS: dict[str, Look] = {
    "the plan's trees": {"color": style.BLUE, "marker": "o", "linestyle": "-"},
    "plain decoding": {"color": style.BLACK, "marker": "s", "linestyle": (0, (2, 3))},
    "the plan's trees, measured": {"color": style.VERMILLION, "marker": "D", **HOLLOW},
    "plain decoding, measured": {"color": style.BLACK, "marker": "s", **HOLLOW},
}


@dataclass(frozen=True)
class Placed:
    """What one of several reaches at a batch size."""

    name: str
    figure: Figure
    is_measured: bool


def kinds_chart(plan: Plan, benches: Mapping[int, Benchmark] | None = None) -> Chart:
    """What a plan expects of the best draft of each kind, and what its benchmarks measured of these.

    benches : batch size -> its benchmark

    Raises OutOfRange for a plan without dynamic trees.
    """
    marks = []
    for entry in plan.entries:
        bench = (benches or {}).get(entry.batch_size)
        measured = {c.draft: bench.figure(c.name) for c in reversed(bench.contenders)} if bench else {}
        for name, best in kinds_of(entry).items() if entry.best("dynamic") else ():
            found = measured.get(best.draft)
            marks += [
                Placed(name, best, is_measured=False),
                *([Placed(name, found, is_measured=True)] if found else []),
            ]
    if not marks:
        raise OutOfRange(
            "The plan has no dynamic trees. They need treeopt calibrate --topk, treeopt profile, then treeopt search"
        )
    about = style.known(plan.runtime, "name", "version")
    return _beside(marks, "The best draft of each kind", about, style.rule(plan.acceptance))


def drafters_chart(result: DraftersCompared) -> Chart:
    """What each drafter reaches at each batch size with its own best draft."""
    marks = [Placed(style.short(one.drafter), one.figure, one.is_measured) for one in result.settings]
    return _beside(marks, "Drafters, each with its own best tree", result.about)


def _beside(marks: Sequence[Placed], title: str, *about: str | None) -> Chart:
    """Speedups on the left, tokens per step on the right; predicted ones are hollow."""
    sizes = sorted({mark.figure.batch_size for mark in marks})
    names = list(dict.fromkeys(mark.name for mark in marks))
    width = TOGETHER / len(names)
    left, right = [plain_line(1.0)], []
    for i, name in enumerate(names):
        for is_measured in (True, False):
            mine = [m.figure for m in marks if (m.name, m.is_measured) == (name, is_measured)]
            look = {**style.series(i), "linestyle": "none", "fillstyle": "full" if is_measured else "none"}
            aside = width * (i - (len(names) - 1) / 2 + (0.12 if is_measured else -0.12))
            x = [sizes.index(figure.batch_size) + aside for figure in mine]
            noted = {m.figure.batch_size for m in marks if m.name == name and is_measured and not m.is_measured}
            timed = [(at, f.speedup_ratio, f) for at, f in zip(x, mine, strict=True) if f.speedup_ratio]
            notes = ["" if f.batch_size in noted else setting_name(f.draft) for *_, f in timed]
            speedups = Estimates.of((ratio.value, (ratio.low, ratio.high), None) for _, ratio, _ in timed)
            left.append(replace(speedups.over("", [at for at, *_ in timed], **look), notes=notes))
            rates = [(f.tokens_per_step, f.interval95.tokens_per_step, f.stderr.tokens_per_step) for f in mine]
            right.append(Estimates.of(rates).over(name if mine else "", x, **look))
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
    for (kind, look), figures in zip(LOOKS.items(), drawn, strict=True):
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
    log = max(totals) > MOST_LINEAR * min(totals)
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
