"""Closed loops of clients: each asks its next prompt when the one before is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from treeopt.errors import InvalidInput, TreeoptError

if TYPE_CHECKING:
    from treeopt.serving.client import Answer, Prompt, Server


async def together(tasks: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run tasks at the same time; the first TreeoptError of one ends all, and is raised."""
    import anyio

    failed = list[TreeoptError]()

    async def alone(task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except TreeoptError as error:
            failed.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(alone, task)
    if failed:
        raise failed[0]


async def drive(
    server: Server, prompts: Sequence[Prompt], *, clients: int, max_tokens: int | Sequence[int]
) -> list[Answer]:
    """The greedy answers of a server to all prompts, in their order, so many asked at once; tokens at most of all, or of each.

    Warm a server up with a load of its own before. Raises the first error of an answer, which ends all.
    """
    if not prompts:
        raise InvalidInput("A load needs at least one prompt, but got none.")
    found, left = dict[int, "Answer"](), iter(range(len(prompts)))
    most = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens

    async def client() -> None:
        for place in left:
            found[place] = await server.complete(prompts[place], most[place])

    await together([client] * clients)
    return [found[place] for place in range(len(prompts))]
