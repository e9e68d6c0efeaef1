"""A server that is up, by its URL: its pages, completions that it streams, and loads of many prompts at once.

Whatever a server answers, the caller has it in the time that it gives, or one sentence that says why not. A deadline is over
a whole exchange, so that neither silence nor a drip outlasts it; the bytes are counted as they come and must not be packed,
so that a short answer cannot unpack to a long one; redirects are followed on the same server only. Nothing but the URL says
where to connect: no proxies, no .netrc. Credentials are the environment variable TREEOPT_API_KEY, which is in no message.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from treeopt.errors import InvalidInput, TreeoptError, Unsupported, first_line, quoted
from treeopt.files.bounds import loads

if TYPE_CHECKING:
    import httpx

MOST_BYTES = 2**25  # of one answer
MOST_LINE_BYTES = 2**20  # of one event of a stream
MOST_REDIRECTS = 3
WITHIN_S, ANSWERED_WITHIN_S = 10.0, 600.0  # that a page may take, and an answer to a prompt
KEY = "TREEOPT_API_KEY"
OWN_PATHS = re.compile(r"(/v1|/metrics|/prometheus/metrics)?/*$")
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, tokens, or messages of a chat


@dataclass(frozen=True)
class Answer:
    """What a server completed, and when.

    num_tokens : as the server counts them
    began      : `time.perf_counter` when it was asked
    first_s    : seconds from then to the first piece of the text
    seconds    : to the end of the answer
    """

    text: str
    num_tokens: int
    began: float
    first_s: float
    seconds: float

    @property
    def ended(self) -> float:
        return self.began + self.seconds

    @property
    def steps_s(self) -> float:
        """Seconds of the steps that gave all tokens but the first."""
        return self.seconds - self.first_s

    @property
    def step_tokens(self) -> int:
        """Tokens that steps gave: the first comes of the prompt."""
        return max(self.num_tokens - 1, 0)


class Server(AbstractAsyncContextManager[Any]):
    """A server of an OpenAI-compatible API, to be used as ``async with Server(url) as server``.

    url  : with ?model=NAME where it serves several, as llama.cpp's router does; by default its first is meant
    body : further fields of every request for an answer
    """

    def __init__(self, url: str) -> None:
        import httpx

        try:
            parts = httpx.URL(url)
        except (httpx.InvalidURL, TypeError, ValueError):
            parts = httpx.URL()
        if parts.userinfo or "@" in url:
            raise InvalidInput(f"A URL must be without credentials: set the environment variable {KEY} instead.")
        if parts.scheme not in ("http", "https") or not parts.host or parts.fragment or {*parts.params} - {"model"}:
            raise InvalidInput(f"A server's URL must be like http://localhost:8000, but got {quoted(url)}.")
        self._key = os.environ.get(KEY, "")
        if not re.fullmatch(r"[!-~]*", self._key):
            raise InvalidInput(f"{KEY} must be printable ASCII without spaces, but is not.")
        self.url = OWN_PATHS.sub("", str(parts.copy_with(query=None)))
        headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {self._key}"} if self._key else {})}
        limits = httpx.Limits(max_connections=None)
        is_safe = parts.scheme == "https"  # certificates take a while to load
        self._client = httpx.AsyncClient(trust_env=False, timeout=None, limits=limits, headers=headers, verify=is_safe)
        self._model = self._named = parts.params.get("model")
        self._has_chat_alone = False
        self.body: Mapping[str, Any] = {}

    async def __aexit__(self, *ended: object) -> None:
        await self._client.aclose()

    async def text(self, path: str, within_s: float = WITHIN_S) -> str:
        """A page, got by GET; Unsupported where there is none in time, InvalidInput where it is no text or too long."""
        async with self._asked("GET", path, within_s) as response:
            pieces = [piece async for piece in self._pieces(response)]
        try:
            return b"".join(pieces).decode()
        except UnicodeDecodeError:
            raise InvalidInput(f"{self.url}{path} must be text in UTF-8, but is not.") from None

    async def json(self, path: str, within_s: float = WITHIN_S) -> Any:
        """A page of JSON, likewise."""
        return self._parsed(await self.text(path, within_s), path)

    async def metrics(self, page: str = "/metrics", within_s: float = WITHIN_S) -> str:
        """The page of its counters, of the model that is meant."""
        try:
            return await self.text(f"{page}?model={quote(self._named)}" if self._named else page, within_s)
        except NoSuchPage:
            raise
        except Unsupported as error:
            if self._named or len(models := await self._models()) == 1:
                raise
            raise Unsupported(f"{error} It serves {', '.join(map(quoted, models))}: name one with `model`.") from None

    async def model(self) -> str:
        """The model that is meant, by its name there."""
        if self._model is None:
            self._model, *_ = await self._models()
        return str(self._model)

    async def _models(self) -> list[str]:
        match await self.json("/v1/models"):
            case {"data": [{"id": str()}, *_] as models}:
                return [str(model["id"]) for model in models if isinstance(model, dict) and "id" in model]
        raise InvalidInput(f"{self.url}/v1/models must list models, but lists none.")

    async def complete(self, prompt: Prompt, max_tokens: int, *, within_s: float = ANSWERED_WITHIN_S) -> Answer:
        """Complete a prompt greedily: messages as a chat, text and tokens as they are.

        A server that has chats alone gets a text as a message of the user.
        """
        asked = {"model": await self.model(), "max_tokens": max_tokens, "temperature": 0, "stream": True}
        asked |= {"stream_options": {"include_usage": True}, **self.body}
        is_chat = self._has_chat_alone if isinstance(prompt, str) else isinstance(prompt[0], Mapping)
        if not is_chat:
            try:
                return await self._streamed("/v1/completions", {**asked, "prompt": prompt}, within_s)
            except NoSuchPage:
                if not isinstance(prompt, str):
                    raise
                self._has_chat_alone = True
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return await self._streamed("/v1/chat/completions", {**asked, "messages": messages}, within_s)

    async def _streamed(self, path: str, asked: Mapping[str, Any], within_s: float) -> Answer:
        began = time.perf_counter()
        text, reason, count, first_s = "", "", -1, 0.0
        async with self._asked("POST", path, within_s, asked) as response:
            async for event in self._events(response, path):
                if not isinstance(event, dict):
                    continue
                if event.get("error"):
                    raise Unsupported(f"{self.url}{path} answered with an error: {self._said(event['error'])}.")
                match event.get("usage"):
                    case {"completion_tokens": int(counted)}:
                        count = counted
                match event.get("choices"):
                    case [{**choice}, *_]:
                        piece = _piece(choice)
                        if piece and not text:
                            first_s = time.perf_counter() - began
                        text += piece
                        reason = str(choice.get("finish_reason") or reason)
        if not reason or count < 0:
            lacks = "say why it ended" if not reason else "say how many tokens it has (usage.completion_tokens)"
            raise InvalidInput(f"{self.url}{path} must {lacks}, but its answer was cut off before.")
        seconds = time.perf_counter() - began
        text = text.encode("utf-8", "replace").decode()  # JSON may hold half of a character
        return Answer(text, count, began, first_s if text else seconds, seconds)

    async def _events(self, response: httpx.Response, path: str) -> AsyncIterator[Any]:
        """The JSON of every ``data:`` line, until [DONE] or the end."""
        rest = b""
        async for piece in self._pieces(response):
            *lines, rest = (rest + piece).split(b"\n")
            if max(map(len, [*lines, rest])) > MOST_LINE_BYTES:
                raise InvalidInput(
                    f"{self.url}{path} may stream lines of {MOST_LINE_BYTES:,} bytes, but has longer ones."
                )
            for line in lines:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data and line.startswith(b"data:"):
                    yield self._parsed(data.decode("utf-8", "replace"), path)

    def _parsed(self, text: str, path: str) -> Any:
        try:
            return loads(text)
        except ValueError as error:
            raise InvalidInput(
                f"{self.url}{path} must answer in JSON, but it cannot be read: {first_line(error)}."
            ) from None

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, within_s: float, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The response to a request, of status 200; all that happens within must be done in time."""
        import anyio
        import httpx

        place = f"{self.url}{path}"
        try:
            with anyio.fail_after(within_s):
                url = httpx.URL(place)
                for _ in range(MOST_REDIRECTS + 1):
                    request = self._client.build_request(method, url, json=body)
                    response = await self._client.send(request, stream=True)
                    try:
                        if response.is_redirect and method == "GET":
                            url = self._moved(url, response.headers.get("location", ""))
                            continue
                        await self._check(response, place)
                        yield response
                        return
                    finally:
                        await response.aclose()
                raise Unsupported(f"{place} must be there, but redirects more than {MOST_REDIRECTS} times.")
        except TimeoutError:
            raise Unsupported(
                f"{place} must answer within {within_s:.3g} s, but did not: is the server up and not overloaded?"
            ) from None
        except httpx.ConnectError as error:
            raise Unsupported(
                f"No server answers at {self.url} ({first_line(error)}): start it, or correct the URL."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise Unsupported(f"{place} must answer by HTTP, but the exchange broke: {first_line(error)}.") from None

    def _moved(self, url: httpx.URL, location: str) -> httpx.URL:
        """Where a redirect leads; Unsupported where that is another server."""
        there = url.join(location)
        if (there.scheme, there.host, there.port, there.userinfo) != (url.scheme, url.host, url.port, b""):
            raise Unsupported(
                f"{self.url} redirects to another server, {quoted(f'{there.scheme}://{there.host}')}, which treeopt does not "
                "follow: give its URL if you mean it."
            )
        return there

    async def _check(self, response: httpx.Response, place: str) -> None:
        """Raise where the status is not 200, or the body is packed."""
        status = response.status_code
        if status in (401, 403):
            raise Unsupported(f"{place} wants other credentials (status {status}): set the environment variable {KEY}.")
        if status in (404, 405, 501):
            raise NoSuchPage(f"{place} is not served (status {status}).")
        if status != 200:
            said = [self._said(piece.decode("utf-8", "replace")) async for piece in self._pieces(response, 1000)]
            raise Unsupported(f"{place} must answer with status 200, but did with {status}: {''.join(said[:1])}.")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InvalidInput(f"{place} was asked for as it is, but answers packed: ask the server directly.")

    def _said(self, error: Any) -> str:
        """What the server says of an error, without the key, which it may repeat."""
        text = str(error.get("message", error) if isinstance(error, dict) else error)
        return quoted(text.replace(self._key, "...") if self._key else text, 200)

    async def _pieces(self, response: httpx.Response, size: int | None = None) -> AsyncIterator[bytes]:
        total = 0
        async for piece in response.aiter_raw(size):
            total += len(piece)
            if total > MOST_BYTES:
                raise InvalidInput(f"{response.url} may answer with {MOST_BYTES:,} bytes, but has more.")
            yield piece


class NoSuchPage(Unsupported):
    """The server is up, but does not have what was asked for."""


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
    found, left = dict[int, Answer](), iter(range(len(prompts)))
    most = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens

    async def client() -> None:
        for place in left:
            found[place] = await server.complete(prompts[place], most[place])

    await together([client] * clients)
    return [found[place] for place in range(len(prompts))]


def _piece(choice: Mapping[Any, Any]) -> str:
    """The text of a streamed choice, thoughts of a chat with it."""
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else {"content": choice.get("text")}
    texts = [said.get(name) for name in ("reasoning_content", "reasoning", "content")]
    return "".join(one for one in texts if isinstance(one, str))
