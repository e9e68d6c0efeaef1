"""How long the planner takes, without a model: `python benchmarks/planning.py`."""

from __future__ import annotations

import functools
import time
from statistics import median

import numpy as np

from treeopt.files.provenance import cpu
from treeopt.growth.objectives import OBJECTIVES, grow, grow_independent
from treeopt.growth.replay import replay_trees
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits


def milliseconds(work, repeats: int = 20) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - started))
    return median(times)


def synthetic_trace(sequences: int, length: int, heads: int) -> RankTrace:
    """Geometric ranks that get worse with the head; the last states have no trial."""
    rng = np.random.default_rng(0)
    skill = 0.55 * 0.75 ** np.arange(heads)
    ranks = rng.geometric(skill, (sequences, length, heads)) - 1
    ranks[ranks > 31] = -1
    state, head = np.indices((length, heads))
    ranks[:, state + head + 2 > length] = -2
    ranks[:, -1] = -2
    starts = np.arange(sequences + 1) * length
    return RankTrace(ranks.reshape(-1, heads).astype(np.int16), starts, meta={"top_k": 32})


def main() -> None:
    print(f"planner on {cpu()}")
    accept = np.sort(np.random.default_rng(0).dirichlet(np.ones(12), 5)[:, :10], axis=1)[:, ::-1]
    for nodes in (64, 512):
        ms = milliseconds(lambda n=nodes: grow_independent(accept, Limits(n, shape="any")).tree(n))
        print(f"best {nodes}-node tree from a 5 x 10 table: {ms:.2f} ms")
    trace = synthetic_trace(1000, 100, 5)
    for objective in OBJECTIVES:
        ms = milliseconds(functools.partial(grow, trace, Limits(64, shape="any"), objective=objective), 3)
        print(f"{objective} family to 64 rows, 10^5 states: {ms:.0f} ms")
    large = synthetic_trace(10_000, 100, 5)
    limits = Limits(256, shape="any")
    ms = milliseconds(lambda: grow(large, limits, objective="joint"), 1)
    print(f"joint family to 256 rows, 10^6 states: {ms / 1e3:.1f} s")
    family = grow(large, limits, objective="joint")
    members = family.members_of(family.sizes)
    ms = milliseconds(lambda: replay_trees(large, family.paths, members), 1)
    print(f"replay of all 256 sizes, 10^6 states: {ms / 1e3:.1f} s")


if __name__ == "__main__":
    main()
