"""Latencies between measured ones: each is a weighted mean of the measurements next to it on either side.

This file decides how latencies lie between sizes, depths, contexts and batch sizes; nothing else draws a line.

Matrix products cost by the tile, so latency over rows = batch_size x size can be a staircase (Medusa, Table 8), which all
measurements of a profile share. A batch size or a depth shifts it, by what it costs besides. Other machines have none to
be seen. So every timed step is left out in turn and estimated from the others, along the staircase and along straight
lines: the profile follows what errs less, and by how much it errs is the error of what was not timed.

A table of weights has a row for each step asked for and a column for each step measured. A row sums to 1, or is 0
where no measurements enclose the step: nothing is extrapolated.

n steps asked for · A steps measured at one batch size and context, the plain one first
M measurements of a profile
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeopt.latency.measurements import Measurements
from treeopt.records.profile import Setting
from treeopt.trees.tree import IntArray

SMOOTHNESS = 1e-3  # of the staircase: it only decides what overlapping rows leave open
EXACT = 1e-9  # below it a measurement is free of all others
MOST_LEFT_OUT = 200  # measurements, evenly among all
COVERED, ENOUGH = 0.95, 19  # of how many left out the largest but none is the 95 % quantile
ANYWHERE = 12**-0.5  # standard deviation of what lies anywhere on a way of length 1
FLAT = 0.1  # of a latency: how far apart its neighbours are taken to be where they are equal
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
    any_depth: bool = False,
    curve: Curve | None = None,
) -> Floats:
    """(n, A) weights of the two measured trees about each one asked for.

    They have its depth, or the next deeper one that encloses it. Failing these, a chain is between the next
    shorter and the next longer chain. Size 1 is the plain step.

    plain_ends : whether the plain step, too, is a measured tree of every depth
    any_depth  : whether what nothing encloses lies between the least deep trees of each size, the plain step among them
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
    if any_depth:
        known, columns = np.unique(measured_sizes, return_index=True)  # the least deep stands first of its size
        rows = np.flatnonzero((sizes <= known.max()) & ~weights.any(1))
        _share(weights, rows, columns, sizes[rows], known, curve)
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


class Staircase:
    """Latency over rows, up to a constant [ms].

    Least squares of step_ms = curve(rows) + one constant for each value of each kind of offset, relative
    errors alike, then made to rise (isotonic regression).

    rows    : (M,)
    offsets : of every kind (M,) what a measurement's constant goes by: its batch size, its depth
    step_ms : (M,)

    >>> stairs = Staircase(rows=[1, 2, 4], offsets=[["a"] * 3], step_ms=np.array([2.0, 2.0, 3.0]))
    >>> (stairs(np.array([1, 2, 3, 4])) - stairs(np.array([1]))).round(2).tolist()
    [0.0, 0.0, 0.5, 1.0]
    """

    def __init__(self, *, rows: Sequence[int], offsets: Sequence[Sequence[Hashable]], step_ms: Floats) -> None:
        self.knots, at = np.unique(rows, return_inverse=True)
        columns = [np.eye(len(self.knots))[at]]
        for labels in offsets:
            known = list(dict.fromkeys(labels))
            columns.append(np.eye(len(known))[[known.index(label) for label in labels]])
        measured = np.hstack(columns) / step_ms[:, None]
        bends = np.zeros((max(len(self.knots) - 2, 0), measured.shape[1]))
        for i in range(len(bends)):
            before, after = np.diff(np.log(self.knots[i : i + 3]))
            bends[i, i : i + 3] = [1 / before, -1 / before - 1 / after, 1 / after]
        table = np.vstack([measured, SMOOTHNESS * bends / step_ms.mean()])
        self._inverse = np.linalg.pinv(table, rcond=max(table.shape) * np.finfo(float).eps)[:, : len(rows)]
        self._found = self._inverse.sum(1)
        self._table = measured
        self.heights = self._rising(self._found)

    def _rising(self, found: Floats) -> Floats:
        from scipy.optimize import isotonic_regression

        return np.asarray(isotonic_regression(found[: len(self.knots)]).x, dtype=float)

    def __call__(self, rows: IntArray) -> Floats:
        return np.asarray(np.interp(rows, self.knots, self.heights))

    def without(self, i: int) -> Curve:
        """The staircase that all measurements but the i-th make."""
        row = self._table[i]
        free = 1 - row @ self._inverse[:, i]  # 0 if it alone says what one of the constants is, and nothing else
        left = self._found - self._inverse[:, i] * ((1 - row @ self._found) / free if free > EXACT else 0.0)
        kept = (np.delete(self._table, i, 0)[:, : len(self.knots)] > 0).any(0)
        knots, heights = self.knots[kept], self._rising(left)[kept]
        return lambda rows: np.interp(rows, knots, heights)


