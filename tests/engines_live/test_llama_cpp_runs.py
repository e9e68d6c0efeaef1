"""llama.cpp runs what is exported for it, and what it counts meanwhile is imported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from treeopt import demo
from treeopt.records.trace import RankTrace

from ..conftest import treeopt
from .gguf_model import write_gguf
from .llama_server import Served, answered, built
from .started import LENGTH, PROMPTS, exported, greedy_answers, predicted

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Path:
    return built()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama-cpp")
    write_gguf(demo.MODEL, folder / "MODEL.gguf")
    write_gguf(demo.DRAFTERS[demo.NAME]["draft"], folder / "DRAFTER.gguf")
    return folder


@pytest.fixture(scope="module")
def served(server, run, models, tmp_path_factory) -> Served:
    """The prompts, answered by the server as it is exported for a draft model."""
    prompts = [prompt for prompt, _ in greedy_answers()]
    return answered(server, exported(run, "llama-cpp", models), prompts, tmp_path_factory.mktemp("llama-cpp"))


def survival(*files: Path, into: Path) -> list[float]:
    """What `treeopt import` makes of the files."""
    treeopt("import", "--run", into, "--drafter", "draft-model", *files)
    found: dict[str, Any] = json.loads((into / "calibration.json").read_text(encoding="utf-8"))
    return found["survival"]


def test_it_answers_as_transformers_does(served):
    tokens = [answer["tokens"] for answer in served.answers]
    same = sum(got == wanted for got, (_, wanted) in zip(tokens, greedy_answers(), strict=True))
    print(f"{same} of {len(tokens)} answers have the tokens of transformers")
    assert same >= 0.9 * len(tokens)  # another order of sums may turn a near tie


def test_its_log_and_its_metrics_are_imported(served, run, tmp_path):
    """The log has three digits of a rate, and only the sum of the drafts' lengths: the last of an answer is shorter."""
    log = survival(served.log, into=tmp_path / "log")
    metrics = survival(served.before, served.after, into=tmp_path / "metrics")
    drafts, accepted = counted(served)
    assert drafts > 100
    assert len(log) == len(metrics) == len(accepted) == LENGTH
    assert log[0] == metrics[0] == accepted[0] / drafts
    assert log == pytest.approx(metrics, abs=0.005)
    tokens = 1 + sum(metrics)
    print(f"survival {metrics}: {tokens:.2f} tokens per step, where the plan says {predicted(run):.2f}")
    assert tokens == pytest.approx(predicted(run), rel=0.1)


ANSWER, TIMES = 200, 10  # tokens of an answer at most; how often each is drawn


def test_it_accepts_by_chance_what_it_accepts_of_the_drafter(server, run, models, tmp_path):
    """Rates of the trace, drawn in 7,000 steps or more: the mean's error is 0.9 %, and seeds are given.

    Answers are as long as the trace's, so that loops are cut, and the last drafts of both are alike.
    """
    own = tmp_path / "run"
    options = ("--max-new-tokens", ANSWER, "--num-prompts", len(PROMPTS))
    treeopt(
        "calibrate", "--run", own, "--model", "demo", "--drafter", "draft", "--prompts", run / "prompts.jsonl", *options
    )
    trace = RankTrace.load(own / "trace.npz")
    texts = [(prompt, text) for prompt, begun in greedy_answers() for text in trace.texts if is_begun_so(text, begun)]
    prompts, lengths = [prompt for prompt, _ in texts], [len(text) for _, text in texts]
    assert len(texts) >= 12
    folder = exported(run, "llama-cpp", models)
    real = answered(server, folder, prompts, tmp_path, [{"n_predict": n} for n in lengths])
    same = sum(answer["tokens"] == text for answer, (_, text) in zip(real.answers, texts, strict=True))
    print(f"{same} of {len(prompts)} answers have the tokens of the trace")

    chance = Path(shutil.copytree(folder, tmp_path / "chance"))
    command = (chance / "commands.sh").read_text(encoding="utf-8").strip()
    (chance / "commands.sh").write_text(f"{command} {rates_of(own)}\n", encoding="utf-8")
    into = tmp_path / "drawn"
    into.mkdir()
    asked = [
        {"n_predict": n, "seed": 16 * i + k, "ignore_eos": True} for i in range(TIMES) for k, n in enumerate(lengths)
    ]
    drawn = answered(server, chance, prompts * TIMES, into, asked)

    (steps, wanted), (draws, got) = counted(real), counted(drawn)
    means = [sum(wanted) / steps, sum(got) / draws]
    print(f"accepted per step: {means[0]:.4f} of the drafter in {steps} steps, {means[1]:.4f} by chance in {draws}")
    print(f"by position: {[n / steps for n in wanted]}, {[n / draws for n in got]}")
    assert draws > 7_000
    assert means[1] == pytest.approx(means[0], rel=0.02)
    assert [n / draws for n in got] == pytest.approx([n / steps for n in wanted], abs=0.02)
    survival(real.before, real.after, into=tmp_path / "counted")
    assert numbers(rates_of(tmp_path / "counted")) == pytest.approx(numbers(rates_of(own)), abs=0.02)


def is_begun_so(text: list[int], begun: list[int]) -> bool:
    """Whether an answer of the trace, which may be cut, is the one that transformers begins."""
    shared = min(len(text), len(begun))
    return text[:shared] == begun[:shared]


def rates_of(run: Path) -> str:
    """The options that llama.cpp takes in place of the drafter, for chains of `LENGTH`."""
    treeopt("export", "--run", run, "--to", "acceptance")
    lines = (run / "export" / "acceptance" / "llama-cpp.txt").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if f"--spec-draft-n-max {LENGTH} " in line]
    return line


def numbers(line: str) -> list[float]:
    return [float(number) for number in line.rsplit(" ", 1)[1].split(",")]


def counted(served: Served) -> tuple[int, list[int]]:
    """Drafts, and how many were accepted up to each position, by the server's own counters."""
    text = served.after.read_text(encoding="utf-8")
    drafts, *accepted = re.findall(
        r"^llamacpp:spec_decode_num_(?:drafts|accepted_tokens_per_pos)_total\S* (\d+)$", text, re.M
    )
    return int(drafts), [int(number) for number in accepted]
