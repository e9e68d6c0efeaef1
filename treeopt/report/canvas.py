"""Drawings of the report that answer to the pointer: the chosen tree, and the curve over sizes.

They are Marks on a Canvas, in pixels from the upper left; templates/report.html.j2 draws them, and its script
writes what a mark says, as text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.records.figure import Figure as DraftFigure
from treeopt.records.plan import PlanEntry
from treeopt.report.figures.registry import Inputs
from treeopt.report.figures.style import SEQUENTIAL, Z95, runs
from treeopt.report.figures.tree import RAREST, TreeData, columns, node_gid, shape_words, tree_data
from treeopt.trees.tree import Choice

Texts = list[tuple[str, str]]
COLUMN, MOST_COLUMN, TREE_WIDTH, LEVEL = 20.0, 64.0, 1040.0, 60.0  # pixels of the tree's layout


@dataclass(frozen=True)
class Mark:
    """A node of a tree or a point of a curve at (x, y), and what it says.

    rows     : (name, value)
    examples : (text that came before, accepted guesses)
    kind     : root, never (accepted), chosen, or nothing
    look     : CSS custom properties with its colours
    parent   : id of the mark above it
    hit      : left end and width of the strip in which the pointer finds it
    """

    id: str
    x: float
    y: float
    title: str
    rows: Texts
    examples: Texts = field(default_factory=list)
    text: str = ""
    kind: str = ""
    look: str = ""
    parent: str | None = None
    hit: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Canvas:
    """A drawing of ``width`` x ``height`` pixels.

    lines  : (SVG path, stroke width); radius: of the marks
    across : (x, label) of the ticks below; down: (y, label) of those at the left
    bands  : (left end, width) of runs of tied sizes
    plain  : y of plain decoding
    error  : x, upper and lower end of the 95 % interval of the chosen size
    shades : (look, label) of the colours
    """

    title: str
    caption: str
    width: float
    height: float
    marks: list[Mark]
    lines: list[tuple[str, float]]
    down: list[tuple[float, str]]
    across: list[tuple[float, str]] = field(default_factory=list)
    shades: list[tuple[str, str]] = field(default_factory=list)
    unit: str = ""
    radius: float = 0.0
    bands: list[tuple[float, float]] = field(default_factory=list)
    plain: float | None = None
    error: tuple[float, float, float] | None = None


def tree_canvas(inputs: Inputs, entry: PlanEntry, examples: Mapping[Choice, Texts], prefix: str) -> Canvas | None:
    """The chosen tree, its nodes shaded by how often they are accepted; None for a lone root."""
    tree = entry.tree
    if len(tree) == 1:
        return None
    gains: dict[Choice, float] = {(): 1.0, **dict(entry.growth_order)}
    data: TreeData | None = None
    with suppress(OutOfRange):
        data = tree_data(tree, inputs.source, in_sample=inputs.grown_on is not None)
    places = data.columns if data else columns(tree, np.array([gains.get(path, 0.0) for path in tree.paths]))
    span = float(places.max()) + 1
    step = min(max(COLUMN, TREE_WIDTH / span), MOST_COLUMN)
    x, y = (80 + step * places).tolist(), (30 + LEVEL * tree.depths).tolist()
    marks, lines = [], []
    for i, path in enumerate(tree.paths):
        name, title = node_gid(path), f"path {list(path)}" if path else "root: the target's own token"
        p = float(data.probabilities[i]) if data else None
        mark = Mark(f"{prefix}-{name}", x[i], y[i], title, _node_rows(data, i, gains.get(path)), examples.get(path, []))
        kind = "never" if p == 0 else "" if path else "root"
        marks.append(replace(mark, kind=kind, look="" if p is None else _shade(p), text=str(path[-1]) if path else ""))
        if path:
            parent = tree.parents[i]
            marks[-1] = replace(marks[-1], parent=f"{prefix}-{node_gid(path[:-1])}")
            middle = (y[parent] + y[i]) / 2
            bend = f"C{x[parent]:.1f} {middle} {x[i]:.1f} {middle} {x[i]:.1f} {y[i]}"
            lines.append((f"M{x[parent]:.1f} {y[parent]}{bend}", 1.0 if p is None else 0.6 + 5 * math.sqrt(p)))
    return Canvas(
        f"The {'best fixed' if entry.draft.topk else 'chosen'} tree: {shape_words(tree)}",
        data.caption if data else "How often nodes are accepted is not known",
        110 + step * (span - 1),
        60 + LEVEL * tree.depth,
        sorted(marks, key=lambda mark: (mark.y, mark.x)),  # as the eye goes
        lines,
        [(30 + LEVEL * d, f"depth {d}" if d else "root") for d in range(tree.depth + 1)],
        shades=[(_shade(p), f"{p:g}") for p in (RAREST, 0.01, 0.1, 1.0)] if data else [],
        radius=min(11, 0.43 * step),
    )


def _node_rows(data: TreeData | None, node: int, gain: float | None) -> Texts:
    """(name, value) that a node of the tree shows under the pointer."""
    rows = []
    if data is not None:
        rows.append(("accepted in", f"{data.probabilities[node]:.2%} of steps"))
        if data.visits is not None:
            rows.append(("visits", f"{data.visits[node]:,} of {data.steps:,} steps"))
    return rows if gain is None else [*rows, ("gain", f"{gain:+.4f} tokens per step")]


def _shade(p: float) -> str:
    """Colours of a probability on a light and on a dark page, each with that of the text on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    level = min(max(1 - math.log(max(p, RAREST)) / math.log(RAREST), 0.0), 1.0)
    found = []
    for name, place in (("light", level), ("dark", 1 - level)):
        colour = colormaps[SEQUENTIAL](place)[:3]
        ink = "#fff" if np.dot(np.power(colour, 2.2), (0.2126, 0.7152, 0.0722)) < 0.18 else "#000"
        found.append(f"--{name}:{to_hex(colour)};--{name}-ink:{ink}")
    return ";".join(found)


