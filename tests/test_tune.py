"""treeopt tune against servers whose every step is known, and against servers that lie."""

from __future__ import annotations

import itertools
import json
import operator
import re
import time
import zlib
from itertools import count, repeat

import anyio
import pytest
from click.testing import CliRunner

from treeopt.cli import cli
from treeopt.errors import TreeoptError
from treeopt.pipeline.tune import tune
from treeopt.records.rundir import RunDirectory
from treeopt.report.server_table import first_line_of
from treeopt.serving import watch
from treeopt.serving.client import KEY, Server
from treeopt.serving.watch import Watching

from .helpers.lying_server import MODELS, Engine, lying, page

SURVIVAL = (0.7, 0.5, 0.3)
FAST = 0.15


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory):
    """What is imported at first is no part of the time that a test takes."""
    with lying(Engine(SURVIVAL, 0.002)) as server:
        invoke("tune", server.url, "--minutes", "0.004", "--run", tmp_path_factory.mktemp("warm") / "run")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Scrapes every twentieth second, and less patience."""
    monkeypatch.setattr(watch, "EVERY_S", 0.05)
    monkeypatch.setattr(watch, "BLOCK_S", 0.15)
    monkeypatch.setattr(Server.text, "__defaults__", (FAST,))
    monkeypatch.setattr(Server.json, "__defaults__", (FAST,))
    monkeypatch.setattr(Server.metrics, "__defaults__", ("/metrics", FAST))


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, results and talk of a command; a traceback fails."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_it_says_what_the_counters_say_and_what_speculation_brings(run):
    """2.5 tokens in a step of 2 ms beside one in 1.2 ms: 1.5 times as fast."""
    with lying(Engine(SURVIVAL, 0.002)) as server, lying(Engine((), 0.0012)) as plain:
        found = tune(run, server.url, Watching(minutes=0.015, plain=plain.url, drafter="eagle3"))
        assert set(server.asked + plain.asked) == {"GET"}
    before, after = ((run.path / name).read_text() for name in ("before.txt", "after.txt"))
    drafts, *reached = (
        float(new.split()[-1]) - float(old.split()[-1])
        for old, new in zip(before.splitlines(), after.splitlines(), strict=True)
        if "num_drafts_total" in old or "per_pos" in old
    )
    rates = (count / before for before, count in itertools.pairwise([drafts, *reached]))  # survival is their product
    assert found.survival == list(itertools.accumulate(rates, operator.mul))
    assert found.tokens_per_step == pytest.approx(2.5, rel=0.01)
    assert found.paces[4].step_ms == pytest.approx(2, rel=1e-6)
    assert found.over_plain.value == pytest.approx(1.5, rel=0.02)
    assert found.over_plain.low <= 1.5 * 1.02
    assert found.over_plain.high >= 1.5 / 1.02
    assert first_line_of(found).startswith("Speculation brings now: 1.")
    assert '"num_speculative_tokens": 3' in found.command
    assert run.report.exists()
    assert run.read_profile().settings == [(4, 0)]


def test_where_speculation_costs_the_plan_is_to_serve_without(run, tmp_path):
    """The other server was watched before; 1.2 tokens in a step of 20 ms beside one in 10 ms."""
    with lying(Engine((), 0.01)) as plain:
        alone = tune(RunDirectory(tmp_path / "plain"), plain.url, Watching(minutes=0.015))
    assert first_line_of(alone) == "The server decodes without speculation now."
    with lying(Engine((0.2,), 0.02)) as server:
        found = tune(
            run, server.url, Watching(minutes=0.015, plain=str(tmp_path / "plain" / "scrapes.jsonl"), drafter="eagle3")
        )
    assert found.over_plain.value == pytest.approx(0.6, rel=0.02)
    assert first_line_of(found).startswith("Speculation costs now: 0.6")
    assert found.command == "vllm serve MODEL"


@pytest.mark.parametrize("options", [[], ["--plain", "scrapes.jsonl", "--overwrite"]])
def test_recordings_are_not_replaced(run, monkeypatch, options):
    """Another look at a server needs --overwrite, and never takes the plain server's file, which it reads; it is said at once."""
    run.path.mkdir(exist_ok=True)
    monkeypatch.chdir(run.path)
    with lying(Engine((), 0.01)) as plain:
        tune(run, plain.url, Watching(minutes=0.015))
        before = (run.path / "scrapes.jsonl").read_bytes()
        code, _, said = invoke("tune", plain.url, "--minutes", "60", "--run", run.path, *options)
    assert (code, (run.path / "scrapes.jsonl").read_bytes()) == (1, before)
    assert ("would be replaced" if options else "only with --overwrite") in said


