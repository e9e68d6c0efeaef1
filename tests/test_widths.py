"""Blocks of several widths in one calibration: each as if it were recorded alone, compared by search, and damage refused."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import Qwen3Config

from treeopt import calibrate, demo
from treeopt.engines.base import Request
from treeopt.engines.plans import export_plan, export_request
from treeopt.errors import InvalidInput
from treeopt.files import npz
from treeopt.growth.score import score_tree
from treeopt.growth.source import source_of
from treeopt.latency.estimate import StepCosts
from treeopt.pipeline import merge_runs, score
from treeopt.pipeline.search import request_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.regret import plan_losses
from treeopt.planning.request import PlanRequest
from treeopt.records.pools import USUAL
from treeopt.records.profile import LatencyProfile, StepTiming, Timings
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import NO_TRIAL, OF_BLOCK, RankTrace
from treeopt.report.tables import calibration_table
from treeopt.runtime.checkpoints import save_heads
from treeopt.runtime.drafters.dflash import DFlashHeads, Form
from treeopt.runtime.measure.ranks import PoolRecorder, read_answers
from treeopt.runtime.session import open_session
from treeopt.runtime.target import load_target
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Tree

from .conftest import invoke, random_trace, treeopt

WIDTHS, SHORT = (1, 3, 6), {"num_prompts": 8, "max_new_tokens": 8, "batch_size": 4, "ranks": 1000}


def random_block(folder, *, causal=False, block=7):
    """A DFlash drafter of random weights for the demo model, as z-lab publishes them."""
    target = load_target(demo.NAME, dtype="float64")
    embedding, width = target.model.get_input_embeddings().weight, target.width
    sizes = {"hidden_size": width, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, vocab_size=1, num_hidden_layers=2, intermediate_size=2 * width, rms_norm_eps=1e-6)
    form = Form(width, target.vocab_size, (1, 2), 5, block, False, (causal,) * 2, (None, None))
    made = DFlashHeads(
        config, form, embedding=embedding, lm_head=target.lm_head.weight, num_heads=block - 1, dtype=embedding.dtype
    )
    torch.manual_seed(0)
    for name, weight in made.named_parameters():
        weight.data = 1 + 0.3 * torch.randn_like(weight) if "norm" in name else 0.1 * torch.randn_like(weight)
    save_heads(made.requires_grad_(False).eval(), "dflash", folder, base=demo.NAME)
    return folder


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    return random_block(tmp_path_factory.mktemp("dflash") / "drafter")


def recorded(run, drafter, **options) -> RankTrace:
    return calibrate(drafter=str(drafter), dtype="float64", run=run, **SHORT, **options)


@pytest.fixture(scope="session")
def run(drafter, tmp_path_factory) -> RunDirectory:
    """A calibration of three widths."""
    run = RunDirectory(tmp_path_factory.mktemp("widths") / "run")
    recorded(run, drafter, widths=WIDTHS[::-1])
    return run


def assert_same(one: RankTrace, other: RankTrace):
    arrays, others = (trace._arrays(*RankTrace.__dataclass_fields__) for trace in (one, other))
    for name in {**arrays, **others}.keys() - {"narrower", "meta"}:
        assert arrays[name].dtype == others[name].dtype, name
        assert (arrays[name] == others[name]).all(), name
    assert not one.narrower
    assert {**one.meta, "schema": None} == {**other.meta, "schema": None}


@pytest.mark.parametrize("width", WIDTHS)
def test_each_width_is_recorded_as_a_calibration_of_that_width_alone_is(run, drafter, width, tmp_path):
    depth = {} if width == WIDTHS[-1] else {"draft_depth": width}
    assert_same(run.read_trace().at(width), recorded(tmp_path / "alone", drafter, **depth))


def test_widths_differ_at_every_depth(run):
    one, three, six = (run.read_trace().at(width).ranks for width in WIDTHS)
    for narrow, wide in ((one, three), (three, six)):
        assert (narrow != wide[:, : narrow.shape[1]]).any(0).all()


def test_shards_of_several_widths_are_merged_into_the_whole(drafter, tmp_path):
    short = {
        "drafter": str(drafter),
        "num_prompts": 9,
        "max_new_tokens": 7,
        "batch_size": 1,
        "topks": (2,),
        "widths": (1, 6),
    }
    parts = {"whole": {}, "1": {"shard": "1/2"}, "2": {"shard": "2/2"}}
    whole, *_ = [calibrate(run=tmp_path / name, **short, **part) for name, part in parts.items()]
    merge_runs(RunDirectory(tmp_path / "merged"), [tmp_path / "1", tmp_path / "2"])
    merged = RunDirectory(tmp_path / "merged").read_trace()
    for width in (1, 6):
        for name in OF_BLOCK:
            assert (getattr(merged.at(width), name) == getattr(whole.at(width), name)).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"drafter": "medusa", "widths": (2, 4)},
            r"treeopt demo medusa \(medusa\) do not: one record serves all widths. Leave",
        ),
        (
            {"widths": (3, 7)},
            r"`widths` must be 1 to 6, the guesses of the blocks that .*drafter was trained for, but got 7",
        ),
        ({"widths": (3, 6), "acceptance": "typical"}, "Typical acceptance .*: leave `widths` out"),
        ({"widths": (1, 6), "draft_depth": 3}, "widths says how many tokens each block guesses: leave draft_depth out"),
        ({}, r"another measurement and is not replaced unasked; they differ in narrower \(\[1, 3\] there, None here\)"),
    ],
)
def test_other_widths_are_refused_with_the_reason(run, drafter, options, said):
    with pytest.raises(InvalidInput, match=said.replace("`widths`", "widths")):
        recorded(run, options.pop("drafter", drafter), **options)


def test_one_record_serves_all_widths_of_a_causal_block(tmp_path):
    with pytest.raises(InvalidInput, match="do not: one record serves all widths"):
        recorded(tmp_path / "run", random_block(tmp_path / "causal", causal=True), widths=(3, 6))


# Search.


def several(rng, widths=(2, 4, 7), lengths=(30,) * 8) -> tuple[RankTrace, dict[int, RankTrace]]:
    """A trace of several widths whose ranks have nothing to do with each other, and each of them alone."""
    alone = {width: random_trace(rng, lengths, width, 4) for width in widths}
    whole, meta = alone[widths[-1]], {"top_k": 4, "narrower": [*widths[:-1]], "drafter": {"kind": "dflash"}}
    return replace(whole, narrower={f"ranks-{n}": alone[n].ranks for n in widths[:-1]}, meta=meta), alone


def timed(rng, widths, batch_sizes=(1, 8), runtime="treeopt") -> tuple[LatencyProfile, dict[int, LatencyProfile]]:
    """Profiles of several widths, and each alone: a step costs what its rows do, and the width's own draft pass."""
    each = {}
    for width in widths:
        draft, row = rng.uniform(0.1, 1.5), rng.uniform(0.02, 0.3, len(batch_sizes))
        points = [
            StepTiming(b, 64, n, min(d, n - 1), (2 + draft + float(row[i]) * n,))
            for (i, b), n, d in itertools.product(enumerate(batch_sizes), (2, 3, 5, 8, 9, 16), range(1, width + 1))
            if n > d
        ]
        plain = [StepTiming(b, 64, 1, 0, (2.0,)) for b in batch_sizes]
        each[width] = LatencyProfile(tuple(points), tuple(plain), {"name": runtime})
    own = {n: Timings(each[n].points, each[n].autoregressive) for n in widths[:-1]}
    return replace(each[widths[-1]], narrower=own), each


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch_sizes", [(1,), (1, 8), {1: 0.7, 8: 0.3}])
def test_search_takes_the_width_that_is_best_of_separate_searches(seed, batch_sizes, tmp_path):
    rng, request = np.random.default_rng(seed), PlanRequest(Limits(16), batch_sizes)
    (trace, alone), (latencies, each) = several(rng), timed(rng, (2, 4, 7))
    trace.save(tmp_path / "trace.npz")
    latencies.save(tmp_path / "profile.json")
    latencies = LatencyProfile.load(tmp_path / "profile.json")
    plan = plan_trees(RankTrace.load(tmp_path / "trace.npz"), latencies, request)
    plans = {width: plan_trees(alone[width], each[width], request) for width in alone}

    def speed(one):
        rates = [e.batch_size * e.chosen.tokens_per_step / e.chosen.step_ms for e in one.entries]
        if isinstance(batch_sizes, dict):
            return sum(share * rate for share, rate in zip(batch_sizes.values(), rates, strict=True))
        return math.fsum(map(math.log, rates))

    best = max(plans, key=lambda width: speed(plans[width]))
    assert (plan.width, plan.drafter["kind"]) == (best, "dflash")
    assert plan.entries == plans[best].entries
    assert plan.widths == {width: [e.chosen for e in one.entries] for width, one in plans.items()}
    assert plan_losses(plan, trace, latencies) == plan_losses(plans[best], alone[best], each[best])
    for record in (trace.at(best), alone[best]):  # alone, with the latencies of all
        assert plan_trees(record, latencies, request).entries == plan.entries


