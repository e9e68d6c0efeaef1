"""How long the planner takes, without a model: `python benchmarks/planning.py`.

With `--states N` a trace of N states is written as traffic makes it, and `treeopt search` plans with it in a process of
its own: seconds and the most memory that it held, the trace among it.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from traffic import step_profile, traffic

from treeopt.files.provenance import machine
from treeopt.growth.grow import grow, grow_products
from treeopt.growth.replay import dynamic_rates, replay_trees
from treeopt.records.pools import NO_PLACE, columns_of
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import MOST_LEVELS, MOST_ROWS, pool_size
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


def with_pools(trace: RankTrace, topks: tuple[int, ...] = (1, 2, 4, 8)) -> RankTrace:
    """The trace with pools of dynamic trees: geometric places that get worse with the depth."""
    rng, states = np.random.default_rng(1), int(trace.lengths.sum())
    behind = rng.geometric(0.4, (states, MOST_LEVELS)).cumsum(1) - 1  # how far behind the path alone, by depth
    places = np.full((states, len(topks), columns_of(MOST_LEVELS).stop), NO_PLACE, dtype=np.uint8)
    depth = np.arange(MOST_LEVELS)
    for i, topk in enumerate(topks):
        known = depth + behind < min(pool_size(MOST_LEVELS, topk), MOST_ROWS - 1)
        for levels in range(1, MOST_LEVELS + 1):
            last = pool_size(levels, topk) - levels + depth  # the best place that is left when the pool ends with it
            found = np.minimum(depth + behind, last)[:, :levels]
            places[:, i, columns_of(levels)] = np.where(known[:, :levels], found, NO_PLACE)
    about = {**trace.meta, "pools": {"levels": MOST_LEVELS, "topks": list(topks)}}
    return RankTrace(trace.ranks, trace.starts, pool_places=places, meta=about)


def dynamic(trace: RankTrace) -> None:
    """All settings of dynamic trees."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    rates = dynamic_rates(trace)
    took = time.perf_counter() - started
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 2**20
    print(f"replay of {len(rates)} dynamic settings, 10^6 states: {took:.1f} s, at most {more:.1f} GiB more (bar 20 s)")


def at_scale(states: int, folder: Path) -> None:
    """Plan with a trace of so many states on disk, for a budget of 64 rows and one batch size."""
    if not (folder / "trace.npz").exists():
        trace = traffic(states)
        trace.save(folder / "trace.npz")
        step_profile().save(folder / "profile.json")
        print(f"{len(trace.ranks):,} states of {trace.num_sequences:,} answers, {trace.num_heads} heads", flush=True)
    command = [
        sys.executable,
        "-m",
        "treeopt.cli",
        "search",
        "--run",
        str(folder),
        "--budget",
        "64",
        "--batch-size",
        "1",
    ]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    if status:
        raise SystemExit(f"treeopt search failed: {os.waitstatus_to_exitcode(status)}")
    print(
        f"search on {states:,} states: {wall:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of the processor, "
        f"{used.ru_maxrss / 1024:.0f} MiB at most",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=lambda text: int(float(text)), help="1e6, for example")
    parser.add_argument("--folder", type=Path, help="where the trace is kept, and found again; by default nowhere")
    options = parser.parse_args()
    print(f"planner on {machine()}")
    if options.states:
        with tempfile.TemporaryDirectory() as nowhere:
            folder = options.folder or Path(nowhere)
            folder.mkdir(parents=True, exist_ok=True)
            at_scale(options.states, folder)
        return
    accept = np.sort(np.random.default_rng(0).dirichlet(np.ones(12), 5)[:, :10], axis=1)[:, ::-1]
    for nodes in (64, 512):
        ms = milliseconds(lambda n=nodes: grow_products(accept, Limits(n)).tree(n))
        print(f"best {nodes}-node tree from a 5 x 10 table: {ms:.2f} ms")
    trace = synthetic_trace(1000, 100, 5)
    ms = milliseconds(lambda: grow(trace, Limits(64)), 3)
    print(f"trees to 64 rows, 10^5 states: {ms:.0f} ms")
    large = synthetic_trace(10_000, 100, 5)
    limits = Limits(256)
    ms = milliseconds(lambda: grow(large, limits), 1)
    print(f"trees to 256 rows, 10^6 states: {ms / 1e3:.1f} s")
    grown = grow(large, limits)
    ms = milliseconds(lambda: replay_trees(large, grown.paths, grown.sizes), 1)
    print(f"replay of all 256 sizes, 10^6 states: {ms / 1e3:.1f} s")
    dynamic(with_pools(large))


if __name__ == "__main__":
    main()
