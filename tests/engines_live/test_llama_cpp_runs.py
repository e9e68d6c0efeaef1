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
from .llama_server import Served, answered, built, said
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
    return found["survival"]


def test_it_answers_as_transformers_does(served):
    tokens = [answer["tokens"] for answer in served.answers]
    same = sum(got == wanted for got, (_, wanted) in zip(tokens, greedy_answers(), strict=True))
    print(f"{same} of {len(tokens)} answers have the tokens of transformers")
    assert same >= 0.9 * len(tokens)  # another order of sums may turn a near tie


def test_it_speculates(served):
    drafted, accepted = served.counted("draft_n"), served.counted("draft_n_accepted")
    print(f"{accepted} of {drafted} guesses accepted")
    assert 0 < accepted < drafted


def test_its_log_and_its_metrics_are_imported(served, run, tmp_path):
    """The log has three digits of a rate, and only the sum of the drafts' lengths: the last of an answer is shorter."""
    log = survival(served.log, into=tmp_path / "log")
    metrics = survival(served.before, served.after, into=tmp_path / "metrics")
    text = served.after.read_text(encoding="utf-8")
    drafts, *accepted = re.findall(
        r"^llamacpp:spec_decode_num_(?:drafts|accepted_tokens_per_pos)_total\S* (\d+)$", text, re.M
    )
    assert int(drafts) > 100
    assert len(log) == len(metrics) == len(accepted) == LENGTH
    assert log[0] == metrics[0] == int(accepted[0]) / int(drafts)
    assert log == pytest.approx(metrics, abs=0.005)
    tokens = 1 + sum(metrics)
    print(f"survival {metrics}: {tokens:.2f} tokens per step, where the plan says {predicted(run):.2f}")
    assert tokens == pytest.approx(predicted(run), rel=0.1)


def test_it_looks_up(server, lookup_run, models, tmp_path):
    asked = greedy_answers()[:4]
    folder = exported(lookup_run, "llama-cpp", models)
    found = answered(server, folder, [prompt for prompt, _ in asked], tmp_path)
    drafted, accepted = found.counted("draft_n"), found.counted("draft_n_accepted")
    print(f"{accepted} of {drafted} guesses that were looked up accepted")
    assert 0 < accepted < drafted
    assert [answer["tokens"] for answer in found.answers] == [tokens for _, tokens in asked]


@pytest.mark.parametrize("option", ["--draft-max", "--draft-min"])
def test_options_that_were_exported_before_are_refused(server, option):
    code, text = said(server, option, "3")
    assert code != 0
    assert "has been removed" in text
