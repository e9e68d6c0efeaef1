"""What a search weighs: tokens per step against size, and throughput against size.

N sizes (1 ... budget)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.source import objective_for, source_of
from treeopt.planning.comparison import MOST_DENSE, Comparison, compare
from treeopt.records.inputs import Accuracies
from treeopt.records.origins import Runtime
from treeopt.records.plan import Plan, PlanEntry
from treeopt.report.figures import style
from treeopt.report.wording import count
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class SizesData:
    """Tokens per step of every size, and of fixed trees for comparison.

    curves : objective -> (N,) cross-fitted tokens per step of sizes 1 ... N, with 95 % intervals
    """

    curves: Mapping[str, style.Shares]
    objective: str
    others: Comparison
    caption: str = ""


def sizes_data(
    record: Accuracies, limits: Limits = LIMITS, *, objective: str = "replay", most_dense: int = MOST_DENSE
) -> SizesData:
    """Cross-fitted curves of all objectives, and replays of dense trees (a sample, where they are many).

    A probe has one objective, coverage; of the other trees those are shown that were probed.
    Raises OutOfRange for a record with a single sequence, which has nothing to hold out.
    """
    source = source_of(record)
    objective = objective_for(source, objective)
    found = compare(source, replace(limits, shape="sibling-closed"), most_dense=most_dense)
    curves = {}
    for name, held_out in found.held_out.items():
        low, high = np.quantile(held_out.draws, [0.025, 0.975], axis=1)
        curves[name] = style.Shares(held_out.tokens_per_step, low, high)
    about = count(*source.observed)
    if source.answers is not None:
        about = f"{count(source.answers.num_sequences, 'sequence')}, {about}"
    return SizesData(
        curves,
        objective,
        found,
        style.sentence(
            about,
            style.origin(source.meta.get("provenance")),
            style.rule(source.meta.get("acceptance")),
            "grown trees are cross-fitted: replayed on sequences that they were not grown on",
            source.approximate,
            f"shaded: 95 % interval of {objective}",
        ),
    )


@style.look()
def draw_sizes(data: SizesData, figure: Figure | None = None) -> Figure:
    """A line for each objective, small crosses for dense trees."""
    figure = figure or style.blank()
    axes = figure.add_subplot()
    largest = 2
    for i, (name, curve) in enumerate(data.curves.items()):
        sizes = np.arange(1, len(curve.value) + 1)
        largest = max(largest, len(sizes))
        line = style.series(i)
        axes.plot(sizes, curve.value, label=f"grown: {name}", markevery=0.15, **line)
        if name == data.objective:
            axes.fill_between(sizes, curve.low, curve.high, color=line["color"], alpha=0.15, linewidth=0)
    chains = [(size, rate) for name, size, rate in data.others.fixed if name.startswith("chain")]
    if chains:
        axes.plot(*zip(*chains, strict=True), label="chains of top-1", **style.series(4))
    for name, size, rate in data.others.fixed:
        if not name.startswith("chain"):
            axes.plot(size, rate, "*", markersize=10, color="black", label=name, linestyle="none")
    if dense := data.others.dense:
        sample = "" if len(dense) == data.others.n_dense else f"\n({len(dense)} of {data.others.n_dense:,})"
        axes.plot(
            [size for _, size, _ in dense],
            [rate for *_, rate in dense],
            "x",
            markersize=3,
            color="#A0A0A0",
            label=f"dense trees{sample}",
            zorder=1,
        )
    style.size_axis(axes, [1, largest])
    axes.set(ylabel="tokens per step", ylim=(0.95, None))
    style.legend(axes)
    style.heading(figure, "Tokens per step over tree size", data.caption)
    return figure


@dataclass(frozen=True, eq=False)
class Throughput:
    """The best tree of every size for one batch size.

    sizes, tokens_per_s : (N,)
    tied                : sizes, the chosen one among them, where there is another
    plain               : tokens per second without speculation; None where the curve lacks it
    error               : standard error of tokens_per_s at the chosen size
    """

    batch_size: int
    context_tokens: int | None
    sizes: IntArray
    tokens_per_s: NDArray[np.float64]
    chosen: int
    tied: tuple[int, ...]
    plain: float | None
    error: float | None

    def bands(self) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Where the curve is tied, run by run: sizes and tokens per second, half of the way to the next sizes included."""
        logs = np.log2(self.sizes)
        middle = np.concatenate([logs[:1], (logs[1:] + logs[:-1]) / 2, logs[-1:]])
        found = []
        for first, last in style.runs(np.isin(self.sizes, self.tied).tolist()):
            x = np.unique([middle[first], *logs[first : last + 1], middle[last + 1]])
            found.append((2**x, np.interp(x, logs, self.tokens_per_s)))
        return found

    def at(self, size: int) -> float:
        """Tokens per second at one of the sizes."""
        return float(self.tokens_per_s[self.sizes == size][0])


