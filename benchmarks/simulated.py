"""Printed speedups against known ones, in simulated searches: `python benchmarks/simulated.py [--searches 200]`.

Conversations and timings are drawn, so that the truth is known: heads that guess independently in easy and in hard
conversations, and steps whose latency rises with rows and levels, with or without jumps at 17 and 33 rows. Noise is the
standard error of each timed ratio to a plain step; trees of one block share a plain visit. For every cell: how far the
printed speedup of the chosen draft is off, how often its 95 % interval covers the truth, what the choice loses against the
best, and how often plain decoding is chosen where speculation would bring 5 % or more.
"""

from __future__ import annotations

import argparse
import itertools
from functools import cache
from typing import NamedTuple

import numpy as np

from treeopt.growth.source import source_of
from treeopt.latency.rounds import turns
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

HEADS, RANKS, TOKENS, ROUNDS = 3, 8, 50, 12
SIZES = (2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48)
# (heads, ranks) P(a head's candidate is right) in easy and in hard conversations
ACCEPT = [p * (1 - p) ** np.arange(RANKS) for p in np.multiply.outer((0.65, 0.35), 0.85 ** np.arange(HEADS))[..., None]]
WORTH = 0.05  # of throughput, that plain decoding forgoes


def conversations(count: int, rng: np.random.Generator) -> RankTrace:
    chance = np.stack(ACCEPT)[rng.integers(0, 2, count)]  # (count, heads, ranks)
    ranks = (rng.random((count, TOKENS, HEADS, 1)) > chance.cumsum(-1)[:, None]).sum(-1)
    ranks[ranks == RANKS] = -1
    state, head = np.indices((TOKENS, HEADS))
    ranks[:, state + head + 2 > TOKENS] = NO_TRIAL
    ranks = ranks.reshape(-1, HEADS).astype(np.int16)
    return RankTrace(ranks, np.arange(count + 1) * TOKENS, meta={"top_k": RANKS})


def true_rate(tree: Tree) -> float:
    """Tokens per step of a tree in all conversations that there could be."""
    steps = []
    for accept in ACCEPT:
        reached = np.zeros(HEADS + 2)
        for path in tree.paths:
            reached[len(path)] += np.prod([accept[head, rank] for head, rank in enumerate(path)])
        steps.append(_expected_steps(reached[:-1] - reached[1:]))
    return (TOKENS - 1) / float(np.mean(steps))


def _expected_steps(shares: np.ndarray) -> float:
    """Steps of an answer, by the shares of the steps that accept 0, 1, ... guesses."""
    left = np.zeros(TOKENS)  # steps from t tokens before the end on
    for t in range(1, TOKENS):
        left[t] = 1 + sum(share * left[max(t - 1 - a, 0)] for a, share in enumerate(shares))
    return float(left[TOKENS - 1])


def overhead(rows: int, depth: int, *, has_jumps: bool, slope: float) -> float:
    """A step over a plain one."""
    return 1.05 + slope * (rows - 1) + 0.03 * depth + has_jumps * (0.15 * (rows > 16) + 0.25 * (rows > 32))


def profile(noise: float, rng: np.random.Generator, **truth: float) -> LatencyProfile:
    """Timings of `ROUNDS` rounds, as `treeopt profile` takes them."""
    steps = [
        (size, depth)
        for size in SIZES
        for depth in range(1, HEADS + 1)
        if depth < size and (depth == HEADS or size in (2, 3, 8, 32))
    ]
    per_visit = noise * np.sqrt(ROUNDS / 2) / 1.2533
    samples: dict[int, list[tuple[float, int]]] = {place: [] for place in range(len(steps) + 1)}
    block = 0
    for number in range(ROUNDS):
        for places in turns(range(len(steps)), len(steps), number):
            slow = np.exp(0.15 * rng.standard_normal())
            for place in places:
                ms = 4.0 * (overhead(*steps[place], **truth) if place < len(steps) else 1.0)
                samples[place].append((ms * slow * np.exp(per_visit * rng.standard_normal()), block))
            block += 1
    points = [
        StepTiming(1, 100, *step, tuple(ms for ms, _ in samples[i]), round=tuple(n for _, n in samples[i]))
        for i, step in enumerate([*steps, (1, 0)])
    ]
    return LatencyProfile(tuple(points[:-1]), tuple(points[-1:]))


class Searches(NamedTuple):
    """What came of each search, the first three of those that chose to speculate.

    off       : logarithm of the printed speedup over the true one
    covered   : whether the interval has the true one
    steps_off : logarithm of the printed cost of a step over the true one
    regrets   : share of the best speedup that the choice loses
    mistakes  : whether plain decoding was chosen where speculation would bring `WORTH`
    """

    off: list[float]
    covered: list[bool]
    steps_off: list[float]
    regrets: list[float]
    mistakes: list[bool]


def searched(searches: int, count: int, noise: float, **truth: float) -> Searches:
    """Searches on so many conversations each."""
    found, best = Searches([], [], [], [], []), best_speedup(**truth)
    for seed in range(searches):
        rng = np.random.default_rng([11, seed])
        entry = plan_trees(conversations(count, rng), profile(noise, rng, **truth), PlanRequest(Limits(48)))[1]
        chosen, true = entry.chosen, 1.0
        if chosen.size > 1:
            cost = overhead(chosen.size, chosen.depth, **truth)
            true = true_rate(chosen.draft) / cost
            low, high = chosen.speedup.ends
            found.off.append(np.log(chosen.speedup / true))
            found.covered.append(low <= true <= high)
            found.steps_off.append(np.log(chosen.step_ms / chosen.plain_ms / cost))
        found.regrets.append(1 - true / best)
        found.mistakes.append(chosen.size == 1 and best > 1 + WORTH)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=200)
    asked = parser.parse_args()
    print(
        "| conversations | noise | jumps | slope | bias % | its error | rms % | covered % | step's bias % | rms % | regret % | plain by mistake |\n|"
        + "---|" * 12
    )
    for count, noise, has_jumps, slope in itertools.product((128, 30), (0.01, 0.05), (False, True), (0.012, 0.06)):
        found = searched(asked.searches, count, noise, has_jumps=has_jumps, slope=slope)
        off, steps_off = np.array(found.off), np.array(found.steps_off)
        shares = (
            off.mean(),
            off.std() / len(off) ** 0.5,
            np.square(off).mean() ** 0.5,
            np.mean(found.covered),
            steps_off.mean(),
            np.square(steps_off).mean() ** 0.5,
            np.mean(found.regrets),
            np.mean(found.mistakes),
        )
        print(
            f"| {count} | {noise:.0%} | {'yes' if has_jumps else 'no'} | {slope} | "
            + " | ".join(f"{100 * share:.2f}" for share in shares)
            + f" | best {best_speedup(has_jumps=has_jumps, slope=slope):.2f}",
            flush=True,
        )


@cache
def best_speedup(*, has_jumps: bool, slope: float) -> float:
    """Of the best trees by all conversations that there could be."""
    source, best = source_of(conversations(4000, np.random.default_rng(0))), 1.0
    for depth in range(1, HEADS + 1):
        family = source.grow(Limits(48, depth))
        for size in range(2, len(family) + 1):
            tree = family.tree(size)
            best = max(best, true_rate(tree) / overhead(size, tree.depth, has_jumps=has_jumps, slope=slope))
    return best


if __name__ == "__main__":
    main()
