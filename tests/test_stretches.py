"""Steps of an engine, timed on the texts of a trace: what they cost by rows and context, and against which plain decoding."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import treeopt as api
from tests.helpers import steps
from treeopt.errors import InvalidInput
from treeopt.growth.source import source_of
from treeopt.latency.costs import StepCosts
from treeopt.latency.rounds import time_steps
from treeopt.pipeline.entrants import engine_entrants
from treeopt.pipeline.profile.timed import all_timings, texts_of
from treeopt.records.benchmark import AS_IT_COMES, Benchmark
from treeopt.records.contender import Answer, Block, Contender
from treeopt.records.origins import Provenance
from treeopt.records.plan import EXACT
from treeopt.records.profile import LatencyProfile
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import RankTrace
from treeopt.report.bench_table import bench_tables
from treeopt.report.latency_table import profile_table
from treeopt.report.plan_table import certainty
from treeopt.report.verdict import measured
from treeopt.runtime.stepper import PLAIN, STRETCH, Pass, Stepper, StretchVisits
from treeopt.trees.tree import Tree

from .conftest import treeopt
from .helpers.runs import make_run

CHAINS = [Tree.chain(n) for n in (1, 3, 8)]


def law_ms(rows: int, context: float) -> float:
    """More rows and longer texts cost more, and more rows more of them."""
    return 4 + 0.5 * rows + 0.002 * context * (1 + 0.3 * rows)


class Lawful(Stepper):
    """An engine by the law, on a machine that slows down and recovers by a third, with 3 % noise; it accepts by chance."""

    name, version, most_rows = "lawful", "1", 4

    def __init__(self, scale: float = 1.0, as_it_comes: Stepper | None = None) -> None:
        self.scale, self.as_it_comes, self.passes = scale, as_it_comes, 0
        self.rng, self.asked = np.random.default_rng(0), list[tuple[Tree, tuple[int, ...]]]()

    def answer(self, prompts, draft, rows=1):
        self.asked.append((draft, tuple(map(len, prompts))))
        lengths = np.array([len(prompt) for prompt in prompts])
        for n in range(400):
            emitted = {i: [8] * (1 + int(self.rng.integers(0, draft.depth + 1))) for i in range(len(prompts))}
            self.passes += 1
            ms = law_ms(len(draft), lengths.mean()) * (1 + 0.3 * np.sin(self.passes / 900)) * self.scale
            yield Pass(emitted, 1e-3 * ms * self.rng.lognormal(0, 0.03), reads_prompt=n == 0)
            lengths += [len(tokens) for tokens in emitted.values()]


def traced(prompt_tokens: list[int], answer: int = 48):
    """A trace of prompts of these lengths, and a session that has them."""
    n = len(prompt_tokens)
    known = [SimpleNamespace(sha256=f"{i}", group="", first=(7,) * length) for i, length in enumerate(prompt_tokens)]
    trace = RankTrace(
        np.zeros((n * answer, 1), int),
        answer * np.arange(n + 1),
        np.arange(n * answer) % 50,
        prompt_tokens=np.array(prompt_tokens),
        meta={"top_k": 1, "prompt_sha256": [one.sha256 for one in known]},
    )
    prompts = SimpleNamespace(conversations=known, next_prompt=lambda one, before: one.first, name="prompts")
    return trace, SimpleNamespace(prompts=prompts)


MIXES = {
    "alike": [90 + 2 * i for i in range(20)],
    "two lengths": [40 + 3 * i for i in range(24)] + [900 + 40 * i for i in range(12)],
    "few long": [100] * 57 + [1800, 1900, 2000],
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
def test_the_law_of_rows_and_context_is_found_whatever_the_prompts(mix, rows, monkeypatch):
    """Within 1.5 % at the trace's own mean context, and 2 % where a context is asked for; the noise is drawn once."""
    monkeypatch.setattr("treeopt.latency.rounds.FEWEST_SAMPLES", 21)
    trace, session = traced(np.random.default_rng(1).permutation(MIXES[mix]).tolist())
    texts, engine = texts_of(trace, session), Lawful()
    found = time_steps(StretchVisits(engine, texts, CHAINS, rows), time_limit_s=1e9, precision=1.0)
    profile = LatencyProfile(*all_timings({(rows, None): found}))
    contexts = [context for _, context in profile.settings]
    assert len(contexts) == (1 if mix == "alike" else 2)
    whole = trace.prompt_tokens.mean() + 24
    for asked, margin in {
        whole: 0.015,
        contexts[0]: 0.02,
        contexts[-1]: 0.02,
        (contexts[0] + contexts[-1]) / 2: 0.02,
    }.items():
        costs = StepCosts(profile, rows, asked)
        assert costs.context_tokens == pytest.approx(asked, abs=1 if len(contexts) > 1 else 12)
        for chain in CHAINS:
            ratio = costs.ms([chain.cost])[0] / costs.plain.ms
            true = law_ms(len(chain), costs.context_tokens) / law_ms(1, costs.context_tokens)
            assert ratio == pytest.approx(true, rel=margin)


