"""Latencies between measured ones: each is a weighted mean of the measurements next to it on either side.

This file decides how latencies lie between sizes, depths, contexts and batch sizes; nothing else draws a line.

Matrix products cost by the tile, so latency over rows = batch_size x size is a staircase (Medusa, Table 8), which all
measurements of a profile share. A batch size or a depth shifts it, by what it costs besides.

A table of weights has a row for each step asked for and a column for each step measured. A row sums to 1, or is 0
where no measurements enclose the step: nothing is extrapolated.

n steps asked for · A steps measured at one batch size and context, the plain one first
M measurements of a profile
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.trees.tree import IntArray

SMOOTHNESS = 1e-3  # of the staircase: it only decides what overlapping rows leave open
Floats = NDArray[np.float64]
Curve = Callable[[IntArray], Floats]  # of sizes what a step costs there, up to a constant


def way_to(wanted: ArrayLike, low: ArrayLike, high: ArrayLike) -> Floats:
    """Share of the straight way from ``low`` to ``high`` at which each wanted number lies; 0 where the two are one.

    >>> way_to([4, 6, 8], 4, 8).tolist()
    [0.0, 0.5, 1.0]
    """
    start, end = np.asarray(low, float), np.asarray(high, float)
    return np.asarray((np.asarray(wanted, float) - start) / np.maximum(end - start, 1))


def between_batch_sizes(low_ms: Floats, high_ms: Floats, wanted: ArrayLike, low: int, high: int) -> Floats:
    """(n, G) latencies of n trees at G batch sizes between two, from their (n,) latencies at these: a straight line.

    >>> between_batch_sizes(np.array([5.0]), np.array([7.0]), [4, 6], 4, 8).tolist()
    [[5.0, 6.0]]
    """
    way = way_to(wanted, low, high)
    return np.asarray(low_ms[:, None] * (1 - way) + high_ms[:, None] * way)


def rising_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The line through points: what it is at 0, and its slope; neither below 0, level where all have one x.

    >>> [round(number, 9) for number in (*rising_line([1, 2], [2.0, 3.0]), *rising_line([1, 2], [3.0, 2.0]))]
    [1.0, 1.0, 2.5, 0.0]
    """
    slope = max(float(np.polyfit(x, y, 1)[0]), 0.0) if len(set(x)) > 1 else 0.0
    return max(float(np.mean(np.subtract(y, np.multiply(slope, x)))), 0.0), slope


def size_weights(
    sizes: IntArray,
    depths: IntArray,
    measured_sizes: IntArray,
    measured_depths: IntArray,
    plain_ends: bool = False,
    *,
    curve: Curve | None = None,
) -> Floats:
    """(n, A) weights of the two measured trees about each one asked for.

    They have its depth, or the next deeper one that encloses it. Failing these, a chain is between the next
    shorter and the next longer chain. Size 1 is the plain step.

    plain_ends : whether the plain step, too, is a measured tree of every depth
    curve      : how the way from one size to the next goes; by default straight

    >>> measured_sizes, measured_depths = np.array([1, 4, 8]), np.array([0, 2, 2])
    >>> size_weights(np.array([1, 5, 9]), np.array([0, 1, 2]), measured_sizes, measured_depths).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.75, 0.25], [0.0, 0.0, 0.0]]
    """
    weights = np.zeros((len(sizes), len(measured_sizes)))
    weights[sizes == 1, 0] = 1.0
    for depth in np.unique(measured_depths[1:]).tolist():
        columns = np.flatnonzero((measured_depths == depth) | (plain_ends & (measured_sizes == 1)))
        known = measured_sizes[columns]
        enclosed = (depths <= depth) & (sizes >= known.min()) & (sizes <= known.max())
        rows = np.flatnonzero(enclosed & ~weights.any(1))
        _share(weights, rows, columns, sizes[rows], known, curve)
    chains = np.flatnonzero((measured_sizes == measured_depths + 1) & ((measured_sizes > 1) | plain_ends))
    if len(chains):
        known = measured_depths[chains]
        enclosed = (sizes == depths + 1) & (depths >= known.min()) & (depths <= known.max())
        rows = np.flatnonzero(enclosed & ~weights.any(1))
        _share(weights, rows, chains, depths[rows], known, None)
    return weights


def _share(
    weights: Floats, rows: IntArray, columns: IntArray, wanted: IntArray, known: IntArray, curve: Curve | None
) -> None:
    """Give each row its weights of the two columns whose ``known`` number is next to the ``wanted`` one."""
    order = np.argsort(known)
    columns, known = columns[order], known[order]
    high = np.searchsorted(known, wanted)
    low = np.where(known[high] == wanted, high, high - 1)
    share = way_to(wanted, known[low], known[high])
    if curve is not None:
        at, stairs = curve(wanted), curve(known)
        rise = stairs[high] - stairs[low]  # where it is flat nothing tells the sizes apart
        share = np.where(rise > 0, (at - stairs[low]) / np.where(rise > 0, rise, 1.0), share)
    weights[rows, columns[low]] += 1 - share
    weights[rows, columns[high]] += share


def fit_staircase(*, rows: Sequence[int], offsets: Sequence[Sequence[Hashable]], step_ms: Floats) -> Curve:
    """Latency over rows, up to a constant [ms]; a flat line where nothing was measured.

    Least squares of step_ms = curve(rows) + one constant for each value of each kind of offset, relative
    errors alike, then made to rise (isotonic regression).

    rows    : (M,)
    offsets : of every kind (M,) what a measurement's constant goes by: its batch size, its depth
    step_ms : (M,)

    >>> curve = fit_staircase(rows=[1, 2, 4], offsets=[["a"] * 3], step_ms=np.array([2.0, 2.0, 3.0]))
    >>> (curve(np.array([1, 2, 3, 4])) - curve(np.array([1]))).round(2).tolist()
    [0.0, 0.0, 0.5, 1.0]
    """
    from scipy.optimize import isotonic_regression

    if not len(rows):
        return lambda rows: np.zeros(np.shape(rows))
    knots, at = np.unique(rows, return_inverse=True)
    columns = [np.eye(len(knots))[at]]
    for labels in offsets:
        known = list(dict.fromkeys(labels))
        columns.append(np.eye(len(known))[[known.index(label) for label in labels]])
    table = np.hstack(columns) / step_ms[:, None]
    bends = np.zeros((max(len(knots) - 2, 0), table.shape[1]))
    for i in range(len(bends)):
        before, after = np.diff(np.log(knots[i : i + 3]))
        bends[i, i : i + 3] = [1 / before, -1 / before - 1 / after, 1 / after]
    table = np.vstack([table, SMOOTHNESS * bends / step_ms.mean()])
    wanted = np.concatenate([np.ones(len(step_ms)), np.zeros(len(bends))])
    found = np.linalg.lstsq(table, wanted)[0][: len(knots)]
    heights = np.asarray(isotonic_regression(found).x, dtype=float)
    return lambda rows: np.interp(rows, knots, heights)