@pytest.mark.parametrize("full", [0.99, 0.9])
def test_drafts_that_the_ends_of_answers_cut_are_planned_by_their_length(run, full):
    """Nothing was planned for llama-server, whose last drafts are shorter; where many are, steps are of no one length."""
    with lying(Engine(SURVIVAL, 0.002, full=full)) as server, lying(Engine((), 0.0012)) as plain:
        found = tune(run, server.url, Watching(minutes=0.015, plain=plain.url, drafter="eagle3"))
    assert (found.command is not None and '"num_speculative_tokens": 3' in found.command) == (full == 0.99)


@pytest.mark.parametrize("printed", [7, 3])
def test_a_step_has_the_rows_that_are_served_where_the_last_guesses_are_never_right(run, printed):
    """1.85 tokens in a step of 3 ms beside one in 2: a step of 8 rows was read as one of 5, or of 4 where only three positions are
    printed. Shorter drafts have nearly as many tokens: 1.8 in 16/7 ms, if every guess takes as long."""
    engine = Engine((0.6, 0.2, 0.05, 0, 0, 0, 0), 0.003)

    def answer(path: str) -> bytes:
        if path != "/metrics":
            return engine(path)
        lines = engine.metrics().splitlines(keepends=True)
        return page("".join(line for line in lines if not re.search(rf'position="[{printed}-9]"', line)))

    with lying(answer) as server, lying(Engine((), 0.002)) as plain:
        found = tune(run, server.url, Watching(minutes=0.015, plain=plain.url, drafter="eagle3"))
    assert any("2 guesses would have 1.28 times the throughput" in text for text in found.unknown)
    assert found.tokens_per_step == pytest.approx(1.85, rel=0.01)
    assert [(point.size, point.depth) for point in run.read_profile().points] == [(8, 7)]
    assert '"num_speculative_tokens": 7' in found.command


def test_without_plain_it_says_what_a_step_may_cost_and_plans_nothing(run):
    with lying(Engine((0.7, 0.5, 0.35), 0.002)) as server:
        code, out, said = invoke("tune", server.url, "--minutes", "0.01", "--run", run.path)
    assert code == 0
    assert "it pays while its step takes less than 2.5" in " ".join(out.split())
    assert "What a plain step takes is not known" in said
    assert run.calibration.exists()
    assert not run.plan.exists()


def test_a_restart_is_said_and_only_what_follows_counts(run):
    with lying(Engine(SURVIVAL, 0.002, restarts_at=0.6)) as server:
        found = tune(run, server.url, Watching(minutes=0.015))
    assert watch.RESTARTED in found.unknown
    assert found.survival == pytest.approx(SURVIVAL, abs=0.01)
    assert found.tokens_per_step == pytest.approx(2.5, rel=0.01)
    assert max(pace.blocks.max() for pace in found.paces.values()) < 1e5  # no jump from before


