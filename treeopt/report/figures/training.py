"""How heads learned: loss and accuracy step by step, and what they reach on held-out texts.

n points of a curve · K heads
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.report.figures import style
from treeopt.report.figures.chart import Chart, Panel, Series
from treeopt.report.figures.style import Look

POINTS = 100  # of a curve; each is the mean of neighbouring steps
MOST_NAMED = 10  # heads that the legend names, and that have a look of their own; more share a scale of colours


def training_chart(log: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> Chart:
    """Loss and accuracy of each head over steps, with marks for the held-out texts before the first and after the last.

    log    : the lines of a training log; a head that had nothing to guess leaves a gap
    record : what the run says of itself, with the counts on held-out texts

    Raises OutOfRange for an empty log.
    """
    from matplotlib import colormaps

    if not log:
        raise OutOfRange("Curves need at least one step, but the training log is empty.")
    parts = np.array_split(np.arange(len(log)), min(POINTS, len(log)))

    def means(key: str) -> NDArray[np.float64]:
        values = [line[key] if isinstance(line[key], list) else [line[key]] for line in log]
        array = np.ma.masked_invalid(np.array(values, dtype=np.float64))  # null becomes NaN
        return np.array([array[part].mean(0).filled(np.nan) for part in parts])

    steps, loss, accuracy = means("step")[:, 0], means("head_loss_nats"), means("accuracy")
    before, after = (np.array(record["held_out"][when]["accuracy"], dtype=np.float64) for when in ("before", "after"))
    last, heads = float(steps[-1]), loss.shape[1]
    every = -(-heads // MOST_NAMED)  # of more heads the legend names some
    left, right = [], []
    for k, colour in enumerate(colormaps["viridis"](np.linspace(0.0, 0.9, heads))):  # its last tenth is pale
        name = str(k + 1) if k % every == 0 or k == heads - 1 else ""
        look = style.series(k) if heads <= MOST_NAMED else {"color": colour, "marker": "o", "linestyle": "-"}
        line, ends = {**look, "marker": ""}, {**look, "linestyle": "none", "markersize": 6, "clip_on": False}
        left.append(Series(name, steps, loss[:, k], look=line))
        right.append(Series("", steps, accuracy[:, k], look=line))
        right.append(Series("", [0], before[k : k + 1], look={**ends, "markerfacecolor": "white", "zorder": 3}))
        right.append(Series("", [1.04 * last], after[k : k + 1], look={**ends, "zorder": 3}))
    title = "Lines: the texts of each step"
    axes: Look = {"scale": "whole", "xlim": (0, 1.06 * last), "ylim": (0, None)}
    held_out = f"{title}\nMarks: held-out texts, open before, full after"
    panels = [
        Panel(left, "step", "loss [nats per state]", title, **axes),
        Panel(right, "step", "accuracy of the first choice", held_out, **axes),
    ]
    return Chart("How the heads learned", _caption(record), [panels], "head")


def _caption(record: Mapping[str, Any]) -> str:
    """The recipe, its steps and its texts, from the record of a run."""
    recipe, trials = record.get("recipe"), record["held_out"]["after"]["trials"]
    return style.sentence(
        f"{recipe['kind']}, {recipe['num_heads']} heads" if recipe else None,
        f"{record['steps']:,} steps of {recipe['batch_size']} texts in {record['seconds']:,.0f} s" if recipe else None,
        style.origin(record.get("provenance")),
        f"{max(trials):,} held-out states" if trials else None,
    )
