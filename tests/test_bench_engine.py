"""Chains decoded by another runtime, beyond the contract of all that decodes (test_stepper)."""

import itertools
import json
import shutil
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import treeopt as api
from tests.helpers.steps import api_bench
from treeopt.errors import InvalidInput, Unsupported
from treeopt.growth.source import source_of
from treeopt.pipeline.bench import asked_prompts
from treeopt.pipeline.contest import contest
from treeopt.pipeline.entrants import Entrant, own_entrants
from treeopt.records.benchmark import Benchmark
from treeopt.records.contender import Prompt
from treeopt.records.rundir import RunDirectory
from treeopt.report.bench_table import bench_tables, closing
from treeopt.report.verdict import measured
from treeopt.runtime.acceptance.rules import Sampling
from treeopt.runtime.decode import decode
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.lookup import PromptLookup
from treeopt.runtime.engines.transformers import Transformers
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.tree import Tree

from .conftest import VOCABULARY, first_layers, tiny_model, treeopt
from .helpers.runs import make_run
from .test_stepper import Recorded

CSV = "batch_size,size,depth,step_ms\n1,1,0,2.0\n1,2,1,2.1\n1,3,2,2.2\n1,4,3,2.3\n1,8,2,2.4\n2,1,0,2.0\n2,4,3,2.5\n"
STOP = StopRule(frozenset({3, 5}), 22)


def flat(passes: list[list[int]]) -> list[int]:
    return [token for emitted in passes for token in emitted]


def said(engine, prompt: list[int], length: int | None) -> list[list[int]]:
    """The tokens of every pass that answers a prompt."""
    return [one.emitted[0] for one in engine.answer([prompt], None if length is None else Tree.chain(length))]


def test_lookup_looks_for_as_many_tokens_as_it_is_said_to():
    """The last three tokens stand elsewhere than the last two do first, with the right token behind them."""
    target, places = Target(tiny_model()), itertools.product(range(8, 12), range(12, 15), range(15, 18), range(6, 20))
    prompts = ([20, b, c, 23, 21, a, b, c, right, 22, a, b, c] for a, b, c, right in places)
    prompt = next(p for p in prompts if int(target.model(torch.tensor([p])).logits[0, -1].argmax()) == p[8])
    passes = said(Transformers(Setup(target, PromptLookup(VOCABULARY), STOP)), prompt, 4)
    (ours,) = decode(target, PromptLookup(VOCABULARY), [prompt], Tree.chain(4), batch_size=1, stop=STOP)
    assert flat(passes) == ours.tokens
    assert len(passes[0]) > 1


def test_guesses_that_are_split_again_may_be_more_than_were_told():
    """The benchmark is of the longest chain that was accepted; it is not refused when all is decoded."""
    target = Target(tiny_model())
    setup = Setup(target, PromptLookup(VOCABULARY), STOP)
    passes = {1: [[n] for n in range(6, 13)], 2: [[6], [7, 8, 9, 10], [11, 12]]}

    class Splitting(Recorded):
        def answer(self, prompts, draft, rows=1):
            self.passes = passes[len(draft)]
            return super().answer(prompts, draft, rows)

    engine = Splitting([])
    engine.setup = setup
    result = contest(engine, {"chain of 1": Entrant(Tree.chain(1), is_replayable=False)}, [Prompt((1,), "a")])
    assert [contender.size for contender in result.contenders] == [1, 4]
    assert [contender.steps for contender in result.contenders] == [6, 2]


@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_the_best_chain_is_decoded_once_where_it_is_the_plan(tmp_path, kind):
    run = make_run(tmp_path, batch_sizes=(1,))
    entry, source = run.read_plan().entries[0], source_of(run.read_trace())
    drafter = SimpleNamespace(num_heads=source.num_heads, draft_vocab_size=64)
    found = own_entrants(run.read_plan(), replace(entry.served(entry.best(kind)), others={}), source, drafter, ())
    assert ("chain" in found) == (kind == "tree")


def test_what_the_library_raises_is_a_sentence_and_leaves_the_model_as_it_was(monkeypatch):
    target = Target(tiny_model())
    engine, config = Transformers(Setup(target, first_layers(target), STOP)), target.model.generation_config
    with monkeypatch.context() as patch:
        patch.setattr(target.model.model.layers[1], "forward", lambda *a, **k: 1 / 0)
        with pytest.raises(InvalidInput, match="must be able to answer, but unknown: ZeroDivisionError"):
            said(engine, [1, 2], 3)
    assert target.model.generation_config == config


