"""Drafters that copy text in the engines themselves: texts are those of plain decoding, and every step is the replay's."""

from __future__ import annotations

import importlib.util
import shutil
from itertools import chain, pairwise

import pytest

from treeopt import demo
from treeopt.demo.corpus import standard_library
from treeopt.engines.base import COMMANDS
from treeopt.engines.base import Request as Asked
from treeopt.engines.plans import export_request
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

from .engines_live import archives
from .engines_live.gguf_model import write_gguf
from .engines_live.llama_server import answered

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


def served(server, models, draft, prompts, into):
    """What a llama.cpp server of one slot answers, one request after another, with a draft as it is exported, or none."""
    written = export_request(Asked(copied=draft, num_heads=1, drafter="copied-text"), "llama-cpp")
    folder = into / (draft.drafter.partition(":")[2].replace(",", "-") if draft else "plain")
    shutil.copytree(models, folder)
    command = written.files[COMMANDS].splitlines()[-1]
    (folder / COMMANDS).write_text(f"{command} --parallel 1\n", encoding="utf-8")
    return answered(server, folder, prompts, folder, [{"n_predict": TOKENS}] * len(prompts)).answers


SIZES = {"size_n": 3, "size_m": 8}
LLAMA = [
    ("ngram-simple", {f"spec_ngram_simple_{name}": value for name, value in SIZES.items()}),
    ("ngram-map-k", {f"spec_ngram_map_k_{name}": value for name, value in SIZES.items()}),
    ("ngram-mod", {"spec_ngram_mod_n_match": 4, "spec_ngram_mod_n_min": 1, "spec_ngram_mod_n_max": 8}),
    ("ngram-cache", {}),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A server that was built, by `make engines-start`, the folder of the demo model for it, prompts, and plain answers."""
    server = next(archives.folder().glob("llama-server-*/bin/llama-server"), None)
    if server is None:
        pytest.skip("llama-server is not built: make engines-start builds it")
    folder = tmp_path_factory.mktemp("llama-cpp")
    (models := folder / "models").mkdir()
    write_gguf(demo.MODEL, models / "MODEL.gguf")
    tokenizer = load_target(str(demo.MODEL)).tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    return server, models, prompts, served(server, models, None, prompts, folder), folder


@pytest.mark.parametrize(("kind", "settings"), LLAMA, ids=[kind for kind, _ in LLAMA])
def test_llama_cpp_accepts_what_the_replay_does_in_one_slot(llama, kind, settings):
    server, models, prompts, plain, folder = llama
    name = f"llama.cpp:{kind}"
    found = served(server, models, CopiedText.of(name, settings, 9, 8), prompts, folder)
    assert [one["tokens"] for one in found] == [one["tokens"] for one in plain]
    requests = [Request(prompt, one["tokens"], TOKENS) for prompt, one in zip(prompts, found, strict=True)]
    replayed = replay(requests, lambda: text_drafter(name, settings), state="serial")
    print(
        f"{name} serial: {len(requests)} requests, {replayed.drafted.sum()} guesses, {replayed.accepted.sum()} accepted"
    )
    drafted, accepted = (
        [int(counts[a:b].sum()) for a, b in pairwise(replayed.starts)]
        for counts in (replayed.drafted, replayed.accepted)
    )
    timings = [one["timings"] for one in found]
    assert [one.get("draft_n", 0) for one in timings] == drafted
    assert [one.get("draft_n_accepted", 0) for one in timings] == accepted
    assert sum(accepted) > 5  # ngram-cache sees no n-gram over the border of two steps, and seldom drafts
