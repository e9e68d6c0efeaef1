"""What real decoding measured, beside what was predicted.

A lengths of an accepted run of guesses (0 ... depth)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.records.benchmark import Benchmark, Ratio
from treeopt.report.figures import style
from treeopt.report.verdict import CONTENDERS
from treeopt.report.wording import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {  # colour, marker, hatch
    "predicted, product": (style.GREY, "^", ""),
    "predicted, joint": (style.GREY, "v", ""),
    "predicted": (style.ORANGE, "D", "///"),
    "replayed": (style.BLUE, "s", ""),
    "measured": (style.VERMILLION, "o", "..."),
}


@dataclass(frozen=True, eq=False)
class AcceptedData:
    """How many guesses the steps of one contender accepted.

    shares : kind -> (A,)  share of the steps that accepted 0, 1, ... guesses; only kinds that are known
    means  : kind -> accepted guesses per step
    """

    name: str
    shares: Mapping[str, style.Shares]
    means: Mapping[str, float]
    caption: str = ""


def accepted_data(bench: Benchmark, name: str = "chosen") -> AcceptedData:
    """Accepted lengths of a contender: predicted before the run, replayed on its prompts, and measured.

    Raises OutOfRange where the benchmark has none of them.
    """
    contender = bench.contender(name)
    counted: dict[str, Sequence[float]] = {
        "predicted": contender.predicted_accepted,
        "replayed": contender.replayed_accepted,
        "measured": contender.accepted,
    }
    shares = {kind: style.wilson(counts, sum(counts)) for kind, counts in counted.items() if sum(counts)}
    for kind in shares.keys() - {"measured"}:
        shares[kind] = style.Shares(*[shares[kind].value] * 3)
    if not shares:
        raise OutOfRange("The benchmark did not count accepted guesses. Measure again with: treeopt bench")
    means = {kind: float(share.value @ np.arange(len(share.value))) for kind, share in shares.items()}
    steps = sum(contender.accepted)
    caption = style.sentence(count(steps, "measured step") if steps else None, _about(bench))
    return AcceptedData(name, shares, means, caption)


def _about(bench: Benchmark) -> str:
    first = bench.contenders[0]
    prompts = "held-out prompt" if bench.prompts == "held out" else "calibration prompt"
    source = {**(bench.provenance or {}), "dtype": bench.dtype}
    return style.sentence(
        count(first.compared, prompts),
        count(bench.rounds, "round"),
        f"batch size {first.batch_size}",
        style.origin(source),
        style.rule(bench.acceptance),
    )


@style.look()
def draw_accepted(data: AcceptedData, figure: Figure | None = None) -> Figure:
    """Bars side by side, one kind beside the other."""
    figure = figure or style.blank()
    axes: Axes = figure.add_subplot()
    longest = max(len(share.value) for share in data.shares.values())
    width = 0.8 / len(data.shares)
    for i, (kind, share) in enumerate(data.shares.items()):
        colour, _, hatch = KINDS[kind]
        x = np.arange(len(share.value)) + (i - (len(data.shares) - 1) / 2) * width
        axes.bar(
            x,
            share.value,
            width,
            yerr=share.errors if share.errors.any() else None,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
            error_kw={"elinewidth": 0.9},
            label=f"{kind}\n({data.means[kind]:.2f} a step)",
        )
    axes.set_xticks(range(longest))
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="accepted guesses in a step", ylabel="share of steps")
    style.legend(axes, labelspacing=1.0)
    who = CONTENDERS.get(data.name, data.name)
    interval = "95 % interval, steps as independent" if "measured" in data.shares else None
    style.heading(figure, f"Accepted guesses per step: {style.short(who, 40)}", style.sentence(data.caption, interval))
    return figure


@dataclass(frozen=True, eq=False)
class ContendersData:
    """Contenders in the benchmark's order.

    speedups        : tokens per second over plain decoding's; None where nothing was timed
    tokens_per_step : kind -> one for each contender, None where unknown
    groups          : group -> speedup of the chosen tree; empty where prompts are not grouped
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    speedups: tuple[Ratio | None, ...]
    tokens_per_step: Mapping[str, tuple[float | None, ...]]
    groups: Mapping[str, Ratio]
    caption: str = ""


