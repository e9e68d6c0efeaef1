"""treeopt bench --launch with servers that are real: what they say, and what is left of them."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from treeopt.arms.arm import Arms
from treeopt.records.benchmark import Benchmark

from ..conftest import treeopt
from .started import LENGTH, PROMPTS

pytestmark = pytest.mark.slow
BATCH_SIZES, ANSWERS = (1, 4), 6
BENCH = ("--num-prompts", ANSWERS, "--max-new-tokens", 32)
LEFT_S = 40  # that a keeper may take after the command


@pytest.fixture
def asked(program, tmp_path) -> tuple[object, ...]:
    """The options of a run whose plan, from tables, are chains of `LENGTH`."""
    run, prompts, lengths = ("--run", tmp_path / "run"), tmp_path / "prompts.jsonl", range(LENGTH + 2)
    rates = "".join(f"{k},0,{0.01 if k > LENGTH else 0.7}\n" for k in lengths if k)
    steps = "".join(f"{b},{k + 1},{k},{10 + k / 10}\n" for b in BATCH_SIZES for k in lengths)
    (tmp_path / "table.csv").write_text(f"head,rank,accuracy\n{rates}", encoding="utf-8")
    (tmp_path / "steps.csv").write_text(f"batch_size,size,depth,step_ms\n{steps}", encoding="utf-8")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS[:ANSWERS]), encoding="utf-8")
    treeopt("import", tmp_path / "table.csv", "--trials", 1000, "--drafter", program.kind, *run)
    treeopt("profile", "--from-csv", tmp_path / "steps.csv", "--runtime", program.engine, *run)
    treeopt("search", "--for", program.engine, *run)
    given = ("--engine", program.engine, "--drafter", program.drafter, "--prompts", prompts)
    return ("--launch", program.launch, *given, *run)


def test_a_bench_has_the_texts_of_plain_and_the_counters_of_the_server(program, asked, tmp_path):
    """Each step emits the guesses that it accepts and a token of its own, but for what the end of an answer cuts off; the last
    one of llama.cpp has no draft where a single token is left."""
    treeopt("bench", *asked, *BENCH, "--present", shlex.join(program.drafts))
    for size in BATCH_SIZES:
        bench = Benchmark.load(tmp_path / "run" / f"bench-launched-batch-size-{size}.json")
        for one in bench.contenders:
            print(size, one.name, one.tokens_per_step, one.tokens_per_s, bench.speedup(one.name))
            assert one.identical == one.compared == ANSWERS
            emitted = sum((1 + guesses) * steps for guesses, steps in enumerate(one.accepted)) or one.tokens
            assert -ANSWERS <= emitted - one.tokens <= LENGTH * ANSWERS
            assert len({block.round for block in one.blocks}) == 3
        plain, chosen, present = (bench.contender(name) for name in ("plain", "chosen", "present"))
        assert chosen.draft.depth == present.draft.depth == LENGTH
        assert chosen.tokens_per_step == present.tokens_per_step > plain.tokens_per_step == 1  # the same options


def test_lengths_are_arms_of_the_server(program, asked, tmp_path):
    """Longer drafts accept no less of a text that all lengths decode alike."""
    launch = program.launch.replace("{options}", shlex.join(program.drafts))
    prompts = ("--prompts", tmp_path / "prompts.jsonl", *BENCH)
    treeopt(
        "bench",
        "--launch",
        launch,
        *prompts,
        "--lengths",
        f"0,1,{LENGTH}",
        "--clients",
        "1,4",
        "--run",
        tmp_path / "arms",
    )
    arms = {(arm.concurrency, arm.k): arm for arm in Arms.load(tmp_path / "arms" / "arms.json").arms}
    print(arms)
    for clients in (1, 4):
        tokens = [arms[clients, k].tokens_per_step for k in (1, LENGTH)]
        assert 1 < tokens[0] <= tokens[1] <= 1 + LENGTH
        assert len(arms[clients, LENGTH].positions) == LENGTH
        assert arms[clients, 0].positions == ()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_bench_that_is_killed(asked, tmp_path, number):
    words = [sys.executable, "-m", "treeopt", "bench", *map(str, (*asked, *BENCH))]
    bench = psutil.Popen(words, stderr=subprocess.DEVNULL)
    processes, ports = [bench], set()
    while bench.poll() is None and not (ports and (tmp_path / "run" / "launches" / "chosen-1.log").exists()):
        time.sleep(0.2)
        processes = bench.children(recursive=True)
        ports = listened_at([one.pid for one in processes])
    print(f"{[one.name() for one in processes]} at {ports}")
    bench.send_signal(number)
    bench.wait()
    last = time.monotonic() + LEFT_S
    while (left := [one for one in processes if one.is_running()]) and time.monotonic() < last:
        time.sleep(0.1)
    assert left == []
    assert not ports & listened_at(psutil.pids())


def listened_at(pids: list[int]) -> set[int]:
    found = psutil.net_connections("tcp")
    return {one.laddr.port for one in found if one.pid in pids and one.status == psutil.CONN_LISTEN}