@pytest.fixture(scope="module", params=[pytest.param("draft", marks=pytest.mark.long), "ngram"])
def run(request, tmp_path_factory):
    """Calibrated in float64, with latencies by which chains pay."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "steps.csv").write_text(CSV)
    short = ("--num-prompts", 8, "--max-new-tokens", 20)
    treeopt("calibrate", "--drafter", request.param, "--dtype", "float64", *short, "--run", folder / "run")
    treeopt("profile", "--from-csv", folder / "steps.csv", "--run", folder / "run")
    treeopt("search", "--shape", "chain", "--run", folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def session(run):
    return api.open(run=run)


@pytest.fixture
def bench(run, session, tmp_path):
    """Benchmarks on a copy of the run."""
    own = shutil.copytree(run, tmp_path / "run")
    asked = {"run": own, "engine": "transformers", "num_prompts": 2, "rounds": 1, "max_new_tokens": 12}
    return lambda **options: api_bench(options.pop("plan", None), session, **{**asked, **options})


def test_measured_steps_are_the_replayed_ones_on_every_prompt(run, bench, tmp_path, capsys):
    result = bench(num_prompts=4, max_new_tokens=20)
    assert result == Benchmark.load(tmp_path / "run" / "bench-transformers.json")
    assert not (tmp_path / "run" / "bench.json").exists()
    plan, chosen = json.loads((run / "plan.json").read_text())["entries"][0], result.contender("chosen")
    assert chosen.draft.record == {key: plan[key] for key in chosen.draft.record}
    assert chosen.predicted_tokens_per_step == plan["tokens_per_step"]["value"]
    assert chosen.size > 1
    for contender in result.contenders:
        assert contender.identical == contender.compared == 4
        assert contender.passes == contender.steps + 4
        assert all(answer.replayed_steps == answer.steps for answer in contender.sequences)
    if result.provenance.drafter["kind"] != "ngram":
        assert any(a.prefilled > 1 for a in chosen.sequences)
        assert any(chosen.accepted[1:])
    assert "bench-transformers.json" in treeopt("status", "--run", tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("run", ["draft"], indirect=True)
def test_what_an_engine_cannot_do_is_said(run, session, bench, tmp_path, capsys):
    folder = tmp_path / "run"
    with pytest.raises(Unsupported, match="one sequence at a time, but got batch_size=4"):
        bench(batch_size=4)
    with pytest.raises(Unsupported, match="decodes greedily, but the plan is for rule='sample"):
        api_bench(None, replace(session, acceptance=Sampling(temperature=0.7)), run=folder, engine="transformers")
    for name, choices in {"fork": [[0], [1]], "second": [[1]], "turn": [[0], [0, 1]]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(choices))
        with pytest.raises(Unsupported, match=f"takes chains of the likeliest guesses, but {name} is"):
            bench(trees=[tmp_path / f"{name}.json"])
    (tmp_path / "plain.json").write_text("[[0]]")
    with pytest.raises(InvalidInput, match="'plain' is taken"):
        bench(trees=[tmp_path / "plain.json"])
    treeopt("search", "--batch-size", 2, "--run", folder)
    with pytest.raises(Unsupported, match=r"the plan is for batch size 2\. Plan for it with: treeopt search.* --run"):
        bench()
    treeopt("search", "--budget", 4, "--run", folder)
    entry = RunDirectory(folder).read_plan().entry(1)
    assert entry.chosen.draft.kind == "tree"
    (tmp_path / "long.json").write_text(json.dumps(Tree.chain(7).choices))
    best, _ = entry.best("chain"), capsys.readouterr()
    result = bench(trees=[tmp_path / "long.json"])
    assert f"its best chain, of {entry.best('chain').draft.depth}, is decoded" in capsys.readouterr().err
    assert [c.name for c in result.contenders][:2] == ["plain", result.judged]
    assert result.judged == f"chain of {entry.best('chain').draft.depth}"
    assert result.contender(result.judged).size == best.size
    assert bench_tables(result)[0].rows[1][0] == f"{result.judged}, for the plan's tree"
    assert f"The {result.judged} (" in measured(result)
    assert closing(entry, result) == ""
    assert "chosen by treeopt" not in treeopt("report", "--run", folder) + (folder / "report.html").read_text()
    assert (result.contender("long").size, result.contender("long").predicted_tokens_per_step) == (8, None)


def test_a_draft_model_with_other_rows_guesses_text():
    """Its tokenizer is handed over too, and the texts stay; the demo's has one."""
    opened = api.open(api.Model("demo", "draft", dtype="float64"))
    prompt = opened.prompts.next_prompt(opened.prompts.conversations[0], [])
    stop = StopRule(frozenset(), 6, at_loops=False)
    plain = said(Transformers(Setup(opened.target, opened.drafter, stop)), prompt, 0)
    model = opened.drafter.model.model
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    more = DraftModel(Target(model, opened.drafter.model.tokenizer), opened.target.vocab_size)
    engine = Transformers(Setup(opened.target, more, stop))
    assert "splits it into tokens again" in engine.about
    assert flat(said(engine, prompt, 3)) == flat(plain)


def test_only_later_turns_follow_plain_answers(session, tmp_path, monkeypatch):
    """Three conversations, the second of two turns: its answers alone are wanted, and prompts stay in the conversations' order."""
    asked, chats = [], [SimpleNamespace(first=(i,), sha256=f"{i}", group="", num_turns=1 + (i == 1)) for i in range(3)]

    def collected(session, conversations, *_, **__):
        asked.append([conversation.sha256 for conversation in conversations])

    def turns(prompts, reference):
        return [Prompt((1,), "1"), Prompt((1, 8, 2), "1")]

    monkeypatch.setattr(import_module("treeopt.pipeline.bench"), "collect", collected)
    monkeypatch.setattr("treeopt.runtime.measure.ranks.turn_prompts", turns)
    prompts = asked_prompts(session, chats, 8, tmp_path)
    assert asked == [["1"]]
    assert [(prompt.text, prompt.cluster) for prompt in prompts] == [((0,), 0), ((1,), 1), ((1, 8, 2), 1), ((2,), 2)]
    assert len(asked_prompts(session, [chats[0], chats[2]], 8, tmp_path)) == 2
    assert len(asked) == 1