def test_prompts_are_sent_only_if_asked_for(run, tmp_path):
    engine = Engine(SURVIVAL, 0.02)
    events = [
        {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 1}},
    ]
    stream = page("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    with lying(lambda path: stream if path == "/v1/chat/completions" else engine(path)) as server:
        tune(run, server.url, Watching(minutes=0.005, drive=str(prompts), clients=(1, 2)))
        assert set(server.asked) == {"GET", "POST"}


def metrics(**values: object) -> bytes:
    """A page of vLLM's with some values replaced."""
    text = Engine(SURVIVAL, 0.02).metrics()
    for name, value in values.items():
        text = "\n".join(f"{line.rpartition(' ')[0]} {value}" if name in line else line for line in text.split("\n"))
    return page(text)


def slowly(*pieces: bytes, every_s: float = 0.02):
    yield from pieces[:-1]
    while True:
        time.sleep(every_s)
        yield pieces[-1]


HEAD = b"HTTP/1.1 200 OK\r\n"
GOOD = Engine(SURVIVAL, 0.02).metrics()
BOMB = zlib.compress(b"0" * 2**24, wbits=31)
LIES = {
    "silence": lambda: slowly(b"", b""),
    "drip": lambda: slowly(HEAD + b"\r\n", b"#"),
    "drip of headers": lambda: slowly(HEAD, b"a: b\r\n"),
    "endless": lambda: (HEAD + b"\r\n", *repeat(b"x" * 65536, 800)),
    "endless headers": lambda: (HEAD, *repeat(b"a: " + b"b" * 1000 + b"\r\n", 2000)),
    "endless line": lambda: (HEAD, b"a: ", *repeat(b"b" * 65536, 200)),
    "continue for ever": lambda: repeat(b"HTTP/1.1 100 Continue\r\n\r\n", 200_000),
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
COUNTS = {
    "negative": lambda: metrics(num_drafts_total=-5),
    "NaN": lambda: metrics(generation_tokens_total="NaN"),
    "infinite": lambda: metrics(per_pos="+Inf"),
    "astronomic": lambda: metrics(inter_token="1e300"),
    "no number": lambda: metrics(num_requests_running="many"),
    "twice": lambda: page(GOOD + GOOD),
    "20,000 series": lambda: page("".join(f'vllm:spec_x_total{{a="{i}"}} 1\n' for i in range(20_000))),
    "a long line": lambda: page(f'vllm:num_requests_running{{a="{"x" * 10**6}"}} 1\n'),
    "braces": lambda: page('vllm:num_requests_running{a="b 1\n'),
    "another engine": lambda: page("llamacpp:requests_processing 1\n"),
    "a position too many": lambda: page(GOOD.replace('position="1"', 'position="11"')),
    "positions that rise": lambda: metrics(position=10**9),
}
CASES = [
    *(("first", name) for name in LIES | COUNTS),
    *(("later", name) for name in ("silence", "endless", "cut body", "gzip bomb", *COUNTS)),
    *(pytest.param("models", name, marks=pytest.mark.long) for name in LIES),
    *(pytest.param("later", name, marks=pytest.mark.long) for name in LIES),
]


@pytest.mark.parametrize(("place", "name"), CASES)
def test_a_server_that_lies_is_one_sentence_in_the_time_given(run, place, name):
    engine, asked = Engine(SURVIVAL, 0.002), count()
    lie = (LIES | COUNTS)[name]

    def answer(path):
        if place == "models":
            return lie() if path == "/v1/models" else engine(path)
        is_due = path == "/metrics" and next(asked) >= (3 if place == "later" else 0)
        return lie() if is_due else engine(path)

    began = time.monotonic()
    with lying(answer) as server:
        code, _, said = invoke("tune", server.url, "--minutes", "0.004", "--run", run.path)
        assert time.monotonic() - began < 4
        assert set(server.asked) == {"GET"}
    assert "Traceback" not in said
    assert "\x1b" not in said
    if place == "later":  # what was seen before is kept, unless it contradicts itself
        assert code == 0 or said.count("treeopt: ") == 1
    elif name not in ("10 GB announced", "another engine", "a position too many", "positions that rise"):
        assert code == 1
        assert said.startswith("treeopt: ")
        assert len(said.strip().splitlines()) == 1
        assert len(said) < 600


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"data: {",
        b"data: [1]\n\n",
        b'data: {"choices": [{"text": "a"}]}\n\n',
        b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
        b'data: {"error": {"message": "\x1b too long"}}\n\n',
        b'data: {"choices": 7, "usage": {"completion_tokens": "x"}}\n\n',
        b"data: " + b"a" * 2**21,
    ],
)
def test_a_stream_that_is_damaged_is_one_sentence(body):
    async def ask(url):
        async with Server(url) as server:
            return await server.complete("x", 4, within_s=2)

    with (
        lying(lambda path: MODELS if path == "/v1/models" else page(body)) as server,
        pytest.raises(TreeoptError) as caught,
    ):
        anyio.run(ask, server.url)
    assert str(caught.value).isprintable()


def test_the_key_goes_to_the_server_alone_and_into_no_message_or_file(run, monkeypatch):
    monkeypatch.setenv(KEY, "sesame-open")
    engine = Engine(SURVIVAL, 0.02)
    with lying(engine) as server:
        tune(run, server.url, Watching(minutes=0.005))
        assert all("bearer sesame-open" in "\n".join(head).lower() for head in server.heads)
    for file in run.path.rglob("*"):
        assert file.is_dir() or b"sesame" not in file.read_bytes()
    with lying(lambda path: page("your key sesame-open is wrong", "500 No")) as server:
        _, _, said = invoke("tune", server.url, "--overwrite", "--run", run.path)
    assert "sesame" not in said
    _, _, said = invoke("tune", "http://me:secret@localhost", "--run", "other")
    assert "secret" not in said
    assert KEY in said


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]\n", '{"at_s": -1, "metrics": ""}\n', '{"at_s": 0, "metrics": "vllm:num_requests_running x"}\n' * 2],
)
def test_a_damaged_file_of_scrapes_is_one_sentence(run, tmp_path, text):
    (tmp_path / "scrapes.jsonl").write_text(text)
    with lying(Engine(SURVIVAL, 0.02)) as server:
        code, _, said = invoke(
            "tune", server.url, "--minutes", "0.005", "--plain", tmp_path / "scrapes.jsonl", "--run", run.path
        )
    assert (code, said.count("treeopt: "), len(said.splitlines()) < 9) == (1, 1, True) or text == ""
