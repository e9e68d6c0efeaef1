"""What a step costs: the staircase over tree size, and the parts that a step is made of.

N sizes that were measured
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treeopt.drafting import whole_parts
from treeopt.errors import OutOfRange
from treeopt.figures.style import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    Z95,
    Shares,
    bars,
    blank,
    heading,
    legend,
    log_axis,
    look,
    origin,
    sentence,
    series,
    size_axis,
    span,
)
from treeopt.latency import Latency, LatencyProfile, median_latency
from treeopt.tree import IntArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {  # in the order of a step: colour and hatch
    "draft": (ORANGE, ""),
    "target": (SKY, "///"),
    "verify": (GREEN, "..."),
    "commit": (BLUE, "\\\\\\"),
}
ACROSS = 3  # panels side by side


@dataclass(frozen=True, eq=False)
class Staircase:
    """Median step latency of one batch size and context, at the deepest tree measured for each size.

    sizes, depths : (N,)
    ms            : (N,)  with 95 % intervals of the median
    overhead      : (N,)  over the plain step, both errors in the interval
    others        : (size, ms) of the shallower trees
    """

    batch_size: int
    context_tokens: int
    sizes: IntArray
    depths: IntArray
    ms: Shares
    overhead: Shares
    plain: Latency
    others: tuple[tuple[int, float], ...]
    label: str


@dataclass(frozen=True, eq=False)
class LatencyData:
    """A staircase for each batch size and context."""

    curves: tuple[Staircase, ...]
    caption: str = ""


def latency_data(profile: LatencyProfile) -> LatencyData:
    """Medians of the measured steps, repeated timings pooled.

    >>> from treeopt.latency import StepTiming
    >>> point, plain = StepTiming(1, 128, 8, 2, (3.0, 3.0)), StepTiming(1, 128, 1, 0, (2.0, 2.0))
    >>> latency_data(LatencyProfile((point,), (plain,))).curves[0].overhead.value.tolist()
    [1.5]
    """
    curves = []
    for batch_size, context in profile.settings:
        deepest, others = _trees(profile, batch_size, context)
        plain = profile.plain(batch_size, context)
        steps = [profile.step(batch_size, context, size, depth) for size, depth in deepest]
        ms = np.array([step.ms for step in steps if step])
        error = np.array([step.stderr_ms for step in steps if step])
        ratio = ms / plain.ms
        spread = ratio * np.hypot(error / np.maximum(ms, 1e-12), plain.stderr_ms / plain.ms)
        measured = [(size, profile.step(batch_size, context, size, depth)) for size, depth in others]
        curves.append(
            Staircase(
                batch_size,
                context,
                np.array([size for size, _ in deepest], dtype=np.int64),
                np.array([depth for _, depth in deepest], dtype=np.int64),
                _interval(ms, error),
                _interval(ratio, spread),
                plain,
                tuple((size, step.ms) for size, step in measured if step),
                _label(profile, batch_size, context),
            )
        )
    return LatencyData(tuple(curves), _caption(profile))


def _trees(
    profile: LatencyProfile, batch_size: int, context: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(size, depth) of the deepest tree of every measured size, and of all others."""
    here = sorted({(p.size, p.depth) for p in profile.points
                   if (p.batch_size, p.context_tokens) == (batch_size, context)})  # fmt: skip
    deepest = dict(here)  # the last of a size is its deepest
    return list(deepest.items()), [tree for tree in here if deepest[tree[0]] != tree[1]]


def _interval(value: NDArray[np.float64], stderr: NDArray[np.float64]) -> Shares:
    return Shares(value, value - Z95 * stderr, value + Z95 * stderr)


def _label(profile: LatencyProfile, batch_size: int, context: int) -> str:
    alone = [c for b, c in profile.settings if b == batch_size] == [context]
    return str(batch_size) if alone else f"{batch_size}, context {context:,}"


def _caption(profile: LatencyProfile) -> str:
    n = [len(p.step_ms) for p in profile.points] or [len(p.step_ms) for p in profile.autoregressive]
    contexts = [context for _, context in profile.settings]
    runtime = profile.runtime
    return sentence(
        f"{span(n)} steps timed per point",
        f"context {span(contexts)} tokens",
        " ".join(str(runtime[key]) for key in ("name", "version", "attention") if runtime.get(key)) or None,
        origin(profile.info.get("provenance")),
    )


