"""A server of the OpenAI-compatible API that decodes nothing: its texts, its counters and its times are known in closed form.

Every word of an answer is a token. A step takes --step-ms, and with --spec-length K accepts --accepted guesses in turn,
beginning anew with every answer; counters have vLLM's names.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from asyncio import StreamReader, StreamWriter

HOLD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "stubborn" else signal.SIG_DFL)
if os.fork():
    os._exit(0)
os.setsid()
time.sleep(600)
"""
FINISHED = {"choices": [{"text": "", "finish_reason": "length"}]}


def words_of(prompt: str, n: int, *, salt: str = "") -> list[str]:
    number = int(hashlib.sha256((prompt + salt).encode()).hexdigest(), 16)
    return [f"w{number * (i + 1) % 10007} " for i in range(n)]


def steps_of(tokens: int, accepted: list[int]) -> int:
    """Steps that emit all tokens but the first."""
    left, steps = tokens - 1, 0
    for n in itertools.cycle(accepted):
        if left <= 0:
            return steps
        left, steps = left - 1 - n, steps + 1
    raise AssertionError


class Fake:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.answered = asked, 0
        self.accepted = [int(n) for n in asked.accepted.split(",")] if asked.spec_length else [0]
        self.drafts, self.drafted, self.reached = 0, 0, [0] * asked.spec_length

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        length = next(
            (int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        try:
            await self.answer(method, path, body, writer)
        finally:
            writer.close()

    async def answer(self, method: str, path: str, body: dict, writer: StreamWriter) -> None:
        if path == "/health":
            return self.say(writer, 503 if self.asked.never_healthy else 200, "")
        if path == "/v1/models":
            return self.say(writer, 200, json.dumps({"data": [{"id": "fake"}]}))
        if path == "/metrics":
            return self.say(writer, 200, self.metrics())
        if path != "/v1/completions":
            return self.say(writer, 404, "")
        self.answered += 1
        if self.answered == self.asked.dies_at:
            print("it fell over", flush=True)
            os._exit(7)
        other = self.asked.other_text and self.asked.spec_length
        words = words_of(body["prompt"], body["max_tokens"], salt="other" if other else "")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        self.event(writer, words[0])
        place, length = 1, self.asked.spec_length
        if self.asked.by_request:
            length = min(length, body.get("speculative.n_max", length))
        dearer = self.asked.dearer * bool(length) + self.asked.per_guess * length
        for n in (min(n, length) for n in itertools.cycle(self.accepted)):
            if place >= len(words):
                break
            await asyncio.sleep(1e-3 * self.asked.step_ms * (1 + dearer))
            self.drafts += bool(self.reached)
            self.drafted += length
            self.reached = [count + (i < n) for i, count in enumerate(self.reached)]
            self.event(writer, "".join(words[place : place + 1 + n]))
            place += 1 + n
        writer.write(f"data: {json.dumps(FINISHED)}\n\n".encode())
        usage = {"choices": [], "usage": {"completion_tokens": self.asked.claims or len(words)}}
        writer.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return await writer.drain()

    def event(self, writer: StreamWriter, text: str) -> None:
        writer.write(f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode())

    def say(self, writer: StreamWriter, status: int, text: str) -> None:
        data = text.encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)

    def metrics(self) -> str:
        at = 'engine="0",model_name="fake"'
        lines = [f"vllm:num_requests_running{{{at}}} 0.0"]
        if self.reached:
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{at}}} {self.drafts}.0",
                f"vllm:spec_decode_num_draft_tokens_total{{{at}}} {self.drafted}.0",
                f"vllm:spec_decode_num_accepted_tokens_total{{{at}}} {sum(self.reached)}.0",
            ]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{{at},position="{i}"}} {n}.0' for i, n in enumerate(self.reached)]
        return "\n".join(lines) + "\n"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-config", type=json.loads, default={})
    parser.add_argument("--accepted", default="0")
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--dearer", type=float, default=0.0, help="share by which a step that speculates takes longer")
    parser.add_argument("--per-guess", type=float, default=0.0, help="share by which each guess lengthens a step")
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="standard deviation of its steps' logarithm, drawn once"
    )
    parser.add_argument("--by-request", action="store_true", help="heed speculative.n_max of a request")
    parser.add_argument("--spec-draft-n-max", type=int, default=0)
    parser.add_argument("--spec-draft-n-min", type=int)
    parser.add_argument("--at-least", type=int, default=0, help="guesses of every draft, whatever the length is set to")
    parser.add_argument("--refuses", type=int, help="a length with which it does not start")
    parser.add_argument("--claims", type=int, help="tokens that every answer is said to have")
    parser.add_argument("--dies-at", type=int)
    parser.add_argument("--never-healthy", action="store_true")
    parser.add_argument("--other-text", action="store_true")
    parser.add_argument("--forks", choices=("stubborn", "mild"))
    parser.add_argument("--record")
    asked = parser.parse_args()
    asked.step_ms *= random.lognormvariate(0, asked.jitter)
    asked.spec_length = max(
        asked.speculative_config.get("num_speculative_tokens", asked.spec_draft_n_max), asked.at_least
    )
    if asked.spec_length == asked.refuses:
        sys.exit("it is too long")
    if asked.record:
        with open(asked.record, "a", encoding="utf-8") as file:
            file.write(json.dumps([os.getpid(), asked.port, sys.argv[1:]]) + "\n")
    if asked.forks:
        subprocess.Popen([sys.executable, "-c", HOLD, asked.forks])
        if asked.forks == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = await asyncio.start_server(Fake(asked).serve, "127.0.0.1", asked.port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
