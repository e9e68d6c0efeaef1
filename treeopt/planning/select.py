"""The choice among candidates when both factors of throughput have noise.

A candidate is *tied* with the fastest one where none is faster than it in 97.5 % of the bootstrap draws, which are the
same for all candidates (`candidates`). Of the tied ones that cost next to nothing a fixed tree is chosen before a dynamic
one, which is more to run, then one that was timed, and the smallest of them.

B bootstrap draws
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.planning.candidates import Candidates
from treeopt.trees.tree import IntArray

CERTAIN = 0.975  # share of the draws in which one candidate is faster than another that it is not tied with
NEGLIGIBLE = 0.005  # share of the throughput that a smaller tree may cost where they are tied


@dataclass(frozen=True, eq=False)
class Selection:
    """Which candidate was chosen, and how sure that is.

    chosen    : of the tied ones that cost at most `NEGLIGIBLE` throughput a fixed one, a timed one, and the smallest
    tied      : all that the data cannot tell from the fastest
    runner_up : the fastest of another size; None where there is no other, or no latency is known
    """

    chosen: int
    tied: IntArray
    runner_up: int | None


def select_all(options: Sequence[Candidates]) -> list[Selection]:
    """The best candidate at each batch size, as of one server for all: where it has a drafter, plain steps are idle ones."""
    found = [select(c) for c in options]
    speculates = [bool(c.sizes[one.chosen] > 1) for c, one in zip(options, found, strict=True)]
    if not any(speculates):
        return found
    each = zip(options, found, speculates, strict=True)
    return [one if does or c.idle is None else select(c, has_drafter=True) for c, one, does in each]


def select(c: Candidates, *, has_drafter: bool = False) -> Selection:
    """The best candidate.

    has_drafter : whether what decodes has one at any rate, so that the idle root stands for plain decoding
    """
    if c.context is None:  # nothing says what a step costs: the whole budget
        most = np.where(c.groups == "grown", c.sizes, 0)
        chosen = int(most.argmax())
        return Selection(chosen, np.array([chosen]), None)
    barred = c.plain if has_drafter and c.idle is not None else c.idle
    can = np.arange(len(c.all)) != barred
    total, draws = c.throughput * can, c.throughput_draws * can[:, None]
    fastest = int(total.argmax())
    near = np.flatnonzero((draws[fastest] > draws).mean(axis=1) < CERTAIN)
    # The fastest may be one that is hardly known: then another may still be clearly faster than what is near to it.
    tied = np.array([i for i in near if i == fastest or ((draws > draws[i]).mean(axis=1) < CERTAIN).all()])
    tied = tied[np.lexsort((-total[tied], c.sizes[tied], ~c.timed[tied], c.anew[tied]))]
    chosen = int(tied[(total[tied] >= (1 - NEGLIGIBLE) * total[fastest]).argmax()])
    others = np.flatnonzero(c.sizes != c.sizes[chosen])
    runner_up = int(others[total[others].argmax()]) if len(others) else None
    return Selection(chosen, tied, runner_up)
