"""The choice among candidates when both factors of throughput have noise.

A candidate is *tied* with the fastest one where none is faster than it in 97.5 % of the bootstrap draws, which are the
same for all candidates (`table`). Of the tied ones that cost next to nothing a fixed tree is chosen before a draft that is
built anew at every step, which is more to run, then one that was timed, and the smallest of them.

B bootstrap draws
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.planning.table import FIXED_BEFOREHAND, GROWN, Table
from treeopt.records.estimate import NEGLIGIBLE
from treeopt.trees.tree import IntArray

CERTAIN = 0.975  # share of the draws in which one candidate is faster than another that it is not tied with


@dataclass(frozen=True, eq=False)
class Selection:
    """Which candidate was chosen, and how sure that is.

    chosen    : of the tied ones that cost at most `NEGLIGIBLE` throughput a fixed one, a timed one, and the smallest
    tied      : all that the data cannot tell from the fastest
    runner_up : the fastest of another size; None where there is no other, or no latency is known
    plain     : the lone root that could have been chosen
    """

    chosen: int
    tied: IntArray
    runner_up: int | None
    plain: int


def select_all(tables: Sequence[Table]) -> list[Selection]:
    """The best candidate at each batch size, as of one server for all: where it has a drafter, plain steps are idle ones."""
    selections = [select(table) for table in tables]
    speculates = [bool(table.sizes[best.chosen] > 1) for table, best in zip(tables, selections, strict=True)]
    if any(speculates):
        for i, table in enumerate(tables):
            if table.idle is not None and not speculates[i]:
                selections[i] = select(table, has_drafter=True)
    return selections


def select(table: Table, *, has_drafter: bool = False) -> Selection:
    """The best candidate.

    has_drafter : whether what decodes has one at any rate, so that the idle root stands for plain decoding

    Where nothing says what a step costs it is the largest grown tree, or else what emits the most tokens in the fewest rows.
    """
    if table.context is None:
        grown = np.where(table.groups == GROWN, table.sizes, 1)
        chosen = int(np.lexsort((table.sizes, -table.rates.round(3), -grown))[0])
        return Selection(chosen, np.array([chosen]), None, table.plain)
    plain, barred = table.plain, table.idle
    if has_drafter and table.idle is not None:
        plain, barred = table.idle, table.plain
    can = np.arange(len(table.candidates)) != barred
    total, draws = table.throughput * can, table.throughput_draws * can[:, None]
    fastest = int(total.argmax())
    near = np.flatnonzero((draws[fastest] > draws).mean(axis=1) < CERTAIN)
    # Draws of the fastest may be so wide that nothing is told from it. What a third one clearly beats is not tied.
    tied = np.array([i for i in near if i == fastest or ((draws > draws[i]).mean(axis=1) < CERTAIN).all()])
    is_fixed = np.isin(table.groups[tied], FIXED_BEFOREHAND)
    tied = tied[np.lexsort((-total[tied], table.sizes[tied], ~table.timed[tied], ~is_fixed))]
    least = max((1 - NEGLIGIBLE) * total[fastest], total[plain])
    chosen = int(tied[(total[tied] >= least).argmax()])
    others = np.flatnonzero(table.sizes != table.sizes[chosen])
    runner_up = int(others[total[others].argmax()]) if len(others) else None
    return Selection(chosen, tied, runner_up, plain)
