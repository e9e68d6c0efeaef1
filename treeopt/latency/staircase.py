"""The curve of latency over rows that all measurements of a profile share.

Matrix products cost by the tile, so latency over rows = batch_size x size is a staircase (Medusa, Table 8). A
batch size or a depth shifts it, by what it costs besides.

M measurements · R distinct numbers of rows
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

SMOOTHNESS = 1e-3  # it only decides what overlapping rows leave open


def fit_staircase(
    *, rows: Sequence[int], offsets: Sequence[Sequence[Hashable]], step_ms: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(R,) rows and (R,) latency there, up to a constant [ms]; a flat line where nothing was measured.

    Least squares of step_ms = curve(rows) + one constant for each value of each kind of offset, relative
    errors alike, then made to rise (isotonic regression).

    rows    : (M,)
    offsets : of every kind (M,) what a measurement's constant goes by: its batch size, its depth
    step_ms : (M,)

    >>> rows, curve = fit_staircase(rows=[1, 2, 4], offsets=[["a"] * 3], step_ms=np.array([2.0, 2.0, 3.0]))
    >>> (curve - curve[0]).round(2).tolist()
    [0.0, 0.0, 1.0]
    """
    from scipy.optimize import isotonic_regression

    if not len(rows):
        return np.array([0.0, 1.0]), np.zeros(2)
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
    return knots.astype(float), np.asarray(isotonic_regression(found).x, dtype=float)
