"""llama.cpp runs what is exported for it, and what it counts meanwhile is imported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from treeopt import demo

from ..conftest import treeopt
from .gguf_model import write_gguf
from .llama_server import Served, answered, built
from .started import LENGTH, exported, greedy_answers, predicted

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
    return [share["value"] for share in found["survival"]]


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


def counted(served: Served) -> tuple[int, list[int]]:
    """Drafts, and how many were accepted up to each position, by the server's own counters."""
    text = served.after.read_text(encoding="utf-8")
    drafts, *accepted = re.findall(
        r"^llamacpp:spec_decode_num_(?:drafts|accepted_tokens_per_pos)_total\S* (\d+)$", text, re.M
    )
    return int(drafts), [int(number) for number in accepted]
