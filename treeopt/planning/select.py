"""The choice among candidates when both factors of throughput have noise.

A candidate is *tied* with the fastest one where none is faster than it in 97.5 % of the bootstrap draws, which are the
same for all candidates (`candidates`). Of the tied ones that cost next to nothing a fixed tree is chosen before a dynamic
one, which is more to run, and the smallest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treeopt.planning.candidates import Candidates
from treeopt.trees.draft import Draft
from treeopt.trees.tree import IntArray

CERTAIN = 0.975  # share of the draws in which one candidate is faster than another that it is not tied with
NEGLIGIBLE = 0.005  # share of the throughput that a smaller tree may cost where they are tied
POWER = 1.96 + 0.84  # standard errors between two trees that 95 % intervals separate in 80 % of the cases
ASKED = 100_000  # conversations; how many more it takes to separate two trees is not said


@dataclass(frozen=True, eq=False)
class Selection:
    """Which candidate was chosen, and how sure that is.

    chosen    : of the tied ones that cost at most `NEGLIGIBLE` throughput a fixed one, and the smallest
    tied      : all that the data cannot tell from the fastest
    runner_up : the fastest of another size; None where there is no other, or no latency is known
    sizes95   : 95 % interval of the fastest size over the draws
    prompts   : conversations that would tell the runner-up from the chosen one; None where more would not
    """

    chosen: int
    tied: IntArray
    runner_up: int | None
    sizes95: tuple[int, int]
    prompts: int | None = None


def select(c: Candidates, *, take: Draft | None = None) -> Selection:
    """The best candidate, or ``take`` whatever the prediction says."""
    wanted = None
    if take is not None:
        same = [i for i, one in enumerate(c.all) if (one.size, one.depth) == (take.rows, take.depth)]
        wanted = next(i for i in same if c.all[i].draft == take)
    if c.context is None:  # nothing says what a step costs: the whole budget
        chosen = int(np.where(c.groups == "grown", c.sizes, 0).argmax()) if wanted is None else wanted
        return Selection(chosen, np.array([chosen]), None, (int(c.sizes[chosen]),) * 2)
    total, draws = c.throughput, c.throughput_draws
    fastest = int(total.argmax())
    near = np.flatnonzero((draws[fastest] > draws).mean(axis=1) < CERTAIN)
    # The fastest may be one that is hardly known: then another may still be clearly faster than what is near to it.
    tied = np.array([i for i in near if i == fastest or ((draws > draws[i]).mean(axis=1) < CERTAIN).all()])
    good = [i for i in tied.tolist() if total[i] >= (1 - NEGLIGIBLE) * total[fastest]]
    chosen = min(good, key=lambda i: (c.all[i].group == "dynamic", c.sizes[i], -total[i])) if wanted is None else wanted
    others = np.flatnonzero(c.sizes != c.sizes[chosen])
    runner_up = int(others[total[others].argmax()]) if len(others) else None
    winners = np.sort(c.sizes[draws.argmax(0)])
    low, high = (int(winners[int(share * (len(winners) - 1))]) for share in (0.025, 0.975))
    prompts = None if runner_up is None else _prompts(c, chosen, runner_up)
    return Selection(chosen, tied, runner_up, (low, high), prompts)


def _prompts(c: Candidates, i: int, j: int) -> int | None:
    """How many conversations would tell two candidates apart in four of five cases.

    None where there are as many already, or none to draw: more would make tokens per step surer, but not the latencies,
    which need a longer profile. At most `ASKED` and one.
    """
    behind = float(np.log(c.throughput[i] / c.throughput[j]))
    of_prompts = float(np.log(c.rate_draws[i] / c.rate_draws[j]).std())
    n = c.all[i].conversations
    needed = n * (POWER * of_prompts / behind) ** 2 if behind else np.inf
    return int(min(np.ceil(needed), ASKED + 1)) if n and n < needed else None
