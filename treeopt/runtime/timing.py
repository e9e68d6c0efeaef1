"""Step latencies for a profile: real steps on real prompts, trees and plain steps interleaved.

The same `Decoder` as in calibration and benchmark; a whole step (propose, verify, accept, commit) is
timed with the device synchronised around it. What is compared is interleaved in random order, so that
a slow minute of the machine falls on all alike. A round visits everything once and is a block of the
profile's journal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.latency import StepTiming
from treeopt.runtime.decode import Decoder, StopRule, capacity_for, synchronize
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.target import Target
from treeopt.tree import Tree

STEPS_PER_VISIT = 3  # timed steps each time a point has its turn, after one that is not
PLAIN_VISITS = 3  # turns of the plain step per round: every speedup is against it
FEWEST_ROUNDS, MOST_ROUNDS = 3, 30

Round = dict[str, Any]  # {"seconds", "lengths", "points": [{"step_ms", "accepted", "parts_ms"}]}, as JSON


def timed_step(decoder: Decoder, tree: Tree | None) -> tuple[float, Any]:
    """Seconds of one decoding step, and the guesses it accepted."""
    synchronize(decoder.target.device)
    started = time.perf_counter()
    accepted = decoder.step(tree)
    synchronize(decoder.target.device)
    return time.perf_counter() - started, accepted


def step_parts(decoder: Decoder, tree: Tree | None) -> dict[str, float]:
    """Milliseconds of each part of one more step; the device is synchronised after every part."""
    synchronize(decoder.target.device)
    decoder.parts = [("", time.perf_counter())]
    decoder.step(tree)
    marks, decoder.parts = decoder.parts, None
    return {part: 1e3 * (now - before) for (_, before), (part, now) in itertools.pairwise(marks)}


def measure_steps(
    target: Target,
    heads: MedusaHeads,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[Tree],
    *,
    batch_size: int,
    stop: StopRule,
    time_limit_s: float,
    finished: Sequence[Round] = (),
    keep: Callable[[Round], None] = lambda round_: None,
    seed: int = 0,
    progress: Callable[[float], None] = lambda seconds: None,
) -> list[Round]:
    """Time steps with each tree, and plain ones, at one batch size, round by round.

    Every round visits all trees in a new random order; rounds go on until the time limit, but at
    least three. Rows that end are refilled between steps, so all are live in every timed step.
    ``finished`` are rounds of an earlier run, ``keep`` takes every new one, ``progress`` its seconds.

    Raises InvalidInput where no answer is longer than its first token.
    """
    decoder = Decoder(target, heads, batch_size=batch_size, capacity=capacity_for(prompts, stop, target),
                      stop=stop, most_nodes=max(map(len, trees), default=1))  # fmt: skip
    decoder.start([])
    supply = enumerate(itertools.cycle(prompts))
    rounds = list(finished)
    for round_ in rounds:
        progress(round_["seconds"])
    while len(rounds) < MOST_ROUNDS:
        if len(rounds) >= FEWEST_ROUNDS and sum(r["seconds"] for r in rounds) > time_limit_s:
            break
        rng = np.random.default_rng([seed, len(rounds)])
        points: list[dict[str, Any]] = [
            {"step_ms": [], "accepted": [], "parts_ms": {}} for _ in range(len(trees) + 1)
        ]
        lengths, started = [], time.perf_counter()
        for i in rng.permutation([*range(len(trees)), *[len(trees)] * PLAIN_VISITS]).tolist():
            tree, point = trees[i] if i < len(trees) else None, points[i]
            for n in range(1 + STEPS_PER_VISIT):
                refill_all(decoder, supply, tries=len(prompts))
                lengths.append(sum(decoder.cache.lengths) // batch_size)
                seconds, accepted = timed_step(decoder, tree)
                if n:
                    point["step_ms"].append(round(1e3 * seconds, 5))
                    point["accepted"].append(float(accepted.mean()))
            refill_all(decoder, supply, tries=len(prompts))
            for part, ms in step_parts(decoder, tree).items():
                point["parts_ms"].setdefault(part, []).append(round(ms, 5))
        rounds.append({"seconds": time.perf_counter() - started, "lengths": lengths, "points": points})
        keep(rounds[-1])
        progress(rounds[-1]["seconds"])
    return rounds


def timings(
    rounds: Sequence[Round], trees: Sequence[Tree], batch_size: int
) -> tuple[list[StepTiming], StepTiming]:
    """The trees' timings and the plain one. The context is the median length of rows over all steps."""
    context = int(median([length for round_ in rounds for length in round_["lengths"]]))

    def timing(i: int, size: int, depth: int) -> StepTiming:
        points = [round_["points"][i] for round_ in rounds]
        accepted = [a for point in points for a in point["accepted"]]
        return StepTiming(
            batch_size,
            context,
            size,
            depth,
            step_ms=tuple(ms for point in points for ms in point["step_ms"]),
            accepted_mean=round(sum(accepted) / len(accepted), 4),
            round=tuple(n for n, point in enumerate(points) for _ in point["step_ms"]),
            parts_ms={part: tuple(ms for point in points for ms in point["parts_ms"][part])
                      for part in points[0]["parts_ms"]},
        )  # fmt: skip

    return [timing(i, len(t), t.depth) for i, t in enumerate(trees)], timing(len(trees), 1, 0)


def refill_all(decoder: Decoder, supply: Iterator[tuple[int, Sequence[int]]], tries: int) -> None:
    """Make all rows live; a prompt whose answer is one token leaves its row free, so try on."""
    for _ in range(tries + 1):
        decoder.finished.clear()
        if len(decoder.live) == decoder.batch_size:
            return
        decoder.waiting.extend(itertools.islice(supply, decoder.batch_size - len(decoder.live)))
        decoder.refill()
    raise InvalidInput(
        f"Timing needs answers of more than one token, but {tries} prompts in a row gave none: they may "
        "be as long as the context, or end at once."
    )
