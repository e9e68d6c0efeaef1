"""Step latencies for a profile: real steps on real prompts, trees and plain steps interleaved.

The same `Decoder` as in calibration and benchmark; a whole step (propose, verify, accept, commit) is
timed with the device synchronised around it. What is compared is interleaved in random order, so that
a slow minute of the machine falls on all alike. A round visits everything once and is a block of the
profile's journal.

The rule for outliers: none is thrown away. A tree's latency is the plain one's median times the median over
rounds of the ratio of the two within a round (`treeopt.latency.paired`): an interruption is one sample of a
round's median, a slow round one ratio of many. Rounds go on until that is known well enough.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal
from treeopt.latency.rounds import PRECISION, Round, is_enough
from treeopt.runtime.decode import Decoder, Setup, synchronize
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.tree import Tree

# Steps each time a point has its turn. The first ones find the caches full of what the step before needed,
# which is no part of what a step costs where one follows the other; the last of them is timed by its parts.
UNTIMED_STEPS, TIMED_STEPS = 4, 6
PLAIN_VISITS = 3  # turns of the plain step per round: every speedup is against it
SHORTEST_CONTEXT = 16  # that rows can be held at [tokens]


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
    setup: Setup,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[Tree],
    *,
    batch_size: int,
    time_limit_s: float,
    precision: float = PRECISION,
    journal: Journal | None = None,
    progress: Callable[[float], None] = lambda seconds: None,
) -> list[Round]:
    """Time steps with each tree, and plain ones, at one batch size, round by round.

    Rounds go on until every latency is known to ``precision`` (at least five), or until the time limit (at least
    three). Those of the journal come first, and every new one goes there; ``progress`` is called with the seconds
    of each. Raises InvalidInput where no answer is longer than its first token.
    """
    decoder = Decoder.for_prompts(setup, prompts, trees, batch_size=batch_size)
    decoder.start([])
    supply = Supply(decoder, prompts)
    rounds = journal.documents() if journal else []
    for round_ in rounds:
        progress(round_["seconds"])
    is_warm = False
    while not is_enough(rounds, trees, batch_size, time_limit_s=time_limit_s, precision=precision):
        if not is_warm:
            for tree in (*trees, None):
                supply.refill()
                timed_step(decoder, tree)
            is_warm = True
        rounds.append(one_round(supply, trees, np.random.default_rng([0, len(rounds)])))
        if journal:
            journal.append(rounds[-1])
        progress(rounds[-1]["seconds"])
    return rounds


def one_round(supply: Supply, trees: Sequence[Tree], rng: np.random.Generator) -> Round:
    """Visit every tree, and plain decoding `PLAIN_VISITS` times, in random order; all rows are live in every step."""
    decoder = supply.decoder
    points: list[dict[str, Any]] = [{"step_ms": [], "accepted": [], "parts_ms": {}} for _ in range(len(trees) + 1)]
    lengths, started, worked = [], time.perf_counter(), time.process_time()
    for i in rng.permutation([*range(len(trees)), *[len(trees)] * PLAIN_VISITS]).tolist():
        tree, point = trees[i] if i < len(trees) else None, points[i]
        for n in range(UNTIMED_STEPS + TIMED_STEPS):
            supply.refill()
            lengths.append(sum(decoder.cache.lengths) // decoder.batch_size)
            if n == UNTIMED_STEPS - 1:
                for part, ms in step_parts(decoder, tree).items():
                    point["parts_ms"].setdefault(part, []).append(round(ms, 5))
                continue
            seconds, accepted = timed_step(decoder, tree)
            if n >= UNTIMED_STEPS:
                point["step_ms"].append(round(1e3 * seconds, 5))
                point["accepted"].append(float(accepted.mean()))
    return {
        "seconds": time.perf_counter() - started,
        "processor_s": time.process_time() - worked,
        "lengths": lengths,
        "points": points,
    }


class Supply:
    """Prompts without end for the rows of a decoder."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]]) -> None:
        self.decoder, self.tries = decoder, len(prompts)
        self._prompts = enumerate(itertools.cycle(prompts))

    def refill(self) -> None:
        """Make all rows live; a prompt whose answer is one token leaves its row free, so try on."""
        decoder = self.decoder
        for _ in range(self.tries + 1):
            decoder.finished.clear()
            if len(decoder.live) == decoder.batch_size:
                return
            decoder.waiting.extend(itertools.islice(self._prompts, decoder.batch_size - len(decoder.live)))
            decoder.refill()
        raise InvalidInput(
            f"Timing needs answers of more than one token, but {self.tries} prompts in a row gave none: they may "
            "be as long as the context, or end at once."
        )


def rows_at(context_tokens: int, prompts: Sequence[Sequence[int]], target: Target) -> tuple[list[list[int]], StopRule]:
    """Prompts repeated and cut, and where their rows end, so that rows stay about a context length.

    They begin at different lengths, as rows of real prompts do, and end 1/16 beyond the context; neither
    EOS nor a loop ends them before. Raises InvalidInput for a context that the model does not reach.
    """
    if not SHORTEST_CONTEXT <= context_tokens <= target.context:
        raise InvalidInput(
            f"--context must be {SHORTEST_CONTEXT} to {target.context}, the context of the model, but got "
            f"{context_tokens}."
        )
    half = max(SHORTEST_CONTEXT // 2, context_tokens // 16)
    end = min(context_tokens + half, target.context)
    found = []
    for i, prompt in enumerate(prompts):
        length = max(1, end - 2 * half + round(i * 0.618 % 1 * (half // 2)))
        found.append([token for token, _ in zip(itertools.cycle(prompt), range(length), strict=False)])
    longest = max(map(len, found))
    return found, StopRule(frozenset(), end - longest, at_loops=False)
