"""A server that is up, by its URL: its pages, completions that it streams, and loads of many prompts at once.

Whatever a server answers, the caller has it in time, or one sentence that says why not. A deadline is over a whole exchange,
so that neither silence nor a drip outlasts it; the bytes are counted as they come and must not be packed, so that a short
answer cannot unpack to a long one; redirects are followed on the same server only. Nothing but the URL says where to connect:
no proxies, no .netrc. Credentials are the environment variable TREEOPT_API_KEY, which is in no message.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from treeopt.errors import InvalidInput, TreeoptError, Unsupported, first_line, quoted
from treeopt.files.bounds import loads

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
MOST_PAGE_BYTES, MOST_PAGE_LINES = 2**22, 2**16  # an engine's counters are some 200 KB in 2,000 lines
MOST_BYTES = 2**25  # of an answer's stream
MOST_LINE_BYTES = 2**20  # of one event of a stream
MOST_REDIRECTS = 3
OTHER_FILES = 100  # that a process has open beside its connections
INTERRUPTED_S = 0.05  # until an interrupt is seen
KEY = "TREEOPT_API_KEY"
API_PATHS = re.compile(r"(/v1|/metrics|/prometheus/metrics)?/*$")
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

    url               : with ?model=NAME where it serves several, as llama.cpp's router does; by default its first is meant
    body              : further fields of every request for an answer
    within_s          : seconds that a page may take
    answered_within_s : seconds that an answer to a prompt may take
    """

    within_s = 10.0
    answered_within_s = 600.0

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
        self.url = API_PATHS.sub("", str(parts.copy_with(query=None)))
        headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {self._key}"} if self._key else {})}
        limits = httpx.Limits(max_connections=None)
        is_safe = parts.scheme == "https"  # certificates take a while to load
        self._client = httpx.AsyncClient(trust_env=False, timeout=None, limits=limits, headers=headers, verify=is_safe)
        self._model = self._named = parts.params.get("model")
        self._has_chat_alone = False
        self.body: Mapping[str, Any] = {}

    async def __aexit__(self, *ended: object) -> None:
        await self._client.aclose()

    async def text(self, path: str) -> str:
        """A page, got by GET; Unsupported where there is none in time, InvalidInput where it is no text or too long."""
        async with self._response("GET", path, self.within_s) as response:
            data = b"".join([piece async for piece in self._pieces(response, MOST_PAGE_BYTES)])
        try:
            page = data.decode()
        except UnicodeDecodeError:
            raise InvalidInput(f"{self.url}{path} must be text in UTF-8, but is not.") from None
        if page.count("\n") > MOST_PAGE_LINES:
            raise InvalidInput(f"{self.url}{path} may have {MOST_PAGE_LINES:,} lines, but has more.")
        return page

    async def json(self, path: str) -> Any:
        """A page of JSON, likewise."""
        return self._parsed(await self.text(path), path)

    async def metrics(self, page: str = "/metrics") -> str:
        """The page of its counters, of the model that is meant."""
        try:
            return await self.text(f"{page}?model={quote(self._named)}" if self._named else page)
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

    async def complete(self, prompt: Prompt, max_tokens: int) -> Answer:
        """Complete a prompt greedily: messages as a chat, text and tokens as they are.

        A server that has chats alone gets a text as a message of the user.
        """
        body = {"model": await self.model(), "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self.body}
        is_chat = self._has_chat_alone if isinstance(prompt, str) else isinstance(prompt[0], Mapping)
        if not is_chat:
            try:
                return await self._streamed("/v1/completions", {**body, "prompt": prompt})
            except NoSuchPage:
                if not isinstance(prompt, str):
                    raise
                self._has_chat_alone = True
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return await self._streamed("/v1/chat/completions", {**body, "messages": messages})

    async def _streamed(self, path: str, body: Mapping[str, Any]) -> Answer:
        began = time.perf_counter()
        text, reason, count, first_s = "", "", -1, 0.0
        async with self._response("POST", path, self.answered_within_s, body) as response:
            async for event in self._events(response, path):
                if not isinstance(event, dict):
                    continue
                if event.get("error"):
                    raise Unsupported(f"{self.url}{path} answered with an error: {self._message(event['error'])}.")
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
        seconds = time.perf_counter() - began
        if not reason or count < 0:
            lacks = "say why it ended" if not reason else "say how many tokens it has (usage.completion_tokens)"
            raise InvalidInput(f"{self.url}{path} must {lacks}, but its answer was cut off before.")
        if not bool(text) <= count <= body["max_tokens"]:
            raise InvalidInput(
                f"{self.url}{path} must answer with up to {body['max_tokens']} tokens, as was asked for, but counts {count:,} "
                f"(usage.completion_tokens) in a text of {len(text):,} characters."
            )
        text = text.encode("utf-8", "replace").decode()  # JSON may hold half of a character
        return Answer(text, count, began, first_s if text else seconds, seconds)

    async def _events(self, response: httpx.Response, path: str) -> AsyncIterator[Any]:
        """The JSON of every ``data:`` line, until [DONE] or the end."""
        rest = bytearray()
        async for piece in self._pieces(response, MOST_BYTES):
            rest += piece
            lines = []
            if b"\n" in piece:
                *lines, rest = rest.split(b"\n")
            if max(map(len, [*lines, rest])) > MOST_LINE_BYTES:
                raise InvalidInput(
                    f"{self.url}{path} may stream lines of {MOST_LINE_BYTES:,} bytes, but has longer ones."
                )
            for line in lines:
                data = line.removeprefix(b"data:").strip()
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
    async def _response(
        self, method: str, path: str, within_s: float, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The response to a request, of status 200; all that happens within must be done in time."""
        import anyio
        import httpx

        place = f"{self.url}{path}"
        try:
            with anyio.fail_after(within_s):
                request = self._client.build_request(method, place, json=body)
                for _ in range(MOST_REDIRECTS + 1):
                    response = await self._client.send(request, stream=True)
                    try:
                        if response.next_request is None or method != "GET":
                            await self._check(response, place)
                            yield response
                            return
                        self._check_redirect(request.url, response.next_request.url)
                        request = response.next_request
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
        except TreeoptError:
            raise
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            raise Unsupported(f"{place} must answer by HTTP, but the exchange broke: {first_line(error)}.") from None

    def _check_redirect(self, url: httpx.URL, target: httpx.URL) -> None:
        if (target.scheme, target.netloc, target.userinfo) != (url.scheme, url.netloc, b""):
            server = quoted(f"{target.scheme}://{target.netloc.decode(errors='replace')}")
            raise Unsupported(
                f"{self.url} redirects to another server, {server}, which treeopt does not follow: give its URL if you mean it."
            )

    async def _check(self, response: httpx.Response, place: str) -> None:
        """Raise where the status is not 200, or the body is packed."""
        status = response.status_code
        if status in (401, 403):
            raise Unsupported(f"{place} wants other credentials (status {status}): set the environment variable {KEY}.")
        if status in (404, 405, 501):
            raise NoSuchPage(f"{place} is not served (status {status}).")
        if status != 200:
            pieces = [piece async for piece in self._pieces(response, MOST_PAGE_BYTES)]
            message = self._message(b"".join(pieces).decode("utf-8", "replace"))
            kind = Loading if status == 503 else Unsupported
            raise kind(f"{place} must answer with status 200, but did with {status}: {message}.")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InvalidInput(f"{place} was asked for as it is, but answers packed: ask the server directly.")

    def _message(self, error: Any) -> str:
        """What the server says of an error, without the key, which it may repeat."""
        text = str(error.get("message", error) if isinstance(error, dict) else error)
        return quoted(text.replace(self._key, "...") if self._key else text, 200)

    async def _pieces(self, response: httpx.Response, most: int) -> AsyncIterator[bytes]:
        async for piece in response.aiter_raw():
            if response.num_bytes_downloaded > most:
                raise InvalidInput(f"{response.url} may answer with {most:,} bytes, but has more.")
            yield piece


class NoSuchPage(Unsupported):
    """The server is up, but does not have what was asked for."""


class Loading(Unsupported):
    """The server is up, but does not serve yet."""


def run_async(task: Callable[[], Awaitable[T]]) -> T:
    """What an async function returns; an interrupt of the caller cancels it, and is raised when it has ended.

    It runs in a thread of its own, so also where a loop runs already, as in a notebook.
    """
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    import anyio

    is_over = Event()

    async def cancellable() -> T:  # type: ignore[return]  # nothing where it is cancelled
        with anyio.CancelScope() as scope:
            loop = asyncio.get_running_loop()

            def look() -> None:
                if is_over.is_set():
                    scope.cancel()
                loop.call_later(INTERRUPTED_S, look)

            look()
            return await task()

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(anyio.run, cancellable).result()
        finally:
            is_over.set()


async def together(tasks: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run tasks at the same time; the first TreeoptError of one ends all, and is raised."""
    import anyio

    errors = list[TreeoptError]()

    async def alone(task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except TreeoptError as error:
            errors.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(alone, task)
    if errors:
        raise errors[0]


async def drive(
    server: Server, prompts: Sequence[Prompt], *, clients: int, max_tokens: int | Sequence[int]
) -> list[Answer]:
    """The greedy answers of a server to all prompts, in their order, so many asked at once; tokens at most of all, or of each.

    Warm a server up with a load of its own before. Raises the first error of an answer, which ends all.
    """
    if not prompts:
        raise InvalidInput("A load needs at least one prompt, but got none.")
    check_open_files(clients)
    answers, places = dict[int, Answer](), iter(range(len(prompts)))
    most = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens

    async def client() -> None:
        for place in places:
            answers[place] = await server.complete(prompts[place], most[place])

    await together([client] * min(clients, len(prompts)))
    return [answers[place] for place in range(len(prompts))]


def check_open_files(clients: int) -> None:
    """Raise InvalidInput where the system does not let this process have a connection for each client."""
    with suppress(ImportError):  # Windows has no such limit
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if resource.RLIM_INFINITY != most < clients + OTHER_FILES:
            raise InvalidInput(
                f"`clients` must be at most {most - OTHER_FILES:,}, since a process may have {most:,} open files here, but got "
                f"{clients:,}: allow more by ulimit -n."
            )


def _piece(choice: Mapping[Any, Any]) -> str:
    """The text of a streamed choice, thoughts of a chat with it."""
    delta = choice.get("delta")
    message = delta if isinstance(delta, dict) else {"content": choice.get("text")}
    texts = [message.get(name) for name in ("reasoning_content", "reasoning", "content")]
    return "".join(text for text in texts if isinstance(text, str))
