"""Traces and calibrations: where sequences end, what is counted, and what is refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.records.bootstrap import conversation_draws, drawn_rates
from treeopt.records.calibration import Calibration
from treeopt.records.trace import NO_TRIAL, End, Meta, RankTrace
from treeopt.runtime.stop import LOOP_PERIOD, LOOP_REPEATS, SequenceEnd, StopRule

from .conftest import traces


def slow_end(tokens, eos, limit):
    for n in range(1, len(tokens) + 1):
        if tokens[n - 1] in eos:
            return n, End.EOS
        for p in range(1, LOOP_PERIOD + 1):
            tail = tokens[max(0, n - LOOP_REPEATS * p) : n]
            if len(tail) == LOOP_REPEATS * p and tail == tail[:p] * LOOP_REPEATS:
                return n, End.LOOP
        if n == limit:
            return n, End.LIMIT
    return len(tokens), End.LIMIT


def sequence_end(tokens, stop):
    """How many tokens there are up to where they end, and why; LIMIT where nothing else ends them."""
    end = SequenceEnd(stop)
    return len(end.take(tokens)), end.reason or End.LIMIT


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 40))
def test_sequences_end_as_the_definition_says(tokens, limit):
    assert sequence_end(tokens, StopRule(frozenset({3}), limit)) == slow_end(tokens, {3}, limit)


@given(st.integers(1, LOOP_PERIOD), st.integers(0, 5))
def test_a_loop_ends_with_its_third_repeat(period, before):
    tokens = [100 + i for i in range(before)] + list(range(period)) * 5
    assert sequence_end(tokens, StopRule(frozenset(), 1000)) == (before + LOOP_REPEATS * period, End.LOOP)


@given(traces())
def test_a_trace_survives_its_file(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    trace.save(path)
    loaded = RankTrace.load(path)
    for name in ("ranks", "starts", "end"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trace, name))
    assert loaded.top_k == trace.top_k


def test_a_hand_written_trace_needs_ranks_and_starts_only(tmp_path):
    arrays = {"ranks": np.array([[1], [0], [-2]], np.int16), "starts": np.array([0, 3])}
    for about in (
        {},
        {"meta": np.array(json.dumps(dict.fromkeys(Meta.__annotations__)))},
    ):  # what is unknown may be null
        np.savez(tmp_path / "t.npz", **arrays, **about)
        trace = RankTrace.load(tmp_path / "t.npz")
        assert Calibration.from_trace(trace).hits.tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"starts": [0, 1]}, "must hold the array 'ranks'"),
        ({"ranks": [[0]], "starts": [0, 2]}, "rise from 0 to the number of states"),
        ({"ranks": [[0]], "starts": [1]}, "rise from 0"),
        ({"ranks": [[-3]], "starts": [0, 1]}, "least value -3"),
        ({"ranks": [[0.5]], "starts": [0, 1]}, "must be whole numbers"),
        ({"ranks": np.array([{}], dtype=object), "starts": [0, 1]}, "without pickles"),
        ({"ranks": [[0]], "starts": [0, 1], "meta": '{"schema": "treeopt.trace/9"}'}, "schema"),
        ({"ranks": [[0]], "starts": [0, 1], "meta": '{"a'}, "cut off"),
        ({"ranks": [[0]], "starts": [0, 1], "meta": "[1]"}, "schema"),
        ({"ranks": [[0]], "starts": [0, 1], "meta": '{"top_k": "x"}'}, "at top_k"),
        ({"ranks": [[0]], "starts": [0, 1], "meta": '{"drafter": "x"}'}, "at drafter"),
        ({"ranks": [[5]], "starts": [0, 1], "meta": '{"top_k": 5}'}, "below top_k"),
        ({"ranks": [[65536]], "starts": [0, 1]}, "fit into int16"),
        ({"ranks": [[0]], "starts": [0, 1], "tokens": [2**40]}, "tokens must fit into int32"),
        ({"ranks": [[0]], "starts": [0, 1], "meta": '{"top_k": 1000000000}'}, "top_k must be at most 32768"),
        ({"ranks": [[0]], "starts": np.zeros(0, int)}, "rise from 0"),
    ],
)
def test_bad_traces_are_refused_by_rule(tmp_path, arrays, message):
    np.savez(tmp_path / "t.npz", **{name: np.array(value) for name, value in arrays.items()})
    with pytest.raises(InvalidInput, match=message):
        RankTrace.load(tmp_path / "t.npz")


@given(traces())
def test_marginals_are_counted_state_by_state(trace):
    steps = [
        row
        for s in range(trace.num_sequences)
        for row in trace.ranks[trace.starts[s] : trace.starts[s + 1] - 1].tolist()
    ]
    trials = [sum(row[k] != -2 for row in steps) for k in range(trace.num_heads)]
    if min(trials) == 0:
        with pytest.raises(InvalidInput, match="never had a token to guess"):
            Calibration.from_trace(trace)
        return
    calibration = Calibration.from_trace(trace)
    assert calibration.trials.tolist() == trials
    for k in range(trace.num_heads):
        expected = [sum(row[k] == r for row in steps) for r in range(trace.top_k)]
        assert calibration.hits[k].tolist() == expected


def test_errors_of_accuracies_are_over_conversations():
    """Against the bootstrap, of turns that share a conversation's skill; independent states would have less than half."""
    rng = np.random.default_rng(0)
    skill = rng.choice([0.2, 0.9], 60).repeat(2 * 30)
    ranks = np.where(rng.random(len(skill)) < skill, 0, -1).astype(np.int16)[:, None]
    ranks[29::30] = NO_TRIAL
    trace = RankTrace(
        ranks, np.arange(0, len(ranks) + 1, 30), meta={"top_k": 1}, cluster=np.arange(120, dtype=np.int32) // 2
    )
    hits, trials = ((of & trace.has_step).reshape(60, -1).sum(1) for of in (ranks[:, 0] == 0, ranks[:, 0] != NO_TRIAL))
    calibration = Calibration.from_trace(trace)
    bootstrapped = drawn_rates(hits, trials, conversation_draws(60)).std() * np.sqrt(60 / 59)
    assert calibration.stderr[0, 0] == pytest.approx(bootstrapped, rel=0.05)
    assert calibration.independent[0] < 0.25


GOOD = {"schema": "treeopt.calibration/2", "hits": [[5, 2]], "trials": [10], "unknown": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hits": [[5, 7]]}, "look cumulative"),
        ({"hits": [[5, -1]]}, "at least 0"),
        ({"hits": [[0.5, 0.2]]}, "whole number"),
        ({"trials": [0]}, "at least 1"),
        ({"trials": [10, 10]}, "shapes"),
        ({"schema": "treeopt.plan/1"}, "schema"),
        ({"hits": "many"}, "at hits"),
        ({"trials": None}, "trials"),
    ],
)
def test_bad_calibrations_are_refused_by_rule(tmp_path, change, message):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(GOOD))
    assert Calibration.load(path).num_heads == 1  # a hand-written file with the required keys loads
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(InvalidInput, match=message):
        Calibration.load(path)
