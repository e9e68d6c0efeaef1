"""vLLM's process: a stand-in for the package that answers by a rule, so that every pass is known; and how it fails.

The rule: after a token t comes (7 t + 3) mod 50, and of K guesses a step accepts text length mod (K + 1). The stand-in notes in
a file how each engine was launched. With vLLM itself the contract of `test_stepper` is run.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.drafters.lookup import PromptLookup
from treeopt.runtime.engines import open_stepper
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import PLAIN
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.draft import CopiedText
from treeopt.trees.tree import Tree

from .conftest import decoded, tiny_model

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
STOP = StopRule(frozenset(), 17, at_loops=False)
STAND_IN = """
import json, os
from types import SimpleNamespace as Some
__version__ = "0.0"
FOLDER = os.path.dirname(os.path.abspath(__file__))

class SamplingParams:
    def __init__(self, **told):
        self.__dict__.update(told)

class Engine:
    def __init__(self, speculative_config):
        self.config, self.live = speculative_config or {}, {}
        has_table = "num_speculative_tokens_per_batch_size" in self.config and not os.path.exists(FOLDER + "/no-table")
        table = [0] + [self.config["num_speculative_tokens"]] * 64 if has_table else None
        self.engine_core = Some(engine_core=Some(scheduler=Some(dynamic_sd_lookup=table) if table else Some()))
    def add_request(self, name, prompt, params):
        self.live[name] = [list(prompt["prompt_token_ids"]), params.max_tokens, True]
    def abort_request(self, names):
        for name in names:
            del self.live[name]
    def has_unfinished_requests(self):
        return bool(self.live)
    def step(self):
        if os.path.exists(FOLDER + "/die"):
            os._exit(3)
        if os.path.exists(FOLDER + "/raise"):
            raise RuntimeError("no kernel for it\\nsecond line")
        table = self.engine_core.engine_core.scheduler.__dict__.get("dynamic_sd_lookup")
        told = self.config.get("num_speculative_tokens_per_batch_size", [[1, 64, self.config.get("num_speculative_tokens", 0)]])
        length = table[len(self.live)] if table else told[0][2]
        found = []
        for name, row in list(self.live.items()):
            text, left, reads = row
            tokens, row[2] = [], False
            for _ in range(1 if reads else 1 + len(text) % (length + 1)):
                if left > 0:
                    tokens.append((7 * (tokens or text)[-1] + 3) % 50)
                    left -= 1
            text += tokens
            row[1] = left
            if left == 0:
                del self.live[name]
            found.append(Some(request_id=name, finished=left == 0, outputs=[Some(token_ids=tokens)]))
        return found

class LLM:
    def __init__(self, speculative_config=None, **told):
        print("noise on stdout")
        if os.path.exists(FOLDER + "/raise-at-launch"):
            raise RuntimeError("no memory")
        with open(FOLDER + "/launches", "a") as file:
            file.write(json.dumps([speculative_config, told["dtype"], told["enable_prefix_caching"]]) + "\\n")
        self.llm_engine = Engine(speculative_config)
"""


@pytest.fixture
def place(tmp_path):
    """The folder of the stand-in, with a Python that finds it and a model's folder."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def opened(place):
    target = Target(tiny_model(), name=str(place / "model"))
    drafter = PromptLookup(target.vocab_size)
    return open_stepper("vllm", Setup(target, drafter, STOP), python=str(place / "python"))


def launches(place):
    lines = (place / "site" / "vllm" / "launches").read_text().splitlines()
    return sorted(
        [(json.loads(line)[0] or {}).get("num_speculative_tokens") for line in lines], key=str
    )  # two begin at once


def expected(prompt, length):
    """The answer, and the guesses that each step accepts."""
    text, accepted = [*prompt, (7 * prompt[-1] + 3) % 50], []
    while (left := len(prompt) + STOP.max_new_tokens - len(text)) > 0:
        emitted = min(1 + len(text) % (length + 1), left)
        for _ in range(emitted):
            text.append((7 * text[-1] + 3) % 50)
        accepted.append(min(emitted, 1 + (len(text) - emitted) % (length + 1)) - 1)
    return text[len(prompt) :], accepted


@pytest.mark.parametrize("rows", [1, 3])
def test_every_pass_is_what_the_engine_emitted_at_every_length(place, rows):
    stepper = opened(place)
    for length in (0, 3, 1, 8):
        run = decoded(stepper, Tree.chain(length), PROMPTS, rows)
        assert [(answer.text, answer.accepted) for answer in run.answers] == [
            expected(prompt, length) for prompt in PROMPTS
        ]
    assert launches(place) == [8, None]  # one without a drafter, and one for all lengths


