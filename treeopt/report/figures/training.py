"""How heads learned: loss and accuracy step by step, and what they reach on held-out texts.

S steps · n points of a curve · K heads
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.report.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 100  # of a curve; each is the mean of neighbouring steps
MOST_NAMED = 10  # heads with a look and a name of their own; more share a scale of colours


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Means over neighbouring steps; NaN where a head had nothing to guess.

    steps    : (n,)    middle of each point's steps
    loss     : (n, K)  of each head [nats]
    accuracy : (n, K)  share of the states at which its first choice is right
    before, after : (K,)  accuracy on held-out texts, and ``trials`` (K,) states that they were counted on
    """

    steps: NDArray[np.float64]
    loss: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    trials: NDArray[np.int64]
    caption: str = ""


def training_data(
    log: Sequence[Mapping[str, Any]], held_out: Mapping[str, Mapping[str, Any]], *, caption: str = ""
) -> TrainingData:
    """From the lines of a training log and the counts before and after. Raises OutOfRange for an empty log.

    >>> log = [{"step": s, "head_loss_nats": [2.0 - s], "accuracy": [s / 4]} for s in (1, 2)]
    >>> counts = {"accuracy": [0.5], "trials": [8]}
    >>> training_data(log, {"before": counts, "after": counts}).accuracy.tolist()
    [[0.25], [0.5]]
    """
    if not log:
        raise OutOfRange("Curves need at least one step, but the training log is empty.")
    parts = np.array_split(np.arange(len(log)), min(POINTS, len(log)))

    def means(values: Sequence[Any]) -> NDArray[np.float64]:
        array = np.ma.masked_invalid(np.array(values, dtype=np.float64))  # null becomes NaN
        return np.array([array[part].mean(0).filled(np.nan) for part in parts])

    return TrainingData(
        means([[line["step"]] for line in log])[:, 0],
        means([line["head_loss_nats"] for line in log]),
        means([line["accuracy"] for line in log]),
        np.array(held_out["before"]["accuracy"], dtype=np.float64),
        np.array(held_out["after"]["accuracy"], dtype=np.float64),
        np.array(held_out["after"]["trials"]),
        caption,
    )


def training_caption(record: Mapping[str, Any]) -> str:
    """What was trained on what, from the record of a run."""
    recipe = record["recipe"]
    return style.sentence(
        f"{recipe['kind']}, {recipe['num_heads']} heads",
        f"{record['steps']:,} steps of {recipe['batch_size']} texts in {record['seconds']:,.0f} s",
        style.origin(record.get("provenance")),
    )


@style.look()
def draw_training(data: TrainingData, figure: Figure | None = None) -> Figure:
    """Loss on the left; accuracy on the right, with marks beyond the last step for the held-out texts."""
    figure = figure or style.blank()
    left, right = figure.subplots(1, 2)
    last, num_heads = float(data.steps[-1]), data.loss.shape[1]
    few = num_heads <= MOST_NAMED
    for k, shade in enumerate(_shades(num_heads)):
        line = style.series(k) if few else {"color": shade, "marker": "o", "linestyle": "-"}
        ends = {**line, "linestyle": "", "markersize": 6}
        line["marker"] = ""
        left.plot(data.steps, data.loss[:, k], label=str(k + 1), **line)
        right.plot(data.steps, data.accuracy[:, k], label=str(k + 1), **line)
        right.plot([0], data.before[k : k + 1], markerfacecolor="white", clip_on=False, zorder=3, **ends)
        right.plot([1.04 * last], data.after[k : k + 1], clip_on=False, zorder=3, **ends)
    left.set(title="Lines: the texts of each step", ylabel="loss [nats per state]", ylim=(0, None))
    right.set(
        title="Lines: the texts of each step\nMarks: held-out texts, open before, full after",
        ylabel="accuracy of the first choice",
        ylim=(0, None),
    )
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("step")
        axes.set_xlim(0, 1.06 * last)
    if few:
        style.legend(right, "head")
    else:
        _colour_scale(right, num_heads)
    trials = f"{int(data.trials.max()):,} held-out states" if len(data.trials) else None
    style.heading(figure, "How the heads learned", style.sentence(data.caption, trials))
    return figure


def _shades(num_heads: int) -> list[Any]:
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0.0, 0.9, num_heads)))  # its last tenth is pale


def _colour_scale(axes: Axes, num_heads: int) -> None:
    """Which colour is which head, beside the axes."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    scale = ScalarMappable(Normalize(0.5, num_heads + 0.5), ListedColormap(_shades(num_heads)))
    bar = axes.figure.colorbar(scale, ax=axes, fraction=0.05, pad=0.03, ticks=MaxNLocator(integer=True, min_n_ticks=2))
    bar.set_label("head")
