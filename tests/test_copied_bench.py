"""A plan of a drafter that copies text, proved by an engine: each request's steps are the replay's, and its text is plain decoding's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch

import treeopt
from tests.helpers.steps import api_bench, search
from treeopt import demo
from treeopt.demo.corpus import standard_library
from treeopt.errors import InvalidInput, Unsupported
from treeopt.pipeline.copied import halves
from treeopt.records.benchmark import Benchmark
from treeopt.records.requestlog import Request, RequestLog
from treeopt.records.rundir import RunDirectory
from treeopt.report.bench_table import bench_table
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.engines import open_stepper
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import PLAIN
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import load_target
from treeopt.text.engines import text_drafter
from treeopt.text.replay import replay
from treeopt.text.rules import NO_GUESSES, TextDrafter
from treeopt.trees.draft import CopiedText

from .engines_live import archives
from .engines_live.gguf_model import write_gguf
from .engines_live.llama_server import TOLD
from .helpers.vllm_cases import TEXTS, python_of_vllm

LIMITS = [24, 40, 17]  # of the requests, in turn


def steps_of(stepper, prompts, draft):
    """The tokens that each pass emitted, by prompt; those of the pass over the prompt first."""
    found = [[] for _ in prompts]
    for one in stepper.answer(prompts, draft):
        for place, tokens in one.emitted.items():
            found[place] += [list(tokens)] if tokens else []
    return found


@pytest.fixture(scope="module")
def log() -> RequestLog:
    """Twelve requests of six conversations, which the demo model answered greedily, each up to a limit of its own."""
    target = load_target(str(demo.MODEL))
    texts = [module.text[600:1000] for module in standard_library(held_out=True) if len(module.text) > 1000][:12]
    prompts = [target.tokenizer(text)["input_ids"] for text in texts]
    setup = Setup(target, open_drafter("ngram", target).drafter, StopRule(target.eos_ids, max(LIMITS), at_loops=False))
    plain = [list(chain(*steps)) for steps in steps_of(open_stepper("transformers", setup), prompts, PLAIN)]
    limits = [LIMITS[i % len(LIMITS)] for i in range(len(prompts))]
    made = RequestLog.of(Request(p, a[:n], n) for p, a, n in zip(prompts, plain, limits, strict=True))
    meta = {"source": {"tokenizer": str(demo.MODEL)}, "group_names": ["chat", "agent"]}
    cluster, group = np.arange(12) // 2, np.arange(12) // 2 % 2
    return RequestLog(made.tokens, made.starts, made.prompt_tokens, group, cluster, made.limit, meta=meta)


@pytest.fixture
def run(log, tmp_path) -> RunDirectory:
    log.save(tmp_path / "requests.npz")
    return RunDirectory(tmp_path)


def proved(run: RunDirectory, engine: str, log: RequestLog, **options) -> Benchmark:
    """The benchmark of a plan for the engine, whose steps are the prediction's: the log has plain decoding's own texts."""
    search(run, engine=engine.partition("-")[0], method="prompt-lookup")
    bench = api_bench(run=run, engine=engine, **options)
    kept = int((halves(log)[log.clusters] > 0).sum())
    limits = [one.limit for one, half in zip(log.requests(), halves(log)[log.clusters], strict=True) if half > 0]
    assert [one.name for one in bench.contenders][:3] == ["plain", "chosen", "usual"]
    for one in bench.contenders[:3]:  # an engine as it comes has other texts
        assert one.identical == one.compared == kept
        assert sorted(answer.tokens for answer in one.sequences) == sorted(limits)
        assert [answer.steps for answer in one.sequences] == [answer.replayed_steps for answer in one.sequences]
        assert one.predicted_tokens_per_step == pytest.approx(one.tokens_per_step)
        assert one.accepted == one.replayed_accepted
    assert bench.contender("chosen").tokens_per_step > bench.contender("plain").tokens_per_step == 1
    return bench


@pytest.mark.long
def test_every_request_takes_the_steps_of_the_replay_and_those_that_were_predicted(run, log):
    bench = proved(run, "transformers", log)
    assert bench.speedup("chosen")
    assert bench.groups == ["chat", "agent"]
    assert Benchmark.load(run.path / "bench-transformers.json").contender("chosen") == bench.contender("chosen")
    assert bench_table(bench)
    assert not list(run.path.glob("*.partial"))
    assert {answer.id for answer in bench.contenders[0].sequences} == {f"conversation {c}" for c in range(3)}


def test_the_answers_are_as_long_as_is_asked_and_as_many(run):
    search(run, engine="transformers", method="prompt-lookup")
    bench = api_bench(run=run, engine="transformers", num_prompts=3, max_new_tokens=8)
    assert [answer.tokens for answer in bench.contender("usual").sequences] == [8] * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "engine must say which engine decodes"),
        ({"engine": "transformers", "drafter": "ngram"}, "drafter does not go with a run of a log"),
        ({"engine": "openvino"}, "has no drafter of the plan's, which is of transformers"),
        ({"engine": "transformers", "trees": ["mc_sim_7b_63"]}, "pass one alone"),
    ],
    ids=str,
)
def test_what_does_not_belong_to_a_log_is_refused_in_a_sentence(run, options, said):
    search(run, engine="transformers", method="prompt-lookup")
    with pytest.raises((InvalidInput, Unsupported), match=said):
        api_bench(run=run, **options)


def test_a_log_of_another_model_is_refused(log, tmp_path):
    made = RequestLog.of(Request([10**6, 5], [7, 8]) for _ in range(2))
    made.save(tmp_path / "requests.npz")
    search(tmp_path, engine="transformers", method="prompt-lookup")
    with pytest.raises(InvalidInput, match="model must say which model answers"):
        api_bench(run=tmp_path, engine="transformers")
    with pytest.raises(InvalidInput, match="has the token 1000000"):
        api_bench(run=tmp_path, engine="transformers", model=str(demo.MODEL))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("openvino_genai") is None, reason="OpenVINO GenAI is not installed")
def test_openvino_takes_the_steps_of_the_replay_alone_and_together(run, log):
    profile = treeopt.profile(run=run, engine="openvino", batch_sizes=(1, 2), time_limit_s=35)
    assert {point.size for point in profile.points if point.batch_size == 1} == {2, 3, 5, 7, 9, 13, 17}
    bench = proved(run, "openvino", log)
    assert "default plain" in {one.name for one in bench.contenders}
    search(run, engine="openvino", batch_sizes=(2,))
    together = api_bench(run=run, engine="openvino")
    for one in together.contenders[:3]:
        assert [answer.steps for answer in one.sequences] == [answer.replayed_steps for answer in one.sequences]
    assert json.loads((run.path / "plan.json").read_text())["runtime"]["name"] == "openvino"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache"])
def test_a_server_of_llama_cpp_takes_the_steps_of_the_replay(run, log, monkeypatch, kind):
    """In one slot, request after request, the first of them begun once before to warm the server up."""
    server = next(archives.folder().glob("llama-server-*/bin/llama-server"), None)
    if server is None:
        pytest.skip("llama-server is not built: make engines-start builds it")
    for variable, value in TOLD.items():
        monkeypatch.setenv(variable, value)
    write_gguf(demo.MODEL, run.path / "model.gguf")
    plan = search(run, engine="llama-cpp", method=kind)
    launch = f"{server} --model {run.path / 'model.gguf'} --parallel 1 --port {{port}} {{options}}"
    bench = api_bench(run=run, launch=launch, engine="llama-cpp", rounds=1)
    held_out = [one for one, half in zip(log.requests(), halves(log)[log.clusters], strict=True) if half > 0]
    warm = held_out[0]._replace(answer=held_out[0].answer[:8], limit=8)
    settings = {"chosen": plan[1].draft.options, "usual": {}}
    if kind == "ngram-cache":  # without options
        del settings["usual"]
    assert settings.keys() < {one.name for one in bench.contenders}
    for name, options in settings.items():
        told = replay([warm, *held_out], lambda o=options: text_drafter(f"llama.cpp:{kind}", o), state="serial")
        one = bench.contender(name)
        assert one.identical == one.compared == len(held_out)
        assert (one.tokens, one.steps) == tuple(int(of[told.starts[1] :].sum()) for of in (told.emitted, told.rows > 0))
    assert bench.contender("chosen").steps < bench.contender("plain").steps


@pytest.mark.slow
def test_vllm_takes_the_steps_of_the_replay(tmp_path):
    """Three engines beside each other: one without a drafter, and one for each setting."""
    python, tokenizer = python_of_vllm(), load_target("smollm2").tokenizer
    texts = [tokenizer.encode(text * 4) for text in TEXTS]
    made = RequestLog.of(Request(text, text[:24], 24 + i) for i, text in enumerate(texts))
    made.save(tmp_path / "requests.npz")
    search(tmp_path, engine="vllm", method="ngram-v1")
    options = {"model": "smollm2", "engine_python": python, "rounds": 1}
    bench = api_bench(run=tmp_path, engine="vllm", **options)
    for one in bench.contenders:
        assert one.identical == one.compared
        assert [answer.steps for answer in one.sequences] == [answer.replayed_steps for answer in one.sequences]
    assert [one.name for one in bench.contenders] == ["plain", "chosen", "usual"]
    assert bench.contender("chosen").tokens_per_step > 1


@dataclass
class Overrun(TextDrafter):
    """vLLM's worker keeps the guesses that are right behind the last token that is asked for; ``answers`` has them."""

    rule: TextDrafter
    answers: dict[tuple[int, ...], list[int]]
    limit: int

    def start(self, prompt):
        return [self.rule.start(prompt), self.answers[tuple(prompt)], 0, NO_GUESSES]

    def draft(self, state, left):
        state[3] = self.rule.draft(state[0], left)
        return state[3]

    def commit(self, state, tokens, accepted):
        own, answer, at, draft = state
        state[2] += len(tokens)
        if state[2] == self.limit:
            accepted = draft.accepted(answer[at : at + len(draft.tokens)])
            tokens = answer[at : at + accepted + 1]
        self.rule.commit(own, tokens, accepted)