def contenders_data(bench: Benchmark) -> ContendersData:
    """Speedups with their 95 % intervals, and tokens per step predicted, replayed and measured."""
    cs = bench.contenders
    groups = bench.groups if "chosen" in [c.name for c in cs] else []
    ratios = {group or "(no group)": bench.speedup("chosen", group=group) for group in groups}
    return ContendersData(
        tuple(CONTENDERS.get(c.name, c.name) for c in cs),
        tuple(c.size for c in cs),
        tuple(bench.speedup(c.name) for c in cs),
        {
            "predicted, product": tuple(c.predicted.product for c in cs),
            "predicted, joint": tuple(c.predicted.joint for c in cs),
            "predicted": tuple(c.predicted_tokens_per_step for c in cs),
            "replayed": tuple(c.replayed_tokens_per_step for c in cs),
            "measured": tuple(c.tokens_per_step for c in cs),
        },
        {group: ratio for group, ratio in ratios.items() if ratio is not None},
        _about(bench),
    )


@style.look()
def draw_contenders(data: ContendersData, figure: Figure | None = None) -> Figure:
    """Speedups on the left, tokens per step on the right, and speedups by group below."""
    n, n_groups = len(data.names), len(data.groups)
    upper, lower = max(2.2, 0.34 * n + 0.6), 0.8 + 0.22 * n_groups
    figure = figure or style.blank(height=max(4.5, 1.0 + upper + (lower if n_groups else 0.0)))
    grid = figure.add_gridspec(2 if n_groups else 1, 2, height_ratios=[upper, lower][: 2 if n_groups else 1])
    left = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[0, 1], sharey=left)
    labels = [f"{style.short(name, 24)} ({size})" for name, size in zip(data.names, data.sizes, strict=True)]
    _draw_ratios(left, labels, data.speedups)
    left.set(title="Speedup", xlabel="over plain decoding", ylabel="contender (rows per step)")
    for i, (kind, rates) in enumerate(data.tokens_per_step.items()):
        shown = [(rate, row + (i - 2) * 0.14) for row, rate in enumerate(rates) if rate is not None]
        colour, marker, _ = KINDS[kind]
        if shown:
            right.plot(*zip(*shown, strict=True), marker, color=colour, label=kind)
    right.tick_params(labelleft=False)
    right.set(title="Tokens per step", xlabel="tokens per step")
    style.legend(right)
    if n_groups:
        below = figure.add_subplot(grid[1, :])
        _draw_ratios(below, [style.short(name) for name in data.groups], list(data.groups.values()))
        below.set(title="Speedup of the chosen tree by group", xlabel="over plain decoding", ylabel="group")
    figure.align_ylabels()
    sure = all(ratio is None or ratio.low is not None for ratio in data.speedups)
    bar = "95 % interval over blocks of prompts" if sure else "too few blocks of prompts for intervals"
    style.heading(figure, "Real decoding", style.sentence(data.caption, bar))
    return figure


def _draw_ratios(axes: Axes, labels: Sequence[str], ratios: Sequence[Ratio | None]) -> None:
    """One mark a row, from the top; a row without a ratio stays empty."""
    for row, ratio in enumerate(ratios):
        if ratio is not None:
            if ratio.low is not None and ratio.high is not None:
                axes.hlines(row, ratio.low, ratio.high, color=style.BLUE, linewidth=2)
            axes.plot(ratio.value, row, "o", color=style.BLUE, markersize=5)
    axes.axvline(1.0, color=style.GREY, linestyle=(0, (2, 3)), linewidth=1, zorder=0)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    top = max((r.high or r.value for r in ratios if r is not None), default=1.0)
    axes.set_xlim(0, 1.06 * max(top, 1.0))
