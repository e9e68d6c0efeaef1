"""Copied text or a neural drafter's chain: who drafts at every step, what steps cost, and what a search makes of it."""

import random
from dataclasses import replace
from itertools import chain, product
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from treeopt import demo, pipeline
from treeopt.demo.corpus import standard_library
from treeopt.engines.base import COMMANDS
from treeopt.engines.base import Request as Asked
from treeopt.engines.plans import export_request
from treeopt.errors import InvalidInput, TreeoptError, Unsupported
from treeopt.growth.replay import TreeRates, accepted_lengths
from treeopt.growth.source import source_of
from treeopt.pipeline.entrants import own_entrants
from treeopt.pipeline.pairs import texts_of
from treeopt.pipeline.search import search
from treeopt.planning.candidates import copied_steps
from treeopt.records.plan import Plan
from treeopt.records.pools import RANKS_ALONE
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.requestlog import Request
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.runtime.decode import Setup
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.engines import open_stepper
from treeopt.runtime.measure.ranks import rank_answers
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import load_target
from treeopt.text.llama_cpp import LlamaCpp, Map, Mod, Simple
from treeopt.text.pairs import Pair, drafter_of
from treeopt.text.replay import replay
from treeopt.trees.draft import CopiedOr, CopiedText, draft_of
from treeopt.trees.tree import Tree

from . import slow_text
from .test_text_drafters import requests_of, texts

CASES, HEADS = 2000, 5
METHOD = "with-copied-text"


def ranks_of(rng, answers, skill=None):
    """Ranks of a drafter that is right at random, as a trace has them: none beyond an answer's end."""
    skill, found = skill or rng.random(), []
    for answer in answers:
        left = range(len(answer) - 1, -1, -1)
        found += [
            [(0 if rng.random() < skill else rng.randrange(1, 4)) if k < n else -2 for k in range(HEADS)] for n in left
        ]
    return found


def trace_of(answers, ranks, **arrays):
    tokens = np.array([token for answer in answers for token in answer])
    starts = np.cumsum([0, *map(len, answers)])
    return RankTrace(np.array(ranks), starts, tokens, **arrays)


def chain_reaches(ranks, state, length):
    return next((k for k in range(length) if ranks[state][k] != 0), length)


def automaton_draft(text, threshold, length):
    """What followed the earliest place of the longest suffix that stood before; None where that is shorter than the threshold."""
    for n in range(len(text) - 1, threshold - 1, -1):
        if starts := slow_text.earlier(text, n):
            return text[starts[0] + n :][:length]
    return None


def taken(answer, at, draft):
    return next(
        (i for i, pair in enumerate(zip(draft, answer[at:], strict=False)) if pair[0] != pair[1]),
        min(len(draft), len(answer) - at),
    )


def automaton_steps(prompt, answer, ranks, threshold, length):
    """(rows, accepted, whether by the drafter) of every step of TensorRT-LLM's pair."""
    at, found = 1, []
    while at < len(answer):
        draft = automaton_draft(prompt + answer[1:at], threshold, length) if found else None
        accepted = chain_reaches(ranks, at - 1, length) if draft is None else taken(answer, at, draft)
        found.append((1 + length, accepted, draft is None))
        at += accepted + 1
    return found


def test_the_automaton_overwrites_a_draft_where_its_match_is_as_long_as_the_threshold():
    by_text = 0
    for seed in range(CASES):
        rng, prompt, answer = texts(seed)
        ranks, threshold, length = ranks_of(rng, [answer]), rng.randrange(1, 6), rng.randrange(1, HEADS + 1)
        neural = accepted_lengths(trace_of([answer], ranks), Tree.chain(HEADS)).tolist()
        draft = CopiedOr.of("tensorrt-llm:sa", {"threshold": threshold}, 1 + length, length, length)
        found = replay([Request(prompt, answer, neural=neural)], lambda draft=draft: drafter_of(draft))
        wanted = automaton_steps(prompt, answer, ranks, threshold, length)
        assert [
            *zip(found.rows.tolist(), found.accepted.tolist(), (found.neural > 0).tolist(), strict=True)
        ] == wanted, seed
        assert found.emitted.sum() == len(answer) - 1
        by_text += sum(not neural for *_, neural in wanted)
    assert by_text > CASES


RULES = {
    "ngram-simple": (Simple, slow_text.Simple, lambda rng: (rng.randrange(1, 5), rng.randrange(1, 8))),
    "ngram-map-k": (Map, slow_text.Map, lambda rng: (rng.randrange(1, 5), rng.randrange(1, 8), 1, False)),
    "ngram-mod": (Mod, slow_text.Mod, lambda rng: (rng.randrange(1, 7), rng.randrange(6), rng.randrange(1, 9))),
}


