"""A visit to a server: what it answers to a load, and what it counts of its drafts meanwhile."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from pydantic import BaseModel

from treeopt.engines.llama_cpp import PREFIX as OF_LLAMA_CPP
from treeopt.engines.measured.exposition import COUNTERS, counters_among, is_exposition
from treeopt.engines.vllm import PREFIX as OF_VLLM
from treeopt.errors import Unsupported
from treeopt.serving.client import NoSuchPage, Prompt, Server
from treeopt.serving.load import drive

PREFIX = rf"(?:{OF_VLLM}|{OF_LLAMA_CPP})"
WARM_TOKENS = 8
SETTLE_S = 0.5  # until the last step of an answer is counted


class Told(BaseModel):
    """An answer, with the sha256 of its text; ``timed`` where all clients were busy as long as it took."""

    tokens: int
    decode_s: float  # from the first piece of the text on
    timed: bool
    text: str


class Visit(BaseModel):
    """The answers, the drafts that were counted, and at each position how many of these were accepted."""

    launch: int
    name: str
    batch_size: int
    answers: list[Told]
    drafts: int
    reached: list[int]

    @property
    def emitted(self) -> int:
        """Tokens that steps emitted: the first of an answer comes of its prompt."""
        return sum(answer.tokens - 1 for answer in self.answers)

    @property
    def steps(self) -> int:
        """Steps of all answers: the drafts, or where some steps had none what accepted guesses leave of the tokens."""
        return min(max(self.drafts, self.emitted - sum(self.reached)), self.emitted)

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.steps if self.steps else 1.0

    @property
    def timed(self) -> dict[int, Told]:
        return {i: one for i, one in enumerate(self.answers) if one.timed and one.tokens > 1 and one.decode_s > 0}


async def visited(
    url: str, launch: int, name: str, prompts: Mapping[int, Sequence[Prompt]], most: Mapping[int, Sequence[int]]
) -> list[Visit]:
    """What a server answers and counts at every batch size, with so many tokens of each answer at most."""
    import anyio

    found = []
    async with Server(url) as server:
        for size, asked in prompts.items():
            await drive(server, asked[:size], clients=size, max_tokens=min(WARM_TOKENS, *most[size]))
            before = await _metrics(server)
            answers = await drive(server, asked, clients=size, max_tokens=most[size])
            await anyio.sleep(SETTLE_S)
            files = [
                (text, Path("/metrics")) for text in (before, await _metrics(server)) if is_exposition(text, PREFIX)
            ]
            counted = counters_among(files, PREFIX)
            drafts = counted.totals.get(COUNTERS[0]) if counted else None
            if drafts is None and name != "plain":
                raise Unsupported(
                    f"`launch` must serve /metrics with counters of drafts, but with the options of {name!r} has none: "
                    "llama-server has them with --metrics."
                )
            # The next that ends after this leaves its client without a prompt, and the batch is no longer full.
            full = sorted(one.ended for one in answers)[-size] if len(answers) >= size else -inf
            told = [
                Told(
                    tokens=max(one.num_tokens, 1),
                    decode_s=one.seconds - one.first_s,
                    timed=one.ended <= full,
                    text=hashlib.sha256(one.text.encode("utf-8", "surrogatepass")).hexdigest(),
                )
                for one in answers
            ]
            reached = counted.positions.get(COUNTERS[3], []) if counted else []
            found.append(
                Visit(launch=launch, name=name, batch_size=size, answers=told, drafts=drafts or 0, reached=reached)
            )
    return found


async def _metrics(server: Server) -> str:
    with suppress(NoSuchPage):
        return await server.text("/metrics")
    return ""
