"""What a step costs: the staircase over tree size, and the parts that a step is made of.

Where drafting goes depth by depth, trees of one size cost by their depth. So lines join the trees that are as deep as
their rows allow, up to the deepest that were measured; others are marks that tell their depth.

N sizes of such trees
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.latency.estimate import StepCosts
from treeopt.latency.paired import Latency, median_latency
from treeopt.records.profile import LatencyProfile
from treeopt.report.figures import style
from treeopt.trees.tree import IntArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {  # in the order of a step: colour and hatch
    "draft": (style.ORANGE, ""),
    "target": (style.SKY, "///"),
    "verify": (style.GREEN, "..."),
    "commit": (style.BLUE, "\\\\\\"),
}
NOTICEABLE = 0.002  # share of a step
REST = "the rest"  # of a step, between its parts
ACROSS = 3  # panels side by side


@dataclass(frozen=True, eq=False)
class Staircase:
    """Median step latency of one batch size and context, of trees as deep as their rows allow.

    sizes, depths : (N,)
    ms            : (N,)  with 95 % intervals of the median
    overhead      : (N,)  over the plain step, both errors in the interval
    others        : (size, depth, ms) of the shallower trees
    """

    batch_size: int
    context_tokens: int
    sizes: IntArray
    depths: IntArray
    ms: style.Shares
    overhead: style.Shares
    plain: Latency
    others: tuple[tuple[int, int, float], ...]
    label: str


@dataclass(frozen=True, eq=False)
class LatencyData:
    """A staircase for each batch size and context."""

    curves: tuple[Staircase, ...]
    caption: str = ""


def latency_data(profile: LatencyProfile) -> LatencyData:
    """Medians of the measured steps, repeated timings pooled.

    >>> from treeopt.records.profile import StepTiming
    >>> point, plain = StepTiming(1, 128, 8, 2, (3.0, 3.0)), StepTiming(1, 128, 1, 0, (2.0, 2.0))
    >>> latency_data(LatencyProfile((point,), (plain,))).curves[0].overhead.value.tolist()
    [1.5]
    """
    curves = []
    for batch_size, context in profile.settings:
        deepest, others = _trees(profile, batch_size, context)
        costs = StepCosts(profile, batch_size, context, as_measured=True)
        plain, sizes, depths = costs.plain, [size for size, _ in deepest], [depth for _, depth in deepest]
        ms, error = costs.latencies(sizes, depths)
        ratio = ms / plain.ms
        spread = ratio * np.hypot(error / np.maximum(ms, 1e-12), plain.stderr_ms / plain.ms)
        measured = [(tree, costs.step(*tree)) for tree in others]
        curves.append(
            Staircase(
                batch_size,
                context,
                np.array(sizes, dtype=np.int64),
                np.array(depths, dtype=np.int64),
                _interval(ms, error),
                _interval(ratio, spread),
                plain,
                tuple((*tree, step.ms) for tree, step in measured if step),
                _label(profile, batch_size, context),
            )
        )
    return LatencyData(tuple(curves), _caption(profile))


def _trees(
    profile: LatencyProfile, batch_size: int, context: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(size, depth) of the trees that are as deep as their rows allow, and of all others."""
    here = sorted({(p.size, p.depth) for p in profile.fixed if p.setting == (batch_size, context)})
    most = max((depth for _, depth in here), default=0)
    deepest = [(size, depth) for size, depth in here if depth == min(most, size - 1)]
    return deepest, [tree for tree in here if tree not in deepest]


def _interval(value: NDArray[np.float64], stderr: NDArray[np.float64]) -> style.Shares:
    return style.Shares(value, value - style.Z95 * stderr, value + style.Z95 * stderr)


def _label(profile: LatencyProfile, batch_size: int, context: int) -> str:
    alone = [c for b, c in profile.settings if b == batch_size] == [context]
    return str(batch_size) if alone else f"{batch_size}, context {context:,}"


def _caption(profile: LatencyProfile) -> str:
    n = [len(p.step_ms) for p in profile.points] or [len(p.step_ms) for p in profile.autoregressive]
    contexts = [context for _, context in profile.settings]
    runtime = profile.runtime
    return style.sentence(
        f"{style.span(n)} steps timed per point",
        f"context {style.span(contexts)} tokens",
        " ".join(filter(None, (runtime.get("name"), runtime.get("version"), runtime.get("attention")))) or None,
        style.origin(profile.info.get("provenance")),
    )


