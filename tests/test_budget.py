"""A budget over all sequences against a simulation written anew, and where its answer is known beforehand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from treeopt.engines.vllm import BUDGET
from treeopt.growth.budget import Load, admitted, budget_gain
from treeopt.growth.source import source_of
from treeopt.pipeline.confidence import gains_of, kept_ms
from treeopt.pipeline.export import export
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.inputs import inputs_of
from treeopt.records.rundir import RunDirectory
from treeopt.trees.shapes import Limits

from .test_confidence import run_of
from .test_confident import HEADS, recorded
from .test_widths import several, timed


def slow_rate(trace, order, ms, size, length=None):
    """A queue of dictionaries, one guess at a time."""
    confidences, waiting = trace.confidences.astype(np.float64), [*order, *order * size][: len(order) + size]
    running, tokens, total = [], 0, 0.0

    def begin():
        s = waiting.pop(0)
        return {"at": int(trace.starts[s]), "end": int(trace.starts[s + 1]) - 1, "before": [1.0] * trace.num_heads}

    running = [begin() for _ in range(size)]
    while True:
        now = []
        for one in running:
            product, row = 1.0, []
            for c in confidences[one["at"]]:
                product *= c
                row.append(product)
            now.append(row)
        kept = [length] * size
        if length is None:
            known = sorted((p for one in running for p in one["before"]), reverse=True)
            worth = [(size + sum(known[:m])) / ms[m] for m in range(len(known) + 1)]
            budget = worth.index(max(worth))
            slots = sorted((-now[i][j], i, j) for i in range(size) for j in range(trace.num_heads))[:budget]
            kept = [sum(i == own for _, own, _ in slots) for i in range(size)]
        total += float(ms[sum(kept)])
        for i, one in enumerate(running):
            n = 0
            while n < kept[i] and trace.ranks[one["at"], n] == 0:
                n += 1
            one["at"], one["before"], tokens = one["at"] + n + 1, now[i], tokens + n + 1
        for i, one in enumerate(running):
            if one["at"] >= one["end"] and waiting:
                running[i] = begin()
        if not waiting:
            return tokens / total


@pytest.mark.parametrize("seed", range(12))
def test_a_load_is_served_as_one_guess_at_a_time_says(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 5))
    trace = recorded(seed, rng.integers(2, 25, 9).tolist(), informed=bool(seed % 2))
    ms = np.sort(rng.uniform(3, 9, size * HEADS + 1))
    load, order = Load.of(trace), [s for s in range(9) if trace.lengths[s] > 1]
    for length in (None, 0, 2, HEADS):
        found = load.rate(np.array(order), ms, size, length)
        assert found == pytest.approx(slow_rate(trace, order, ms, size, length))


def test_guesses_that_cost_nothing_are_all_verified_and_dear_ones_not_at_all():
    """Where the answer is one length for all, a budget brings nothing."""
    trace, size = recorded(3, [30] * 20, informed=True), 3
    trace = replace(trace, confidences=trace.confidences.clip(0.01))  # what surely fails is left out, however cheap
    for ms in (np.full(size * HEADS + 1, 5.0), 5.0 + 1e3 * np.arange(size * HEADS + 1)):
        gain = budget_gain(trace, ms, size)
        assert (gain.value, gain.low, gain.high) == pytest.approx((1, 1, 1))


def test_confidences_that_know_verify_what_is_right_and_no_more():
    """Every step is then of as many guesses as are accepted, by a budget of a step that is told them."""
    trace = recorded(4, [30] * 20, informed=True)
    right = np.logical_and.accumulate(trace.ranks == 0, axis=1)
    knowing = replace(trace, confidences=right.astype(np.float32))
    ms = 5.0 + np.arange(2 * HEADS + 1)
    now = Load.of(knowing).survival[[3, 40]]
    assert admitted(now, now, ms / 1e9).sum() <= now.sum()
    rates = [budget_gain(one, ms, 2).value for one in (knowing, trace)]
    assert rates[0] > rates[1]
    assert budget_gain(recorded(4, [30] * 3, informed=True), ms, 2) is None  # too few conversations


def test_vllm_is_told_of_adaptive_verification_and_what_it_brings(tmp_path, monkeypatch):
    run, _ = run_of(tmp_path, "dspark")
    trace, profile = run.read_trace(), run.read_profile()
    (gain,) = gains_of(source_of(trace), profile, [1]).values()
    each = np.interp(np.arange(HEADS + 1), np.arange(HEADS + 1), kept_ms(profile, 1, HEADS))
    assert gain == budget_gain(trace, np.maximum.accumulate(each), 1)
    for low, on in ((1.01, True), (0.99, False)):
        monkeypatch.setitem(export.__globals__, "gains_of", lambda *_, low=low: {1: replace(gain, low=low)})
        files, written = export(run, "vllm", anyway=True)
        config = json.loads(next(file for file in files if file.suffix == ".json").read_text())
        assert config.get(BUDGET, False) is on
        assert f"{gain.value:.2f} [{low:.2f}" in " ".join(written.notes)
        if on:
            assert config["num_speculative_tokens"] == HEADS


def test_what_a_budget_brings_is_of_the_plans_own_block(tmp_path, monkeypatch):
    """Not of the widest that was recorded."""
    rng, run, asked = np.random.default_rng(1), RunDirectory(tmp_path), []
    trace, latencies = several(rng)[0], timed(rng, (2, 4, 7))[0]
    replace(trace, ranks=np.minimum(trace.ranks, -1)).save(run.trace)  # of which no guess is right
    latencies.save(run.profile)
    plan = plan_trees(run.read_trace(), run.read_profile(), PlanRequest(Limits(8), batch_sizes=(1,)))
    assert plan.width < trace.num_heads
    replace(plan, inputs=inputs_of(run.trace, run.profile)).save(run.plan)
    monkeypatch.setitem(export.__globals__, "gains_of", lambda *given: asked.append(given) or {})
    export(run, "vllm", anyway=True)
    ((source, profile, sizes),) = asked
    assert (source.num_heads, sizes) == (plan.width, [1])
    assert profile.points == run.read_profile().at(plan.width, trace.num_heads).points
