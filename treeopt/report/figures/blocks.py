"""What a drafter of blocks leaves to choose: how wide its block is, and what is verified of it.

A block of another width has other guesses at every depth, so each width has a line of its own. Trees over marginals are built
anew at every step, and held against the best fixed trees over the same guesses, row for row. Both are replayed on the same
conversations, so what one has over the other is surer than either by itself.

n numbers of rows
"""

from collections.abc import Mapping, Sequence

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.growth.heldout import drawn
from treeopt.growth.replay import TreeRates, marginal_rates
from treeopt.growth.source import source_of
from treeopt.records.calibration import Calibration
from treeopt.records.trace import RankTrace
from treeopt.report.figures import style
from treeopt.report.figures.accuracy import INTERVALS
from treeopt.report.figures.chart import Chart, Estimates, Panel, Series, banded, plain_line, wilson
from treeopt.report.figures.style import Look
from treeopt.report.wording import count
from treeopt.trees.draft import MOST_ROWS
from treeopt.trees.shapes import Limits


def widths_chart(trace: RankTrace) -> Chart:
    """Top-1 accuracy at each depth, and tokens per step of the chains up to it; a line for each width of the block.

    Raises OutOfRange for a record of a single width.
    """
    if not trace.widths:
        raise OutOfRange(
            "The record is of a single width. Of a drafter whose guesses depend on it several are recorded with: treeopt "
            "calibrate --widths 3,7"
        )
    dodge = (np.arange(len(trace.widths)) - (len(trace.widths) - 1) / 2) * 0.06
    accuracies, chains = list[Series](), list[Series]()
    for i, width in enumerate(trace.widths):
        block, x = trace.at(width), np.arange(1, width + 1) + dodge[i]
        counted, rates = Calibration.from_trace(block), source_of(block).chains(width)
        known = Estimates.of((one.tokens_per_step, None, one.stderr) for one in rates)
        accuracies.append(wilson(counted.hits[:, 0], counted.trials).over(str(width), x, **style.series(i)))
        chains.append(known.over(str(width), x, **style.series(i)))
    caption = style.about(
        trace.meta,
        f"{count(int(trace.has_step.sum()), 'state')} of {count(trace.num_sequences, 'sequence')}",
        f"left: {INTERVALS}",
        "right: replayed, 95 % intervals over conversations",
    )
    axes: Look = {"scale": "whole", "xlim": (0.5, trace.num_heads + 0.5)}
    panels = [
        Panel(
            accuracies, "guess of the block", "top-1 accuracy [share of states]", "Each guess", ylim=(0, None), **axes
        ),
        Panel(chains, "verified guesses", "tokens per step", "A chain of the first guesses", ylim=(1, None), **axes),
    ]
    return Chart("How often the guesses of a block are right, by its width", caption, [panels], "guesses of the block")


def ddtree_chart(trace: RankTrace, budget: int = MOST_ROWS) -> Chart:
    """Held-out tokens per step of trees over marginals, the best fixed trees and the chains of as many rows; and their ratios.

    Raises OutOfRange where no trees over marginals were recorded, and for a single sequence, which has nothing to hold out.
    """
    source = source_of(trace)
    if trace.marginals is None or source.pooled is None:
        raise OutOfRange(
            "The record has no trees over marginals, which are of guesses that do not depend on each other. Drafters that make "
            "such have them recorded by: treeopt calibrate"
        )
    depth = min(source.num_heads, trace.marginals.levels)
    held_out = source.crossfit(Limits(budget, depth), "replay")
    fixed = dict(zip(held_out.family.sizes.tolist(), held_out.every, strict=True))
    every = marginal_rates(source.pooled, depth=depth, rows=budget)
    # n rows reach no deeper than n - 1; of several widths the last one is the widest.
    anew = {tree.rows: rates for tree, rates in every.items() if tree.depth == min(depth, tree.rows - 1)}
    chains = dict(enumerate(source.chains(min(depth, budget - 1)), 2))
    named: dict[str, Mapping[int, TreeRates]] = {"DDTree": anew, "best fixed tree": fixed, "chain": chains}
    left, right = list[Series](), [plain_line(1.0)]
    for i, (name, rates) in enumerate(named.items()):
        look, rows = {**style.series(i), "markevery": 0.15}, sorted(rates.keys() & fixed.keys())
        own, others = (_draws([of[n] for n in rows]) for of in (rates, fixed))
        left += banded(name, rows, *own, look)
        if rates is not fixed:
            right += banded(name, rows, own[0] / others[0], own[1] / others[1], look)
    caption = style.about(
        source.meta,
        f"{count(trace.num_sequences, 'sequence')}, {count(*source.observed)}",
        f"trees to depth {depth}",
        "fixed trees are cross-fitted: replayed on sequences that they were not grown on",
        "shaded: 95 % intervals, on the right of the same conversations",
    )
    rows_name = "rows per step and sequence"
    panels = [
        Panel(left, rows_name, "tokens per step", "At equal rows", "sizes", ylim=(0.95, None)),
        Panel(right, rows_name, "ratio", "Over the best fixed tree", "sizes"),
    ]
    return Chart("A tree built anew at every step beside a fixed one", caption, [panels])


def _draws(rates: Sequence[TreeRates]) -> tuple[np.ndarray, np.ndarray]:
    """(n,) tokens per step, and (n, B) with other conversations."""
    return np.array([one.tokens_per_step for one in rates]), drawn(rates)
