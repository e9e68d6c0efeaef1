"""The choice among candidates when both factors of throughput have noise.

A candidate is *tied* with the fastest one where none is faster than it in 97.5 % of the bootstrap draws, which are the
same for all candidates (`candidates`). Of the tied ones that cost next to nothing a fixed tree is chosen before a dynamic
one, which is more to run, then one that was timed, and the smallest of them.

The winner of a contest looks better than it is. `judged` takes the *luck* out: the choice is made again with noise added
to the estimates, and judged with as much of the opposite noise, which is independent of it (Oliveira, Lei, Tibshirani,
Unbiased Risk Estimation in the Normal Means Problem via Coupled Bootstrap Techniques, 2021).

m tied candidates · B bootstrap draws
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeopt.planning.candidates import Candidates, Floats
from treeopt.trees.tree import IntArray

CERTAIN = 0.975  # share of the draws in which one candidate is faster than another that it is not tied with
NEGLIGIBLE = 0.005  # share of the throughput that a smaller tree may cost where they are tied
ADDED = 0.25  # variance of the noise added, over that of the estimates: as if a fifth of all was held out


@dataclass(frozen=True, eq=False)
class Selection:
    """Which candidate was chosen, and how sure that is.

    chosen    : of the tied ones that cost at most `NEGLIGIBLE` throughput a fixed one, a timed one, and the smallest; plain
                decoding where without luck they would not beat it
    tied      : all that the data cannot tell from the fastest
    runner_up : the fastest of another size; None where there is no other, or no latency is known
    again     : (B,) which of the tied is chosen with noise added; None where there is no noise, or no choice
    """

    chosen: int
    tied: IntArray
    runner_up: int | None
    again: IntArray | None = None


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
    root, barred = (c.idle, c.plain) if has_drafter and c.idle is not None else (c.plain, c.idle)
    can = np.arange(len(c.all)) != barred
    total, draws = c.throughput * can, c.throughput_draws * can[:, None]
    fastest = int(total.argmax())
    near = np.flatnonzero((draws[fastest] > draws).mean(axis=1) < CERTAIN)
    # The fastest may be one that is hardly known: then another may still be clearly faster than what is near to it.
    tied = np.array([i for i in near if i == fastest or ((draws > draws[i]).mean(axis=1) < CERTAIN).all()])
    tied = tied[np.lexsort((-total[tied], c.sizes[tied], ~c.timed[tied], c.anew[tied]))]
    chosen = int(tied[(total[tied] >= (1 - NEGLIGIBLE) * total[fastest]).argmax()])
    noisy = np.log(total[tied, None]) + np.sqrt(ADDED) * _noise(draws[tied])
    again = (noisy >= noisy.max(0) - NEGLIGIBLE).argmax(0)
    if root in tied:
        fewer, longer = _without_luck(c, chosen, tied, again)
        fair = total[chosen] * max(fewer, 1 / c.rates[chosen]) / longer
        chosen = root if total[root] > fair else chosen
    others = np.flatnonzero(c.sizes != c.sizes[chosen])
    runner_up = int(others[total[others].argmax()]) if len(others) else None
    return Selection(chosen, tied, runner_up, again)


def judged(c: Candidates, selection: Selection) -> Candidates:
    """The table without what the chosen candidate owes to luck: fewer tokens per step, longer steps.

    All but plain decoding, which is known, by as much, so that drafts stay to each other as they are.
    """
    if selection.again is None:
        return c
    factors = _without_luck(c, selection.chosen, selection.tied, selection.again)
    fewer, longer = (np.where(c.sizes > 1, factor, 1.0) for factor in factors)
    return replace(
        c,
        rates=np.maximum(fewer * c.rates, 1),
        rate_draws=np.maximum(fewer[:, None] * c.rate_draws, 1),
        ms=longer * c.ms,
        ms_draws=longer[:, None] * c.ms_draws,
    )


def _without_luck(c: Candidates, chosen: int, tied: IntArray, again: IntArray) -> tuple[float, float]:
    """Factors of tokens per step, at most 1, and of a step's latency, at least 1, that take off what the choice owes to luck."""
    n = c.all[chosen].conversations
    widened = np.sqrt(n / (n - 1)) if n > 1 else 1.0
    step, exact = c.ms_draws[tied] / c.ms_draws[c.plain], c.exact[tied]
    # What was not timed errs by how latencies lie between sizes, which no other rounds would show: it has what all share.
    step[~exact] = np.exp(np.log(step[exact]).mean(axis=0)) if exact.any() else 1.0
    own = chosen if c.sizes[chosen] > 1 else int(c.throughput.argmax())  # what was chosen; plain decoding has no luck
    fewer = _luck(c.rate_draws[tied], again, c.rate_draws[own])
    longer = _luck(1 / step, again, c.ms_draws[own] / c.ms_draws[c.plain])
    return float(np.exp(-widened * fewer)), float(np.exp(longer))


def _noise(draws: Floats) -> Floats:
    """(m, B) how far draws are off, as shares."""
    found = np.log(draws)
    return np.asarray(found - found.mean(axis=1, keepdims=True))


def _luck(draws: Floats, again: IntArray, own: Floats) -> float:
    """By what share the one that is chosen is overestimated on average, by (m, B) draws of what it is chosen for.

    No more than the greatest of m would be that are as noisy as the (B,) draws of the chosen one itself: others that are known
    much worse say nothing of it.
    """
    noise = np.broadcast_to(_noise(draws), (len(draws), len(again)))
    found = float(noise[again, np.arange(len(again))].mean() / np.sqrt(ADDED))
    return float(np.clip(found, 0, np.log(own).std() * np.sqrt(2 * np.log(len(noise)))))
