"""A server that says over HTTP whatever a test wants, or what an engine would count whose every step is known."""

import json
import re
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, repeat

Answer = Callable[[str], "bytes | Iterable[bytes]"]


class Lying(socketserver.ThreadingTCPServer):
    """Answers each request with the bytes of ``answer(path)`` and hangs up; ``asked`` has the requests' first lines."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked, self.heads = answer, [], []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(socketserver.StreamRequestHandler):
    server: Lying

    def handle(self) -> None:
        with suppress(OSError):
            line, length, head = self.rfile.readline().decode(), 0, []
            if not line:
                return  # who connected has no patience left
            while header := self.rfile.readline().strip():
                head.append(header.decode())
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            self.rfile.read(length)
            self.server.asked.append(line.split()[0])
            self.server.heads.append(head)
            told = self.server.answer(line.split()[1])
            for piece in [told] if isinstance(told, bytes) else told:
                self.wfile.write(piece)
                self.wfile.flush()


@contextmanager
def lying(answer: Answer) -> Iterator[Lying]:
    server = Lying(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def page(body: str | bytes, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", "Connection: close"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


MODELS = page(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}))


class Engine:
    """vLLM's counters at a constant load: every request-step drafts K guesses, of which S_k are right up to k.

    batch_size requests run, a step takes step_s, and a second passes from look to look; from the look ``restarts_at`` on counters begin
    anew. Drafts have the share ``full`` of the guesses that they would have if none were cut.
    """

    def __init__(
        self, survival: tuple[float, ...], step_s: float, batch_size: int = 4, restarts_at: int = 0, full: float = 1
    ) -> None:
        self.survival, self.step_s, self.batch_size, self.restarts_at = survival, step_s, batch_size, restarts_at
        self.lasted, self.full = 0, full

    def metrics(self) -> str:
        self.lasted += 1
        since = self.lasted - self.restarts_at if 0 < self.restarts_at < self.lasted else self.lasted + 1000
        n = self.batch_size * round(since / self.step_s)
        reached = [int(n * share) for share in self.survival]
        tokens = n + sum(reached) + self.batch_size
        said = {"num_requests_running": self.batch_size, "generation_tokens_total": tokens,
                "time_to_first_token_seconds_count": self.batch_size, "inter_token_latency_seconds_count": n,
                "inter_token_latency_seconds_sum": n * self.step_s}  # fmt: skip
        if reached:
            said |= {"spec_decode_num_drafts_total": n, "spec_decode_num_draft_tokens_total": int(n * len(reached) * self.full),
                     "spec_decode_num_accepted_tokens_total": sum(reached)}  # fmt: skip
        lines = [f'vllm:{name}{{engine="0",model_name="m"}} {float(value)}' for name, value in said.items()]
        place = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{}"}} {}'
        return "\n".join(["up 1", *lines, *(place.format(*at) for at in enumerate(map(float, reached)))]) + "\n"

    def __call__(self, path: str) -> bytes:
        return {"/v1/models": MODELS, "/metrics": page(self.metrics())}.get(path) or page("", "404 Not Found")


def metrics_of(text: str, **values: object) -> str:
    """A page of counters with the values of some lines replaced; a function is told the value."""
    lines = []
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        for part, new in values.items():
            if part in name:
                value = new(float(value)) if callable(new) else new
        lines.append(f"{name} {value}")
    return "\n".join(lines) + "\n"


def slowly(*pieces: bytes, every_s: float = 0.02) -> Iterator[bytes]:
    yield from pieces[:-1]
    while True:
        time.sleep(every_s)
        yield pieces[-1]


def stream_of(*events: object) -> bytes:
    return page("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")


HEAD = b"HTTP/1.1 200 OK\r\n"
PIECE = {"choices": [{"delta": {"content": "a b"}, "finish_reason": "length"}]}
GOOD = Engine((0.7, 0.5, 0.3), 0.02).metrics()
BOMB = zlib.compress(b"0" * 2**24, wbits=31)
TRANSPORT = {  # whatever is asked for, these bytes come
    "silence": lambda: slowly(b"", b""),
    "drip": lambda: slowly(HEAD + b"\r\n", b"#"),
    "drip of headers": lambda: slowly(HEAD, b"a: b\r\n"),
    "endless": lambda: (HEAD + b"\r\n", *repeat(b"x" * 65536, 800)),
    "endless headers": lambda: (HEAD, *repeat(b"a: " + b"b" * 1000 + b"\r\n", 2000)),
    "endless line": lambda: (HEAD, b"a: ", *repeat(b"b" * 65536, 200)),
    "continue for ever": lambda: repeat(b"HTTP/1.1 100 Continue\r\n\r\n", 200_000),
    "32 MiB of line breaks": lambda: page(b"\n" * 2**25),
    "3 MiB of line breaks": lambda: page(GOOD.encode() + b"\n" * (3 * 2**20)),
    "10 GB announced": lambda: page(GOOD, length=10**10),
    "cut body": lambda: page(GOOD, length=len(GOOD) + 1),
    "cut headers": lambda: HEAD + b"Content-Le",
    "empty": lambda: b"",
    "no HTTP": lambda: b"\x16\x03\x01\x00\xff\xfe garbage\r\n\r\n",
    "bad chunks": lambda: HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nabc\r\n",
    "two lengths": lambda: HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "gzip bomb": lambda: page(BOMB, "200 OK", "Content-Encoding: gzip"),
    "bombs in one another": lambda: page(zlib.compress(BOMB, wbits=31), "200 OK", "Content-Encoding: gzip, gzip"),
    "packed by what nobody knows": lambda: page(GOOD, "200 OK", "Content-Encoding: \x1b[2J"),
    "redirect to another host": lambda: page("", "302 Found", "Location: http://127.0.0.2:1/metrics"),
    "redirect to a file": lambda: page("", "302 Found", "Location: file:///etc/passwd"),
    "redirect with credentials": lambda: page("", "302 Found", "Location: http://u:p@127.0.0.1/x"),
    "redirect in circles": lambda: page("", "302 Found", "Location: /metrics"),
    "redirect to nowhere": lambda: page("", "302 Found", "Location: http://[::1"),
    "server error": lambda: page("\x1b[31m no", "500 Oh"),
    "endless error": lambda: slowly(b"HTTP/1.1 500 Oh\r\n\r\n", b"x"),
    "unauthorised": lambda: page("", "401 No"),
    "nothing": lambda: page("", "204 No Content"),
    "HTML": lambda: page("<html><body>Welcome</body></html>", "200 OK", "Content-Type: text/html"),
    "no UTF-8": lambda: page(b"vllm:num_requests_running \xff\xfe"),
    "zeros": lambda: page(b"\0" * 10000),
    "nested": lambda: page("[" * 200_000),
    "another JSON": lambda: page('{"data": [{"id": 7}]}'),
}  # fmt: skip
COUNTS = {  # an honest page of counters and the number of the look, to the page that is shown
    "negative": lambda text, look: metrics_of(text, num_drafts_total=-5),
    "NaN": lambda text, look: metrics_of(text, generation_tokens_total="NaN"),
    "infinite": lambda text, look: metrics_of(text, per_pos="+Inf"),
    "astronomic": lambda text, look: metrics_of(text, inter_token="1e300"),
    "no number": lambda text, look: metrics_of(text, num_requests_running="many"),
    "twice": lambda text, look: text + text,
    "20,000 series": lambda text, look: "".join(f'vllm:spec_x_total{{a="{i}"}} 1\n' for i in range(20_000)),
    "a long line": lambda text, look: f'vllm:num_requests_running{{a="{"x" * 10**6}"}} 1\n',
    "braces": lambda text, look: 'vllm:num_requests_running{a="b 1\n',
    "another engine": lambda text, look: "llamacpp:requests_processing 1\n",
    "a position too many": lambda text, look: text.replace('position="1"', 'position="11"'),
    "positions that rise": lambda text, look: metrics_of(text, position=10**9 * look),
    "tokens stand still": lambda text, look: metrics_of(text, generation_tokens_total=10**9),
    "steps stand still": lambda text, look: metrics_of(text, seconds_count=10**9),
    "seconds stand still": lambda text, look: metrics_of(text, seconds_sum=10**5),
    "seconds of 1e-300": lambda text, look: metrics_of(text, seconds_sum=look * 1e-300),
    "tokens that jump": lambda text, look: metrics_of(text, generation_tokens_total=lambda n: n + 10**9 * (look // 3)),
    "steps that jump": lambda text, look: metrics_of(text, token_latency_seconds_count=lambda n: n + 10**9 * (look // 3)),
    "seconds that jump": lambda text, look: metrics_of(text, seconds_sum=lambda n: n + 10**9 * (look // 3)),
    "seconds that creep": lambda text, look: metrics_of(text, seconds_sum=lambda n: n / 5474),
    "tokens and steps that jump": lambda text, look: metrics_of(
        text, generation_tokens_total=lambda n: 5474 * n, token_latency_seconds_count=lambda n: 5474 * n
    ),
    "all that jumps": lambda text, look: metrics_of(text, _total=lambda n: n * 10.0**look, seconds=lambda n: n * 10.0**look),
    "guesses without number": lambda text, look: metrics_of(text, draft_tokens_total=10**12 * (look + 1)),
    "more accepted than guessed": lambda text, look: metrics_of(text, accepted_tokens_total=10**12 * (look + 1)),
    "drafts without tokens": lambda text, look: metrics_of(text, num_drafts_total=10**12 * (look + 1)),
    "10^12 requests": lambda text, look: metrics_of(text, num_requests_running=10**12),
    "half of a request": lambda text, look: metrics_of(text, num_requests_running=0.5),
    "a restart at every look": lambda text, look: metrics_of(text, _total=1000 - look, seconds=1000 - look),
    "time that goes back": lambda text, look: metrics_of(text, seconds_sum=1000 - look),
    "a series that comes and goes": lambda text, look: re.sub(r".*num_drafts.*\n", "", text) if look % 2 else text,
}  # fmt: skip
STREAMS = {  # answers to prompts
    "an empty stream": b"",
    "a cut stream": b"data: {",
    "a list": stream_of([1]),
    "no reason": stream_of({"choices": [{"text": "a"}]}),
    "no count": stream_of(PIECE),
    "an error": stream_of({"error": {"message": "\x1b too long"}}),
    "a count that is none": stream_of({"choices": 7, "usage": {"completion_tokens": "x"}}),
    "10^15 tokens": stream_of(PIECE, {"choices": [], "usage": {"completion_tokens": 10**15}}),
    "text without tokens": stream_of(PIECE, {"choices": [], "usage": {"completion_tokens": 0}}),
    "fewer tokens than none": stream_of(PIECE, {"choices": [], "usage": {"completion_tokens": -5}}),
    "a long event": page(b"data: " + b"a" * 2**21),
    "a refusal": page('{"error": {"message": "the prompt is too long"}}', "400 Bad Request"),
}
ANSWERED = stream_of(PIECE, {"choices": [], "usage": {"completion_tokens": 2}})


class Liar(Engine):
    """An honest engine but for one lie, by its name in the tables above, from some look on."""

    def __init__(self, lie: str, honest_looks: int = 0) -> None:
        super().__init__((0.7, 0.5, 0.3), 0.002)
        self.lie, self.honest_looks, self.looks = lie, honest_looks, count()

    def __call__(self, path: str) -> "bytes | Iterable[bytes]":
        if path.startswith("/v1/") and path != "/v1/models":
            return STREAMS.get(self.lie, ANSWERED)
        look = next(self.looks) - self.honest_looks if path == "/metrics" else -1
        if look >= 0 and self.lie in TRANSPORT:
            return TRANSPORT[self.lie]()
        if look >= 0 and self.lie in COUNTS:
            return page(COUNTS[self.lie](self.metrics(), look))
        return super().__call__(path)
