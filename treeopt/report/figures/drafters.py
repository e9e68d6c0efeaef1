"""Drafters beside each other at every batch size: speedup and tokens per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeopt.planning.compared import DraftersCompared, Setting
from treeopt.report.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOGETHER = 0.7  # width that the drafters of one batch size share


@dataclass(frozen=True, eq=False)
class DraftersData:
    """Drafter -> (B,) what it reaches at each batch size, None where it was not run."""

    batch_sizes: tuple[int, ...]
    settings: Mapping[str, tuple[Setting | None, ...]]
    caption: str


def drafters_data(result: DraftersCompared) -> DraftersData:
    """The settings by drafter and batch size."""
    sizes = tuple(sorted({one.batch_size for one in result.settings}))
    known = {(one.drafter, one.batch_size): one for one in result.settings}
    names = dict.fromkeys(one.drafter for one in result.settings)
    hollow = "hollow: predicted" if any(not one.is_measured for one in result.settings) else None
    return DraftersData(
        sizes,
        {name: tuple(known.get((name, size)) for size in sizes) for name in names},
        style.sentence(result.about, hollow, "numbers: rows a step", "bars: 95 % intervals"),
    )


@style.look()
def draw_drafters(data: DraftersData, figure: Figure | None = None) -> Figure:
    """Speedups on the left, tokens per step on the right."""
    figure = figure or style.blank()
    left, right = figure.subplots(1, 2)
    width = TOGETHER / max(len(data.settings), 1)
    for i, (name, settings) in enumerate(data.settings.items()):
        aside = width * (i - (len(data.settings) - 1) / 2)
        for place, one in enumerate(settings):
            if one is not None:
                _draw(left, right, one, i, place + aside, style.short(name))
    style.plain_line(left, 1.0)
    for axes, label in ((left, "speedup over plain decoding"), (right, "tokens per step")):
        axes.set_xticks(range(len(data.batch_sizes)), list(map(str, data.batch_sizes)))
        axes.set_xlim(-0.5, len(data.batch_sizes) - 0.5)
        axes.set_ylim(0, None)
        axes.set(xlabel="batch size", ylabel=label)
        axes.grid(visible=False, axis="x")
    handles, labels = right.get_legend_handles_labels()
    style.legend(right, handles=list(dict(zip(labels, handles, strict=True)).values()))
    style.heading(figure, "Drafters, each with its own best tree", data.caption)
    return figure


def _draw(left: Axes, right: Axes, one: Setting, i: int, x: float, name: str) -> None:
    look = {**style.series(i), "linestyle": "none", "fillstyle": "full" if one.is_measured else "none"}
    value, low, high = one.speedup.value, one.speedup.low, one.speedup.high
    errors = [[value - low], [high - value]] if low is not None and high is not None else None
    left.errorbar([x], [value], yerr=errors, elinewidth=0.8, **look)
    below = value if low is None else min(low, value)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "top"}
    left.annotate(str(one.size), (x, below), (0, -3), fontsize=6, bbox=box, **place)
    error = style.Z95 * (one.tokens_per_step_stderr or 0.0)
    right.errorbar([x], [one.tokens_per_step], yerr=error, elinewidth=0.8, label=name, **look)