@dataclass(frozen=True, eq=False)
class Between:
    """How the latencies of a profile lie between those that were timed.

    stairs   : the staircase over rows = batch size x size, None where nothing was left out
    errors   : root mean squares of the relative errors at timed sizes that were left out: along the staircase, and straight
    share    : standard error of an estimate over its `reach_ms`
    left_out : timed sizes that the others enclose
    """

    stairs: Staircase | None = None
    errors: tuple[float, float] = (0.0, 0.0)
    share: float = ANYWHERE
    left_out: int = 0

    @property
    def is_stairs(self) -> bool:
        return self.errors[0] < self.errors[1]

    def curve(self, batch_size: int) -> Curve | None:
        """How the way from one size to the next goes; None for straight."""
        stairs = self.stairs
        return (lambda sizes: stairs(batch_size * sizes)) if stairs and self.is_stairs else None


def between(measured: Mapping[Setting, Measurements]) -> Between:
    """The way that the measurements of a profile say themselves, each of them left out in turn (some, if there are many).

    The error is the 95 % quantile of what was left out (of n + 1, as one more would come), so that no shape of errors is
    assumed: stairs make a few large ones. Below `ENOUGH` of them it is the largest, at least their root mean square and that
    of one more, of which nothing is known but that it lies between its neighbours.
    """
    first = {setting: 0 if here.plain_ends else 1 for setting, here in measured.items()}
    places = [(setting, i) for setting, here in measured.items() for i in range(first[setting], len(here.sizes))]
    if not places:
        return Between()
    stairs = Staircase(
        rows=[setting[0] * int(measured[setting].sizes[i]) for setting, i in places],
        offsets=[[setting for setting, _ in places], [int(measured[setting].depths[i]) for setting, i in places]],
        step_ms=np.array([measured[setting].ms[i] for setting, i in places]),
    )
    found = []
    for n in range(0, len(places), 1 + len(places) // MOST_LEFT_OUT):
        (setting, i), without = places[n], stairs.without(n)
        here, kept = measured[setting], np.arange(len(measured[setting].sizes)) != i
        known = here.sizes[kept], here.depths[kept]
        step = here.sizes[[i]], here.depths[[i]]
        if i and (straight := size_weights(*step, *known, here.plain_ends)[0]).any():
            curve: Curve = lambda sizes: without(setting[0] * sizes)  # noqa: E731, B023
            along = size_weights(*step, *known, here.plain_ends, curve=curve)[0]
            found.append([(*_left_out(weights, here, kept, i),) for weights in (along, straight)])
    if not found:
        return Between()
    errors, shares = np.moveaxis(np.array(found), 2, 0)  # (n, 2)
    along, straight = np.sqrt(np.square(errors).mean(0)).tolist()
    ordered = np.sort(shares[:, 0 if along < straight else 1])
    if len(ordered) >= ENOUGH:
        share = ordered[int(np.ceil(COVERED * (len(ordered) + 1))) - 1]
    else:
        share = max(ordered[-1], np.sqrt((np.square(ordered).sum() + ANYWHERE**2) / (len(ordered) + 1)))
    return Between(stairs, (along, straight), float(share), len(ordered))


def _left_out(weights: Floats, here: Measurements, kept: NDArray[np.bool_], i: int) -> tuple[float, float]:
    """The relative error of an estimate of the i-th measurement, and the share that would cover it."""
    ms = here.ms[kept]
    error_ms = float(weights @ ms - here.ms[i])
    known = np.hypot(weights @ here.own_ms[kept], here.own_ms[i])  # the noise of timing, which is counted beside
    needed_ms = np.sqrt(max((error_ms / 1.96) ** 2 - known**2, 0.0))
    return error_ms / here.ms[i], float(needed_ms / reach_ms(weights[None], ms)[0])


def reach_ms(weights: Floats, ms: Floats) -> Floats:
    """(n,) what the errors of (n, A) estimates are taken to grow with: the way between the measurements of each, and a
    part of the latency itself, since equal neighbours say no more than about that what is between them costs.

    >>> reach_ms(np.array([[0.5, 0.5], [0.5, 0.0]]), np.array([10.0, 10.0])).round(2).tolist()
    [1.0, 0.5]
    """
    used = weights > 0
    low = np.where(used, ms, np.inf).min(1, initial=np.inf)
    high = np.where(used, ms, -np.inf).max(1, initial=-np.inf)
    return np.where(used.any(1), np.hypot(high - low, FLAT * (weights @ ms)), np.nan)
