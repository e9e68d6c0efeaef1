"""treeopt's own decoder as a Stepper: any tree, as many rows as memory holds, another draft at every step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence

from treeopt.errors import InvalidInput
from treeopt.runtime.decode import AnswerRow, Decoder, Setup, synchronize
from treeopt.runtime.stepper import PLAIN, Pass, Stepper
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.draft import Draft

SHORTEST_CONTEXT = 16  # that rows can be held at [tokens]


class Own(Stepper):
    """The decoder of a setup. It is made for a number of rows, prompts and drafts, and again where there is no room."""

    name, switches, takes_trees = "treeopt", True, True

    def __init__(self, setup: Setup) -> None:
        from treeopt import __version__

        self.version, self.setup, self.first_is_slow = __version__, setup, setup.target.compiled
        self.decoder: Decoder | None = None

    def prepare(self, prompts: Sequence[Sequence[int]], drafts: Sequence[Draft], rows: int) -> None:
        self.decoder = None  # its memory is free before another one takes some
        self.decoder = Decoder.for_prompts(self.setup, prompts, drafts, batch_size=rows)

    def answer(
        self, prompts: Sequence[Sequence[int]], draft: Draft | None, rows: int = 1
    ) -> Generator[Pass, Draft | None, None]:
        """The passes; reading prompts is one of its own."""
        if self.decoder is None or self.decoder.batch_size != rows:
            self.prepare(prompts, [draft or PLAIN], rows)
        decoder = self.decoder
        assert decoder is not None
        decoder.start(enumerate(prompts))
        told = draft
        while not decoder.is_done:
            if decoder.waiting and len(decoder.live) < rows:
                told = (yield self._refill(decoder)) or told
            if decoder.live:
                told = (yield self._step(decoder, told)) or told

    def _refill(self, decoder: Decoder) -> Pass:
        before, ended, forwards = set(map(id, decoder.live)), len(decoder.finished), decoder.target.passes
        seconds = self._seconds(decoder.refill)
        rows = [row for row in (*decoder.live, *decoder.finished[ended:]) if id(row) not in before]
        emitted = {row.id: list(row.tokens) for row in rows}
        return Pass(emitted, seconds, reads_prompt=True, forwards=decoder.target.passes - forwards)

    def _step(self, decoder: Decoder, draft: Draft | None) -> Pass:
        before: list[tuple[AnswerRow, int]] = [(row, len(row.tokens)) for row in decoder.live]
        synchronize(decoder.target.device)
        decoder.parts = [("", time.perf_counter())] if self.by_parts else None
        seconds = self._seconds(lambda: decoder.step(draft))
        marks, decoder.parts = decoder.parts or [], None
        return Pass(
            {row.id: row.tokens[n:] for row, n in before},
            seconds,
            reads_prompt=False,
            accepted={row.id: row.accepted[-1] for row, _ in before},
            parts_ms={part: 1e3 * (now - then) for (_, then), (part, now) in itertools.pairwise(marks)},
        )

    def _seconds(self, work: Callable[[], object]) -> float:
        """Seconds that some work takes, with all that it starts on a device."""
        synchronize(self.setup.target.device)
        began = time.perf_counter()
        work()
        synchronize(self.setup.target.device)
        return time.perf_counter() - began


def rows_at(context_tokens: int, prompts: Sequence[Sequence[int]], target: Target) -> tuple[list[list[int]], StopRule]:
    """Prompts repeated and cut, and where their rows end, so that rows stay about a context length.

    They begin at different lengths, as rows of real prompts do, and end 1/16 beyond the context; neither
    EOS nor a loop ends them before. Raises InvalidInput for a context that the model does not reach.
    """
    if not SHORTEST_CONTEXT <= context_tokens <= target.context:
        raise InvalidInput(
            f"`contexts` must be {SHORTEST_CONTEXT} to {target.context}, the context of the model, but got "
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