@pytest.mark.slow
@pytest.mark.parametrize(("cached", "factor"), [(0, 4.0), (1, 1.0), (10000, 1.0)])
def test_vllms_suffix_decoding_takes_the_steps_of_the_replay(cached, factor):
    """Cold, and request after request: the second half of the requests are the first half again."""
    python, target, limit = python_of_vllm(), load_target("smollm2"), 48
    finder = "import importlib.util as u, sys; sys.exit(u.find_spec('arctic_inference') is None)"
    if subprocess.run([python, "-c", finder], check=False).returncode:
        pytest.skip("vLLM's Python has no arctic-inference, which its suffix decoding needs")
    prompts = [target.tokenizer.encode(text * 3) for text in TEXTS]
    longer = {}
    for prompt in prompts:
        asked = torch.tensor([prompt])
        found = target.model.generate(asked, max_new_tokens=limit + 16, do_sample=False, eos_token_id=None)
        longer[tuple(prompt)] = found[0, len(prompt) :].tolist()
    setup = Setup(target, open_drafter("ngram", target).drafter, StopRule(frozenset(), limit, at_loops=False))
    options = {
        "suffix_decoding_max_cached_requests": cached,
        "suffix_decoding_max_spec_factor": factor,
        "suffix_decoding_max_tree_depth": 16,
    }
    draft = CopiedText.of("vllm:suffix", options, 17, 16)
    steps = steps_of(open_stepper("vllm", setup, python=python), prompts * 2, draft)
    requests = [Request(prompt, longer[tuple(prompt)][:limit], limit) for prompt in prompts * 2]
    assert [[*chain(*own)] for own in steps] == [one.answer for one in requests]
    told = replay(requests, lambda: Overrun(text_drafter("vllm:suffix", options), longer, limit), state="serial")
    for r, own in enumerate(steps):
        assert [len(one) for one in own[1:]] == told.emitted[told.starts[r] : told.starts[r + 1]].tolist()
    assert told.emitted.mean() > 1.5