@style.look()
def draw_latency(data: LatencyData, figure: Figure | None = None) -> Figure:
    """Milliseconds on the left, the ratio to a plain step on the right."""
    from matplotlib.lines import Line2D

    figure = figure or style.blank()
    left, right = figure.subplots(1, 2)
    for i, curve in enumerate(data.curves):
        line = {**style.series(i), "marker": "."}
        style.bars(left, curve.sizes, curve.ms, **line)
        style.bars(right, curve.sizes, curve.overhead, label=f"batch size {curve.label}", **line)
        style.plain_line(left, curve.plain.ms, line["color"])
        for size, depth, ms in curve.others:
            for axes, unit in ((left, 1.0), (right, curve.plain.ms)):
                axes.plot(size, ms / unit, color=line["color"], **_mark(depth))
    all_ms = np.concatenate([[curve.plain.ms, *curve.ms.value] for curve in data.curves])
    sizes = np.concatenate([[*curve.sizes, *(size for size, *_ in curve.others)] for curve in data.curves])
    style.beside_plain(left, right, all_ms, sizes, most=8)
    left.set(title="One step (dashed: plain)", ylabel="step latency [ms]")
    right.set(title="Over a plain step", ylabel="overhead", ylim=(0, None))
    depths = sorted({depth for curve in data.curves for _, depth, _ in curve.others})
    marks = [Line2D([], [], color="#666666", label=f"depth {depth}", **_mark(depth)) for depth in depths]
    style.legend(right, handles=[*right.get_legend_handles_labels()[0], *marks])
    most = max((int(curve.depths.max()) for curve in data.curves if len(curve.depths)), default=0)
    note = f"medians, 95 % intervals; lines: trees as deep as their rows allow, {most} at most"
    note += "; marks: shallower ones" if marks else ""
    style.heading(figure, "What a decoding step costs", style.sentence(data.caption, note))
    return figure


def _mark(depth: int) -> dict[str, Any]:
    """Of a tree that is shallower than its rows allow."""
    return {
        "marker": style.MARKERS[(depth - 1) % len(style.MARKERS)],
        "markersize": 3.5,
        "linestyle": "none",
        "alpha": 0.6,
    }


@dataclass(frozen=True, eq=False)
class Parts:
    """Median latency of the parts of a step, of trees as deep as their rows allow.

    ms    : part -> (N,) [ms]; they add up to the whole step. They are timed in steps of their own, with a clock between
            them: where they take longer together, they are scaled to it, and what they leave of it is the `REST`
    total : (N,)  median of the whole steps [ms]
    depth : of the deepest
    """

    label: str
    depth: int
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
        deepest, _ = _trees(profile, batch_size, context)
        here = [p for p in profile.fixed if p.setting == (batch_size, context) and p.parts_ms]
        found = {p.size: p for p in reversed(here) if (p.size, p.depth) in deepest}
        points = [found[size] for size in sorted(found)]
        if points:
            parts = [p.whole_parts() for p in points]
            names = [*PARTS, *sorted({name for found in parts for name in found} - set(PARTS))]
            ms = {
                name: np.array([float(np.median(found.get(name) or 0.0)) for found in parts])
                for name in names
                if any(found.get(name) for found in parts)
            }
            total = np.array([median_latency(p.step_ms).ms for p in points])
            room = np.minimum(total / np.maximum(sum(ms.values()), 1e-12), 1.0)
            ms = {name: room * each for name, each in ms.items()}
            rest = np.maximum(total - sum(ms.values()), 0.0)
            if (rest > NOTICEABLE * total).any():
                ms[REST] = rest
            panels.append(
                Parts(
                    _label(profile, batch_size, context),
                    max(p.depth for p in points),
                    np.array([p.size for p in points]),
                    ms,
                    total,
                    StepCosts(profile, batch_size, context).plain.ms,
                )
            )
    if not panels:
        raise OutOfRange("No step of the profile was timed in parts. Measure again with: treeopt profile")
    return PartsData(tuple(panels), _caption(profile))


@style.look()
def draw_parts(data: PartsData, figure: Figure | None = None) -> Figure:
    """Stacked areas, one panel for each batch size; the whole step and the plain step as lines."""
    n = len(data.panels)
    down = -(-n // ACROSS)
    figure = figure or style.blank(height=max(4.5, 0.9 + 2.2 * down))
    grid = figure.subplots(down, min(n, ACROSS), squeeze=False)
    for axes in grid.ravel()[n:]:
        axes.set_visible(False)
    for i, (axes, panel) in enumerate(zip(grid.ravel(), data.panels, strict=False)):
        sizes = panel.sizes if len(panel.sizes) > 1 else panel.sizes * [0.93, 1.07]  # an area needs width
        base = np.zeros(len(sizes))
        for name, ms in panel.ms.items():
            colour, hatch = PARTS.get(name, ("#DDDDDD", "") if name == REST else ("#999999", "xx"))
            axes.fill_between(
                sizes, base, base + ms, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.3, label=name
            )
            base = base + ms
        axes.plot(panel.sizes, panel.total, "o-", color="black", markersize=2.5, label="whole step")
        axes.axhline(panel.plain_ms, color="black", linestyle=(0, (2, 3)), label="plain step")
        style.size_axis(axes, panel.sizes)
        axes.set(
            title=f"batch size {panel.label}",
            ylim=(0, None),
            xlabel="rows per step (tree size)",
            ylabel="median [ms]" if i % ACROSS == 0 else "",
        )
    every = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    lines = ("whole step", "plain step")
    labels = [*reversed([label for label in every if label not in lines]), *lines]  # as they are stacked
    style.legend(grid[0, min(n, ACROSS) - 1], handles=[every[label] for label in labels], labels=labels)
    note = (
        f"medians of trees as deep as their rows allow, {max(panel.depth for panel in data.panels)} at "
        "most; parts are timed in steps of their own; if they take longer together than a whole step "
        "they are scaled to it, and if they take less there is a rest"
    )
    style.heading(figure, "What a decoding step is made of", style.sentence(data.caption, note))
    return figure
