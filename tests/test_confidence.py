"""Temperatures of confidences against a slow fit, and what engines are told of confidences, by the forms of their files."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from treeopt.engines.plans import export_plan
from treeopt.engines.registry import method_of
from treeopt.engines.sglang import BUDGET, COSTS, STS, TABLES
from treeopt.errors import OutOfRange
from treeopt.growth.confidence import BINS, GRID, fit_temperatures
from treeopt.growth.replay import dynamic_rates, rate_anew
from treeopt.latency.estimate import StepCosts
from treeopt.pipeline.confidence import cost_table, tables_of
from treeopt.pipeline.export import export
from treeopt.planning.candidates import Candidate, latencies_of, shares_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.inputs import inputs_of
from treeopt.records.plan import Plan
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.rundir import RunDirectory
from treeopt.records.trace import NO_TRIAL, RankTrace, fold_numbers
from treeopt.trees.draft import ConfidentChain, DynamicLimits, SurvivingChain
from treeopt.trees.shapes import Limits

from .engine_rows import READERS
from .test_confident import HEADS, profile_of, recorded
from .test_dynamic import with_pools

DRAFTER = {"drafter": {"kind": "dspark"}}


def slow_error(states, temperatures) -> float:
    """ECE of the product as far as the last temperature: plain loops over states and bins."""
    j, bins = len(temperatures), {}
    for sure, ranks in states:
        if ranks[j - 1] == NO_TRIAL:
            continue
        product = 1.0
        for c, t in zip(sure, temperatures, strict=False):
            c = min(max(float(c), 1e-7), 1 - 1e-7)
            product /= 1 + math.exp(-math.log(c / (1 - c)) / t)
        some = bins.setdefault(min(int(product * BINS), BINS - 1), [])
        some.append((product, all(rank == 0 for rank in ranks[:j])))
    count = sum(map(len, bins.values()))
    gaps = [abs(np.mean([p for p, _ in some]) - np.mean([s for _, s in some])) * len(some) for some in bins.values()]
    return sum(gaps) / count


def states_of(trace, sequences):
    for s in sequences:
        for t in range(trace.starts[s], trace.starts[s + 1] - 1):
            yield trace.confidences[t], trace.ranks[t].tolist()


def test_temperatures_are_those_of_a_slow_fit_and_judged_on_other_answers():
    trace = replace(recorded(1, [25] * 12, informed=True), cluster=None)
    found, fold = fit_temperatures(trace), fold_numbers(trace)
    train, test = ([*states_of(trace, np.flatnonzero(part))] for part in (fold != 0, fold == 0))
    fitted = []
    for _ in range(HEADS):
        fitted.append(min(GRID, key=lambda one: slow_error(train, [*fitted, one])))
    assert found["temperatures"] == fitted
    assert found["num_samples"] == len(train)
    for j in range(1, HEADS + 1):
        assert found["ece_before"][j - 1] == pytest.approx(slow_error(test, [1.0] * j), abs=1e-9)
        assert found["ece_after"][j - 1] == pytest.approx(slow_error(test, fitted[:j]), abs=1e-9)
    with pytest.raises(OutOfRange):
        fit_temperatures(recorded(1, [25, 25]))  # which are turns of one conversation


def test_temperatures_mend_confidences_that_are_too_sure():
    """Guesses are right as often as true probabilities say, and the drafter says them at temperature 1/2.5."""
    rng, lengths = np.random.default_rng(3), [60] * 200
    logits = rng.normal(1, 1.5, (sum(lengths), HEADS))
    ranks = np.where(rng.random(logits.shape) < 1 / (1 + np.exp(-logits)), 0, 1)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(ranks))
    ranks[np.arange(1, HEADS + 1) >= left[:, None]] = NO_TRIAL
    sure = (1 / (1 + np.exp(-2.5 * logits))).astype(np.float32)
    found = fit_temperatures(RankTrace(ranks, np.cumsum([0, *lengths]), confidences=sure))
    assert found["temperatures"] == pytest.approx([2.5] * HEADS, rel=0.2)
    assert sum(found["ece_after"]) < sum(found["ece_before"]) / 2


def test_the_cost_table_is_a_staircase_of_all_tokens_verified():
    """Form A of SGLang: ascending tokens, steps per second of each, and no fewer as the most. A block is drafted in full."""
    table = cost_table(profile_of(), HEADS)
    ms = {b * (1 + n): [] for b in (1, 2) for n in range(HEADS + 1)}
    for b in (1, 2):
        for n in range(HEADS + 1):
            ms[b * (1 + n)].append(5 + 0.3 * HEADS + 0.2 + n)
    tokens = table["sample_batch_tokens"]
    assert tokens == sorted(ms)
    assert {type(n) for n in tokens} == {int}
    slowest = [max(np.mean(ms[n]) for n in tokens[: i + 1]) for i in range(len(tokens))]
    np.testing.assert_allclose(table["sample_steps_per_sec"], 1e3 / np.array(slowest))
    assert table["max_batch_tokens"] == tokens[-1]
    chains = LatencyProfile(tuple(profile_of((1,)).fixed), profile_of((1,)).autoregressive)
    table = cost_table(chains, HEADS)
    assert table["sample_batch_tokens"] == [2, 3, 4, 5]
    np.testing.assert_allclose(table["sample_steps_per_sec"], [1e3 / (5 + 1.3 * n) for n in range(1, 5)])
    nothing = LatencyProfile((), (StepTiming(1, 512, 1, 0, (5.0,)),))
    assert cost_table(nothing, HEADS) == {} == tables_of(None, nothing)


def run_of(tmp_path, kind) -> tuple[RunDirectory, Plan]:
    """A run whose chosen drafts are confident chains."""
    run, trace = RunDirectory(tmp_path), recorded(6, [40] * 10, informed=True)
    about = {"drafter": {"kind": kind}, "provenance": {"dataset": "some prompts"}}
    replace(trace, meta=trace.meta | about).save(run.trace)
    profile_of(row_ms=2.0).save(run.profile)
    inputs = inputs_of(run.trace, run.profile)
    plan = plan_trees(run.read_trace(), run.read_profile(), PlanRequest(Limits(8), batch_sizes=(1,), context=512))
    replace(plan, inputs=inputs).save(run.plan)
    assert plan[1].draft.kind == "confident"
    return run, plan


def test_sglang_is_told_the_temperatures_and_costs_of_a_dspark_block(tmp_path):
    run, _ = run_of(tmp_path, "dspark")
    files, written = export(run, "sglang")
    texts = {file.name: file.read_text() for file in files}
    for name, flag in TABLES.items():
        assert f"{flag} {name}" in written.command
    sts, costs = json.loads(texts[STS]), json.loads(texts[COSTS])
    assert sts.keys() == {"temperatures", "num_samples", "ece_before", "ece_after", "dataset"}
    assert len(sts["temperatures"]) == len(sts["ece_before"]) == len(sts["ece_after"]) == HEADS
    assert min(sts["temperatures"]) > 0
    assert sts == {**fit_temperatures(run.read_trace()), "dataset": "some prompts"}
    assert costs == cost_table(run.read_profile(), HEADS)
    assert "bias_seconds" not in texts[COSTS]  # which would be form B
    assert READERS["sglang", "dspark"](texts) == ((1, None, HEADS),)
    assert BUDGET in written.notes
    assert any(f"off by {100 * np.mean(sts['ece_after']):.1f} %" in note for note in written.notes)
    replace(run.read_plan(), inputs={}).save(run.plan)  # of files that are here no more
    files, written = export(run, "sglang", anyway=True)
    assert STS not in {file.name for file in files}
    assert "sps-table" not in written.command


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "draft-model", "mtp"])
def test_llama_cpp_is_told_the_threshold_and_others_get_the_best_chain(tmp_path, kind):
    _, plan = run_of(tmp_path, kind)
    chain = plan[1].draft
    written = export_plan(plan, "llama-cpp")
    assert f"--spec-draft-n-max {HEADS} --spec-draft-n-min 0 --spec-draft-p-min {chain.threshold:g}" in written.command
    assert any("likeliest ten" in note for note in written.notes) == (kind in ("eagle3", "draft-model"))
    if kind == "dspark":
        edge = export_plan(plan, "edge-llm")
        assert any("by another rule" in note and "search --for edge-llm" in note for note in edge.notes)
        assert "--dsparkScheduler" not in edge.command
    vllm = export_plan(plan, "vllm")
    assert "vllm takes chains only: written is the best of the plan's chains." in vllm.notes
    two = replace(plan, entries=(plan.entries[0], replace(plan.entries[0], batch_size=4)), schedule=[])
    other = replace(two.entries[1].chosen, draft=ConfidentChain(HEADS, 0.99), batch_size=4)
    two = replace(two, entries=(two.entries[0], replace(two.entries[1], chosen=other)))
    for size, threshold in ((1, chain.threshold), (4, 0.99)):
        assert f"--spec-draft-p-min {threshold:g}" in export_plan(two, "llama-cpp", batch_size=size).command


def test_for_such_an_engine_confident_chains_are_planned_beside_chains_alone(tmp_path):
    run, _ = run_of(tmp_path, "dspark")
    for engine, kind in (("llama-cpp", ConfidentChain), ("sglang", ConfidentChain), ("edge-llm", SurvivingChain)):
        limits = method_of(engine, "dspark").dynamic_limits
        assert limits == DynamicLimits(levels=0, confident=kind)
        request = PlanRequest(Limits(8, shape="chain"), batch_sizes=(1,), context=512, dynamic=limits)
        plan = plan_trees(run.read_trace(), run.read_profile(), request)
        assert {plan[1].draft.kind, *plan[1].others} == {"confident", "chain"}
        assert type(plan[1].draft) is kind
    assert method_of("vllm", "dspark").dynamic_limits is None
    assert not dynamic_rates(with_pools(np.random.default_rng(0), [9, 9], 3, (1, 2)), DynamicLimits(levels=0))


def test_no_draw_of_a_noisy_latency_is_below_zero():
    trace, noisy, rng = recorded(2, [30] * 4), profile_of((4,)), np.random.default_rng(0)
    points = [replace(p, step_ms=tuple(p.step_ms * rng.exponential(size=9) ** 3)) for p in noisy.points]
    one = ConfidentChain(HEADS, 0.5)
    found = [Candidate("confident", 1 + HEADS, HEADS, None, rate_anew(trace, one), one)]
    _, ms, draws, _ = latencies_of(found, StepCosts(replace(noisy, points=tuple(points)), 4, 512), 999, rng)
    assert min(ms.min(), draws.min()) > 0
    assert draws.std() > ms.min() / 2


def test_edge_llm_is_told_the_threshold_of_survival(tmp_path):
    run, _ = run_of(tmp_path, "dspark")
    limits = method_of("edge-llm", "dspark").dynamic_limits
    request = PlanRequest(Limits(8, shape="chain"), batch_sizes=(1,), context=512, dynamic=limits)
    plan = plan_trees(run.read_trace(), run.read_profile(), request)
    plan.save(tmp_path / "edge.json")
    written = export_plan(Plan.load(tmp_path / "edge.json"), "edge-llm")
    told = f"--dsparkConfidenceThreshold {plan[1].draft.threshold:g} --dsparkMinProposalLen 1 --dsparkMaxProposalLen {HEADS}"
    assert f"--specVerifySize {1 + HEADS} --dsparkScheduler threshold {told}" in written.command
    assert READERS["edge-llm", "dspark"](written.files) == ((1, None, HEADS),)
    for engine in ("llama-cpp", "sglang"):
        assert "by another rule" in " ".join(export_plan(plan, engine).notes)


def test_a_step_costs_what_the_longest_of_the_batch_keeps():
    trace = recorded(2, [30] * 4)
    one = ConfidentChain(HEADS, 0.5)
    rates = rate_anew(trace, one)
    for b in (1, 3):
        shares = shares_of(Candidate("confident", 5, 4, None, rates, one), b)
        assert sum(shares.values()) == pytest.approx(1)
