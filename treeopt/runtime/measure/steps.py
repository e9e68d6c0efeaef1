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
from treeopt.latency.rounds import PLAIN_VISITS, PRECISION, VISITS, Planned, Round, is_enough, plan_rounds, timed_trees
from treeopt.runtime import clock
from treeopt.runtime.decode import Decoder, Setup, synchronize
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.dynamic import AnyTree

LONG_STEP_S = 0.5  # a first step that takes so long is not taken twice
SHORTEST_CONTEXT = 16  # that rows can be held at [tokens]


def timed_step(decoder: Decoder, tree: AnyTree | None) -> tuple[float, Any]:
    """Seconds of one decoding step, and the guesses it accepted."""
    synchronize(decoder.target.device)
    started = clock.start()
    accepted = decoder.step(tree)
    synchronize(decoder.target.device)
    return clock.elapsed(started), accepted


def step_parts(decoder: Decoder, tree: AnyTree | None) -> dict[str, float]:
    """Milliseconds of each part of one more step; the device is synchronised after every part."""
    synchronize(decoder.target.device)
    decoder.parts = [("", time.perf_counter())]
    decoder.step(tree)
    marks, decoder.parts = decoder.parts, None
    return {part: 1e3 * (now - before) for (_, before), (part, now) in itertools.pairwise(marks)}


def measure_steps(
    setup: Setup,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[AnyTree],
    *,
    batch_size: int,
    time_limit_s: float,
    precision: float = PRECISION,
    journal: Journal | None = None,
    progress: Callable[[Planned | Round], None] = lambda event: None,
) -> list[Round]:
    """Time steps with each tree, and plain ones, at one batch size, round by round.

    Rounds go on until every latency is known to ``precision`` (at least five), or until the time limit (at least
    three). Where these would take longer, trees are left out: the rounds are of their `timed_trees`. Rounds of the
    journal come first, and every new one goes there; ``progress`` is called with what is planned, before the first
    round, and with every round. Raises InvalidInput where no answer is longer than its first token.
    """
    decoder = Decoder.for_prompts(setup, prompts, trees, batch_size=batch_size)
    decoder.start([])
    supply = Supply(decoder, prompts)
    rounds = journal.documents() if journal else []
    for round_ in rounds:
        progress(round_)
    first: dict[str, Any] = rounds[0] if rounds else {}
    is_warm = False
    while not is_enough(
        rounds,
        timed_trees(rounds, trees),
        batch_size,
        time_limit_s=time_limit_s - first.get("warm_up_s", 0.0),
        precision=precision,
    ):
        if not is_warm:
            started, step_s = clock.start(), first_steps(supply, trees)
            is_warm = True
        if not rounds:
            warm_up_s = clock.elapsed(started)
            planned = plan_rounds(trees, step_s, time_limit_s - warm_up_s)
            progress(planned)
            first = {"kept": planned.kept, "visit": planned.visit, "warm_up_s": warm_up_s}
        kept = [trees[i] for i in first.get("kept", range(len(trees)))]
        found = one_round(supply, kept, np.random.default_rng([0, len(rounds)]), first.get("visit", VISITS[0]))
        rounds.append(found if rounds else {**first, **found})
        if journal:
            journal.append(rounds[-1])
        progress(rounds[-1])
    return rounds


def first_steps(supply: Supply, trees: Sequence[AnyTree]) -> list[float]:
    """Seconds of a step with each tree, and of a plain one; of two, since the first finds nothing warm."""
    found = []
    for tree in (*trees, None):
        supply.refill()
        seconds = timed_step(supply.decoder, tree)[0]
        if seconds < LONG_STEP_S or supply.decoder.target.compiled:
            supply.refill()
            seconds = min(seconds, timed_step(supply.decoder, tree)[0])
        found.append(seconds)
    return found


def one_round(supply: Supply, trees: Sequence[AnyTree], rng: np.random.Generator, visit: Sequence[int]) -> Round:
    """Visit every tree, and plain decoding `PLAIN_VISITS` times, in random order; all rows are live in every step.

    visit : untimed steps, of which the last is timed by its parts, and timed ones
    """
    decoder, (untimed, timed) = supply.decoder, visit
    points: list[dict[str, Any]] = [{"step_ms": [], "accepted": [], "parts_ms": {}} for _ in range(len(trees) + 1)]
    lengths, started, worked = [], clock.start(), time.process_time()
    for i in rng.permutation([*range(len(trees)), *[len(trees)] * PLAIN_VISITS]).tolist():
        tree, point = trees[i] if i < len(trees) else None, points[i]
        for n in range(untimed + timed):
            supply.refill()
            lengths.append(sum(decoder.cache.lengths) // decoder.batch_size)
            if n == untimed - 1:
                for part, ms in step_parts(decoder, tree).items():
                    point["parts_ms"].setdefault(part, []).append(round(ms, 5))
                continue
            seconds, accepted = timed_step(decoder, tree)
            if n >= untimed:
                point["step_ms"].append(round(1e3 * seconds, 5))
                point["accepted"].append(float(accepted.mean()))
    return {
        "seconds": clock.elapsed(started),
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
