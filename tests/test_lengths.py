"""bench --launch --lengths: arms of a server whose steps are known, which lengths are launched again, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest

from treeopt.arms.arm import Arm, Arms
from treeopt.engines.registry import ENGINES
from treeopt.errors import InvalidInput
from treeopt.pipeline import lengths
from treeopt.serving import visit
from treeopt.serving.client import Answer, Server

from .conftest import invoke
from .helpers.fake_server import steps_of
from .helpers.lying_server import lying, page
from .test_launch import FAKE

ACCEPTED, TOKENS, PROMPTS = [4, 2, 0, 3], 17, 8
STEP_MS, DEARER, PER_GUESS = 8, 0.1, 0.4
VLLM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')


@pytest.fixture(autouse=True)
def _counts_at_once(monkeypatch):
    """The fake server counts a step before it sends its tokens."""
    monkeypatch.setattr(visit, "SETTLE_S", 0)


def launch(folder: Path, *more: object) -> str:
    costs = ("--step-ms", STEP_MS, "--dearer", DEARER, "--per-guess", PER_GUESS, "--record", folder / "seen")
    accepted = ("--accepted", ",".join(map(str, ACCEPTED)))
    return shlex.join([sys.executable, str(FAKE), "--port", "{port}", *accepted, *map(str, (*costs, *more))])


def words(folder: Path, command: str, *more: object) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(PROMPTS)))
    usual = ("--prompts", prompts, "--no-chat-template", "--max-new-tokens", TOKENS, "--run", folder / "run")
    return ["bench", "--launch", command, *map(str, (*usual, "--engine", "vllm", *more))]


def arms_of(folder: Path) -> dict[tuple[int, int | None], Arm]:
    return {(arm.concurrency, arm.k): arm for arm in Arms.load(folder / "run" / "arms.json").arms}


def launched(folder: Path) -> list[int]:
    """The lengths that servers were started with."""
    found = []
    for line in (folder / "seen").read_text().splitlines():
        numbers = re.findall(r'(?:tokens": |n-max )(\d+)', " ".join(json.loads(line)[2]))
        found.append(int(numbers[-1]) if numbers else 0)
    return found


def steps(length: int) -> int:
    return steps_of(TOKENS, [min(n, length) for n in ACCEPTED])


def step_ms(length: int) -> float:
    return STEP_MS * (1 + DEARER * bool(length) + PER_GUESS * length)


def test_the_arms_are_what_the_server_does(tmp_path):
    invoke(*words(tmp_path, launch(tmp_path, *VLLM), "--lengths", "0,2,4", "--clients", "1,4"))
    arms = arms_of(tmp_path)
    assert arms.keys() == {(n, k) for n in (1, 4) for k in (0, 2, 4)}
    for (n, k), arm in arms.items():
        seconds = 1e-3 * steps(k) * step_ms(k)
        assert (arm.drafter, arm.dataset, arm.prompts) == ("ngram" if k else "none", "prompts.jsonl", PROMPTS)
        assert 0 < arm.tokens_per_s / (n * TOKENS / seconds) < 1.01  # a sleep ends late on a busy machine
        assert arm.tpot_ms / (1e3 * seconds / (TOKENS - 1)) > 0.99
        assert arm.tpot_p99_ms >= arm.tpot_ms
        assert arm.tokens_per_step == (pytest.approx((TOKENS - 1) / steps(k)) if k else None)
        assert len(arm.positions) == k
    again = launched(tmp_path)
    assert sorted(again[:3]) == [0, 2, 4]
    assert len(again) == sum(arms[1, k].repeats for k in (0, 2, 4))
    assert not list((tmp_path / "run").glob("*.partial"))


class Simulated:
    """Launches of a server whose tokens per second are known, but for noise of each launch."""

    def __init__(self, rates: dict[int, float], noise: float, seed: int) -> None:
        self.rates, self.noise, self.rng, self.lengths = rates, noise, np.random.default_rng(seed), list[int]()

    def __call__(self, run, sweep, length, launches, prompts, most) -> dict[str, object]:
        self.lengths.append(length)
        visits = []
        for clients in sweep.server.clients:
            rate = self.rates[length] * clients**0.8 * self.rng.lognormal(0, self.noise)
            answer = Answer("", 100, 0.0, 0.0, 100 * len(prompts) / rate)
            about = {"name": str(length) if length else "plain", "batch_size": clients}
            counted = {"drafts": 400, "drafted": 400 * length, "reached": [200] * length} if length else {}
            visits.append(visit.Visit(**about, **counted, answers=[answer] * len(prompts)).model_dump())
        return {"seconds": 1.0, "model": "m", "visits": visits}


@pytest.mark.parametrize(("second", "noise", "repeats"), [(50.0, 0.01, False), (70.0, 0.1, True)])
def test_launches_are_repeated_where_that_may_change_the_decision(tmp_path, monkeypatch, second, noise, repeats):
    """Every length once and the best twice, no more where that tells what is best; two that are as fast again, now and then."""
    rates = {0: 50.0, 2: 70.0, 4: second, 8: 40.0}
    launches = []
    for seed in range(12 if repeats else 3):
        simulated = Simulated(rates, noise, seed)
        monkeypatch.setattr(lengths, "_launched", simulated)
        (folder := tmp_path / str(seed)).mkdir()
        invoke(*words(folder, f"vllm --port {{port}} {shlex.join(VLLM)}", "--lengths", "0,2,4,8", "--clients", "1,8"))
        arms = arms_of(folder)
        assert sorted(simulated.lengths[:4]) == [0, 2, 4, 8]
        for k in rates:
            assert arms[1, k].repeats == arms[8, k].repeats == simulated.lengths.count(k)
            assert bool(arms[1, k].stderr) == (arms[1, k].repeats > 1)
        launches.append(len(simulated.lengths))
    assert min(launches) == 5
    assert (max(launches) > 5) == repeats


@pytest.mark.long
def test_a_bench_that_is_killed_goes_on(tmp_path):
    command = words(tmp_path, launch(tmp_path, *VLLM), "--lengths", "0,2,4")
    bench = subprocess.Popen([sys.executable, "-m", "treeopt", *command], stderr=subprocess.DEVNULL)
    while not (tmp_path / "run" / "arms.json").exists():
        assert bench.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(bench.pid, signal.SIGKILL)
    bench.wait()
    before = launched(tmp_path)
    assert sum(arm.repeats for arm in arms_of(tmp_path).values() if arm.tokens_per_s) == 1
    invoke(*command)
    after = launched(tmp_path)[len(before) :]
    assert sorted([before[0], *after[:2]]) == [0, 2, 4]
    known, number = arms_of(tmp_path), len(launched(tmp_path))
    assert "No further launch is worth its time." in invoke(*command).stderr
    assert (arms_of(tmp_path), len(launched(tmp_path))) == (known, number)


@pytest.mark.long
def test_what_the_time_does_not_suffice_for_is_run_by_the_same_command(tmp_path):
    command = words(tmp_path, launch(tmp_path, *VLLM), "--lengths", "0,2,4", "--time-limit")
    assert "larger --time-limit goes on" in invoke(*command, 0.01).stderr
    assert len(launched(tmp_path)) == 1
    invoke(*command, 100)
    assert sorted(launched(tmp_path)[:3]) == [0, 2, 4]


@pytest.mark.long
def test_a_length_that_does_not_start_is_left_out(tmp_path):
    said = invoke(*words(tmp_path, launch(tmp_path, "--refuses", 2, *VLLM), "--lengths", "0,2,4"))
    assert "2 guesses are left out" in said.stderr
    assert "it is too long" in said.stderr
    assert {k for (_, k), arm in arms_of(tmp_path).items() if arm.tokens_per_s} == {0, 4}


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.long
def test_requests_set_the_length_where_drafts_follow(tmp_path, follows):
    more = ["--by-request"] * follows + ["--spec-draft-n-max", 3]
    said = invoke(*words(tmp_path, launch(tmp_path, *more), "--lengths", "0,1,2,4", "--engine", "llama-cpp"))
    arms = arms_of(tmp_path)
    for k in (1, 2, 4):
        assert arms[1, k].tokens_per_step == pytest.approx((TOKENS - 1) / steps(k)), said.stderr
    assert launched(tmp_path)[0] == 4
    assert (set(launched(tmp_path)) == {0, 4}) == follows


@pytest.mark.parametrize(
    ("command", "more", "says"),
    [
        ("vllm serve M {options}", (), "has no {port}"),
        ("vllm serve M --port {port}", (), "must have the options of speculation"),
        ("vllm serve M --port {port} {options}", (), "must have the options of speculation"),
        ("serve --spec-tokens 3 --port {port}", ("--engine", "none"), "must be one of llama-cpp"),
        ("vllm serve M --spec-tokens 3 --port {port}", ("--lengths", "two"), "whole numbers"),
    ],
)
def test_what_cannot_be_launched_is_said_at_once(tmp_path, command, more, says):
    found = invoke(*words(tmp_path, command, "--lengths", "0,2", *more), code=2 if "two" in more[-1:] else 1)
    assert says in " ".join(found.stderr.split())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--spec-draft-n-max", 3, *VLLM), "0 guesses a step were asked for"),
        (("--at-least", 3, *VLLM), "2 guesses a step were asked for, but the server made"),
    ],
)
def test_a_server_that_drafts_otherwise_is_refused(tmp_path, more, says):
    """--spec-draft-n-max is no option of vLLM's, and stays in the command."""
    length = says[0]
    found = invoke(*words(tmp_path, launch(tmp_path, *more), "--lengths", length), code=1)
    assert says in " ".join(found.stderr.split())


