"""A chart as plain data: panels of series, each with its points. One function, `draw`, makes the picture of any chart.

A figure's module computes a `Chart`; so its numbers can be used and tested without a drawing. Panels stand below each
other, since a phone shows no two side by side.

n points of a series
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.files.shell import printable
from treeopt.records.estimate import Z95, Estimate
from treeopt.report.figures import style
from treeopt.report.figures.style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 2.4  # inches of a panel
LEGEND = 60  # characters of a line of the legend


@dataclass(frozen=True, eq=False)
class Series:
    """Points that belong together.

    label : in the legend; empty for none
    x, y  : (n,)
    ends  : (2, n) low and high of each point's interval; of an area its edges
    look  : options of matplotlib: colour, marker, line style
    kind  : points on a line, bars, an area between the ends, lines across the panel at y, or marks at its lower edge
    """

    label: str
    x: ArrayLike
    y: ArrayLike
    ends: ArrayLike | None = None
    look: Mapping[str, Any] = field(default_factory=dict)
    kind: Literal["line", "bar", "area", "across", "edge"] = "line"


def intervals(estimates: Iterable[Estimate]) -> NDArray[np.float64]:
    """(3, n) value, low and high of each, by its interval or its standard error; without either all three are the value.

    >>> intervals([Estimate(2.0, low=1.5, high=2.5), Estimate(1.0)]).tolist()
    [[2.0, 1.0], [1.5, 1.0], [2.5, 1.0]]
    """
    return np.array([(estimate.value, *estimate.ends) for estimate in estimates], dtype=float).reshape(-1, 3).T


def wilson(hits: ArrayLike, trials: ArrayLike) -> NDArray[np.float64]:
    """(3, ...) shares, and low and high of their 95 % Wilson score intervals; without a trial all three are NaN.

    >>> wilson([0, 5], [10, 10]).round(3).tolist()
    [[0.0, 0.5], [0.0, 0.237], [0.278, 0.763]]
    """
    n = np.where(np.asarray(trials) > 0, trials, np.nan).astype(float)
    share = np.asarray(hits) / n
    middle = share + Z95**2 / (2 * n)
    half = Z95 * np.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    low, high = np.clip(np.stack([middle - half, middle + half]) / (1 + Z95**2 / n), 0.0, 1.0)
    return np.stack([share, low, high])


def over(label: str, x: ArrayLike, known: NDArray[np.float64], **look: Any) -> Series:
    """Marks over ``x`` with their intervals.

    known : (3, n) value, low and high
    """
    return Series(label, x, known[0], known[1:], look)


def along(label: str, rows: ArrayLike, known: NDArray[np.float64], **look: Any) -> Series:
    """Marks in ``rows``, with intervals along the axis below."""
    return Series(label, known[0], rows, known[1:], {**look, "linestyle": "none"})


def plain_line(at: float, color: str = style.BLACK) -> Series:
    """A dashed line across a panel at what plain decoding reaches."""
    look = {"color": color, "linestyle": (0, (5, 3)), "linewidth": 0.9, "zorder": 1}
    return Series("", [], [at], look=look, kind="across")


@dataclass(frozen=True, eq=False)
class Panel:
    """Axes and what is drawn on them.

    scale      : of the axis below: any numbers, whole ones, tree sizes by powers of two; or the names of its places
    rows       : names of places at the left, the first on top; intervals then lie along the axis below
    log        : whether the axis at the left is logarithmic
    xlim, ylim : ends of the axes, None for where the data ends
    height     : inches
    """

    series: Sequence[Series]
    xlabel: str
    ylabel: str = ""
    title: str = ""
    scale: Literal["any", "whole", "sizes"] | Sequence[str] = "any"
    rows: Sequence[str] = ()
    log: bool = False
    xlim: tuple[float | None, float | None] = (None, None)
    ylim: tuple[float | None, float | None] = (None, None)
    height: float = HEIGHT

    def __getitem__(self, label: str) -> Series:
        return next(one for one in self.series if one.label == label)


@dataclass(frozen=True, eq=False)
class Chart:
    """Panels below a title; the caption says how much was measured and of what.

    legend : its title
    """

    title: str
    caption: str
    panels: Sequence[Panel]
    legend: str = ""


@style.look()
def draw(chart: Chart) -> Figure:
    """The picture of a chart; what its series are called stands above the panels."""
    heights = [panel.height for panel in chart.panels]
    handles: Look = {}
    labels = list(dict.fromkeys(one.label for panel in chart.panels for one in panel.series if one.label))
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    columns = max(1, LEGEND // (10 + longest))
    figure = style.blank(height=0.9 + sum(heights) + 0.2 * -(-len(labels) // columns))
    body = figure.add_subfigure(figure.add_gridspec()[0])  # below the title, with a legend of its own
    stacked = body.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(stacked, chart.panels, strict=True):
        for one in panel.series:
            handles.setdefault(one.label, _add(axes, one, across=bool(panel.rows)))
        _finish(axes, panel)
    if labels:
        look: Look = {"alignment": "left", "handlelength": 3, "borderpad": 0.0, "ncols": columns}
        named = [handles[label] for label in labels]
        body.legend(named, labels, title=chart.legend or None, loc="outside upper left", **look)
    body.align_ylabels()
    style.heading(figure, chart.title, chart.caption)
    return figure


def _add(axes: Axes, one: Series, *, across: bool) -> Any:
    """Draw a series; the handle is what stands for it in a legend. ``across``: intervals lie along the axis below."""
    x, y = np.asarray(one.x, dtype=float), np.asarray(one.y, dtype=float)
    ends = np.stack([y, y]) if one.ends is None else np.asarray(one.ends, dtype=float)
    if one.kind == "across":
        return (axes.axvline if across else axes.axhline)(float(y[0]), **one.look)
    if one.kind == "area":
        return axes.fill_between(x, *ends, **one.look)
    if one.kind == "edge":
        edge: Look = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 3, "in_layout": False}
        return axes.plot(x, np.zeros(len(x)), **edge, **one.look)[0]
    errors = np.abs(ends - (x if across and one.ends is not None else y))
    bars: Look = {"xerr" if across else "yerr": errors if np.nan_to_num(errors).any() else None}
    if one.kind == "bar":
        return axes.bar(x, y, error_kw={"elinewidth": 0.9}, **bars, **one.look)
    return axes.errorbar(x, y, **bars, **{"elinewidth": 0.8, **one.look})


def _finish(axes: Axes, panel: Panel) -> None:
    """Scales, ticks and names of the axes."""
    if panel.log:
        axes.set_yscale("log")
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, xlim=panel.xlim, ylim=panel.ylim)
    if panel.log:
        style.log_axis(axes)
    if panel.rows:
        axes.set_yticks(range(len(panel.rows)), map(printable, panel.rows))
        axes.set_ylim(len(panel.rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        for row in range(0, len(panel.rows), 2):
            axes.axhspan(row - 0.5, row + 0.5, color="#F4F4F4", zorder=-1)
    if panel.scale == "sizes":
        style.size_axis(axes, np.concatenate([[], *(np.asarray(one.x, dtype=float) for one in panel.series)]))
    elif panel.scale == "whole":
        axes.locator_params(axis="x", nbins=10, integer=True, min_n_ticks=1)
    elif panel.scale != "any":
        axes.set_xticks(range(len(panel.scale)), list(map(printable, panel.scale)))
        axes.set_xlim(-0.5, len(panel.scale) - 0.5)
        axes.grid(visible=False, axis="x")
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "linear" and axis.get_view_interval()[1] >= 1000:
            axis.set_major_formatter(lambda value, _: f"{value:,g}")
