"""Context as a group: a trace is cut where the context doubles, and each bucket has a best draft of its own."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import OutOfRange
from treeopt.growth.contexts import by_context, context_name
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import NO_TRIAL, RankTrace

from .conftest import examples, invoke, traces


@examples(40)
@given(trace=traces(), data=st.data())
def test_parts_are_those_of_plain_loops(trace, data):
    """Each token is decoded in one part, all steps of a part are in its bucket, and no guess goes beyond its end."""
    prompts = data.draw(st.lists(st.integers(0, 40), min_size=trace.num_sequences, max_size=trace.num_sequences))
    trace = RankTrace(trace.ranks, trace.starts, prompt_tokens=np.array(prompts), meta=trace.meta)
    parts = by_context(trace)
    decoded = dict.fromkeys(parts.group_names, 0)
    for prompt, length in zip(prompts, trace.lengths.tolist(), strict=True):
        for state in range(max(length - 1, 0)):
            decoded[context_name(prompt + state)] += 1
    assert parts.lengths.sum() - parts.num_sequences == trace.lengths.sum() - trace.num_sequences
    for name, count in decoded.items():
        of_name = np.flatnonzero(np.array(parts.group_names)[parts.group] == name)
        assert (parts.lengths[of_name] - 1).sum() == count
    parts.check()


def test_speculation_stops_paying(tmp_path):
    """The guess is right below 1,024 tokens and wrong from there on; a step of two rows takes 11 ms for 10 of plain."""
    n, prompt, length = 12, 200, 2000
    right = prompt + np.arange(length) < 1024
    ranks = np.where(right, 0, -1)[:, None]
    ranks[-1] = NO_TRIAL
    trace = RankTrace(
        np.tile(ranks, (n, 1)),
        np.arange(0, n * length + 1, length),
        prompt_tokens=np.full(n, prompt),
        meta={"top_k": 2},
    )
    trace.save(tmp_path / "trace.npz")
    plain, steps = (
        [StepTiming(1, c, rows, rows - 1, (ms,)) for c in (64, 4096)] for rows, ms in ((1, 10.0), (2, 11.0))
    )
    LatencyProfile(tuple(steps), tuple(plain)).save(tmp_path / "profile.json")
    words = ("compare", tmp_path, "--group-by", "context", "--budget", 2)
    document = json.loads(invoke(*words, "--json").stdout)
    assert "Speculation stops paying at 1,024 to 2,047 tokens of context." in document["verdict"]
    rows = [
        (group["group"], group["best"]["tokens_per_step"], round(group["accepted"])) for group in document["groups"]
    ]
    assert [name for name, *_ in rows] == [
        "128 to 255 tokens",
        "256 to 511 tokens",
        "512 to 1,023 tokens",
        "1,024 to 2,047 tokens",
        "2,048 to 4,095 tokens",
    ]
    assert [accepted for *_, accepted in rows] == [1, 1, 1, 0, 0]
    assert [tokens for _, tokens, _ in rows] == pytest.approx([2, 2, 2, 1, 1], abs=0.05)
    assert "stops paying" in invoke(*words).stdout


def test_contexts_need_prompts(tmp_path):
    """Without the lengths of prompts there is no context; with a second source there is nothing to group."""
    trace = RankTrace(np.array([[0], [0], [0], [NO_TRIAL]]), np.array([0, 4]))
    with pytest.raises(OutOfRange, match="lengths of prompts"):
        by_context(trace)
    trace.save(tmp_path / "a.npz")
    assert (
        "one run" in invoke("compare", tmp_path / "a.npz", tmp_path / "a.npz", "--group-by", "context", code=1).stderr
    )
