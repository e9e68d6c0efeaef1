"""Engines started with what ``treeopt export`` wrote, on the demo model and its draft model, one thread each.

`chain_run` makes the plan: a chain of `LENGTH` guesses, since all its sizes take nearly the same time a step. An export
is started in a folder that has the models under the names MODEL and DRAFTER, which the export gives them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import venv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from treeopt import demo
from treeopt.demo.corpus import standard_library
from treeopt.records.plan import Plan

from ..conftest import treeopt
from . import archives

LENGTH = 4  # guesses a step
TOKENS = 48  # of an answer at most
PROMPTS = [module.text[600:1000] for module in standard_library(held_out=True) if len(module.text) > 1000][:16]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def chain_run(run: Path, drafter: str) -> Path:
    """A run directory with the plan of a chain of `LENGTH`, calibrated on `PROMPTS`."""
    prompts, steps = run / "prompts.jsonl", run / "steps.csv"
    run.mkdir()
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS), encoding="utf-8")
    rows = "".join(f"1,{size},{10 + size / 10}\n" for size in range(1, LENGTH + 2))
    steps.write_text(f"batch_size,size,step_ms\n{rows}", encoding="utf-8")
    treeopt("calibrate", "--run", run, "--model", "demo", "--drafter", drafter, "--prompts", prompts,
            "--max-new-tokens", TOKENS, "--num-prompts", len(PROMPTS))  # fmt: skip
    treeopt("profile", "--run", run, "--from-csv", steps, "--runtime", "equal")
    treeopt("search", "--run", run, "--shape", "chain", "--budget", LENGTH + 1)
    assert predicted(run) > 1
    return run


def predicted(run: Path) -> float:
    """Tokens per step of the run's plan, which is of a chain of `LENGTH`."""
    (entry,) = Plan.load(run / "plan.json").entries
    assert entry.chosen.size == LENGTH + 1
    return entry.chosen.tokens_per_step


def exported(run: Path, engine: str, models: Path) -> Path:
    """The folder of the models, with what the export writes for the engine beside them."""
    treeopt("export", "--run", run, "--to", engine)
    return Path(shutil.copytree(run / "export" / engine, models, dirs_exist_ok=True))


def in_float32(source: Path, folder: Path) -> None:
    """The checkpoint, in the format in which answers are compared."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(source, folder)
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(folder)


def environment(*packages: str) -> Path:
    """The Python of an environment of its own, kept beside the archives, that has the newest of these packages."""
    folder = archives.folder() / f"{packages[0]}-environment"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--upgrade", *packages]
    ended = subprocess.run(install, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"{packages[0]} cannot be installed: {ended.stderr[-500:]}")
    return python


@cache
def greedy_answers(most: int = len(PROMPTS)) -> list[tuple[list[int], list[int]]]:
    """Tokens of the first of `PROMPTS` and what transformers answers to them, in float32 and without speculation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    model = AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32)
    answers = []
    for text in PROMPTS[:most]:
        asked = tokenizer(text, return_tensors="pt")
        got = model.generate(**asked, do_sample=False, max_new_tokens=TOKENS)[0].tolist()
        answers.append((got[: asked["input_ids"].shape[1]], got[asked["input_ids"].shape[1] :]))
    return answers


def watched(python: Path | str, watcher: str, folder: Path, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """What a watcher, a program of this folder, saw of the command in ``folder`` for every prompt."""
    text = (folder / "commands.sh").read_text(encoding="utf-8")
    print(text.strip())
    interpreter, *words = shlex.split(text, comments=True)
    assert interpreter == "python"
    ended = subprocess.run(
        [python, Path(__file__).parent / watcher, *words],
        input=json.dumps(prompts), cwd=folder, env=ONE_THREAD, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(prompts), ended.stdout
    return found
