"""Servers that are launched: what is measured of them is known in closed form, and nothing of them is left."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy as np
import psutil
import pytest

from treeopt.engines.base import About
from treeopt.engines.copied import KIND
from treeopt.engines.plans import write_served
from treeopt.engines.registry import method_of
from treeopt.errors import InvalidInput, Unsupported
from treeopt.pipeline.launched import Servers
from treeopt.records.benchmark import Benchmark, launches_interval
from treeopt.records.contender import Block, Prompt
from treeopt.records.origins import Runtime
from treeopt.records.plan import for_all
from treeopt.serving import keeper, visit
from treeopt.serving.launch import Launcher
from treeopt.serving.served import Served
from treeopt.trees.draft import CopiedText

from .conftest import invoke, treeopt
from .helpers.fake_server import steps_of
from .test_no_models import run as without_models

FAKE = Path(__file__).parent / "helpers" / "fake_server.py"
ACCEPTED, TOKENS, PROMPTS = [2, 0, 1], 12, 10


def command(*more: object) -> str:
    return shlex.join([sys.executable, str(FAKE), "--port", "{port}", *map(str, more)]) + " {options}"


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """A run for vLLM that was planned from a table, with chains of 2, and prompts."""
    tmp_path = tmp_path_factory.mktemp("planned")
    (tmp_path / "table.csv").write_text("head,rank,accuracy\n1,0,0.7\n2,0,0.6\n3,0,0.1\n")
    (tmp_path / "steps.csv").write_text("batch_size,size,depth,step_ms\n" + "".join(
        f"{b},{k + 1},{k},{10 + k}\n" for b in (1, 4) for k in range(4)
    ))  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(PROMPTS)))
    run = tmp_path / "run"
    treeopt("import", tmp_path / "table.csv", "--trials", 1000, "--drafter", "draft-model", "--run", run)
    treeopt("profile", "--from-csv", tmp_path / "steps.csv", "--runtime", "vllm", "--run", run)
    treeopt("search", "--for", "vllm", "--run", run)
    return tmp_path


@pytest.fixture
def folder(planned, tmp_path) -> Path:
    return Path(shutil.copytree(planned, tmp_path, dirs_exist_ok=True))


@pytest.fixture(autouse=True)
def _counts_at_once(monkeypatch):
    """The fake server counts a step before it sends its tokens."""
    monkeypatch.setattr(visit, "SETTLE_S", 0)


def asked(folder: Path, launch: str, *more: object) -> tuple[object, ...]:
    prompts = ("--prompts", folder / "prompts.jsonl", "--no-chat-template", "--drafter", "DRAFTER")
    return ("--launch", launch, "--engine", "vllm", "--run", folder / "run", *prompts, *more)


BENCH = ("--max-new-tokens", TOKENS, "--num-prompts", PROMPTS)


@pytest.mark.long
def test_what_is_measured_is_what_the_server_does(folder):
    """Tokens per step of the counters; the speedup of steps that take up to half as long again; 3 launches of each, in turn."""
    told = command(
        "--accepted", ",".join(map(str, ACCEPTED)), "--step-ms", 8, "--dearer", 0.5, "--record", folder / "seen"
    )
    present = json.dumps({"num_speculative_tokens": 3})
    treeopt("bench", *asked(folder, told, *BENCH, "--present", f"--speculative-config {shlex.quote(present)}"))
    for size in (1, 4):
        bench = Benchmark.load(folder / "run" / f"bench-launched-batch-size-{size}.json")
        steps, wanted = steps_of(TOKENS, ACCEPTED), TOKENS - 1
        assert [c.name for c in bench.contenders] == ["plain", "chosen", "present"]
        for name in ("chosen", "present"):
            one = bench.contender(name)
            assert one.steps == PROMPTS * steps
            assert one.tokens_per_step == wanted / steps
            assert one.identical == one.compared == PROMPTS
            speedup = bench.speedup(name)
            assert 0.85 / 1.5 < speedup.value * steps / wanted < 1  # on a busy machine sleeps of both end late
            assert speedup.low < speedup.value < speedup.high
        assert bench.contender("plain").tokens_per_step == 1
        assert bench.contender("present").draft.depth == 3
        assert bench.contender("plain").token_ms[0] > 8  # and what a busy machine adds
        timed = {(b.round, *b.prompts) for b in bench.contender("plain").blocks}
        assert len(timed) == 3 * (PROMPTS - size + 1)
    launches = [json.loads(line)[2] for line in (folder / "seen").read_text().splitlines()]
    lengths = [[w for w in words if "num_spec" in w] for words in launches]
    drafted = [json.loads(words[0])["num_speculative_tokens"] if words else 0 for words in lengths]
    chosen = drafted[1]
    assert chosen >= 1
    assert drafted == [0, chosen, 3, 3, chosen, 0, 0, chosen, 3]
    assert not list((folder / "run").glob("*.partial"))


def test_other_texts_are_counted(folder):
    told = command("--accepted", "1", "--other-text")
    assert f" 0/{PROMPTS}" in invoke("bench", *asked(folder, told, *BENCH, "--batch-size", 1)).stdout


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--never-healthy", "--healthy-within", 2), "healthy within 2 s"),
        (("--nonsense",), "ended with status 2"),
        (("--dies-at", 9), "ended with status 7"),
        (("--claims", 10**15), "must answer with up to 8 tokens, as was asked for, but counts 1,000,000,000,000,000"),
    ],
)
def test_a_server_that_does_not_serve_is_said_in_a_sentence(folder, more, says):
    own, limit = (more[:1], more[1:]) if "--healthy-within" in more else (more, ())
    found = invoke("bench", *asked(folder, command(*own), *BENCH, *limit), code=1)
    assert says in found.stderr
    assert "Traceback" not in found.stderr
    assert "Its log" in found.stderr or "--claims" in more


@pytest.mark.long
def test_a_bench_that_was_stopped_goes_on(folder):
    dying = folder / "dying.py"
    dying.write_text(f"import runpy, sys, pathlib\ncount = pathlib.Path({str(folder / 'count')!r})\n"
                     "n = len(count.read_text()) if count.exists() else 0\ncount.write_text('x' * (n + 1))\n"
                     f"if n == 3: sys.exit(9)\nsys.path.insert(0, {str(FAKE.parent)!r})\n"
                     f"runpy.run_path({str(FAKE)!r}, run_name='__main__')\n")  # fmt: skip
    told = shlex.join([sys.executable, str(dying), "--port", "{port}", "--accepted", "1"]) + " {options}"
    words = ("bench", *asked(folder, told, *BENCH, "--batch-size", 1))
    assert "ended with status 9" in invoke(*words, code=1).stderr
    treeopt(*words)
    assert len((folder / "count").read_text()) == 3 + 1 + 3


def test_it_needs_no_torch(folder):
    words = map(str, asked(folder, "nowhere {port} {options}", *BENCH))
    assert "--launch must be a program" in without_models(folder, "bench", *words, code=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("serve --port {port}", "has no {options}"),
        ("serve {options}", "has no {port}"),
        ("serve {options} {port} {size}", "got {size}"),
        ("serve '{options} {port}", "as in a shell"),
    ],
)
def test_commands_that_cannot_be_filled_are_refused(text, says):
    with pytest.raises(InvalidInput, match=says):
        Launcher.parse(text)


def test_a_program_that_is_not_there_is_said(tmp_path):
    with (
        pytest.raises(Unsupported, match="cannot be started"),
        Launcher.parse("nowhere {options} {port}").launched([], tmp_path / "log"),
    ):
        pass


def test_a_server_answers_where_a_loop_runs(tmp_path):
    """As in a notebook, where it was refused: one thread has one loop."""
    server = Served(Runtime(name="vllm"), Launcher.parse(command()), "plain", (), TOKENS, tmp_path / "launches", 0)

    async def cell() -> list[Block]:
        return server.decode([Prompt("say it")], None)

    try:
        (block,) = anyio.run(cell)
    finally:
        server.renew()
    assert block.answers[0].tokens == TOKENS


@pytest.fixture
def kept(tmp_path):
    """Starts a keeper of a Python program, which writes its process id into a file."""
    keepers = []

    def start(program: str) -> tuple[subprocess.Popen[bytes], int]:
        words = [sys.executable, "-c", f"import os; open('pid', 'w').write(str(os.getpid()) + '.')\n{program}"]
        told = {"words": words, "environment": {}, "log": str(tmp_path / "log"), "port": 0}
        pipe = subprocess.PIPE
        one = subprocess.Popen(
            [sys.executable, keeper.__file__, json.dumps(told)], cwd=tmp_path, stdin=pipe, stdout=pipe
        )
        keepers.append(one)
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith(".")):
            time.sleep(0.02)
        return one, int((tmp_path / "pid").read_text()[:-1])

    yield start
    for one in keepers:
        one.communicate(timeout=30)


def test_a_log_is_bounded(kept, tmp_path):
    """A server that printed without end filled 3 GB in 4 s; the first and the last are kept."""
    size = 3 * keeper.LOG_BYTES
    process, _ = kept(f"print('the first')\nfor _ in range({size // 1000}): print('x' * 999)\nprint('the last')")
    assert process.wait(30) == 0
    assert (tmp_path / "log").stat().st_size <= 2.1 * keeper.LOG_BYTES
    lines = (tmp_path / "log").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("the first", "the last")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot ask to end with its parent")
def test_a_server_ends_with_its_keeper(kept):
    process, server = kept("import time; time.sleep(600)")
    process.kill()
    process.wait()
    last = time.monotonic() + 5
    while psutil.pid_exists(server) and psutil.Process(server).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < last
        time.sleep(0.02)


def test_an_interval_covers_what_launches_hide():
    """Launches that differ by 10 % move a ratio of rates: 95 % of the intervals should have the true one, 1.2.

    By chance alone the share of 200 intervals that have it is below 0.89 once in 10,000 times if it is 0.95.
    """
    rng, hit = np.random.default_rng(0), 0

    def blocks(rate: float) -> list[Block]:
        found = []
        for launch in range(3):
            luck = rng.lognormal(0, 0.1)
            found += [
                Block(
                    round=launch,
                    prompts=[p],
                    tokens=100,
                    steps=50,
                    decode_s=100 / (rate * luck * rng.lognormal(0, 0.05)),
                )
                for p in range(20)
            ]
        return found

    for _ in range(200):
        low, high = launches_interval(blocks(120), blocks(100))
        hit += low < 1.2 < high
    assert hit >= 0.89 * 200
    assert launches_interval([b for b in blocks(1) if b.round < 2], blocks(1)) is None


def left_of(folder: Path, since: set[int]) -> tuple[list[psutil.Process], list[int]]:
    """Processes of the fake server and of its children, and ports that are still listened at."""
    lines = (folder / "seen").read_text().splitlines() if (folder / "seen").exists() else []
    ports = {json.loads(line)[1] for line in lines}
    processes = []
    for one in psutil.process_iter(["pid", "cmdline"]):
        words = one.info["cmdline"] or []
        if one.pid not in since and any("time.sleep(600)" in w or str(folder) in w for w in words):
            processes.append(one)
    found = psutil.net_connections("tcp")  # of another test's server, who may get the port next, the process is no news
    heard = {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN and one.pid not in since}
    return processes, sorted(ports & heard)


def killed(folder: Path, number: int, wait_s: float, words: Sequence[object], *, serves: bool = False):
    """Processes and ports that are left of a bench that was sent a signal after a while, when its keeper has had its time.

    serves : whether the while begins when its first server is up
    """
    since = {one.pid for one in psutil.process_iter()}
    bench = subprocess.Popen([sys.executable, "-m", "treeopt", "bench", *map(str, words)], stderr=subprocess.DEVNULL)
    while serves and not (folder / "seen").exists():
        assert bench.poll() is None
        time.sleep(0.05)
    time.sleep(wait_s)
    os.kill(bench.pid, number)
    bench.wait()
    last = time.monotonic() + 20
    while any(found := left_of(folder, since)) and time.monotonic() < last:
        time.sleep(0.1)
    for one in found[0]:
        one.kill()
    return found


def test_nothing_is_left_of_a_bench_that_is_killed(folder):
    told = command("--accepted", "1", "--step-ms", 5, "--forks", "mild", "--record", folder / "seen")
    assert killed(folder, signal.SIGKILL, 0.5, asked(folder, told, *BENCH), serves=True) == ([], [])


@pytest.mark.long
def test_nothing_is_left_after_20_kills_at_random_moments(folder):
    """Every fourth may come before a server is up, however busy the machine is."""
    rng, numbers = random.Random(0), (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    for i in range(20):
        (folder / "seen").unlink(missing_ok=True)
        forks = "stubborn" if i % 5 == 0 else "mild"
        told = command("--accepted", "1", "--step-ms", 5, "--forks", forks, "--record", folder / "seen")
        words, serves = asked(folder, told, *BENCH), i % 4 > 0
        assert killed(folder, numbers[i % 3], rng.uniform(0, 3), words, serves=serves) == ([], [])


def test_a_server_has_the_environment_of_its_rule(tmp_path):
    """The model runner of vLLM decides how n-grams are looked up; the user's command may have assignments too."""
    servers = Servers(Runtime(name="vllm"), Launcher.parse("CUDA=0 serve {options} {port}"), TOKENS, tmp_path)
    draft = CopiedText.of("vllm:ngram-v1", {"num_speculative_tokens": 3}, 4, 1)
    written = write_served(method_of("vllm", KIND), for_all(draft), About(num_heads=4))
    server = servers.of("chosen", written.options, environment=written.environment)
    assert server.launcher.environment == {"CUDA": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert servers.of("usual", written.options, environment=written.environment) is server
    assert [servers.of("chosen", (word,)).setting for word in "ab"] == ["chosen-2", "chosen-3"]