@pytest.mark.parametrize("batch_sizes", [(1,), (1, 8), {1: 0.7, 8: 0.3}])
def test_a_machine_that_drifts_between_widths_does_not_choose_one(batch_sizes):
    """Widths are timed one after the other, each with plain steps beside it."""
    rng, request = np.random.default_rng(0), PlanRequest(Limits(16), batch_sizes)
    (trace, _), (latencies, _) = several(rng), timed(rng, (2, 4, 7))
    width = plan_trees(trace, latencies, request).width
    for slower, factor in itertools.product(latencies.narrower, (0.5, 2.0)):
        parts = vars(latencies.narrower[slower]).items()
        late = {
            of: tuple(replace(t, step_ms=tuple(factor * ms for ms in t.step_ms)) for t in some) for of, some in parts
        }
        drifted = replace(latencies, narrower={**latencies.narrower, slower: Timings(**late)})
        assert plan_trees(trace, drifted, request).width == width


def test_a_narrow_plans_tree_is_scored_by_the_ranks_of_its_own_block(tmp_path):
    trace, alone = several(np.random.default_rng(0))
    run, plan = RunDirectory(tmp_path), plan_trees(alone[4])
    trace.save(run.trace)
    plan.save(run.plan)
    assert plan.width == 4
    tokens = score(run, run.plan).given.rates.tokens_per_step
    assert tokens == score_tree(alone[4], plan.entries[0].tree).given.rates.tokens_per_step
    assert tokens != score_tree(trace, plan.entries[0].tree).given.rates.tokens_per_step


