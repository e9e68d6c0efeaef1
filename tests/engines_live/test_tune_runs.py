"""treeopt tune beside a server that speculates and one that does not, under a load that it makes and with one of ours."""

from __future__ import annotations

import json
import re
import sys

import anyio
import pytest

from treeopt.pipeline.tune import tune
from treeopt.records.exchange import Watching
from treeopt.records.rundir import RunDirectory
from treeopt.serving.client import Server, drive
from treeopt.serving.launch import Launcher
from treeopt.serving.watch import over_plain

from .started import LENGTH, PROMPTS, TOKENS

pytestmark = pytest.mark.slow
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]
COUNTER = r"^(?:llamacpp|vllm):spec_decode_num_(?:drafts|accepted_tokens_per_pos)_total\S* (\S+)$"
CLIENTS = (1, 4)


def decoding_s(address: str, clients: int) -> float:
    """Seconds of decoding per token, of answers that ended while all clients were busy."""

    async def answers():
        async with Server(address) as up:
            found = await drive(up, CHATS, clients=clients, max_tokens=TOKENS)
            last = sorted(one.ended for one in found)[-clients]
            return [one for one in found if one.ended <= last]

    found = anyio.run(answers)
    return sum(a.seconds - a.first_s for a in found) / sum(a.num_tokens - 1 for a in found)


def test_it_counts_as_the_server_does_and_says_what_a_bench_says(program, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[tune.__module__], "MOST_TOKENS", TOKENS)  # answers of one length are compared
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS), encoding="utf-8")
    run, launcher = RunDirectory(tmp_path / "run"), Launcher.parse(program.launch)
    given = {"minutes": 1, "drive": str(prompts), "clients": CLIENTS}
    with (
        launcher.launched(program.drafts, tmp_path / "drafts.txt") as drafts,
        launcher.launched([], tmp_path / "plain.txt") as plain,
    ):
        tune(RunDirectory(tmp_path / "plain"), plain, Watching(**given))
        found = tune(
            run, drafts, Watching(plain=str(tmp_path / "plain" / "watched.json"), drafter=program.kind, **given)
        )
        measured = {n: decoding_s(plain, n) / decoding_s(drafts, n) for n in CLIENTS}
    before, after = ((run.path / name).read_text(encoding="utf-8") for name in ("before.txt", "after.txt"))
    total, *reached = (int(float(count)) for count in re.findall(COUNTER, after, re.M))
    earlier = [*(int(float(count)) for count in re.findall(COUNTER, before, re.M)), *[0] * (1 + len(reached))]
    rises = [new - old for new, old in zip(reached, earlier[1:], strict=False)]
    assert found.calibration.hits[:, 0].tolist() == rises
    # The last drafts of answers are shorter, which survival makes up for.
    counted = [rise / (total - earlier[0]) for rise in rises]
    most = 1 / (1 - LENGTH * 0.05)  # where all guesses that are missing are of the last position
    assert all(low - 1e-9 <= mine <= most * low for low, mine in zip(counted, found.survival, strict=True))
    said = {n: over_plain([found.paces[n]], [found.plain[n]]) for n in CLIENTS}
    print(f"{said} times plain, and {measured} by the answers")
    assert {n: ratio.value for n, ratio in said.items()} == pytest.approx(measured, rel=0.07)
    assert found.command.startswith(("llama-server --model ", "vllm serve "))
