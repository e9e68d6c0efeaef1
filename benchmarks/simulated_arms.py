"""Decisions about simulated arms against the truth: `python benchmarks/simulated_arms.py [--tables 200]`.

The truth of a table (off and five lengths of a drafter at four concurrencies) is a draw of the prior of `treeopt.arms.model`,
with 2 % that each arm has of its own. Launches differ by 3 or 10 %. Off and one arm of each cell are run, then what is named
as the next run of the file, until half of the grid has been spent. The raw grid runs each arm once and takes the fastest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from treeopt.arms import model
from treeopt.arms.arm import OFF, Arm
from treeopt.arms.decide import decide
from treeopt.arms.model import Floats, posterior_of

LENGTHS, LOADS = (0, 1, 2, 3, 5, 7), (1, 4, 16, 64)
OWN = 0.02  # standard deviation of what an arm has of its own, beside the form
NEAR = 0.03  # share of throughput that an arm in the list of ties may lack


def grid() -> list[Arm]:
    return [Arm(drafter="MTP" if k else OFF, k=k, concurrency=concurrency) for concurrency in LOADS for k in LENGTHS]


def truths(arms: Sequence[Arm], count: int, rng: np.random.Generator) -> Floats:
    """(count, n) log tokens per second."""
    drawn = {}
    for name, (mean, *errors) in model.PRIOR.items():
        drawn[name] = mean + np.hypot.reduce(errors) * rng.standard_normal((count, 1))
    cost = model.log_plain(arms, drawn) + model.log_cost(arms, drawn)
    loads = np.log([arm.concurrency for arm in arms])
    return np.asarray(loads + model.log_tokens(arms, drawn) - cost + OWN * rng.standard_normal((count, len(arms))))


class Launches:
    """Runs of the arms of a grid, whose figures are means of logarithms."""

    def __init__(self, truth: Floats, noise: float, rng: np.random.Generator) -> None:
        self.truth, self.noise, self.rng = truth, noise, rng
        self.logs: list[list[float]] = [[] for _ in truth]

    def run(self, i: int) -> None:
        self.logs[i].append(float(self.truth[i] + self.noise * self.rng.standard_normal()))

    def figures(self, arms: Sequence[Arm]) -> list[Arm]:
        return [
            replace(arm, tokens_per_s=float(np.exp(np.mean(logs))), repeats=len(logs)) if logs else arm
            for arm, logs in zip(arms, self.logs, strict=True)
        ]


def chosen(
    truth: Floats, noise: float, launch: float, rng: np.random.Generator
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The choice and its ties in each cell of a table, after half of the grid."""
    arms, launches = grid(), Launches(truth, noise, rng)
    cells = [[i for i, arm in enumerate(arms) if arm.concurrency == concurrency] for concurrency in LOADS]
    for cell in cells:
        launches.run(cell[0])
        launches.run(int(rng.choice(cell[1:])))
    for spent in range(2 * len(cells), len(arms) // 2 + 1):
        posterior = posterior_of(launches.figures(arms), launch=launch)
        decisions = [decide(posterior, cell) for cell in cells]
        named = [decision.next_run for decision in decisions if decision and decision.next_run]
        if not named or spent == len(arms) // 2:
            break
        launches.run(max(named, key=lambda following: following.gain).arm)
    for decision in decisions:
        assert decision
        yield decision.chosen, decision.tied


def row(count: int, noise: float, launch: float) -> str:
    rng, arms = np.random.default_rng(0), grid()
    losses, raw, near = [], [], []
    for truth in truths(arms, count, rng):
        decisions = list(chosen(truth, noise, launch, rng))
        seen = truth + noise * rng.standard_normal(len(arms))
        for start, (choice, tied) in zip(range(0, len(arms), len(LENGTHS)), decisions, strict=True):
            cell = range(start, start + len(LENGTHS))
            best = max(truth[cell])
            losses.append(1 - np.exp(truth[choice] - best))
            raw.append(1 - np.exp(truth[max(cell, key=lambda i: seen[i])] - best))
            near.append(max(truth[[choice, *tied]]) >= best + np.log1p(-NEAR))
    return f"| {100 * noise:g} | {100 * launch:g} | {100 * np.mean(losses):.2f} | {100 * np.mean(raw):.2f} | {100 * np.mean(near):.0f} |"


def simulated(tables: int) -> Iterator[str]:
    """Lines of Markdown: what is lost by noise of launches, and by what is said of it."""
    yield f"Loss of {tables} tables whose truth is a draw of the prior (`benchmarks/simulated_arms.py`), after half of the runs of the grid.\n"
    yield "| launches differ by [%] | as was said [%] | loss [%] | loss of the whole grid run once [%] | a tie is within 3 % [%] |"
    yield "|---|---|---|---|---|"
    for noise, launch in ((0.03, 0.03), (0.1, 0.1), (0.1, model.LAUNCH)):
        yield row(tables, noise, launch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=200)
    for line in simulated(parser.parse_args().tables):
        print(line)


if __name__ == "__main__":
    main()
