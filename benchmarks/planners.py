"""Our growth against the algorithms of Medusa and Sequoia, on their own objective: `python benchmarks/planners.py`.

Every planner grows the tree of N rows with the highest sum of products of acceptances. Ours must be worth as
much or more (asserted). Planners that take less than a second are timed in turns and compared by medians;
slower ones once (*). About a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from baselines import Choice, Table, expected, explore_graph, sequoia, sequoia_loops

from treeopt.files.places import shipped
from treeopt.files.provenance import machine
from treeopt.growth.grow import grow_products
from treeopt.records.calibration import Calibration
from treeopt.trees.shapes import Limits

SIZES = (64, 128, 256, 512)
ROUNDS, SLOW_S = 7, 1.0
Result = float | list[Choice]  # the loops tell the value alone
Planner = Callable[[Table, int], Result]


@dataclass(frozen=True)
class Case:
    """A table of acceptances, and up to how many rows the loops of the original are waited for."""

    name: str
    accept: Table
    loops_to: int


def ours(accept: Table, size: int) -> Result:
    family = grow_products(accept, Limits(size, max_rank=accept.shape[1] - 1))
    return list(family.tree(size).paths[1:])


def dynamic_programme(accept: Table, size: int) -> Result:
    return sequoia(accept, size)[1]


def loops(accept: Table, size: int) -> Result:
    return sequoia_loops(torch.tensor([0.0, *accept[0]], dtype=torch.float32), size, 1 + len(accept))


def cases() -> list[Case]:
    rng = np.random.default_rng(0)
    vicuna = Calibration.load(shipped("calibration")["vicuna-7b-medusa1"]).accept

    def anew(states: int) -> Table:
        return np.stack([rng.multinomial(states, [*row, 1 - row.sum()])[:-1] for row in vicuna]) / states

    vector = np.tile(0.6 * 0.5 ** np.arange(32), (9, 1))
    return [
        Case("Medusa's Vicuna-7B accuracies, 5 heads x 5 ranks", vicuna, 0),
        Case("the same, measured anew on 60 states: ranks out of order, some without a hit", anew(60), 0),
        Case("the same, measured anew on 300 states", anew(300), 0),
        Case("one falling vector of 32 children, 10 levels, as in Sequoia's demo", vector, 128),
    ]


def timed(planners: dict[str, Planner], case: Case, size: int) -> dict[str, tuple[float, list[float]]]:
    """Value and seconds of every planner; all those that are quick take turns."""
    found: dict[str, tuple[float, list[float]]] = {}
    for round_ in range(1 + ROUNDS):  # the first warms up
        for name, plan in planners.items():
            if name in found and found[name][1][0] > SLOW_S:
                continue
            started = time.perf_counter()
            result = plan(case.accept, size)
            seconds = time.perf_counter() - started
            if round_ <= 1:
                value = result if isinstance(result, float) else expected(case.accept, result)
                found[name] = (value, [])
            found[name][1].append(seconds)
    return found


def main() -> None:
    print(f"planners on {machine()}, torch with {torch.get_num_threads()} thread(s)")
    for case in cases():
        planners: dict[str, Planner] = {"treeopt": ours, "Medusa": explore_graph, "Sequoia, numpy": dynamic_programme}
        if case.loops_to:
            planners["Sequoia, loops"] = loops
        print(f"\n{case.name}\n\n| rows | {' | '.join(f'{n}: tokens/step | ms | x' for n in planners)} |")
        print("|" + "---:|" * (1 + 3 * len(planners)))
        for size in SIZES:
            here = {n: p for n, p in planners.items() if p is not loops or size <= case.loops_to}
            found = timed(here, case, size)
            print(f"| {size} | {' | '.join(cells(found, name) for name in planners)} |", flush=True)


def cells(found: dict[str, Any], name: str) -> str:
    """A planner's value, time, and time over ours."""
    if name not in found:
        return "– | – | –"
    value, seconds = found[name]
    middle, base = median(seconds), median(found["treeopt"][1])
    once = "\\*" if len(seconds) == 1 else ""
    return f"{value:.4f} | {1e3 * middle:.3g}{once} | {middle / base:.3g}"


if __name__ == "__main__":
    main()