@pytest.mark.parametrize("named", [[], None, [4], [2, 2, 4], [4, 2], [2, 4, 7], [2, 5]])
def test_narrower_blocks_are_those_that_are_named(named, tmp_path):
    trace, _ = several(np.random.default_rng(0))
    replace(trace, meta={**trace.meta, "narrower": named}).save(tmp_path / "trace.npz")
    with pytest.raises(InvalidInput, match=r"^(?!.*\n).*narrower.*\.$"):
        RankTrace.load(tmp_path / "trace.npz")


# Engines.


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama-cpp", "lmdeploy"])
def test_for_an_engine_whose_length_is_the_width_whole_blocks_alone_are_planned(engine):
    rng = np.random.default_rng(1)
    (trace, alone), (latencies, each) = several(rng), timed(rng, (2, 4, 7))
    trace.meta["drafter"] |= {"widest": 9, "num_heads": 7}
    request, said = request_of(trace, latencies, engine=engine, batch_sizes=(1,))
    plan = plan_trees(trace, latencies, request)
    assert "takes the length as the width of the block" in said[0]
    lengths = {width: source_of(alone[width]).rate(Tree.chain(width)).tokens_per_step for width in alone}
    ms = {width: StepCosts(each[width], 1).ms([width + 1], [width])[0] for width in alone}
    best = max(lengths, key=lambda width: lengths[width] / ms[width])
    assert lengths[best] / ms[best] > 1 / 2.0
    assert (plan.width, plan.entries[0].draft) == (best, Tree.chain(best))
    written = export_plan(plan, engine)
    assert any(
        f"{best} tokens or more: engines cut what is longer, refuse it, or draft it" in note for note in written.notes
    )
    assert any(f"all {best} guesses are verified, and it is neither a prefix" in note for note in written.notes)


def test_a_length_wider_than_the_block_is_refused_with_the_reason():
    request = Request(lengths=((1, None, 7),), num_heads=5, drafter="dflash")
    with pytest.raises(InvalidInput, match="with 7 guesses all would be others than those of the 5 that this drafter"):
        export_request(request, "vllm")
    assert "7" in export_request(replace(request, num_heads=7), "vllm").command


# Files, and the line.


