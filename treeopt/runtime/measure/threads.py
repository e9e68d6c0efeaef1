"""How many threads a processor computes with: as few as bring something, by the time of plain steps.

More threads than the model's products fill bring nothing, and every one of them is a core that has to be free. What is
summed by several threads is rounded otherwise, so a run keeps its number once it is chosen (`treeopt.pipeline.session`).
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from treeopt.runtime.decode import Decoder, Setup
from treeopt.runtime.stepper import StepVisits
from treeopt.runtime.stop import StopRule

CLEARLY = 1.1  # times as fast, for more threads
ROUNDS, FEWEST_ROUNDS, STEPS = 5, 3, 3  # visits to each number of threads, and timed steps of a visit
PLAIN_STEPS = 0  # their place behind no trees
ENOUGH_S = 5.0  # after which the fewest rounds do
SAID_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables by which a user says how many threads


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def are_said() -> bool:
    """Whether the user has said how many threads: in the environment, or to torch, which takes all cores by itself.

    With two threads a core torch takes one of them.
    """
    return any(name in os.environ for name in SAID_BY) or torch.get_num_threads() not in (cores(), cores() // 2)


def choose_threads(setup: Setup, prompts: Sequence[Sequence[int]]) -> int:
    """The number to compute with, of 1, 2, 4, ... and torch's own, by plain steps of one row; it is not set here."""
    own = torch.get_num_threads()
    counts = sorted({own, *(2**i for i in range(own.bit_length()) if 2**i < own)})
    if len(counts) == 1:
        return own
    try:
        return fastest(time_steps(setup, prompts, counts))
    finally:
        torch.set_num_threads(own)


def time_steps(setup: Setup, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> dict[int, list[float]]:
    """Number of threads to the median time of a visit's plain steps, for every round [s].

    All numbers are visited in every round, so that a slow moment of the machine falls on all; a first round warms up.
    """
    half = setup.target.context // 2
    room = StopRule(frozenset(), min(ROUNDS * len(counts) * (STEPS + 1) + STEPS, half), at_loops=False)
    decoder = Decoder(replace(setup, drafter=None, stop=room))
    visits = StepVisits(decoder, [prompt[:half] for prompt in prompts], [], batch_size=1)
    found, began = {n: list[float]() for n in counts}, time.perf_counter()
    for number in range(1 + ROUNDS):
        for n in counts if number % 2 else reversed(counts):
            torch.set_num_threads(n)
            found[n].append(median(visits.visit(PLAIN_STEPS, (1, STEPS), 0).step_ms) / 1e3)
        if number >= FEWEST_ROUNDS and time.perf_counter() - began > ENOUGH_S:
            break
    return {n: seconds[1:] for n, seconds in found.items()}


def fastest(seconds: Mapping[int, Sequence[float]]) -> int:
    """The number of threads to take: a larger one only where it is clearly faster.

    >>> fastest({1: [5.4, 5.5, 5.3], 2: [5.1, 9.9, 5.2]}), fastest({1: [9, 9, 9], 2: [5, 5, 50], 4: [4.8, 4.8, 4.8]})
    (1, 2)
    """
    best, *more = sorted(seconds)
    for n in more:
        if CLEARLY * median(seconds[n]) <= median(seconds[best]):
            best = n
    return best
