"""Closed loops of clients: each asks its next prompt when the one before is answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeopt.errors import InvalidInput, TreeoptError

if TYPE_CHECKING:
    from treeopt.serving.client import Answer, Prompt, Server

ANSWERED_WITHIN_S = 600.0  # each answer


@dataclass(frozen=True)
class Load:
    """The answers to all prompts, in their order."""

    answers: tuple[Answer, ...]
    clients: int

    @property
    def timed(self) -> list[int]:
        """Places of the answers that ended while all clients were busy, whose times are those of a full batch."""
        ends = sorted(answer.ended for answer in self.answers)
        full = len(ends) - self.clients  # the next that ends leaves its client without a prompt
        return [i for i, answer in enumerate(self.answers) if full >= 0 and answer.ended <= ends[full]]


async def drive(
    server: Server, prompts: Sequence[Prompt], *, clients: int, max_tokens: int, within_s: float = ANSWERED_WITHIN_S
) -> Load:
    """Have a server answer all prompts greedily, so many at once; raises the first error of an answer, which ends all.

    Warm a server up with a load of its own before.
    """
    import anyio

    if not prompts:
        raise InvalidInput("A load needs at least one prompt, but got none.")
    found: dict[int, Answer] = {}
    left, failed = iter(range(len(prompts))), list[TreeoptError]()

    async def client() -> None:
        for place in left:
            try:
                found[place] = await server.complete(prompts[place], max_tokens, within_s=within_s)
            except TreeoptError as error:
                failed.append(error)
                group.cancel_scope.cancel()
                return

    async with anyio.create_task_group() as group:
        for _ in range(clients):
            group.start_soon(client)
    if failed:
        raise failed[0]
    return Load(tuple(found[i] for i in range(len(prompts))), clients)
