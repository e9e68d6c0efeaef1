"""What a step costs: the staircase over tree size, and the parts that a step is made of.

Where drafting goes depth by depth, trees of one size cost by their depth. So lines join the trees that are as deep as
their rows allow, up to the deepest that were measured; others are marks that tell their depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.latency.estimate import StepCosts
from treeopt.latency.paired import median_latency
from treeopt.records.profile import LatencyProfile
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Estimates, Panel, Series, plain_line
from treeopt.report.figures.style import Look

FloatArray = NDArray[np.float64]
Sizes = list[tuple[int, int]]  # (size, depth)
PARTS = {  # in the order of a step: colour and hatch
    "draft": (style.ORANGE, ""),
    "target": (style.SKY, "///"),
    "verify": (style.GREEN, "..."),
    "commit": (style.BLUE, "\\\\\\"),
}
NOTICEABLE = 0.002  # share of a step
REST = "the rest"  # of a step, between its parts
ACROSS = 3  # panels side by side
ROWS = "rows per step (tree size)"
MOST_LINEAR = 8  # ratio of the latencies above which their axis is logarithmic


def latency_chart(profile: LatencyProfile) -> Chart:
    """Medians of the measured steps, repeated timings pooled: milliseconds, and the ratio to a plain step.

    >>> from treeopt.records.profile import StepTiming
    >>> point, plain = StepTiming(1, 128, 8, 2, (3.0, 3.0)), StepTiming(1, 128, 1, 0, (2.0, 2.0))
    >>> latency_chart(LatencyProfile((point,), (plain,)))[1]["batch size 1"].y.tolist()
    [1.5]
    """
    left, right = list[Series](), [plain_line(1.0)]
    deepest, depths, every = 0, set[int](), list[float]()
    for i, setting in enumerate(profile.settings):
        line, others = _trees(profile, *setting)
        costs, look = StepCosts(profile, *setting, as_measured=True), {**style.series(i), "marker": "."}
        plain, sizes = costs.plain, [size for size, _ in line]
        ms, error = costs.latencies(sizes, [depth for _, depth in line])
        ratio = ms / plain.ms
        spread = ratio * np.hypot(error / np.maximum(ms, 1e-12), plain.stderr_ms / plain.ms)
        left += [_timed("", sizes, ms, error, look), plain_line(plain.ms, look["color"])]
        right.append(_timed(f"batch size {_label(profile, *setting)}", sizes, ratio, spread, look))
        for size, depth in others:
            if step := costs.step(size, depth):
                mark = _mark(depth, look["color"])
                left.append(Series("", [size], [step.ms], look=mark))
                right.append(Series("", [size], [step.ms / plain.ms], look=mark))
                depths.add(depth)
        deepest = max([deepest, *(depth for _, depth in line)])
        every += [plain.ms, *ms]
    right += [Series(f"depth {d}", [], [], look=_mark(d, "#666666")) for d in sorted(depths)]
    log = max(every) > MOST_LINEAR * min(every)
    ylim = (None if log else 0, None)
    panels = [
        Panel(left, ROWS, "step latency [ms]", "One step (dashed: plain)", "sizes", log=log, ylim=ylim),
        Panel(right, ROWS, "overhead", "Over a plain step", "sizes", ylim=(0, None)),
    ]
    note = f"medians, 95 % intervals; lines: trees as deep as their rows allow, {deepest} at most"
    note += "; marks: shallower ones" if depths else ""
    return Chart("What a decoding step costs", style.sentence(_caption(profile), note), [panels])


def _timed(label: str, sizes: Sequence[int], values: FloatArray, errors: FloatArray, look: Look) -> Series:
    return Estimates.of(zip(values, repeat(None), errors)).over(label, sizes, **look)


def _trees(profile: LatencyProfile, batch_size: int, context: int) -> tuple[Sizes, Sizes]:
    """(size, depth) of the trees that are as deep as their rows allow, and of all others."""
    here = sorted({(p.size, p.depth) for p in profile.fixed if p.setting == (batch_size, context)})
    most = max((depth for _, depth in here), default=0)
    deepest = [(size, depth) for size, depth in here if depth == min(most, size - 1)]
    return deepest, [tree for tree in here if tree not in deepest]


def _label(profile: LatencyProfile, batch_size: int, context: int) -> str:
    alone = [c for b, c in profile.settings if b == batch_size] == [context]
    return str(batch_size) if alone else f"{batch_size}, context {context:,}"


def _caption(profile: LatencyProfile) -> str:
    n = [len(p.step_ms) for p in profile.points or profile.autoregressive]
    return style.sentence(
        f"{style.span(n)} steps timed per point",
        f"context {style.span([context for _, context in profile.settings])} tokens",
        style.known(profile.runtime, "name", "version", "attention"),
        style.origin(profile.info.get("provenance")),
    )


def _mark(depth: int, colour: str) -> Look:
    """The look of a tree that is shallower than its rows allow."""
    marker = style.MARKERS[(depth - 1) % len(style.MARKERS)]
    return {"marker": marker, "markersize": 3.5, "linestyle": "none", "alpha": 0.6, "color": colour}


def parts_chart(profile: LatencyProfile) -> Chart:
    """Medians of drafting, the target's pass, verification and commit, stacked; a panel for each batch size and context.

    Parts are timed in steps of their own, with a clock between them: where they take longer together than a whole step,
    they are scaled to it, and what they leave of it is the `REST`. Raises OutOfRange where no step was timed in parts.
    """
    panels, deepest = list[Panel](), 0
    for setting in profile.settings:
        line, _ = _trees(profile, *setting)
        here = [p for p in profile.fixed if p.setting == setting and p.parts_ms and (p.size, p.depth) in line]
        if not here:
            continue
        points = [p for _, p in sorted({p.size: p for p in reversed(here)}.items())]
        deepest = max(deepest, *(p.depth for p in points))
        sizes, total = np.array([p.size for p in points]), np.array([median_latency(p.step_ms).ms for p in points])
        areas = _stacked(sizes, _parts([p.whole_parts() for p in points], total))
        whole = Series("whole step", sizes, total, look={"color": "black", "marker": "o", "markersize": 2.5})
        plain = plain_line(StepCosts(profile, *setting).plain.ms, label="plain step")
        title = f"batch size {_label(profile, *setting)}"
        beside = "" if len(panels) % ACROSS else "median [ms]"
        panels.append(Panel([*areas, whole, plain], ROWS, beside, title, "sizes", ylim=(0, None), height=2.2))
    if not panels:
        raise OutOfRange("No step of the profile was timed in parts. Measure again with: treeopt profile")
    note = (
        f"medians of trees as deep as their rows allow, {deepest} at most; parts are timed in steps of their own; if they "
        "take longer together than a whole step they are scaled to it, and if they take less there is a rest"
    )
    rows = [panels[i : i + ACROSS] for i in range(0, len(panels), ACROSS)]
    return Chart("What a decoding step is made of", style.sentence(_caption(profile), note), rows)


def _parts(timed: list[Mapping[str, Any]], total: FloatArray) -> dict[str, FloatArray]:
    """Part -> median [ms] at each size; with the rest, where it is noticeable, they add up to ``total``."""
    names = [*PARTS, *sorted({name for found in timed for name in found} - set(PARTS))]
    names = [name for name in names if any(found.get(name) for found in timed)]
    ms = {name: np.array([float(np.median(found.get(name) or 0.0)) for found in timed]) for name in names}
    scale = np.minimum(total / np.maximum(sum(ms.values()), 1e-12), 1.0)
    ms = {name: scale * each for name, each in ms.items()}
    rest = np.maximum(total - sum(ms.values()), 0.0)
    return {**ms, REST: rest} if (rest > NOTICEABLE * total).any() else ms


def _stacked(sizes: NDArray[np.int64], ms: Mapping[str, FloatArray]) -> list[Series]:
    """Areas, the uppermost first, as a legend has them; y is what each adds."""
    x = sizes if len(sizes) > 1 else sizes * [0.93, 1.07]  # an area needs width
    base, found = np.zeros(len(sizes)), []
    for name, each in ms.items():
        colour, hatch = PARTS.get(name, ("#DDDDDD", "") if name == REST else ("#999999", "xx"))
        look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}
        ends = np.repeat([base, base + each], len(x) // len(each), 1)
        found.append(Series(name, x, each, ends, look, "area"))
        base = base + each
    return found[::-1]
