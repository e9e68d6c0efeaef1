"""Time and memory of `treeopt search` on a trace as traffic makes it: `python benchmarks/planning.py --states 1e6`.

Answers have lognormal lengths, and a few make up much of the states. Tokens are easy or hard in runs: every head that
guesses a token finds it easy or hard, so that ranks of one state depend on one another and decoding jumps over the easy
runs. Later heads guess worse. The search runs in a process of its own, and the memory that it held has the trace in it.

P states · K heads · R ranks told apart
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from treeopt.files.provenance import machine
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import MISS, NO_TRIAL, End, RankTrace

HEADS, RANKS = 5, 32
MEDIAN, SPREAD, SHORTEST, LONGEST = 220, 0.8, 2, 2048  # tokens of an answer
EASY, HARD = 3.0, 0.25  # P(rank >= r) = (1 + r) ** -skill, of the first head
FADING = 0.72  # what later heads keep of it
AT_ONCE = 2**22  # states that are drawn together


def traffic(states: int) -> RankTrace:
    """A trace of about so many states."""
    rng = np.random.default_rng(0)
    lengths = np.rint(rng.lognormal(np.log(MEDIAN), SPREAD, states // 200 + 20)).clip(SHORTEST, LONGEST)
    lengths = lengths[: max(2, int(np.searchsorted(lengths.cumsum(), states)))].astype(np.int64)
    starts = np.concatenate([[0], lengths.cumsum()])
    ranks = np.empty((starts[-1], HEADS), dtype=np.int16)
    firsts = [*np.searchsorted(starts, np.arange(0, starts[-1], AT_ONCE)).tolist(), len(lengths)]
    for first, end in pairwise(firsts):
        ranks[starts[first] : starts[end]] = _ranks(rng, lengths[first:end])
    return RankTrace(
        ranks,
        starts,
        tokens=rng.integers(0, 32_000, starts[-1], dtype=np.int32),
        prompt_tokens=rng.integers(20, 800, len(lengths), dtype=np.int32),
        end=np.full(len(lengths), End.LIMIT.value, dtype=np.uint8),
        meta={"top_k": RANKS, "drafter": {"kind": "medusa"}, "acceptance": {"rule": "greedy"}},
    )


def _ranks(rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
    """(P, K) ranks of some sequences."""
    states = int(lengths.sum())
    run = np.repeat(rng.random(states // 6 + 1), 6)[:states] + 0.3 * rng.standard_normal(states)
    skills = np.append(HARD + (EASY - HARD) * run.clip(0, 1), np.full(HEADS + 1, HARD))  # none behind the last token
    left = np.repeat(lengths.cumsum(), lengths) - np.arange(states)  # tokens from each state on
    found = np.empty((states, HEADS), dtype=np.int16)
    for k in range(HEADS):
        tail = rng.random(states) ** (-1 / (FADING**k * skills[k + 2 : k + 2 + states]))
        found[:, k] = np.where(tail < RANKS + 1, tail - 1, MISS)
        found[left < k + 2, k] = NO_TRIAL
    return found


def step_profile() -> LatencyProfile:
    """Steps that take longer the more rows they verify, a little longer the deeper they draft, with noise."""
    rng = np.random.default_rng(0)

    def timing(size: int, depth: int) -> StepTiming:
        ms = 20 + 0.06 * size + 0.2 * depth
        return StepTiming(1, 512, size, depth, tuple((ms * rng.normal(1, 0.01, 9)).tolist()))

    trees = [(size, depth) for size in (2, 4, 8, 16, 32, 64) for depth in range(1, min(HEADS, size - 1) + 1)]
    return LatencyProfile(tuple(timing(*tree) for tree in trees), (timing(1, 0),), runtime={"name": "synthetic"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=lambda text: int(float(text)), default=10**6, help="1e6, for example")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = traffic(options.states)
        trace.save(Path(folder) / "trace.npz")
        step_profile().save(Path(folder) / "profile.json")
        command = [sys.executable, "-m", "treeopt", "search", "--run", folder, "--budget", "64", "--batch-size", "1"]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
    if status:
        raise SystemExit(f"treeopt search failed: {os.waitstatus_to_exitcode(status)}")
    print(
        f"search on {len(trace.ranks):,} states of {trace.num_sequences:,} answers: {wall:.1f} s, "
        f"{used.ru_utime + used.ru_stime:.1f} s of the processor, {used.ru_maxrss / 1024:.0f} MiB at most, on {machine()}"
    )


if __name__ == "__main__":
    main()
