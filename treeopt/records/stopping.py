"""When a contender of a benchmark stops: it is shown to be slower than the chosen tree long before the last block.

There are three looks, after each quarter of the blocks. What is tested again and again is found too often, so a look takes
an interval of 99.9 %: the bound of Haybittle (1971) and Peto et al. (1976, Br. J. Cancer 34, 585), which leaves the
intervals at the end as they are. A contender that stopped keeps the interval of its look, as one of repeated confidence
intervals (Jennison and Turnbull 1989, J. R. Statist. Soc. B 51, 305): whatever stops, 5 % + 3 x 0.1 % of what is reported
misses the truth at most.

n blocks
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeopt.records.bootstrap import conversation_draws, stderr

FEWEST_BLOCKS = 5  # below it no interval is given
LOOKS = 3
ERROR = 0.001  # of an interval at a look


def rates_ratio(sums: Any) -> Any:
    """(..., 4) tokens, seconds, baseline's tokens, baseline's seconds to the ratio of rates."""
    return sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3])


def look_interval(pairs: Any) -> tuple[float, float] | None:
    """The interval of a ratio of rates at a look; None for too few blocks.

    pairs : (n, 4) of `rates_ratio`

    By Student's t on the logarithm, with the bootstrap's standard error: so far out percentiles would need more draws.
    """
    from scipy.stats import t

    pairs = np.asarray(pairs, dtype=float)
    pairs = pairs[(pairs[:, 1] > 0) & (pairs[:, 3] > 0)]
    if (n := len(pairs)) < FEWEST_BLOCKS:
        return None
    middle, error = np.log(rates_ratio(pairs.sum(0))), stderr(np.log(rates_ratio(conversation_draws(n) @ pairs)), n)
    reach = t.ppf(1 - ERROR / 2, n - 1) * error
    return float(np.exp(middle - reach)), float(np.exp(middle + reach))


def loses_by_far(pairs: Any) -> bool:
    """Whether a contender is shown to be slower than another by a look's interval.

    >>> loses_by_far([[50, 1.0, 80, 1.0], [50, 1.1, 82, 1.1]] * 3), loses_by_far([[50, 1.0, 80, 1.0]] * 4)
    (True, False)
    """
    found = look_interval(pairs)
    return found is not None and found[1] < 1