def test_drafts_without_a_count_of_guesses_are_said_without_a_length(monkeypatch):
    """SGLang counts its passes alone: it was said to make drafts of 0.00 guesses."""

    async def counted(*_):
        return [], visit.Drafts(drafts=120)

    async def driven(*_, **__):
        return []

    monkeypatch.setattr(visit, "_counted", counted)
    monkeypatch.setattr(visit, "drive", driven)
    with pytest.raises(InvalidInput, match="0 guesses a step were asked for, but the server made 120 drafts: launch"):
        anyio.run(partial(visit.visited, None, "plain", ["x"], [1], clients=1, length=0))


AT_4 = {  # engine, its options, these with 4 guesses, the drafter's name
    ("vllm", """-sc '{"method": "mtp", "num_speculative_tokens": 1}'"""): ("""-sc '{"method": "mtp", "num_speculative_tokens": 4}'""", "mtp"),
    ("vllm", "--spec-method eagle3 --spec-model D --spec-tokens 2"): ("--spec-method eagle3 --spec-model D --spec-tokens 2 --spec-tokens 4", "eagle3"),
    ("llama-cpp", "-md D.gguf --spec-type draft-eagle3"): ("-md D.gguf --spec-type draft-eagle3 --spec-draft-n-min 0 --spec-draft-n-max 4", "draft-eagle3"),
    ("llama-cpp", "--spec-type ngram-simple"): ("--spec-type ngram-simple --spec-ngram-simple-size-m 4", "ngram-simple"),
    ("sglang", "--speculative-algorithm EAGLE3 --speculative-num-steps 5"): (
        "--speculative-algorithm EAGLE3 --speculative-num-steps 5 --speculative-num-steps 4 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 5", "EAGLE3",
    ),
    ("sglang", "--speculative-algorithm=NGRAM"): ("--speculative-algorithm=NGRAM --speculative-num-draft-tokens 5", "NGRAM"),
}  # fmt: skip