@pytest.mark.parametrize("name", RULES)
def test_llama_cpp_asks_the_drafter_where_no_text_is_found(name):
    make, slow, options = RULES[name]
    by_text = by_chain = 0
    for seed in range(CASES // 4 if make is Map else CASES):
        rng, requests = requests_of(seed)
        setting, length, limit = (
            options(rng),
            rng.randrange(1, HEADS + 1),
            max(len(a) for _, a in requests) + rng.randrange(3),
        )
        ranks, at = ranks_of(rng, [answer for _, answer in requests]), np.cumsum([0, *(len(a) for _, a in requests)])
        neural = accepted_lengths(trace_of([a for _, a in requests], ranks), Tree.chain(HEADS)).tolist()
        asked = [Request(p, a, limit, neural=neural[at[i] : at[i + 1]]) for i, (p, a) in enumerate(requests)]
        found = replay(asked, lambda s=setting, n=length: Pair(LlamaCpp([make(*s)]), n))
        wanted, rule = [], slow(*setting)
        for i, (prompt, answer) in enumerate(requests):
            rule.begin(prompt)
            here = 1
            while here < len(answer):
                left = limit - here
                text = rule.draft(prompt + answer[:here])[: left - 1] if left > 1 else []
                chain = 0 if text else min(length, left - 1)
                accepted = taken(answer, here, text) if text else chain_reaches(ranks[at[i] :], here - 1, chain)
                if text:
                    rule.accept(accepted)
                wanted.append((1 + len(text) + chain, accepted, chain))
                here += accepted + 1
        assert [*zip(found.rows.tolist(), found.accepted.tolist(), found.neural.tolist(), strict=True)] == wanted, seed
        by_chain += sum(bool(chain) for *_, chain in wanted)
        by_text += sum(rows > 1 and not chain for rows, _, chain in wanted)
    assert min(by_text, by_chain) > len(RULES)


def test_a_pass_costs_what_its_mean_rows_do_and_drafts_if_any_sequence_does():
    rows, drafting, length = np.array([0, 0.2, 0, 0.5, 0.3]), 0.5, 2
    rates = TreeRates(rows=rows, drafting=drafting)
    ms = {(n, d, 0): 10 + n + 3 * (d - 1) * (n > 1) for n in range(1, 9) for d in (0, 1, 2)}
    for batch_size in (1, 2, 3):
        total = 0.0
        for each in product(range(1, 5), repeat=batch_size):
            total += float(np.prod(rows[list(each)])) * (10 + sum(each) / batch_size)
        total += 3 * (1 - (1 - drafting) ** batch_size)
        found = sum(share * ms[step] for step, share in copied_steps(rates, length, batch_size).items())
        assert found == pytest.approx(total, rel=1e-9 if batch_size == 1 else 0.005)
    always = copied_steps(TreeRates(rows=np.array([0, 0, 0, 1.0]), drafting=1.0), 2, 4)
    assert always == {(3, 2, 0): 1.0}  # TensorRT-LLM's: a chain's


def recorded(seed=0, conversations=12):
    """A session with prompts, and the trace of their answers, which copy much of the prompts."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(60) for _ in range(40)) for _ in range(conversations)]
    answers = []
    for prompt in prompts:
        answer = [rng.randrange(60)]
        while len(answer) < 50:
            at = rng.randrange(len(prompt))
            answer += [*prompt[at : at + rng.randrange(3, 9)], 60 + rng.randrange(20)]
        answers.append(answer)
    meta = {"prompt_sha256": [f"{i:016x}" for i in range(conversations)], "drafter": {"kind": "eagle3", "id": "x"}}
    trace = trace_of(
        answers, ranks_of(rng, answers, 0.6), prompt_tokens=np.full(conversations, 40), meta={**meta, "top_k": 4}
    )
    known = [
        SimpleNamespace(sha256=sha, group="", first=p) for sha, p in zip(meta["prompt_sha256"], prompts, strict=True)
    ]
    chat = SimpleNamespace(conversations=known, name="known", next_prompt=lambda one, answers: one.first)
    return SimpleNamespace(prompts=chat), trace


def profile_of(row_ms, level_ms, batch_sizes=(1, 4)):
    """Steps of 10 ms, so much more for each row, and for each level of a chain."""
    sizes = [(n, d) for n in range(2, 33) for d in range(1, HEADS + 1) if d < n]
    points = [
        StepTiming(b, 64, n, d, (10 + row_ms * (n - 1) + level_ms * d,) * 4) for b in batch_sizes for n, d in sizes
    ]
    return LatencyProfile(tuple(points), tuple(StepTiming(b, 64, 1, 0, (10.0,) * 4) for b in batch_sizes))


@pytest.fixture
def run(tmp_path):
    """A run with a trace, and the session that it was recorded in."""
    session, trace = recorded()
    run = RunDirectory(tmp_path)
    trace.save(run.trace)
    return run, session, trace


@pytest.mark.parametrize("engine", ["tensorrt-llm", "llama-cpp"])
def test_the_pair_is_planned_beside_each_of_the_two_alone_and_goes_to_its_engine(run, engine):
    run, session, trace = run
    profile_of(0.1, 0.1).save(run.profile)
    plan = search(run, session=session, engine=engine, method=METHOD)
    assert Plan.load(run.plan).entries == plan.entries
    for entry in plan.entries:
        assert isinstance(entry.draft, CopiedOr)
        alone = [entry.others[kind] for kind in ("chain", "copied")]
        assert all(entry.chosen.speedup > other.speedup for other in alone)
        if engine == "tensorrt-llm":
            steps = []
            for (prompt, answer, *_), at in zip(texts_of(session, trace), trace.starts, strict=False):
                ranks = trace.ranks[at:].tolist()
                steps += automaton_steps(prompt, answer, ranks, entry.draft.options["threshold"], entry.draft.length)
            assert entry.accepted == pytest.approx(np.bincount([a for _, a, _ in steps]) / len(steps))
            assert entry.chosen.step_ms == pytest.approx(10 + 0.2 * entry.draft.length, rel=0.05)
    paths, _ = pipeline.export(run, engine)
    (one, *_) = {path.parent for path in paths}
    said = "".join(path.read_text(encoding="utf-8") for path in one.iterdir())
    assert ("sa_config: {threshold: " in said) if engine == "tensorrt-llm" else (",draft-eagle3 " in said)
    with pytest.raises(Unsupported, match="copies no text"):
        own_entrants(plan, plan.entries[0], source_of(trace), SimpleNamespace(num_heads=HEADS), ())
    if engine == "tensorrt-llm":  # others get the chain
        assert any("best of the plan's chains" in note for note in pipeline.export(run, "sglang")[1].notes)


def test_without_latencies_what_emits_the_most_is_taken(run):
    run, session, _ = run
    (entry,) = search(run, session=session, engine="llama-cpp", method=METHOD).entries
    assert entry.chosen.tokens_per_step >= max(other.tokens_per_step for other in entry.others.values())


def test_where_rows_and_levels_are_dear_nothing_is_drafted(run):
    run, session, _ = run
    profile_of(30.0, 30.0).save(run.profile)
    plan = search(run, session=session, engine="llama-cpp", method=METHOD)
    assert not plan.speculates
    assert "the base model without speculation" in pipeline.export(run, "llama-cpp")[1].files[COMMANDS]


def test_what_a_pair_cannot_be_planned_from_is_refused(run):
    run, session, trace = run
    with pytest.raises(InvalidInput, match="leave for_groups out"):
        search(run, session=session, engine="llama-cpp", method=METHOD, for_groups="own")
    session.prompts.conversations.pop()
    with pytest.raises(InvalidInput, match="1 are not in known"):
        search(run, session=session, engine="llama-cpp", method=METHOD)
    replace(trace, weight=np.arange(1, 13)).save(run.trace)
    with pytest.raises(InvalidInput, match="without weight"):
        search(run, session=session, engine="llama-cpp", method=METHOD)


def exported(draft, engine, kind):
    chain = Tree.chain(getattr(draft, "length", 0))
    return export_request(Asked(copied=draft, tree=chain, num_heads=8, drafter=kind), engine, method=METHOD)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "pard"])
def test_tensorrt_llm_is_told_the_threshold(kind):
    written = exported(CopiedOr.of("tensorrt-llm:sa", {"threshold": 6}, 4, 3, 3), "tensorrt-llm", kind)
    config = yaml.safe_load(written.files["llm_api_options.yml"])["speculative_config"]
    assert config.pop("decoding_type") == {"eagle3": "Eagle3", "mtp": "MTP", "pard": "PARD"}[kind]
    assert config == {"max_draft_len": 3, "sa_config": {"threshold": 6}} | (
        {} if kind == "mtp" else {"speculative_model": "DRAFTER"}
    )
    alone = exported(CopiedText.of("tensorrt-llm:sa", {"max_draft_len": 5}, 6, 5), "tensorrt-llm", kind)
    assert "decoding_type: SA\n" in alone.files["llm_api_options.yml"]


@pytest.mark.parametrize("kind", ["draft-model", "eagle3", "mtp"])
def test_llama_cpp_is_told_both_types(kind):
    options = {"spec_ngram_mod_n_match": 8, "spec_ngram_mod_n_min": 2}
    written = exported(CopiedOr.of("llama.cpp:ngram-mod", options, 65, 64, 3), "llama-cpp", kind)
    own = kind.replace("draft-model", "simple")
    assert f"--spec-type ngram-mod,draft-{own} " in written.command
    assert "--spec-draft-n-max 3 " in written.command
    assert written.command.endswith("--spec-ngram-mod-n-match 8 --spec-ngram-mod-n-min 2")
    assert any("of ngram-mod one table for all" in note for note in written.notes)
    alone = exported(CopiedText.of("llama.cpp:ngram-mod", options, 65, 64), "llama-cpp", kind)
    assert "--spec-type ngram-mod --spec-ngram-mod-n-match 8" in alone.command


@pytest.mark.parametrize(
    ("engine", "name", "options"),
    [
        ("tensorrt-llm", "tensorrt-llm:sa", {"threshold": 0}),
        ("tensorrt-llm", "tensorrt-llm:sa", {"threshold": 4, "max_draft_len": 3}),
        ("tensorrt-llm", "tensorrt-llm:sa", {}),
        ("tensorrt-llm", "llama.cpp:ngram-cache", {}),
        ("llama-cpp", "tensorrt-llm:sa", {"threshold": 4}),
        ("llama-cpp", "llama.cpp:ngram-mod", {"spec_ngram_mod_n_match": 2000}),
    ],
)
def test_what_an_engine_would_refuse_is_refused(engine, name, options):
    with pytest.raises(TreeoptError):
        exported(CopiedOr.of(name, options, 4, 3, 3), engine, "eagle3")


def test_a_file_tells_a_pair_from_copied_text():
    draft = CopiedOr.of("tensorrt-llm:sa", {"threshold": 6}, 4, 3, 3)
    assert draft_of(draft.record) == draft
    assert draft_of({**draft.record, "length": 2}) != draft
    assert type(draft_of({key: value for key, value in draft.record.items() if key != "length"})) is CopiedText


@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])
def test_decoding_from_any_place_of_an_answer_accepts_what_the_pair_takes_from_the_record(drafter):
    """The demo model decodes each of the pair's steps anew from where the step before ended: by its drafter's chain, or the
    target itself reads the copied guesses."""
    target, most, length = load_target(demo.NAME), 24, 3
    prompts = [
        target.tokenizer(m.text[600:900])["input_ids"]
        for m in standard_library(held_out=True)[:40:20]
        if len(m.text) > 900
    ]
    setup = Setup(target, open_drafter(drafter, target).drafter, StopRule(target.eos_ids, most, at_loops=False))

    def decoded(prompt, tree, tokens):
        short = replace(setup, stop=StopRule(target.eos_ids, tokens, at_loops=False))
        steps = [one.emitted.get(0, []) for one in open_stepper(None, short).answer([prompt], tree)]
        return [list(tokens) for tokens in steps if len(tokens)]

    answers = [list(chain(*decoded(prompt, Tree.chain(0), most))) for prompt in prompts]
    trace = rank_answers(setup, prompts, answers, batch_size=2, counts=RANKS_ALONE)
    reached = np.split(accepted_lengths(trace, Tree.chain(trace.num_heads)), trace.starts[1:-1])
    requests = [Request(p, a, neural=n.tolist()) for p, a, n in zip(prompts, answers, reached, strict=True)]
    draft = CopiedOr.of("tensorrt-llm:sa", {"threshold": 2}, 1 + length, length, length)
    found = replay(requests, lambda: drafter_of(draft))
    steps = zip(found.accepted.tolist(), (found.neural > 0).tolist(), strict=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        at = 1
        while at < len(answer):
            accepted, is_neural = next(steps)
            before = prompt + answer[: at - 1]
            if is_neural:
                _, step, *_ = decoded(before, Tree.chain(length), 2 + length)
                assert len(step) - 1 >= accepted
                assert len(step) - 1 == accepted or at + accepted + 1 >= len(answer)
            else:
                guesses = automaton_draft(prompt + answer[1:at], 2, length)
                own = list(chain(*decoded(before + answer[at - 1 : at], Tree.chain(0), len(guesses))))
                assert taken([*own, -1], 0, guesses) >= accepted
                assert taken([*own, -1], 0, guesses) == accepted or at + accepted + 1 >= len(answer)
            at += accepted + 1
    assert next(steps, None) is None
    assert {True, False} <= set((found.neural > 0).tolist())
