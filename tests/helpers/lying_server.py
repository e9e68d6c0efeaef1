"""A server that says over HTTP whatever a test wants, or what an engine would count whose every step is known."""

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

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

    batch_size requests run, a step takes step_s; ``restarts_at`` seconds the counters begin anew. Drafts have the share ``full`` of
    the guesses that they would have if none were cut.
    """

    def __init__(
        self, survival: tuple[float, ...], step_s: float, batch_size: int = 4, restarts_at: float = 0.0, full: float = 1
    ) -> None:
        self.survival, self.step_s, self.batch_size, self.restarts_at = survival, step_s, batch_size, restarts_at
        self.began, self.full = time.monotonic(), full

    def metrics(self) -> str:
        lasted = time.monotonic() - self.began
        since = lasted - self.restarts_at if 0 < self.restarts_at < lasted else lasted + 1000
        n = self.batch_size * int(since / self.step_s)
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