@look()
def draw_latency(data: LatencyData, figure: Figure | None = None) -> Figure:
    """Milliseconds on the left, the ratio to a plain step on the right."""
    figure = figure or blank()
    left, right = figure.subplots(1, 2)
    for i, curve in enumerate(data.curves):
        style = series(i)
        bars(left, curve.sizes, curve.ms, label=curve.label, **style)
        bars(right, curve.sizes, curve.overhead, label=curve.label, **style)
        left.axhline(curve.plain.ms, color=style["color"], linestyle=(0, (2, 3)), linewidth=0.9, zorder=1)
        if curve.others:
            sizes, ms = np.array(curve.others).T
            for axes, unit in ((left, 1.0), (right, curve.plain.ms)):
                axes.plot(sizes, ms / unit, ".", color=style["color"], alpha=0.45, markersize=3)
    all_ms = np.concatenate([[curve.plain.ms, *curve.ms.value] for curve in data.curves])
    if all_ms.max() > 8 * all_ms.min():
        log_axis(left)
    else:
        left.set_ylim(0, None)
    right.axhline(1.0, color="black", linestyle=(0, (2, 3)), linewidth=0.9, zorder=1)
    sizes = np.concatenate([curve.sizes for curve in data.curves])
    for axes in (left, right):
        size_axis(axes, sizes)
        axes.set_xlabel("rows per step (tree size)")
    left.set(title="One step (dashed: plain)", ylabel="step latency [ms]")
    right.set(title="Over a plain step", ylabel="overhead", ylim=(0, None))
    legend(right, "batch size")
    note = "medians, 95 % intervals; lines: the deepest tree of each size, dots: shallower ones"
    heading(figure, "What a decoding step costs", sentence(data.caption, note))
    return figure


@dataclass(frozen=True, eq=False)
class Parts:
    """Median latency of the parts of a step, at the deepest tree measured for each size.

    ms    : part -> (N,) [ms]
    total : (N,)  median of the whole steps [ms]; medians of parts need not add up to it
    """

    label: str
    sizes: IntArray
    ms: Mapping[str, NDArray[np.float64]]
    total: NDArray[np.float64]
    plain_ms: float


@dataclass(frozen=True, eq=False)
class PartsData:
    """The parts for each batch size and context."""

    panels: tuple[Parts, ...]
    caption: str = ""


def parts_data(profile: LatencyProfile) -> PartsData:
    """Medians of drafting, the target's pass, verification and commit, where they were timed.

    Raises OutOfRange where no step was timed in parts.
    """
    panels = []
    for batch_size, context in profile.settings:
        found: dict[int, Any] = {}
        for point in profile.points:
            here = (point.batch_size, point.context_tokens) == (batch_size, context)
            if here and point.parts_ms and (point.size not in found or point.depth > found[point.size].depth):
                found[point.size] = point
        points = [found[size] for size in sorted(found)]
        if points:
            parts = [whole_parts(p.parts_ms) for p in points]
            names = [*PARTS, *sorted({name for found in parts for name in found} - set(PARTS))]
            ms = {
                name: np.array([float(np.median(found.get(name) or 0.0)) for found in parts])
                for name in names
                if any(found.get(name) for found in parts)
            }
            panels.append(
                Parts(
                    _label(profile, batch_size, context),
                    np.array([p.size for p in points]),
                    ms,
                    np.array([median_latency(p.step_ms).ms for p in points]),
                    profile.plain(batch_size, context).ms,
                )
            )
    if not panels:
        raise OutOfRange("No step of the profile was timed in parts. Measure again with: treeopt profile")
    return PartsData(tuple(panels), _caption(profile))


@look()
def draw_parts(data: PartsData, figure: Figure | None = None) -> Figure:
    """Stacked areas, one panel for each batch size; the whole step and the plain step as lines."""
    n = len(data.panels)
    down = -(-n // ACROSS)
    figure = figure or blank(height=max(4.5, 0.9 + 2.2 * down))
    grid = figure.subplots(down, min(n, ACROSS), squeeze=False)
    for axes in grid.ravel()[n:]:
        axes.set_visible(False)
    for i, (axes, panel) in enumerate(zip(grid.ravel(), data.panels, strict=False)):
        sizes = panel.sizes if len(panel.sizes) > 1 else panel.sizes * [0.93, 1.07]  # an area needs width
        base = np.zeros(len(sizes))
        for name, ms in panel.ms.items():
            colour, hatch = PARTS.get(name, ("#999999", "xx"))
            axes.fill_between(sizes, base, base + ms, facecolor=colour, hatch=hatch, edgecolor="white",
                              linewidth=0.3, label=name)  # fmt: skip
            base = base + ms
        axes.plot(panel.sizes, panel.total, "o-", color="black", markersize=2.5, label="whole step")
        axes.axhline(panel.plain_ms, color="black", linestyle=(0, (2, 3)), label="plain step")
        size_axis(axes, panel.sizes)
        axes.set(title=f"batch size {panel.label}", ylim=(0, None), xlabel="rows per step (tree size)",
                 ylabel="median [ms]" if i % ACROSS == 0 else "")  # fmt: skip
    handles, labels = grid[0, 0].get_legend_handles_labels()
    last = grid[0, min(n, ACROSS) - 1]
    order = [*reversed(range(len(labels) - 2)), len(labels) - 2, len(labels) - 1]  # as they are stacked
    legend(last, handles=[handles[j] for j in order], labels=[labels[j] for j in order])
    heading(figure, "What a decoding step is made of", data.caption)
    return figure
