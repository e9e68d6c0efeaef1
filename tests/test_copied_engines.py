"""Drafters that copy text in the engines themselves: texts are those of plain decoding, and every step is the replay's."""

from __future__ import annotations

import importlib.util
from itertools import chain, pairwise

import pytest

from treeopt import demo
from treeopt.demo.corpus import standard_library
from treeopt.records.requestlog import Request
from treeopt.runtime.decode import Setup
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.engines import open_stepper
from treeopt.runtime.stepper import PLAIN
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import load_target
from treeopt.text.engines import text_drafter
from treeopt.text.replay import replay
from treeopt.trees.draft import CopiedText

pytestmark = pytest.mark.long
TOKENS = 64  # of an answer at most
TEXTS = [module.text[600:1000] for module in standard_library(held_out=True) if len(module.text) > 1000][:10]


def replayed_steps(requests, name, settings, state="cold"):
    """The tokens of every step of every request, by the replay; of which enough were copied."""
    found = replay(requests, lambda: text_drafter(name, settings), state=state)
    print(
        f"{name} {settings} {state}: {len(requests)} requests, {len(found.rows)} steps, {found.accepted.sum()} guesses accepted"
    )
    assert found.accepted.sum() > 20
    return [found.emitted[a:b].tolist() for a, b in pairwise(found.starts)]


def steps_of(stepper, prompts, draft):
    """The tokens that each pass emitted, by prompt; those of the pass over the prompt first."""
    found = [[] for _ in prompts]
    for one in stepper.answer(prompts, draft):
        for place, tokens in one.emitted.items():
            found[place] += [list(tokens)] if tokens else []
    return found


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("transformers", {"prompt_lookup_num_tokens": 8}),
        ("transformers", {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 4}),
        ("openvino", {"num_assistant_tokens": 8, "max_ngram_size": 3}),
        ("openvino", {"num_assistant_tokens": 4, "max_ngram_size": 1}),
    ],
    ids=str,
)
def test_prompt_lookup_takes_the_steps_of_the_replay(engine, settings):
    if importlib.util.find_spec("openvino_genai" if engine == "openvino" else engine) is None:
        pytest.skip(f"{engine} is not installed")
    target = load_target(str(demo.MODEL))
    prompts = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    setup = Setup(target, open_drafter("ngram", target).drafter, StopRule(target.eos_ids, TOKENS, at_loops=False))
    stepper = open_stepper(engine, setup)
    name = f"{engine}:prompt-lookup"
    length = next(iter(settings.values()))
    plain = [list(chain(*steps)) for steps in steps_of(stepper, prompts, PLAIN)]
    found = steps_of(stepper, prompts, CopiedText.of(name, settings, length + 1, length))
    assert [list(chain(*steps)) for steps in found] == plain
    ends = {"eos_token_id": sorted(target.eos_ids)} if engine == "transformers" else {}
    requests = [Request(prompt, answer, TOKENS) for prompt, answer in zip(prompts, plain, strict=True)]
    told = replayed_steps(requests, name, {**settings, **ends})
    assert [[len(tokens) for tokens in steps[1:]] for steps in found] == told
