"""What copying text brings for the rows that it verifies: settings of an engine's drafters, each a mark."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.records.figure import Figure
from treeopt.records.plan import Plan
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Estimates, Panel, Series
from treeopt.trees.draft import CopiedText

ROW_COSTS = (0.02, 0.05, 0.1, 0.2, 0.5)  # of a row more, as shares of a plain step


def settings_chart(plan: Plan, batch_size: int | None = None) -> Chart:
    """Held-out tokens per step over rows per step of the settings of a batch size, and where they are as fast as plain decoding.

    Raises OutOfRange for a plan of another drafter.
    """
    if not plan.copies:
        raise OutOfRange(
            "The picture is of drafters that copy text. Plan them with: treeopt calibrate --from-logs, then search"
        )
    entry = plan.entries[0] if batch_size is None else plan.entry(batch_size)
    found: dict[str, list[Figure]] = {}
    for figure in (*entry.curve, *entry.others.values()):
        if isinstance(figure.draft, CopiedText):
            found.setdefault(figure.draft.drafter, []).append(figure)
    every = [figure for some in found.values() for figure in some]
    look = {"linestyle": "none"}
    series = [_marks(name, some, **{**style.series(i), **look}) for i, (name, some) in enumerate(found.items())]
    for name, figure in {"chosen": entry.chosen, **entry.others}.items():
        if name in ("chosen", "usual") and isinstance(figure.draft, CopiedText):
            series.append(replace(_marks("", [figure], marker="none", **look), notes=[name], side="left"))
    most = max((f.rows_per_step or 1.0 for f in every), default=1.0)
    top = max(((f.interval95.tokens_per_step or (1.0, f.tokens_per_step))[1] for f in every), default=1.0)
    x, dotted = (
        np.linspace(1, 1.08 * most, 50),
        {"color": style.GREY, "linewidth": 0.8, "linestyle": (0, (2, 3)), "marker": ""},
    )
    for cost in ROW_COSTS:
        y = 1 + cost * (x - 1)
        y = y[y <= 1.05 * top]
        end = len(y) - 1
        series.append(Series("", x[: end + 1], y, look=dotted))
        series.append(Series("", x[end : end + 1], y[end:], look=dotted, notes=[f"{cost:.0%} a row"], side="left"))
    panel = Panel(
        series, "rows verified per step (mean)", "tokens per step", ylim=(1, 1.1 * top), xlim=(0.9, 1.12 * most)
    )
    caption = style.sentence(
        f"batch size {entry.batch_size}",
        f"replayed on {entry.basis.conversations or 0} conversations that settings were not sought on",
        "bars: 95 % intervals",
        "a setting above a dotted line is faster than plain decoding where a row more costs that share of a plain step",
    )
    return Chart("What copied text brings for the rows that it verifies", caption, [[panel]], "drafter")


def _marks(label: str, figures: list[Figure], **look: object) -> Series:
    known = Estimates.of((f.tokens_per_step, f.interval95.tokens_per_step, f.stderr.tokens_per_step) for f in figures)
    return known.over(label, [f.rows_per_step or 1.0 for f in figures], **look)
