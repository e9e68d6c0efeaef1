"""Fixed, dynamic and adaptive trees beside each other, at every batch size.

B batch sizes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeopt.errors import OutOfRange
from treeopt.records.benchmark import Benchmark
from treeopt.records.expected import AdaptiveFigures, DynamicFigures
from treeopt.records.plan import Plan, PlanEntry
from treeopt.report.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONTENDERS = {"fixed": "chosen", "dynamic": "dynamic", "adaptive": "adaptive"}  # a kind's name in benchmarks
ASIDE = 0.28  # between the kinds of one batch size


@dataclass(frozen=True)
class Mark:
    """A figure of one kind at one batch size, with half of its 95 % interval, 0 where that is not known."""

    value: float
    error: float
    label: str = ""


@dataclass(frozen=True, eq=False)
class KindsData:
    """Kind -> (B,) marks, None where there is no such tree or it was not decoded."""

    batch_sizes: tuple[int, ...]
    speedups: Mapping[str, tuple[Mark | None, ...]]
    tokens_per_step: Mapping[str, tuple[Mark | None, ...]]
    measured: Mapping[str, tuple[Mark | None, ...]]  # speedups
    caption: str = ""


def kinds_data(plan: Plan, benches: Mapping[int, Benchmark] | None = None) -> KindsData:
    """What a plan expects of the best tree of each kind, and what its benchmarks measured.

    Raises OutOfRange for a plan without dynamic trees.
    """
    entries = [entry for entry in plan.entries if entry.dynamic or entry.adaptive]
    if not entries:
        raise OutOfRange(
            "The plan has no dynamic trees. They need treeopt calibrate --topk, treeopt profile, then treeopt search"
        )
    each = [{"fixed": e, "dynamic": e.dynamic, "adaptive": e.adaptive} for e in entries]
    found = [(benches or {}).get(e.batch_size) for e in entries]
    runtime = plan.runtime or {}
    measured = {
        kind: tuple(_measured(bench, name) if bench else None for bench in found)
        for kind, name in CONTENDERS.items()
        if any(found)
    }
    return KindsData(
        tuple(e.batch_size for e in entries),
        {kind: tuple(_mark(of[kind], "speedup") for of in each) for kind in CONTENDERS},
        {kind: tuple(_mark(of[kind], "tokens_per_step") for of in each) for kind in CONTENDERS},
        measured,
        style.sentence(
            "predicted, held out" + (", and measured (hollow)" if any(found) else ""),
            " ".join(filter(None, (runtime.get("name"), runtime.get("version")))) or None,
            style.rule(plan.acceptance),
            "numbers: levels/topk/rows, of fixed trees rows",
            "bars: 95 % intervals",
        ),
    )


def _mark(figures: PlanEntry | DynamicFigures | None, name: str) -> Mark | None:
    value: float | None = getattr(figures, name) if figures else None
    if figures is None or value is None:
        return None
    error = style.Z95 * (getattr(figures, f"{name}_stderr") or 0.0)
    if isinstance(figures, AdaptiveFigures):
        return Mark(value, error, figures.adaptive.name)
    return Mark(value, error, figures.tree.name if isinstance(figures, DynamicFigures) else str(figures.size))


def _measured(bench: Benchmark, name: str) -> Mark | None:
    ratio = bench.speedup(name) if name in [c.name for c in bench.contenders] else None
    if ratio is None:
        return None
    half = 0.0 if ratio.low is None or ratio.high is None else (ratio.high - ratio.low) / 2
    return Mark(ratio.value, half)


@style.look()
def draw_kinds(data: KindsData, figure: Figure | None = None) -> Figure:
    """Speedups on the left, tokens per step on the right."""
    figure = figure or style.blank()
    left, right = figure.subplots(1, 2)
    for i, kind in enumerate(data.speedups):
        place = ASIDE * (i - 1)
        _draw(left, data.speedups[kind], i, place, label=kind)
        _draw(right, data.tokens_per_step[kind], i, place, label=kind)
        if kind in data.measured:
            _draw(left, data.measured[kind], i, place + ASIDE / 3, fillstyle="none")
    style.plain_line(left, 1.0)
    for axes, label in ((left, "speedup over plain decoding"), (right, "tokens per step")):
        axes.set_xticks(range(len(data.batch_sizes)), list(map(str, data.batch_sizes)))
        axes.set_xlim(-0.5, len(data.batch_sizes) - 0.5)
        axes.set_ylim(0, None)
        axes.set(xlabel="batch size", ylabel=label)
        axes.grid(visible=False, axis="x")
    style.legend(right)
    style.heading(figure, "Fixed, dynamic and adaptive trees", data.caption)
    return figure


def _draw(axes: Axes, marks: tuple[Mark | None, ...], i: int, aside: float, **options: Any) -> None:
    """Marks of one kind, each beside its batch size, with their settings where they have one."""
    look = {**style.series(i), "linestyle": "none"}
    known = [(place, mark) for place, mark in enumerate(marks) if mark]
    x = [place + aside for place, _ in known]
    errors = [mark.error for _, mark in known]
    axes.errorbar(x, [mark.value for _, mark in known], yerr=errors, elinewidth=0.8, **look, **options)
    for at, (_, mark) in zip(x, known, strict=True):
        axes.annotate(
            mark.label,
            (at, mark.value - mark.error),
            (0, -4),
            textcoords="offset points",
            rotation=90,
            fontsize=6,
            ha="center",
            va="top",
        )
