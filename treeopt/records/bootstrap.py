"""Error bars, by the bootstrap over conversations: a measurement draws conversations at random.

Figures that are compared share the draws, so that what is common to them cancels.

C conversations · B bootstrap draws
"""

import functools

import numpy as np
from numpy.typing import NDArray

from treeopt.trees.tree import IntArray

BOOTSTRAPS, SEED = 2000, 0
LEVEL = 0.95
MOST_DRAWN = 40_000_000  # conversations in all draws together
AT_ONCE = 2**22  # of them as numbers that are multiplied


@functools.lru_cache(maxsize=8)
def conversation_draws(n: int, *, count: int = BOOTSTRAPS, seed: int = SEED) -> NDArray[np.uint8]:
    """(B, C) how often each of ``n`` conversations is drawn; the same for the same n and seed.

    Of more than 20,000 conversations fewer draws than ``count``, but at least 200, so that memory is bounded.

    >>> conversation_draws(3).sum(1)[:2].tolist()
    [3, 3]
    """
    rng, share = np.random.default_rng(seed), np.full(n, 1 / n)
    draws = np.empty((min(count, max(200, MOST_DRAWN // n)), n), dtype=np.uint8)
    for part in np.array_split(draws, -(-draws.size // AT_ONCE)):
        part[:] = rng.multinomial(n, share, size=len(part))
    draws.setflags(write=False)
    return draws


def drawn_rates(
    tokens: IntArray | NDArray[np.float64], steps: IntArray | NDArray[np.float64], draws: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """(..., B) tokens per step of every draw; 1.0 where it has no step.

    tokens, steps : (..., C) of each conversation

    >>> drawn_rates(np.array([4, 6]), np.array([[2, 3]]), np.array([[1, 1], [2, 0]], np.uint8)).tolist()
    [[2.0, 2.0]]
    """
    rates = []
    for part in np.array_split(draws, -(-draws.size // AT_ONCE)):
        times = part.T.astype(np.float64)
        taken = steps @ times
        rates.append(np.where(taken > 0, (tokens @ times) / np.maximum(taken, 1e-300), 1.0))
    return np.concatenate(rates, axis=-1)


def interval95(samples: NDArray[np.float64], n: int) -> tuple[float, float]:
    """The 95 % interval of bootstrap draws over ``n`` things: percentiles, widened for few of them.

    The expanded percentile interval (Hesterberg, What Teachers Should Know about the Bootstrap, 2015, section 4.5).

    >>> [round(end, 3) for end in interval95(np.linspace(0, 1, 1001), 10_000)]
    [0.025, 0.975]
    """
    from scipy.special import ndtr, stdtrit  # of scipy.stats, which takes a second to import

    if n < 2 or len(samples) < 2:
        return float(samples.min()), float(samples.max())
    tail = float(ndtr(np.sqrt(n / (n - 1)) * stdtrit(n - 1, (1 - LEVEL) / 2)))
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)


def stderr(samples: NDArray[np.float64], n: int) -> float:
    """Standard error of a number by its bootstrap draws over ``n`` things.

    >>> stderr(np.array([1.0, 3.0]), 2)
    1.4142135623730951
    """
    return float(samples.std() * np.sqrt(n / (n - 1))) if n > 1 else float(samples.std())