@pytest.mark.parametrize(("engine", "options"), AT_4)
def test_options_get_their_length(engine, options):
    """What a command has before and behind them stays; without speculation they go."""
    speculation, (wanted, drafter) = ENGINES[engine].options, AT_4[engine, options]
    rest, found = speculation.split(["serve", *shlex.split(options), "--port", "80"])
    assert (rest, found) == (["serve", "--port", "80"], shlex.split(options))
    assert speculation.drafter(found) == drafter
    assert list(speculation.at(found, 4)) == shlex.split(wanted)
    assert speculation.at(found, 0) == ()


def test_a_router_is_told_the_model():
    """llama.cpp's has no counters of its own, and says 400 where it is not told whose are wanted."""
    models = page(json.dumps({"data": [{"id": "a"}, {"id": "b"}]}))

    def answer(path: str) -> bytes:
        if path == "/metrics":
            return page(json.dumps({"error": {"message": "model name is missing from the request"}}), "400 Bad Request")
        return {"/v1/models": models, "/metrics?model=b": page("llamacpp:requests_processing 1")}[path]

    async def scraped(url: str) -> tuple[str, str]:
        async with Server(url) as server:
            return await server.metrics(), await server.model()

    with lying(answer) as router:
        assert anyio.run(scraped, f"{router.url}?model=b") == ("llamacpp:requests_processing 1", "b")
        said = invoke("tune", router.url, "--minutes", 0.001, code=1).stderr
        assert "serves 'a', 'b': name one with --model" in " ".join(said.split())


@pytest.mark.parametrize(
    ("text", "loops"),
    [("Why? " + "The cat sat on the mat. " * 6, True), ("".join(f"{i} of the cats sat. " for i in range(60)), False)],
)
def test_answers_that_end_in_a_loop_are_known(text, loops):
    assert bool(visit.LOOP.search(text[-visit.LOOP_CHARS :])) == loops
