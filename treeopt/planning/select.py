"""The choice among candidates when both factors of throughput have noise.

A candidate is *tied* with the fastest one where none is faster than it in 97.5 % of the bootstrap draws, which are the
same for all candidates (`candidates`). Of the tied ones that cost next to nothing a fixed tree is chosen before a dynamic
one, which is more to run, and the smallest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.planning.candidates import Candidates, Floats
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
    runner_up : the fastest of another size; None where there is no other
    sizes95   : 95 % interval of the fastest size over the draws
    """

    chosen: int
    tied: IntArray
    runner_up: int | None
    sizes95: tuple[int, int]


def select(options: list[Candidates], shares: Sequence[float], *, take: Draft | None = None) -> Selection:
    """The best candidate for the batch sizes together, each with its share of the time.

    take : the draft to choose whatever the prediction says
    """
    first, total = options[0], throughput(options, shares)
    if first.ms is None:  # nothing says what a step costs: the whole budget
        chosen = _place(first, take) if take else int(np.where(first.groups == "grown", first.sizes, 0).argmax())
        return Selection(chosen, np.array([chosen]), None, (int(first.sizes[chosen]),) * 2)
    draws = throughput_draws(options, shares)
    fastest = int(total.argmax())
    near = np.flatnonzero((draws[fastest] > draws).mean(axis=1) < CERTAIN)
    # The fastest may be one that is hardly known: then another may still be clearly faster than what is near to it.
    tied = np.array([i for i in near if i == fastest or ((draws > draws[i]).mean(axis=1) < CERTAIN).all()])
    good = [i for i in tied.tolist() if total[i] >= (1 - NEGLIGIBLE) * total[fastest]]
    chosen = min(good, key=lambda i: (first.all[i].group == "dynamic", first.sizes[i], -total[i]))
    if take is not None:
        chosen = _place(first, take)
    others = np.flatnonzero(first.sizes != first.sizes[chosen])
    runner_up = int(others[total[others].argmax()]) if len(others) else None
    winners = np.sort(first.sizes[draws.argmax(0)])
    low, high = (int(winners[int(share * (len(winners) - 1))]) for share in (0.025, 0.975))
    return Selection(chosen, tied, runner_up, (low, high))


def throughput(options: list[Candidates], shares: Sequence[float]) -> Floats:
    """(n,) tokens per second over the batch sizes, each for its share of the time."""
    found: Floats = np.sum([w * c.throughput for w, c in zip(shares, options, strict=True)], axis=0)
    return found


def throughput_draws(options: list[Candidates], shares: Sequence[float]) -> Floats:
    """(n, B) tokens per second with other conversations and rounds."""
    found: Floats = np.sum([w * c.throughput_draws for w, c in zip(shares, options, strict=True)], axis=0)
    return found


def _place(c: Candidates, wanted: Draft) -> int:
    """Where a draft is in the table."""
    alike = [i for i, one in enumerate(c.all) if (one.size, one.depth) == (len(wanted), wanted.depth)]
    return next(i for i in alike if c.all[i].draft == wanted)


def prompts_to_separate(options: list[Candidates], shares: Sequence[float], selection: Selection) -> int | None:
    """How many conversations would tell the chosen candidate from the runner-up in four of five cases.

    None where there are as many already, or none to draw: more would make tokens per step surer, but not the latencies,
    which need a longer profile. At most `ASKED` and one.
    """
    c, i, j = options[0], selection.chosen, selection.runner_up
    if j is None or c.ms is None:
        return None
    total = throughput(options, shares)
    behind = float(np.log(total[i] / total[j]))
    of_prompts = float(np.log(c.rate_draws[i] / c.rate_draws[j]).std())
    n = c.all[i].conversations
    needed = n * (POWER * of_prompts / behind) ** 2 if behind else np.inf
    return int(min(np.ceil(needed), ASKED + 1)) if n and n < needed else None
