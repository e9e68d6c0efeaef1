"""transformers runs what is exported for it: every step emits up to as many tokens as the plan's chain and one more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from treeopt import demo

from .started import LENGTH, PROMPTS, TOKENS, chain_run, exported, greedy_answers, in_float32, watched

pytestmark = pytest.mark.slow
ASKED = PROMPTS[:2]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    in_float32(demo.MODEL, folder / "MODEL")
    in_float32(demo.DRAFTERS[demo.NAME]["draft"], folder / "DRAFTER")
    return folder


def check(folder: Path) -> None:
    """The text is that of the model alone, and some step emits a chain and one token more, none a longer one."""
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(demo.MODEL).decode
    answers = watched(sys.executable, "watch_transformers.py", folder, ASKED)
    print(f"transformers {answers[0]['version']}: tokens of every step {[answer['steps'] for answer in answers]}")
    for answer, (_, tokens) in zip(answers, greedy_answers(len(ASKED)), strict=True):
        assert len(tokens) == TOKENS
        assert answer["text"].startswith(decode(tokens))
    assert max(size for answer in answers for size in answer["steps"]) == LENGTH + 1


def test_a_draft_model_makes_chains_of_the_plan(run, models):
    check(exported(run, "transformers", models))


def test_looking_up_makes_chains_of_the_plan(lookup_run, models):
    check(exported(lookup_run, "transformers", models))


def test_an_early_exit_makes_chains_of_the_plan(models, tmp_path):
    check(exported(chain_run(tmp_path / "run", "early-exit:4"), "transformers", models))