def test_no_guesses_are_by_the_engine_that_has_a_drafter_and_renewing_launches_both(place):
    stepper = opened(place)
    plain = decoded(stepper, PLAIN, [PROMPTS[0]])
    assert decoded(stepper.idle, PLAIN, [PROMPTS[0]]).answers == plain.answers
    assert launches(place) == [8, None]
    stepper.renew()
    decoded(stepper, PLAIN, [PROMPTS[0]])
    decoded(stepper, Tree.chain(2), [PROMPTS[0]])
    assert launches(place) == [8, 8, None, None]


def test_every_setting_that_copies_text_has_an_engine_beside_the_others(place):
    """One that has not answered is not launched anew."""
    settings = {"num_speculative_tokens": 2, "prompt_lookup_max": 4}
    drafts = [CopiedText.of("vllm:ngram-v1", {**settings, "num_speculative_tokens": n}, n + 1, n) for n in (2, 5)]
    stepper = opened(place)
    stepper.prepare(PROMPTS, [PLAIN, *drafts], 1)
    assert stepper.version == "0.0"
    stepper.renew()
    for draft in (*drafts, PLAIN, *drafts):
        run = decoded(stepper, draft, [PROMPTS[0]])
        assert run.answers[0].accepted == expected(PROMPTS[0], draft.depth)[1]
    assert launches(place) == [2, 5, None]
    told = json.loads((place / "site" / "vllm" / "launches").read_text().splitlines()[1])[0]
    assert told == {"method": "ngram", **settings}


def test_where_the_table_is_missing_each_length_is_launched(place):
    (place / "site" / "vllm" / "no-table").touch()
    stepper = opened(place)
    for length in (2, 4):
        run = decoded(stepper, Tree.chain(length), [PROMPTS[1]])
        assert run.answers[0].accepted == expected(PROMPTS[1], length)[1]
    assert launches(place) == [2, 4, 8, None]
    run = decoded(stepper.idle, PLAIN, [PROMPTS[1]])
    assert run.answers[0].accepted == expected(PROMPTS[1], 0)[1]  # it guessed once where it was told nothing


@pytest.mark.parametrize("heard", [0, 1, 3])
def test_who_stops_asking_leaves_the_engine_empty(place, heard):
    stepper = opened(place)
    passes = stepper.answer(PROMPTS, Tree.chain(2), 2)
    for _, _one in zip(range(heard), passes, strict=False):
        pass
    passes.close()
    run = decoded(stepper, Tree.chain(2), PROMPTS, 2)
    assert [answer.text for answer in run.answers] == [expected(prompt, 2)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(("how", "said"), [("die", "noise on stdout"), ("raise", "RuntimeError: no kernel for it")])
def test_an_engine_that_ends_is_said_with_its_last_words(place, how, said):
    stepper = opened(place)
    (place / "site" / "vllm" / how).touch()
    with pytest.raises(Unsupported, match=f"vLLM ended before its answer: .*{said}"):
        decoded(stepper, PLAIN, [PROMPTS[0]])


@pytest.mark.parametrize("length", [0, 2])
def test_an_engine_that_ends_while_it_is_launched_is_launched_again(place, length):
    stepper, raises = opened(place), place / "site" / "vllm" / "raise-at-launch"
    raises.touch()
    for _ in range(2):
        with pytest.raises(Unsupported, match="RuntimeError: no memory"):
            decoded(stepper, Tree.chain(length), [PROMPTS[0]])
    raises.unlink()
    for again in (length, 0):
        run = decoded(stepper, Tree.chain(again), [PROMPTS[0]])
        assert run.answers[0].text == expected(PROMPTS[0], again)[0]


def test_an_engine_that_is_killed_is_launched_again(place):
    stepper = opened(place)
    process = stepper._worker(None)._process
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(Unsupported, match="vLLM ended before its answer: it crashed with SIGKILL"):
        decoded(stepper, PLAIN, [PROMPTS[0]])
    assert decoded(stepper, PLAIN, [PROMPTS[0]]).answers[0].text == expected(PROMPTS[0], 0)[0]


@pytest.mark.parametrize("python", ["/nowhere/python", "/dev/null"])
def test_a_python_that_is_none_is_refused(place, python):
    target = Target(tiny_model(), name=str(place / "model"))
    setup = Setup(target, PromptLookup(target.vocab_size), STOP)
    with pytest.raises(InvalidInput, match="engine_python must be a Python that has vllm"):
        str(open_stepper("vllm", setup, python=python).version)
    with pytest.raises(InvalidInput, match="leave it out with engine='transformers'"):
        open_stepper("transformers", setup, python=python)