def test_texts_stand_for_the_states_of_the_trace():
    """Their contexts have the trace's quantiles, the first few of them already; answers go on where they were."""
    trace, session = traced(MIXES["two lengths"])
    short, long = texts_of(trace, session)
    states = np.sort(np.repeat(trace.prompt_tokens, 48) + np.tile(np.clip(np.arange(48) - 12, 0, 24), 36))
    assert max(map(len, short)) <= states.mean() < min(map(len, long))
    for drawn, part in ((short, states[states <= states.mean()]), (long, states[states > states.mean()])):
        for first in (21, len(drawn)):
            lengths = [len(text) for text in drawn[:first]]
            wanted = np.quantile(part, (0.1, 0.5, 0.9))
            assert np.abs(np.quantile(lengths, (0.1, 0.5, 0.9)) / wanted - 1).max() < (0.08 if first == 21 else 0.01)
    assert all(text[:40] == (7,) * 40 for text in (*short, *long))
    trace.meta["prompt_sha256"] = ["gone"] * 36
    with pytest.raises(InvalidInput, match="An engine is timed on the trace's prompts, but none are in prompts"):
        texts_of(trace, session)


def test_all_of_a_round_go_on_from_the_same_text_for_as_many_tokens():
    engine, texts = Lawful(), [[1] * n for n in (50, 300, 700)]
    found = time_steps(StretchVisits(engine, [texts], CHAINS, 1), time_limit_s=1e-9)
    asked = [length for _, (length,) in engine.asked if length > 16]
    assert asked == [50] * 6 + [300] * 5 + [700] * 5  # the first was to know how long a visit takes
    for number, round_ in enumerate(found.rounds):
        assert {visit.lengths[0] for visit in round_} <= {len(texts[number]) + n for n in range(9)}
        assert all(abs(v.lengths[-1] - len(texts[number]) - STRETCH) <= 18 for v in round_)


@pytest.mark.parametrize(("answer", "margin"), [(48, 0.05), (400, 0.02)])
def test_the_drafter_reads_the_prompt_once_in_an_answer_and_not_in_every_stretch(answer, margin, monkeypatch):
    """The first step takes six times as long: what a step of a whole answer takes is measured; of 48 tokens it is a third."""

    class ReadsAgain(Lawful):
        def answer(self, prompts, draft, rows=1):
            for n, one in enumerate(super().answer(prompts, draft, rows)):
                yield replace(one, seconds=6 * one.seconds) if n == 1 and draft.depth else one

    monkeypatch.setattr("treeopt.latency.rounds.FEWEST_SAMPLES", 41)
    texts = [[1] * n for n in range(280, 321)]
    visits = StretchVisits(ReadsAgain(), [texts], CHAINS, 1, answer_tokens=answer)
    found = time_steps(visits, time_limit_s=1e9, precision=1.0)
    costs = StepCosts(LatencyProfile(*all_timings({(1, None): found})), 1, None)
    for chain in CHAINS:
        steps = answer / (1 + chain.depth / 2)
        true = law_ms(len(chain), 312) / law_ms(1, 312) * (steps + 5) / steps
        assert costs.ms([chain.cost])[0] / costs.plain.ms == pytest.approx(true, rel=margin)


# Against which plain decoding.


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("engine") / "run"
    treeopt("calibrate", "--drafter", "eagle3", "--num-prompts", 8, "--max-new-tokens", 16, "--run", folder)
    return RunDirectory(folder)