def curve_canvas(entry: PlanEntry, prefix: str, *, is_part: bool = False) -> Canvas | None:
    """Throughput over size, or tokens per step where no latency was measured; None without a curve.

    is_part : whether a part of the steps alone was timed, so that only ratios to plain decoding mean something
    """
    from matplotlib.ticker import MaxNLocator

    timed = [point for point in entry.curve if point.tokens_per_s]
    points = [p for _, p in sorted({p.size: p for p in timed or entry.curve if p.size >= 1}.items())]
    if len(points) < 2:
        return None
    one = (entry.plain.tokens_per_s or 1.0) if is_part else 1.0
    values, stderr, is_fixed = [p.rate / one for p in points], entry.chosen.stderr, not entry.draft.topk
    spread = Z95 * ((stderr.tokens_per_s if timed else stderr.tokens_per_step) or 0.0) / one
    left, right, top, bottom = 76.0, 840.0, 16.0, 274.0  # as the template has them
    down = list(MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(0, max(*values, 1e-9) + spread))
    logs = [math.log2(p.size) for p in points]
    scale = (right - left) / ((logs[-1] - logs[0]) or 1.0)

    def at(value: float) -> float:
        return float(bottom - (bottom - top) * value / down[-1])

    x = [left + scale * (log - logs[0]) for log in logs]
    edges = [left - 6, *((a + b) / 2 for a, b in itertools.pairwise(x)), right + 6]
    plain = values[0] if points[0].size == 1 else None
    marks, error = [], None
    for i, (point, value) in enumerate(zip(points, values, strict=True)):
        kind, said = "", "; tied: as good, inside the noise" if point.size in entry.tied_sizes else ""
        if is_fixed and point.size == entry.chosen.size:
            kind, said, error = "chosen", "; chosen", (x[i], at(value + spread), at(value - spread))
        name, title = f"{prefix}-size-{point.size}", f"size {point.size}, depth {point.depth}{said}"
        hit = (edges[i], edges[i + 1] - edges[i])
        marks.append(
            Mark(name, x[i], at(value), title, _point_rows(point, plain, one if is_part else None), kind=kind, hit=hit)
        )
    tied = [p.size in entry.tied_sizes for p in points] if len(entry.tied_sizes) > 1 else []
    bands = [(edges[a], edges[b + 1] - edges[a]) for a, b in runs(tied)]
    signs = [f"★ chosen{', with its 95 % interval' if spread else ''}"] if is_fixed else []
    signs += ["shaded: tied sizes, as good inside the noise"] if bands else []
    signs += ["dashed: plain decoding"] if plain else []
    powers = range(math.ceil(logs[0]), math.floor(logs[-1]) + 1)
    return Canvas(
        f"Predicted {'throughput' if timed else 'tokens per step'} of the best tree of every size",
        " · ".join(signs),
        860,
        320,
        marks,
        [("M" + "L".join(f"{mark.x:.1f} {mark.y:.1f}" for mark in marks), 2.0)],
        [(at(v), f"{v:,.6g}") for v in down],
        [(left + scale * (power - logs[0]), str(2**power)) for power in powers],
        unit="times plain decoding" if is_part else "tokens per second" if timed else "tokens per step",
        bands=bands,
        plain=at(plain) if plain else None,
        error=error if spread else None,
    )


def _point_rows(point: DraftFigure, plain: float | None, only_over: float | None) -> Texts:
    """(name, value) that a point of the curve shows under the pointer.

    plain : the rate of plain decoding; only_over : this rate, where nothing but ratios to it means something
    """
    rate = point.tokens_per_s
    rows = [("tokens/step", f"{point.tokens_per_step:.3f}")]
    if rate and only_over:
        return [*rows, ("over plain", f"{rate / only_over:.2f}")]
    rows += [("step ms", f"{point.step_ms:.3f}")] if point.step_ms is not None else []
    rows += [("tokens/s", f"{rate:,.1f}")] if rate else []
    return rows + ([("over plain", f"{rate / plain:.2f}")] if rate and plain else [])
