"""mlx-lm's server runs what is exported for it, on a CPU: steps emit up to as many tokens as the chain and one more."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from treeopt import demo

from .serving import fetched, free_port, serving
from .started import LENGTH, ONE_THREAD, PROMPTS, TOKENS, environment, exported, greedy_answers, in_float32

pytestmark = pytest.mark.slow


def test_a_draft_model_makes_chains_of_the_plan(run, tmp_path):
    from transformers import AutoTokenizer

    if shutil.which("c++") is None:
        pytest.skip("no c++, with which mlx compiles its kernels for a CPU")
    in_float32(demo.MODEL, tmp_path / "MODEL")
    in_float32(demo.DRAFTERS[demo.NAME]["draft"], tmp_path / "DRAFTER")
    text = (exported(run, "mlx-lm", tmp_path) / "commands.sh").read_text(encoding="utf-8")
    print(text.strip())
    program, *words = shlex.split(text, comments=True)
    assert program == "mlx_lm.server"
    watcher, port, log = Path(__file__).parent / "watch_mlx.py", free_port(), tmp_path / "log.txt"
    command = [environment("mlx-lm", "mlx[cpu]"), watcher, *words, "--port", str(port)]
    decode = AutoTokenizer.from_pretrained(demo.MODEL).decode
    with serving(command, tmp_path, ONE_THREAD, log, port) as address:
        for prompt, (_, tokens) in zip(PROMPTS, greedy_answers(2), strict=False):
            asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            (choice,) = json.loads(fetched(f"{address}/v1/completions", asked))["choices"]
            assert choice["text"] == decode(tokens).lstrip(" ")  # its detokenizer drops the first blank
    seen = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    print(f"mlx-lm {seen[0]['version']}: tokens of every step {[one['steps'] for one in seen]}")
    assert max(size for one in seen for size in one["steps"]) == LENGTH + 1
