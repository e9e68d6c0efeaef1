"""Rounds of a timing: when there are enough of them, and the timings that they make.

round  a visit to everything that is compared, in random order; a dictionary, as it stands in the journal:
       {"seconds", "processor_s", "lengths", "points": [{"step_ms", "accepted", "parts_ms"}]}, the plain step's point
       the last. The first round has also "kept" and "visit", what was planned, and "warm_up_s".
       What somebody else's benchmark timed has "seconds" and "step_ms" alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Any

import numpy as np

from treeopt.latency.paired import median_latency, paired_latency
from treeopt.records.profile import StepTiming
from treeopt.trees.dynamic import AdaptiveTree, AnyTree, DynamicTree
from treeopt.trees.tree import Tree

FEWEST_ROUNDS = 3  # however short the time
FEWEST_SAMPLES, IN_A_ROW = 5, 3  # rounds before a spread is believed, and in how many it has to be small
LEAST_SHARE = 0.8  # of the time that is measured, in which this process has the processor
PRECISION = 0.02  # margin of error that is small enough

Round = dict[str, Any]

# Untimed and timed steps each time a point has its turn; fewer where the time is short. The first steps find the caches
# full of what the step before needed, which is no part of what a step costs where one follows the other.
VISITS = ((4, 6), (2, 3), (1, 1))
PLAIN_VISITS = 3  # turns of the plain step per round: every speedup is against it
LEAST_TREES = 2  # that are timed however short the time


@dataclass(frozen=True)
class Planned:
    """What a time limit has room for.

    kept    : places of the trees that are timed
    visit   : one of `VISITS`
    whole_s : what the fewest rounds would take with all trees and the shortest visits
    least_s : what they take as planned
    """

    kept: list[int]
    visit: tuple[int, int]
    whole_s: float
    least_s: float


def plan_rounds(trees: Sequence[AnyTree], step_s: Sequence[float], time_limit_s: float) -> Planned:
    """The longest visits with which the fewest rounds of all trees fit, or else the trees that fit with the shortest.

    step_s : seconds of a step with each tree, and of a plain step

    >>> plan_rounds([Tree.chain(1), Tree.chain(2), Tree.chain(3)], [1.0, 1.0, 1.0, 1.0], 30.0).kept
    [0, 2]
    """

    def seconds(kept: Sequence[int], visit: tuple[int, int]) -> float:
        steps = sum(step_s[i] for i in kept) + PLAIN_VISITS * step_s[len(trees)]
        return FEWEST_ROUNDS * sum(visit) * steps

    places, shortest = list(range(len(trees))), VISITS[-1]
    whole_s = seconds(places, shortest)
    for visit in VISITS:
        if seconds(places, visit) <= time_limit_s:
            return Planned(places, visit, whole_s, seconds(places, visit))
    kept: list[int] = []
    for i in far_apart(trees):
        if len(kept) < LEAST_TREES or seconds([*kept, i], shortest) <= time_limit_s:
            kept.append(i)
    return Planned(sorted(kept), shortest, whole_s, seconds(kept, shortest))


def far_apart(trees: Sequence[AnyTree]) -> list[int]:
    """Places of the trees: the largest and the smallest of the deepest, between which most sizes lie, then always the
    one that is least like those before it.

    >>> far_apart([Tree.chain(1), Tree.chain(2), Tree.chain(7)])
    [2, 0, 1]
    """
    deepest = max((tree.depth for tree in trees), default=0)
    ends = sorted((len(tree), i) for i, tree in enumerate(trees) if tree.depth == deepest)
    order = list(dict.fromkeys(i for _, i in (ends[-1:] + ends[:1])))
    left = [i for i in range(len(trees)) if i not in order]

    def apart(i: int, j: int) -> float:
        one, other = trees[i], trees[j]
        topks = [1 if isinstance(tree, Tree) else tree.most.topk for tree in (one, other)]
        return abs(log(len(one) / len(other))) + abs(one.depth - other.depth) / 4 + abs(log(topks[0] / topks[1])) / 4

    while left:
        order.append(max(left, key=lambda i: min(apart(i, j) for j in order)))
        left.remove(order[-1])
    return order


def timed_trees(rounds: Sequence[Round], trees: Sequence[AnyTree]) -> list[AnyTree]:
    """The trees that the points of the rounds are of."""
    kept = rounds[0].get("kept") if rounds else None
    return list(trees) if kept is None else [trees[i] for i in kept]


def is_enough(
    rounds: Sequence[Round], trees: Sequence[AnyTree], batch_size: int, *, time_limit_s: float, precision: float
) -> bool:
    """Whether the time has no room for another round, or every latency is known to ``precision``.

    The spread of a few rounds is small by chance every so often, so it has to be in the last rounds each.
    """
    if len(rounds) < FEWEST_ROUNDS:
        return False
    seconds = sum(round_["seconds"] for round_ in rounds)
    if seconds + seconds / len(rounds) > time_limit_s:
        return True
    if len(rounds) < FEWEST_SAMPLES:
        return False
    return all(
        margin_of_error(point, plain) <= precision
        for n in range(len(rounds) - IN_A_ROW + 1, len(rounds) + 1)
        for points, plain in [timings(rounds[:n], trees, batch_size, context_tokens=1)]
        for point in (plain, *points)
    )


def margin_of_error(timing: StepTiming, plain: StepTiming) -> float:
    """Half of the 95 % interval of a latency, as a share of it; of the ratio to plain for a tree.

    >>> timing = StepTiming(1, 9, size=1, depth=0, step_ms=(2.0, 2.0, 2.0))
    >>> margin_of_error(timing, timing)
    0.0
    """
    latency = median_latency(timing.step_ms) if timing.size == 1 else paired_latency(timing, plain)
    return 1.96 * latency.stderr_ms / latency.ms


def timings(
    rounds: Sequence[Round],
    trees: Sequence[AnyTree],
    batch_size: int,
    *,
    context_tokens: int | None = None,
    first_round: int = 0,
) -> tuple[list[StepTiming], StepTiming]:
    """The trees' timings and the plain one, their rounds counted from ``first_round``.

    The context is ``context_tokens``, or else the median length of rows over all steps.
    """
    context = context_tokens
    if context is None:
        context = int(median([length for round_ in rounds for length in round_["lengths"]]))

    def timing(i: int, tree: AnyTree) -> StepTiming:
        drafted = tree if isinstance(tree, Tree) else tree.most
        points = [round_["points"][i] for round_ in rounds]
        accepted = [a for point in points for a in point.get("accepted", ())]
        parts = points[0].get("parts_ms")
        return StepTiming(
            batch_size,
            context,
            len(tree),
            tree.depth,
            step_ms=tuple(ms for point in points for ms in point["step_ms"]),
            accepted_mean=round(sum(accepted) / len(accepted), 4) if accepted else None,
            round=tuple(n for n, point in enumerate(points, first_round) for _ in point["step_ms"]),
            parts_ms=parts
            and {part: tuple(ms for point in points for ms in point["parts_ms"][part]) for part in parts},
            expanding=tuple(drafted.expanding()) if "draft 0" in (parts or {}) else None,
            topk=drafted.topk if isinstance(drafted, DynamicTree) else None,
            adaptive=isinstance(tree, AdaptiveTree) or None,
        )

    return [timing(i, tree) for i, tree in enumerate(trees)], timing(len(trees), Tree.chain(0))


def precision_reached(points: Sequence[StepTiming], plain: Sequence[StepTiming], wanted: float) -> dict[str, Any]:
    """What a profile says of how well its latencies are known: margins of error, of trees those of their ratios."""
    plain_at = {p.setting: p for p in plain}
    margins = [margin_of_error(p, plain_at[p.setting]) for p in (*points, *plain_at.values())]
    missed = sum(margin > wanted for margin in margins)
    return {
        "wanted": wanted,
        "reached": not missed,
        "worst": round(max(margins), 5),
        "missed": missed,
        "timings": len(margins),
    }


def processor_share(rounds: Sequence[Round]) -> float | None:
    """Processor time of this process over the time that rounds took, at most 1; None where that was not measured.

    At least one thread computes all the time, so on a CPU less than 1 means that other programs had the processor.

    >>> processor_share([{"seconds": 4.0, "processor_s": 1.0}])
    0.25
    """
    if not rounds or any("processor_s" not in round_ for round_ in rounds):
        return None
    seconds = sum(round_["seconds"] for round_ in rounds)
    return round(min(sum(round_["processor_s"] for round_ in rounds) / seconds, 1.0), 3) if seconds else None


def busy(share: float | None) -> str | None:
    """Says so where a machine was too busy for its times to be believed, by its `processor_share`.

    >>> busy(0.97), busy(0.5)[:65]
    (None, 'The machine is busy: other programs had the processor for 50% of ')
    """
    if share is None or share >= LEAST_SHARE:
        return None
    return (
        f"The machine is busy: other programs had the processor for {1 - share:.0%} of the time that was measured, so "
        "times are too long and uncertain. Measure again when nothing else runs."
    )


def drifts(plain: Sequence[StepTiming], nominal: Sequence[bool] | None = None) -> list[dict[str, Any]]:
    """What a profile says of the drift of its plain steps; nominal: whether rows were held at a context."""
    return [
        {"batch_size": p.batch_size, "context_tokens": p.context_tokens, "drift": round(drift(p), 4), "nominal": held}
        for p, held in zip(plain, nominal or [True] * len(plain), strict=True)
    ]


def drift(plain: StepTiming) -> float:
    """How much slower plain steps became from the first to the last third of the rounds, 0.1 for 10 %.

    >>> drift(StepTiming(1, 128, size=1, depth=0, step_ms=(2.0, 2.0, 3.0), round=(0, 1, 2)))
    0.5
    """
    medians = list(plain.by_round().values())
    third = max(1, len(medians) // 3)
    return float(np.median(medians[-third:]) / np.median(medians[:third])) - 1 if medians else 0.0
