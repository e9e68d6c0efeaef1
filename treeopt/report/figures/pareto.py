"""What batching trades: tokens per second for each user against those of all users together.

total     tokens per second of a whole batch
per user  total / batch size

B batch sizes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.records.benchmark import Benchmark
from treeopt.records.plan import Plan, PlanEntry
from treeopt.report.figures import style
from treeopt.trees.tree import IntArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR = (0.05, 0.05)  # shares of the axes within which a second number would lie on the first
MOST_LINEAR = 12  # ratio of the totals above which their axis is logarithmic
LOOKS = {  # colour, marker, line
    "plain decoding": (style.BLACK, "s", (0, (2, 3))),
    "the plan's trees": (style.BLUE, "o", "-"),
    "plain decoding, measured": (style.BLACK, "s", "none"),
    "the plan's trees, measured": (style.VERMILLION, "D", "none"),
}


@dataclass(frozen=True, eq=False)
class Rates:
    """Tokens per second over batch sizes.

    batch_sizes : (B,) ascending
    total       : (B,)
    error       : (B,) half of the 95 % interval of the total; 0 where it is not known
    """

    batch_sizes: IntArray
    total: NDArray[np.float64]
    error: NDArray[np.float64]

    @property
    def per_user(self) -> NDArray[np.float64]:
        """(B,)"""
        return self.total / self.batch_sizes


@dataclass(frozen=True, eq=False)
class ParetoData:
    """Rates of each kind of `LOOKS` that is known; predicted where it does not say measured."""

    rates: Mapping[str, Rates]
    caption: str = ""


def pareto_data(plan: Plan, benches: Mapping[int, Benchmark] | None = None) -> ParetoData:
    """The plan's trees and plain decoding, predicted, and measured where there is a benchmark.

    benches : batch size -> its benchmark

    Raises OutOfRange for fewer than two batch sizes with latencies.
    """
    timed = [entry for entry in plan.entries if entry.tokens_per_s and entry.speedup]
    if len({entry.batch_size for entry in timed}) < 2:
        raise OutOfRange(
            "The picture needs at least two batch sizes with latencies. Make them with: treeopt profile --batch-size "
            "1,4, then treeopt search"
        )

    def predicted(total: Callable[[PlanEntry], float], error: Callable[[PlanEntry], float]) -> Rates:
        return Rates(
            np.array([entry.batch_size for entry in timed]),
            np.array([total(entry) for entry in timed]),
            np.array([style.Z95 * error(entry) for entry in timed]),
        )

    rates = {
        "plain decoding": predicted(lambda e: (e.tokens_per_s or 0.0) / (e.speedup or 1.0), lambda e: 0.0),
        "the plan's trees": predicted(lambda e: e.tokens_per_s or 0.0, lambda e: e.tokens_per_s_stderr or 0.0),
    }
    for kind, name in (("plain decoding, measured", "plain"), ("the plan's trees, measured", "chosen")):
        found = {
            size: c.tokens_per_s
            for size, bench in sorted((benches or {}).items())
            for c in bench.contenders
            if c.name == name and c.tokens_per_s
        }
        if found:
            rates[kind] = Rates(np.array(list(found)), np.array(list(found.values())), np.zeros(len(found)))
    runtime = plan.runtime or {}
    caption = style.sentence(
        " ".join(filter(None, ("lines: predicted, latencies of", runtime.get("name"), runtime.get("version")))),
        style.rule(plan.acceptance),
        "numbers: batch sizes",
        "bars: 95 % intervals" if rates["the plan's trees"].error.any() else None,
        "better is further up and to the right",
    )
    return ParetoData(rates, caption)


@style.look()
def draw_pareto(data: ParetoData, figure: Figure | None = None) -> Figure:
    """A line for what was predicted, marks for what was measured."""
    figure = figure or style.blank()
    axes = figure.add_subplot()
    for kind, rates in data.rates.items():
        colour, marker, line = LOOKS[kind]
        axes.errorbar(
            rates.per_user,
            rates.total,
            yerr=rates.error if rates.error.any() else None,
            color=colour,
            marker=marker,
            linestyle=line,
            elinewidth=0.8,
            markerfacecolor="none" if line == "none" else colour,
            markersize=7 if line == "none" else 4,
            label=kind,
        )
    totals = np.concatenate([rates.total for rates in data.rates.values()])
    axes.set_xlim(0, 1.12 * max(float(rates.per_user.max()) for rates in data.rates.values()))
    if totals.max() > MOST_LINEAR * totals.min():
        axes.set_yscale("log")
        axes.set_ylim(0.7 * totals.min(), 1.5 * totals.max())
        style.log_axis(axes)
    else:
        axes.set_ylim(0, 1.12 * max(float((rates.total + rates.error).max()) for rates in data.rates.values()))
        axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:,g}")
    axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:,g}")
    axes.set(xlabel="tokens per second for each user", ylabel="tokens per second of the batch")
    _number(axes, data)
    style.legend(axes)
    style.heading(figure, "What batching trades: speed for each user against the sum", data.caption)
    return figure


def _number(axes: Axes, data: ParetoData) -> None:
    """Batch sizes beside the lines, left of plain decoding's and right of the other; without those that would overlap."""
    placed: list[tuple[float, float]] = []
    for kind, side in (("the plan's trees", 1), ("plain decoding", -1)):
        rates = data.rates[kind]
        for size, x, y in zip(rates.batch_sizes, rates.per_user, rates.total, strict=True):
            across, up = axes.transLimits.transform(axes.transScale.transform((x, y)))
            across += side * NEAR[0] / 2
            if any(abs(across - a) < NEAR[0] and abs(up - b) < NEAR[1] for a, b in placed):
                continue
            placed.append((across, up))
            axes.annotate(
                str(size),
                (x, y),
                (7 * side, 0),
                textcoords="offset points",
                fontsize=7,
                ha="left" if side > 0 else "right",
                va="center",
            )
