"""OpenVINO GenAI runs what is exported for it: steps emit up to as many tokens as the plan's chain and one more."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from treeopt import demo

from .gguf_model import write_gguf
from .started import LENGTH, ONE_THREAD, PROMPTS, environment, exported, watched

pytestmark = pytest.mark.slow
ASKED = PROMPTS[:3]
# Reads a GGUF file, matrices in float16, and writes the model and its tokenizer beside it as LLMPipeline wants them.
CONVERT = "import sys, openvino_genai; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"


@pytest.fixture(scope="module")
def python() -> Path:
    return environment("openvino-genai")


@pytest.fixture(scope="module")
def models(python, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("openvino")
    for name, source in (("MODEL", demo.MODEL), ("DRAFTER", demo.DRAFTERS[demo.NAME]["draft"])):
        (folder / name).mkdir()
        gguf = write_gguf(source, folder / name / "model.gguf", half=True)
        subprocess.run([python, "-c", CONVERT, gguf], env=ONE_THREAD, check=True)
        assert (folder / name / "openvino_model.xml").exists()
    return folder


def check(python: Path, folder: Path) -> None:
    """The text is that of the model alone, in fewer steps than tokens, none of them longer than the chain and one more."""
    answers = watched(python, "watch_openvino.py", folder, ASKED)
    print(f"OpenVINO GenAI {answers[0]['version']}: tokens of every step {[answer['steps'] for answer in answers]}")
    for answer in answers:
        assert answer["text"] == answer["plain"] + "\n"
    assert max(size for answer in answers for size in answer["steps"]) == LENGTH + 1


def test_a_draft_model_makes_chains_of_the_plan(python, run, models):
    check(python, exported(run, "openvino", models))


def test_looking_up_makes_chains_of_the_plan(python, lookup_run, models):
    check(python, exported(lookup_run, "openvino", models))
