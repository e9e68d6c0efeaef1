"""treeopt tune beside a llama-server that speculates and one that does not, under a load that it makes and with one of ours."""

from __future__ import annotations

import json
import os
import re

import anyio
import pytest

from treeopt.pipeline.tune import tune
from treeopt.records.rundir import RunDirectory
from treeopt.serving.client import Server
from treeopt.serving.load import drive

from .llama_server import TOLD
from .serving import free_port, serving
from .started import ONE_THREAD, PROMPTS, TOKENS
from .test_llama_cpp_runs import models, server  # noqa: F401  # fixtures

pytestmark = pytest.mark.slow
DRAFTS = "--spec-type draft-simple --spec-draft-model DRAFTER.gguf --spec-draft-n-max 3 --spec-draft-n-min 0 --spec-draft-p-min 0"
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]


def decoding_s(address: str) -> float:
    """Seconds of decoding per token, of one client's answers."""

    async def answers():
        async with Server(address) as up:
            return await drive(up, CHATS, clients=1, max_tokens=TOKENS)

    found = anyio.run(answers)
    return sum(a.seconds - a.first_s for a in found) / sum(a.num_tokens - 1 for a in found)


def test_it_counts_as_the_server_does_and_says_what_a_bench_says(server, models, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("treeopt.pipeline.tune.MOST_TOKENS", TOKENS)  # answers of one length are compared
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS), encoding="utf-8")
    ports = [free_port(), free_port()]
    started = [[server, "--model", "MODEL.gguf", "--ctx-size", "4096", "--port", str(port)] for port in ports]
    told = {**ONE_THREAD, **TOLD, "PATH": os.environ["PATH"]}
    run = RunDirectory(tmp_path / "run")
    with (
        serving([*started[0], *DRAFTS.split()], models, told, tmp_path / "drafts.txt", ports[0]) as drafts,
        serving(started[1], models, told, tmp_path / "plain.txt", ports[1]) as plain,
    ):
        tune(RunDirectory(tmp_path / "plain"), plain, minutes=1, drive=str(prompts))
        scrapes = str(tmp_path / "plain" / "scrapes.jsonl")
        found = tune(run, drafts, minutes=1, plain=scrapes, drive=str(prompts), drafter="draft-model")
        measured = decoding_s(plain) / decoding_s(drafts)
    before, after = ((run.path / name).read_text(encoding="utf-8") for name in ("before.txt", "after.txt"))
    name = r"^llamacpp:spec_decode_num_(?:drafts|accepted_tokens_per_pos)_total\S* (\d+)$"
    total, *reached = map(int, re.findall(name, after, re.M))
    earlier = [*map(int, re.findall(name, before, re.M)), 0, 0, 0, 0]
    rises = [new - old for new, old in zip(reached, earlier[1:], strict=False)]
    assert found.calibration.hits[:, 0].tolist() == rises
    # The last drafts of answers are shorter, which survival makes up for.
    assert found.survival == pytest.approx([rise / (total - earlier[0]) for rise in rises], abs=0.01)
    print(f"{found.over_plain} times plain, and {measured:.2f} by the answers")
    assert found.over_plain.value == pytest.approx(measured, rel=0.07)
    assert found.command.startswith("llama-server --model MODEL.gguf")