@pytest.mark.parametrize("name", [f"{name}-{width}" for name in OF_BLOCK for width in WIDTHS[:-1]])
def test_damage_to_what_is_recorded_of_a_width_is_refused(run, name, tmp_path):
    with np.load(run.trace) as file:
        arrays = {key: file[key] for key in file}
    array = arrays[name]
    far, ended = np.full_like(array, 2000 if "ranks" in name else 254), np.array(array)
    ended[-1] = 0  # where no token is left to guess
    changes = [None, array[1:], array[..., 1:], array.astype(np.int64) + 2**40, far, array.astype(np.float64), ended]
    for change in changes:
        others = {key: value for key, value in arrays.items() if key != name}
        npz.write(tmp_path / "trace.npz", others | ({} if change is None else {name: change}))
        with pytest.raises(InvalidInput, match=r"^(?!.*\n).*\.$"):
            RankTrace.load(tmp_path / "trace.npz")


def test_a_calibration_shows_what_each_width_reaches(run):
    trace, calibration = run.read_trace(), run.read_calibration()
    console = Console(width=80, markup=False)
    with console.capture() as capture:
        console.print(calibration_table(calibration))
    said = capture.get()
    assert "Accuracy by depth in blocks of 6 guesses over" in said
    rows = said[said.index("By width of the block: accuracy at rank 0") :].splitlines()
    assert rows[2].replace("┃", " ").split("width") == [
        rows[2].replace("┃", " ").split("width")[0],
        " 1   ",
        " 3   ",
        " 6  ",
    ]
    for depth in range(1, 7):
        own = [trace.at(width).ranks[trace.has_step] for width in WIDTHS if width >= depth]
        tried = [ranks[:, depth - 1][ranks[:, depth - 1] != NO_TRIAL] for ranks in own]
        cells = next(row for row in rows if row.strip("│ ").split()[:1] == [str(depth)]).replace("│", " ").split()
        assert cells == [str(depth), *(f"{(ranks == 0).mean():.3f}" for ranks in tried)]


def test_a_block_is_passed_once_for_all_that_is_recorded_of_a_state(drafter, monkeypatch):
    session = open_session({"drafter": str(drafter), "dtype": "float64"})
    passes, block = [], DFlashHeads.block
    monkeypatch.setattr(DFlashHeads, "block", lambda *given: passes.append(1) or block(*given))
    text, n = session.prompts.conversations[0].first, 8
    setup = session.setup(n)
    (row,) = read_answers(setup, [text[:n]], [text[n : 2 * n]], batch_size=1)
    recorder = PoolRecorder(session.drafter, USUAL.fitting(session.drafter))
    found = recorder.record(row.text())
    assert sorted(found) == ["marginal_places", "pool_places"]
    assert len(passes) == 1


@pytest.mark.long
def test_the_line_decodes_with_the_block_of_the_plans_width(run, tmp_path):
    """Profile times each width; whichever is planned, bench opens it: texts are plain decoding's, steps are replay's."""
    own = RunDirectory(tmp_path / "run")
    own.path.mkdir()
    own.trace.write_bytes(run.trace.read_bytes())
    invoke("profile", "--run", own.path, "--sizes", "2,4", "--time-limit", 1, "--batch-size", "2")
    found, trace = own.read_profile(), own.read_trace()
    assert [*found.narrower] == [*WIDTHS[:-1]]
    depths = {width: {p.depth for p in one.points} for width, one in (found.narrower | {6: found}).items()}
    assert [max(depths[width]) for width in WIDTHS] == [1, 3, 3]
    invoke("profile", "--run", own.path, "--sizes", "2,4", "--time-limit", 1, "--batch-size", "3")
    assert own.read_profile().batch_sizes == [2, 3]
    assert "leave --draft-depth out" in treeopt("run", "--widths", "1,3", "--draft-depth", 2, code=1)
    for width in WIDTHS:
        plan = plan_trees(trace.at(width), request=PlanRequest(Limits(8), (2,)))
        replace(plan, inputs={}).save(own.plan)
        invoke("bench", "--run", own.path, "--num-prompts", 4)
        result = json.loads(own.bench.read_text())
        shown = {one["name"]: (one["shown"], one["draft"]) for one in result["contenders"]}
        assert result["provenance"]["drafter"]["num_heads"] == width
        for of, _ in shown.values():
            assert of["identical"] == of["compared"] == 4
            assert of["steps"] == of["replayed_steps"]
        assert shown["chosen"][0]["size"] > 1
    table = invoke("search", "--run", own.path, "--budget", 4).stdout
    assert f"The plan is for a block of {own.read_plan().width} guesses; speedup by width and batch size: 1: " in table