@pytest.mark.parametrize(
    ("scale", "pays"), [(0.3, False), (1.4, True), pytest.param(0.95, True, marks=pytest.mark.long)]
)
def test_speedups_are_over_the_engine_as_it_comes(run, monkeypatch, scale, pays):
    """The same engine with nothing forced takes ``scale`` as long; where it is slower the exact one is plain decoding."""
    engine = Lawful(as_it_comes=Lawful(scale))
    engine.as_it_comes.rng = engine.rng
    monkeypatch.setattr("treeopt.runtime.engines.open_stepper", lambda *parts: engine)
    asked = {"engine": "fake", "batch_sizes": (1,), "budget": 12, "time_limit_s": 1e6, "precision": 0.5}
    profile = steps.profile(run, api.open(run=run), **asked, overwrite=True)
    assert LatencyProfile.load(run.profile).as_it_comes == profile.as_it_comes != []
    entry = api.search(run=run, engine="openvino", budget=12, batch_sizes=[1])[1]
    assert [row[3] for row in profile_table(profile).rows][:2] == ["plain", "plain, default"]
    costs, exact = StepCosts(profile, 1), entry.others.get(EXACT)
    assert entry.plain.step_ms == pytest.approx(min(scale, 1) * costs.plain.ms, rel=0.15)
    assert entry.speculates == pays
    assert (exact is None) == (scale > 1)
    if exact:
        assert exact.speedup == pytest.approx(entry.plain.step_ms / costs.plain.ms)
        assert "Speedups are over the engine's default, plain; told to be exact it is" in certainty(entry)
    if not pays:
        assert entry.chosen.speedup == 1
        assert entry.chosen.step_ms == entry.plain.step_ms


def test_the_engine_as_it_comes_decodes_plainly_and_what_is_judged_stays_second(tmp_path):
    """Also where the plan's tree is not taken; a plan not to speculate is decoded by the engine as it comes."""
    run = make_run(tmp_path, batch_sizes=(1,))
    plan, source, engine = run.read_plan(), source_of(run.read_trace()), Lawful(as_it_comes=Lawful())
    entry = plan.entries[0]
    chain = entry.best("chain")
    cases = {"tree": (f"chain of {chain.depth}", [AS_IT_COMES]), "chain": ("chosen", [AS_IT_COMES])}
    for kind, (judged, by_default) in {**cases, "plain": ("chosen", ["chosen", AS_IT_COMES])}.items():
        chosen = entry.plain if kind == "plain" else entry.best(kind)
        entrants = engine_entrants(
            run, plan, replace(entry.served(chosen), others={"chain": chain}), source, engine, ()
        )
        assert list(entrants)[1] == judged
        assert [name for name, entrant in entrants.items() if entrant.stepper is engine.as_it_comes] == by_default


def contender(name: str, draft: Tree, seconds: float, identical: bool = True) -> Contender:
    blocks = [Block(round=0, prompts=[i], tokens=40, steps=40 // len(draft), decode_s=seconds) for i in range(6)]
    steps, gap = 40 // len(draft), None if identical else 0.01
    answers = [Answer(id=str(i), steps=steps, tokens=41, identical=identical, logit_gap=gap) for i in range(6)]
    return Contender(name=name, batch_size=1, draft=draft, sequences=answers, blocks=blocks)


def test_a_benchmark_says_over_which_plain_decoding_and_what_that_changes():
    plain, own = contender("plain", PLAIN, 3.0), contender(AS_IT_COMES, PLAIN, 2.0, identical=False)
    chosen, about = contender("chosen", Tree.chain(1), 2.5), Provenance(engine={"name": "openvino", "version": "1"})
    alone = Benchmark(contenders=(plain, chosen), provenance=about)
    both = Benchmark(contenders=(plain, own, chosen), provenance=about)
    assert (alone.baseline, both.baseline) == ("plain", AS_IT_COMES)
    assert (alone.speedup("chosen").value, both.speedup("chosen").value) == pytest.approx((1.2, 0.8))
    assert both.speedup("chosen", "plain").value == pytest.approx(1.2)
    assert "decodes 1.20 (1.20 to 1.20) times as fast as plain decoding" in measured(alone)
    assert "is slower than the engine's default, plain: 0.80" in measured(both)
    rows = {row[0]: row for row in bench_tables(both)[0].rows}
    assert rows["the engine's default, plain"][-1] == "0/6"