@dataclass(frozen=True, eq=False)
class ThroughputData:
    """A curve for each batch size of the plan."""

    curves: tuple[Throughput, ...]
    caption: str = ""


def throughput_data(plan: Plan) -> ThroughputData:
    """Predicted tokens per second of every size, from the plan's own curves.

    Raises OutOfRange where the plan was made without a profile.
    """
    curves = tuple(curve for entry in plan.entries if (curve := _throughput(entry)) is not None)
    if not curves:
        raise OutOfRange("The plan has no latencies. Make them with: treeopt profile, then treeopt search")
    runtime: Runtime = plan.runtime or {}
    sequences = plan.entries[0].predicted.sequences
    contexts = [c.context_tokens for c in curves if c.context_tokens is not None]
    caption = style.sentence(
        "Predicted: held-out tokens per step over measured latency",
        count(sequences, "sequence") if sequences is not None else "from accuracies alone",
        f"context {style.span(contexts)} tokens" if contexts else None,
        " ".join(filter(None, (runtime.get("name"), runtime.get("version")))) or None,
        f"objective {plan.objective}" if plan.objective else None,
        style.rule(plan.acceptance),
    )
    return ThroughputData(curves, caption)


def _throughput(entry: PlanEntry) -> Throughput | None:
    points = sorted((point for point in entry.curve if point.tokens_per_s), key=lambda point: point.size)
    sizes = [point.size for point in points]
    if entry.size not in sizes:
        return None
    rates = np.array([point.tokens_per_s for point in points], dtype=float)
    return Throughput(
        entry.batch_size,
        entry.context_tokens,
        np.array(sizes),
        rates,
        entry.size,
        tuple(size for size in entry.tied_sizes if size in sizes) if len(entry.tied_sizes) > 1 else (),
        float(rates[0]) if sizes[0] == 1 else None,
        entry.tokens_per_s_stderr,
    )


@style.look()
def draw_throughput(data: ThroughputData, figure: Figure | None = None) -> Figure:
    """Tokens per second on the left, the ratio to plain decoding on the right."""
    figure = figure or style.blank()
    left, right = figure.subplots(1, 2)
    for i, curve in enumerate(data.curves):
        line = {**style.series(i), "marker": ""}
        for axes, unit in ((left, 1.0), (right, curve.plain)):
            if not unit:
                continue
            rates = curve.tokens_per_s / unit
            axes.plot(curve.sizes, rates, label=str(curve.batch_size), **line)
            for x, y in curve.bands():
                axes.plot(x, y / unit, color=line["color"], linewidth=9, alpha=0.25, solid_capstyle="butt", zorder=1)
            error = None if curve.error is None else style.Z95 * curve.error / unit
            axes.errorbar(
                curve.chosen,
                curve.at(curve.chosen) / unit,
                yerr=error,
                marker="*",
                markersize=10,
                color=line["color"],
                mec="black",
                mew=0.6,
                zorder=4,
            )
        if curve.plain:
            style.plain_line(left, curve.plain, line["color"])
    rates = np.concatenate([curve.tokens_per_s for curve in data.curves])
    sizes = np.concatenate([curve.sizes for curve in data.curves])
    style.beside_plain(left, right, rates, sizes, most=6)
    if left.get_yscale() == "linear":
        left.yaxis.set_major_formatter(lambda rate, _: f"{rate:,g}")
    left.set(title="Throughput (dashed: plain)", ylabel="tokens per second")
    right.set(title="Over plain decoding", ylabel="speedup")
    style.legend(right, "batch size")
    style.heading(
        figure,
        "Throughput over tree size",
        style.sentence(data.caption, "★ chosen, with 95 % interval; broad: tied sizes"),
    )
    return figure
