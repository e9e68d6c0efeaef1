"""What a search weighs, over tree size: tokens per step, what a step costs, and throughput.

Where drafting goes depth by depth, trees of one size cost by their depth. So marks with intervals are the trees that are as
deep as their rows allow, up to the deepest that were measured; of others the marks tell their depth. No line joins latencies:
a dip may be noise.

N sizes (1 ... budget)
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.rates import drawn
from treeopt.growth.source import source_of
from treeopt.latency.measurements import Measurements
from treeopt.records.estimate import Estimate
from treeopt.records.inputs import Accuracies
from treeopt.records.origins import Provenance
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Panel, Series, intervals, over, plain_line
from treeopt.report.figures.style import Look
from treeopt.report.verdict import PUBLISHED
from treeopt.report.wording import count
from treeopt.trees.published import published_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import FIXED, Cost, Tree

LIMITS = Limits()
MOST_LINEAR = 6  # ratio of the throughputs above which their axis is logarithmic
FloatArray = NDArray[np.float64]
Sizes = list[tuple[int, int]]  # (size, depth)
ROWS = "rows per step (tree size)"
MOST_MS = 8  # ratio of the latencies above which their axis is logarithmic


def sizes_chart(record: Accuracies, limits: Limits = LIMITS) -> Chart:
    """Cross-fitted tokens per step of every size, beside chains and the published tree, as far as they were recorded.

    Raises OutOfRange for a record with a single sequence, which has nothing to hold out.
    """
    source = source_of(record)
    depth = limits.depth(source.num_heads)
    held_out = source.crossfit(replace(limits, max_depth=depth, shape=Limits.shape))
    look = {**style.KINDS["predicted"], "markevery": 0.15}
    shade = {"color": style.ORANGE, "alpha": 0.25, "linewidth": 0}
    sizes, rates = held_out.grown.sizes, held_out.tokens_per_step
    ends = np.quantile(drawn(held_out.every), [0.025, 0.975], axis=1)
    series = [
        Series(f"grown: {source.grown_by}", sizes, rates, look=look),
        Series("", sizes, rates, ends, shade, "area"),
    ]
    chains = [Tree.chain(d) for d in range(1, min(depth, limits.budget - 1) + 1)]
    published = published_tree().cut(max_depth=depth)
    star = {"marker": "*", "markersize": 10, "color": "black", "linestyle": "none"}
    others = (
        ("chains of top-1", chains, style.series(3)),
        (PUBLISHED, [published] if len(published) <= limits.budget else [], star),
    )
    for name, trees, look in others:
        if trees := [tree for tree in trees if source.knows(tree)]:
            reached = [source.rates(tree).tokens_per_step for tree in trees]
            series.append(Series(name, [len(tree) for tree in trees], reached, look=look))
    sequences = count(source.answers.num_sequences, "sequence") + ", " if source.answers else ""
    caption = style.about(
        source.meta,
        sequences + count(*source.observed),
        "grown trees are cross-fitted: replayed on sequences that they were not grown on",
        None if source.is_exact or source.answers is None else "approximate, except for the tree that was probed with",
        "shaded: 95 % interval",
    )
    panel = Panel(series, ROWS, "tokens per step", scale="sizes", ylim=(0.95, None))
    return Chart("Tokens per step over tree size", caption, [panel])


def throughput_chart(plan: Plan) -> Chart:
    """Predicted tokens per second of every size, from the plan's own curves, and over plain decoding.

    Raises OutOfRange where the plan was made without a profile.
    """
    drawn = [entry for entry in plan.entries if entry.chosen.tokens_per_s and any(p.tokens_per_s for p in entry.curve)]
    if not drawn:
        raise OutOfRange("The plan has no latencies. Make them with: treeopt profile, then treeopt search")
    left, right = list[Series](), [plain_line(1.0)]
    for entry, series in zip(drawn, style.each(len(drawn), "predicted"), strict=True):
        look, plain = {**series, "marker": ""}, entry.plain.tokens_per_s
        left += _curve(entry, 1.0, look)
        if plain:
            right += _curve(entry, plain, look)
            left.append(plain_line(plain, look["color"]))
    every = [point.tokens_per_s for entry in drawn for point in entry.curve if point.tokens_per_s]
    log = max(every) > MOST_LINEAR * min(every)
    ylim = (None if log else 0, None)
    panels = [
        Panel(left, ROWS, "tokens per second", "Throughput (dashed: plain)", "sizes", log=log, ylim=ylim),
        Panel(right, ROWS, "speedup", "Over plain decoding (dashed)", "sizes"),
    ]
    sequences = plan.entries[0].basis.sequences
    contexts = [e.context_tokens for e in drawn if e.context_tokens is not None]
    caption = style.sentence(
        "Predicted: held-out tokens per step over measured latency",
        count(sequences, "sequence") if sequences is not None else "from accuracies alone",
        f"context {style.span(contexts)} tokens" if contexts else None,
        style.known(plan.runtime, "name", "version"),
        f"objective {plan.objective}" if plan.objective else None,
        style.rule(plan.acceptance),
        "★ chosen; bar and shade: 95 % intervals; pale rings: tied sizes",
    )
    return Chart("Throughput over tree size", caption, panels[1:] if plan.part else panels, "batch size")


def _curve(entry: PlanEntry, unit: float, look: dict[str, object]) -> list[Series]:
    """The line over sizes, in the ``unit``, with its noise, pale rings at its tied sizes, and the chosen draft as a star."""
    points = [
        (p.size, p.tokens_per_s / unit, (p.tokens_per_s.stderr or 0.0) / unit) for p in entry.curve if p.tokens_per_s
    ]
    sizes, rates, errors = np.transpose(sorted(points))
    noise = intervals(map(Estimate, rates, errors))[1:]
    shade = {"color": look["color"], "alpha": 0.12, "linewidth": 0, "zorder": 0}
    ring = {**look, "marker": "o", "markersize": 7, "alpha": 0.3, "zorder": 1, "linestyle": "none"}
    tied = np.isin(sizes, entry.tied_sizes) & (len(entry.tied_sizes) > 1)
    dots = {**look, "linewidth": 0.8, "marker": "o", "markersize": 1.5}
    star = {**look, "marker": "*", "markersize": 10, "mec": "black", "mew": 0.6, "zorder": 4}
    chosen = entry.chosen.tokens_per_s or Estimate(0.0)
    return [
        Series(str(entry.batch_size), sizes, rates, look=dots),
        *([Series("", sizes, rates, noise, shade, "area")] if errors.any() else []),
        Series("", sizes[tied], rates[tied], look=ring),
        over("", [entry.chosen.size], intervals([Estimate(chosen / unit, (chosen.stderr or 0.0) / unit)]), **star),
    ]


def latency_chart(profile: LatencyProfile) -> Chart:
    """Medians of the measured steps, repeated timings pooled: milliseconds, and the ratio to a plain step."""
    left, right = list[Series](), [plain_line(1.0)]
    deepest, depths, every = 0, set[int](), list[float]()
    for setting, series in zip(profile.settings, style.each(len(profile.settings), "measured"), strict=True):
        line, others = _trees(profile, *setting)
        measured, look = Measurements.at(profile, setting), {**series, "linestyle": "none"}
        plain, latencies, sizes = measured.plain, measured.latencies(), [size for size, _ in line]
        steps = [latencies[Cost(FIXED, *tree)] for tree in line]
        ms, error = np.array([step.ms for step in steps]), np.array([step.stderr_ms for step in steps])
        ratio = ms / plain.ms
        spread = ratio * np.hypot(error / np.maximum(ms, 1e-12), plain.stderr_ms / plain.ms)
        left += [_timed("", sizes, ms, error, look), plain_line(plain.ms, look["color"])]
        batch_size, context = setting
        alone = [c for b, c in profile.settings if b == batch_size] == [context]
        label = f"batch size {batch_size}" + ("" if alone else f", context {context:,}")
        right.append(_timed(label, sizes, ratio, spread, look))
        for size, depth in others:
            step, mark = latencies[Cost(FIXED, size, depth)], _mark(depth, look["color"])
            left.append(Series("", [size], [step.ms], look=mark))
            right.append(Series("", [size], [step.ms / plain.ms], look=mark))
            depths.add(depth)
        deepest = max([deepest, *(depth for _, depth in line)])
        every += [plain.ms, *ms]
    right += [Series(f"depth {d}", [], [], look=_mark(d, "#666666")) for d in sorted(depths)]
    log = max(every) > MOST_MS * min(every)
    ylim = (None if log else 0, None)
    panels = [
        Panel(left, ROWS, "step latency [ms]", "One step (dashed: plain)", "sizes", log=log, ylim=ylim),
        Panel(right, ROWS, "overhead", "Over a plain step (dashed)", "sizes", ylim=(0, None)),
    ]
    note = f"medians, 95 % intervals, of trees as deep as their rows allow, {deepest} at most"
    note += "; pale marks: shallower ones" if depths else ""
    return Chart("What a decoding step costs", style.sentence(_caption(profile), note), panels)


def _timed(label: str, sizes: Sequence[int], values: FloatArray, errors: FloatArray, look: Look) -> Series:
    return over(label, sizes, intervals(map(Estimate, values, errors)), **look)


def _trees(profile: LatencyProfile, batch_size: int, context: int) -> tuple[Sizes, Sizes]:
    """(size, depth) of the trees that are as deep as their rows allow, and of all others."""
    here = sorted({(p.size, p.depth) for p in profile.fixed if p.setting == (batch_size, context) and p.size > 1})
    most = max((depth for _, depth in here), default=0)
    deepest = [(size, depth) for size, depth in here if depth == min(most, size - 1)]
    return deepest, [tree for tree in here if tree not in deepest]


def _caption(profile: LatencyProfile) -> str:
    n = [len(p.step_ms) for p in profile.points or profile.autoregressive]
    return style.sentence(
        f"{style.span(n)} steps timed per point",
        f"context {style.span([context for _, context in profile.settings])} tokens",
        style.known(profile.runtime, "name", "version", "attention"),
        style.origin(Provenance.of(profile.info)),
    )


def _mark(depth: int, colour: str) -> Look:
    marker = style.MARKERS[(depth - 1) % len(style.MARKERS)]
    return {"marker": marker, "markersize": 3.5, "linestyle": "none", "alpha": 0.6, "color": colour}
