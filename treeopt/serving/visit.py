"""A visit to a server: what it answers to a load, and what it counts of its drafts meanwhile."""

import re
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from pydantic import BaseModel

from treeopt.engines.measured.exposition import COUNTERS, counters_among, is_exposition
from treeopt.errors import InvalidInput
from treeopt.serving.client import Answer, NoSuchPage, Prompt, Server, drive
from treeopt.serving.watch import ENGINES

PREFIX = f"(?:{'|'.join(names.prefix for names in ENGINES.values())})"
STEPS = "spec_verify_calls"  # of SGLang, which counts no drafts by position
PLAIN = "plain"  # name of a contender without speculation
WARM_TOKENS, PROBE_TOKENS = 8, 32
LOOP, LOOP_CHARS = re.compile(r"(.{8,60}?)\1{2,}.{0,60}$", re.DOTALL), 240
LONGER = 0.01  # guesses by which drafts may be longer on average than was asked
SETTLE_S = 0.5  # until the last step of an answer is counted


class Drafts(BaseModel):
    """Drafts that were counted, all of their guesses, and at each position how many of the drafts had it accepted."""

    drafts: int = 0
    drafted: int = 0
    reached: list[int] = []

    @property
    def length(self) -> float:
        """Mean guesses of a draft; 0 where none are counted."""
        return self.drafted / self.drafts if self.drafts else 0.0


class Visit(Drafts):
    """Answers, and what was counted.

    batch_size : prompts that were asked together
    """

    name: str
    batch_size: int
    answers: list[Answer]

    @property
    def seconds(self) -> float:
        return max(one.ended for one in self.answers) - min(one.began for one in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all requests together."""
        return sum(answer.num_tokens for answer in self.answers) / self.seconds

    @property
    def loops(self) -> bool:
        """Whether an answer's end repeats itself, where guesses are right more often than in other text."""
        return any(LOOP.search(answer.text[-LOOP_CHARS:]) for answer in self.answers)

    @property
    def emitted(self) -> int:
        return sum(answer.step_tokens for answer in self.answers)

    @property
    def steps(self) -> int:
        """Steps of all answers: the drafts, or where some steps had none what accepted guesses leave of the tokens."""
        without = self.emitted - sum(self.reached) if self.reached or not self.drafts else 0
        return min(max(self.drafts, without), self.emitted)

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.steps if self.steps else 1.0

    @property
    def timed(self) -> dict[int, Answer]:
        """The answers that ended while all clients were busy."""
        # The next that ends after this leaves its client without a prompt.
        full = (
            sorted(one.ended for one in self.answers)[-self.batch_size]
            if len(self.answers) >= self.batch_size
            else -inf
        )
        return {
            i: one for i, one in enumerate(self.answers) if one.ended <= full and one.step_tokens and one.steps_s > 0
        }


async def visited(
    server: Server, name: str, prompts: Sequence[Prompt], most: Sequence[int], *, clients: int, length: float = inf
) -> Visit:
    """What a server answers and counts of prompts, so many asked at once, with so many tokens of each answer at most.

    name : of the options that it is served with

    Raises InvalidInput where it drafts more guesses than ``length``, or counts no drafts although it may guess.
    """
    await drive(server, prompts[:clients], clients=clients, max_tokens=min(WARM_TOKENS, *most))
    answers, counted = await _counted(server, prompts, clients, most)
    if counted is None and length:
        raise InvalidInput(
            f"`launch` must serve /metrics with counters of drafts, but with the options of {name!r} has none: "
            "llama-server has them with --metrics, SGLang with --enable-metrics."
        )
    counts = counted or Drafts()
    if counts.length > length + LONGER or (length == 0 and counts.drafts):
        made = f"{counts.drafts:,} drafts" + (f" of {counts.length:.2f} guesses" if counts.drafted else "")
        raise InvalidInput(
            f"{length:g} guesses a step were asked for, but the server made {made}: `launch` speculates by other words than "
            "those that treeopt knows. Put {options} in their place, and pass them as `present`."
        )
    return Visit(name=name, batch_size=clients, answers=answers, **counts.model_dump())


async def follows_requests(server: Server, prompts: Sequence[Prompt], parameter: str, length: int) -> bool:
    """Whether drafts are as short as a request asks by a parameter, and longer where it does not."""
    lengths, most = list[float](), [PROBE_TOKENS] * len(prompts)
    for body in ({parameter: length}, {}):
        server.body = body
        _, counted = await _counted(server, prompts, 1, most)
        lengths.append(counted.length if counted else 0.0)
    short, usual = lengths
    return 0 < short <= length < usual


async def _counted(
    server: Server, prompts: Sequence[Prompt], clients: int, most: Sequence[int]
) -> tuple[list[Answer], Drafts | None]:
    """The answers to prompts, and the drafts that were counted meanwhile; None where the server shows no counters of them."""
    import anyio

    before = await _metrics(server)
    answers = await drive(server, prompts, clients=clients, max_tokens=most)
    await anyio.sleep(SETTLE_S)
    files = [(text, Path("/metrics")) for text in (before, await _metrics(server)) if is_exposition(text, PREFIX)]
    counted = counters_among(files, PREFIX, (*COUNTERS, STEPS))
    if counted is None or not {COUNTERS[0], STEPS} & counted.totals.keys():
        return answers, None
    drafts, drafted, steps = (counted.totals.get(name, 0) for name in (*COUNTERS[:2], STEPS))
    return answers, Drafts(drafts=drafts or steps, drafted=drafted, reached=counted.positions.get(COUNTERS[3], []))


async def _metrics(server: Server) -> str:
    with suppress(NoSuchPage):
        return await server.metrics()
    return ""
