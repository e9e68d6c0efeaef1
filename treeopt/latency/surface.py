"""A smooth surface through noisy timings: the cost of a step over that of a plain one, by family, rows and depth.

    log(step / plain step) = log(trend + building) + bend + stairs

trend     a sum of costs, none below 0: of a step, of each row and of each level
building  what it costs to build a tree anew at every step: again of a step, of each row and of each level. One fit for all
          families of such trees, and a small difference of each family
bend      the part of the rest that is smooth in depth and in the logarithm of rows
stairs    the part that jumps: matrix products cost by the tile, and other kernels are chosen for other numbers of rows

The trend may be wrong by much, building, bend and stairs by standard deviations that are not known: each choice of these is
weighed by the likelihood of the timings (empirical Bayes). All are Gaussian processes. So a noisy timing is drawn to the surface, and a precise one stays where it is.
The farther a step is from the timings, the less is known of it.

A timings · n steps by their costs · J columns of trend and building
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.trees.tree import FIXED, BoolArray, Cost

BUILDING = (0.01, 0.03, 0.1, 0.3)  # standard deviations of what building costs, in plain steps
BENDS, STAIRS = (0.0, 0.02, 0.06, 0.2), (0.003, 0.01, 0.03, 0.1, 0.3)  # standard deviations of the logarithm
TREND, FITTED = 3, 6  # the first columns are the trend's, the next those of building in all families; these are fitted
FAR = 1.5  # length scale of bend and stairs, in units of log(rows)
LEVELS = 4.0  # this many levels count as far apart as e times the rows
SHARED = 0.5  # share of the variance of bend and stairs that all families have in common
EXACT = 1e-12  # variance of a timing without noise
LEAST = 1e-3  # share of the likelihood below which a choice of sizes is left out
Floats = NDArray[np.float64]


class Fit(NamedTuple):
    """The timings as one choice of sizes explains them.

    share   : of the likelihood
    sizes   : variances of trend, building, bend and stairs
    weights : (A,) of each timing in the estimate of another step
    inverse : (A, A) inverse of the Cholesky factor of the timings' covariance
    """

    share: float
    sizes: tuple[float, float, float, float]
    weights: Floats
    inverse: Floats


class Surface:
    """The surface through timings.

    log_ratios : (A,) logarithms of step over plain step, measured for each of ``costs``
    noise      : (A, A) covariance of their errors

    >>> costs = [Cost(FIXED, rows, 1) for rows in (2, 4, 8)]
    >>> surface = Surface(costs, np.log([1.1, 1.3, 1.7]), np.eye(3) * 1e-8)
    >>> np.exp(surface.estimates([Cost(FIXED, 8, 1), Cost(FIXED, 6, 1)])).round(2).tolist()
    [1.7, 1.5]
    """

    def __init__(self, costs: Sequence[Cost], log_ratios: Floats, noise: Floats) -> None:
        from scipy.optimize import nnls

        self.costs = list(costs)
        self.families = sorted({cost.family for cost in costs} - {FIXED})
        self.told = np.array([part for some in self._groups(costs) for part in _varies(costs, some)])  # (J,)
        columns, ratios = self._columns(costs), np.exp(log_ratios)
        self.slopes = nnls(columns[:, :FITTED] / ratios[:, None], np.ones(len(ratios)))[0]  # (6,)
        self.spread = 1 / np.maximum(columns.max(0), 1)  # (J,) standard deviations: a plain step at the farthest timing
        kernels, rest = self._kernels(costs, costs), log_ratios - np.log(columns[:, :FITTED] @ self.slopes)
        fits, likelihoods = list[Fit](), list[float]()
        for building, bend, stairs in product(BUILDING if self.families else BUILDING[:1], BENDS, STAIRS):
            sizes = 1.0, building**2, bend**2, stairs**2
            inverse = np.linalg.inv(
                np.linalg.cholesky(np.tensordot(sizes, kernels, 1) + noise + EXACT * np.eye(len(noise)))
            )
            whitened = inverse @ rest
            likelihoods.append(float(np.log(np.diag(inverse)).sum() - whitened @ whitened / 2))
            fits.append(Fit(0.0, sizes, inverse.T @ whitened, inverse))
        shares = np.exp(np.array(likelihoods) - max(likelihoods))
        shares *= shares >= LEAST
        self.fits = [fit._replace(share=share) for fit, share in zip(fits, shares / shares.sum(), strict=True) if share]

    def estimates(self, costs: Sequence[Cost]) -> Floats:
        """(n,) logarithms of step over plain step."""
        kernels = self._kernels(costs, self.costs)
        rest = sum(fit.share * np.tensordot(fit.sizes, kernels, 1) @ fit.weights for fit in self.fits)
        return np.asarray(np.log(self._columns(costs)[:, :FITTED] @ self.slopes) + rest)

    def covariance(self, costs: Sequence[Cost]) -> Floats:
        """(n, n) of the errors of these estimates."""
        across, within = self._kernels(costs, self.costs), self._kernels(costs, costs)
        rests = np.array([np.tensordot(fit.sizes, across, 1) @ fit.weights for fit in self.fits])
        shares = np.array([fit.share for fit in self.fits])
        differences = rests - shares @ rests  # between choices of sizes
        covariance = (shares[:, None] * differences).T @ differences
        for fit in self.fits:
            explained = np.tensordot(fit.sizes, across, 1) @ fit.inverse.T
            covariance += fit.share * (np.tensordot(fit.sizes, within, 1) - explained @ explained.T)
        return np.asarray(covariance)

    def _groups(self, costs: Sequence[Cost]) -> list[BoolArray]:
        """(n,) which steps are of any draft, of trees that are built anew, and of each of their families."""
        families = np.array([cost.family for cost in costs])
        return [families == families, families != FIXED, *(families == family for family in self.families)]

    def _columns(self, costs: Sequence[Cost]) -> Floats:
        """(n, J) how often each cost is in each step: of the trend, of building, and of building in each family."""
        parts = np.array([(1, cost.rows - 1, cost.depth) for cost in costs], dtype=float)
        return np.asarray(self.told * np.hstack([parts * group[:, None] for group in self._groups(costs)]))

    def _kernels(self, costs: Sequence[Cost], others: Sequence[Cost]) -> Floats:
        """(4, n, m) covariances of trend, building, bend and stairs of unit size."""
        shares, other_shares = (
            self.spread * columns / (columns[:, :FITTED] @ self.slopes)[:, None]
            for columns in (self._columns(costs), self._columns(others))
        )
        trend = shares[:, :TREND] @ other_shares[:, :TREND].T
        building = shares[:, TREND:] @ other_shares[:, TREND:].T
        at, other_at = (
            np.array([(np.log(cost.rows), cost.depth / LEVELS) for cost in some]) for some in (costs, others)
        )
        away = abs(at[:, None] - other_at) / FAR  # (n, m, 2)
        far = np.sqrt(3) * np.hypot(away[..., 0], away[..., 1])
        families, other_families = (np.array([cost.family for cost in some]) for some in (costs, others))
        alike = np.where(families[:, None] == other_families, 1.0, SHARED)
        return np.stack([trend, building, alike * (1 + far) * np.exp(-far), alike * np.exp(-away.sum(-1))])


def _varies(costs: Sequence[Cost], group: BoolArray) -> tuple[bool, bool, bool]:
    """Which costs the timings of a group tell apart: of a step, of rows and of levels where it was timed with several."""
    timed = [cost for cost, belongs in zip(costs, group, strict=True) if belongs]
    levels = {cost.depth for cost in timed if cost.rows > 1}
    return bool(timed), len({cost.rows for cost in timed}) > 1, len(levels) > 1
