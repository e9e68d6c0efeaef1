"""Drafts of several lengths that an engine has only sums of: what can be known of them, and what cannot."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.engines.measured.survival import MIXED, Drafts
from treeopt.engines.registry import ENGINES
from treeopt.errors import InvalidInput
from treeopt.growth.source import source_of
from treeopt.records.drafters import COUNTED
from treeopt.trees.tree import Tree

from .helpers.engine_files import (
    bench,
    exposition,
    lines,
    llama_request,
    meta_info,
    response,
    rows_of,
    trtllm_choice,
    vllm_line,
)

# The same drafts, 1,000 with 2,900 guesses: 900 to 966 of them had a third one.
SHORT = {
    "counters": exposition(drafted=2900),
    "log": lines(vllm_line(drafted=2900)),
    "bench": json.dumps(bench(spec_decode_draft_tokens=2900)),
    "requests": lines(*[response(num_draft_tokens=290)] * 10),
    "tensorrt-llm": lines(*[trtllm_choice(total_draft_tokens=290)] * 10),
    "llama.cpp": lines(*[llama_request(drafted=290)] * 10),
    "sglang": json.dumps([{"meta_info": {**meta_info(), "spec_num_proposed_drafts": 290}}] * 10),
}
HALF_SHORT = {
    "counters": (exposition(drafted=2500), "per-request-spec-decode-metrics detailed"),
    "log": (lines(vllm_line(drafted=2500)), "per-request-spec-decode-metrics detailed"),
    "requests": (lines(*[response(num_draft_tokens=250)] * 10), "per-request-spec-decode-metrics detailed"),
    "tensorrt-llm": (lines(*[trtllm_choice(total_draft_tokens=250)] * 10), "/prometheus/metrics"),
    "llama.cpp": (lines(*[llama_request(drafted=250)] * 10), "--spec-draft-p-min 0"),
}


@rows_of(SHORT)
def test_few_short_drafts(imported, name):
    """.42 of all drafts survive to depth 3, and .42 / .966 to .42 / .9 of those that had a third guess."""
    calibration, notes = imported(SHORT[name])
    survival, errors = calibration.meta["survival"], calibration.survival_stderr.tolist()
    assert survival == pytest.approx([0.8, 0.6 / 0.975, 0.42 / 0.95], abs=0.002)
    assert 0.42 / 0.966 <= survival[2] <= 0.42 / 0.9
    assert errors[2] > 0.42 / 0.9 - survival[2] - 0.001  # trials are whole
    assert any("which is in the standard errors" in note for note in notes)
    assert MIXED in notes
    assert calibration.meta["draft_length"] is None
    assert calibration.meta["draft_lengths"] == {}
    assert any("drafts of up to 3 tokens" in note for note in notes)


@rows_of(HALF_SHORT)
def test_many_short_drafts(imported, name):
    """500 to 833 of 1,000 drafts had a third guess, so that depth 3 may survive .5 or .8."""
    text, way = HALF_SHORT[name]
    with pytest.raises(
        InvalidInput, match=r"depth [23] may be off by 0\.\d+.*drafter`?: dspark, ngram, suffix"
    ) as error:
        imported(text)
    assert way in str(error.value)


def test_emptied_drafts(imported):
    """1,000 drafts with 1,800 guesses: 800 of two tokens and 200 of one, or 900 of two and 100 of none."""
    with pytest.raises(InvalidInput, match=r"depth 2 may be off by 0\.08"):
        imported(exposition(1000, [720, 540], drafted=1800))
    calibration, _ = imported(exposition(1000, [300, 0], drafted=500), drafter="ngram")
    assert calibration.meta["survival"] == [0.3, 0]


@pytest.mark.parametrize(
    "text",
    [
        exposition(1000, [800, 600, 0], drafted=2000),
        vllm_line(1000, [800, 600, 0], drafted=2000),
        lines(*[response([20, 20, 60, 0], num_draft_tokens=200)] * 10),
    ],
    ids=["counters", "log", "requests"],
)
def test_shorter_than_configured(imported, text):
    """Drafts that were all shorter than the longest possible have that shorter length."""
    calibration, notes = imported(text)
    assert calibration.meta["draft_lengths"] == {"2": 1000}
    assert calibration.meta["survival"] == pytest.approx([0.8, 0.6])
    assert MIXED not in notes


def test_mixed_requests(imported):
    """Requests of several lengths are refused, also where most are of one."""
    with pytest.raises(InvalidInput, match="sums drafts of several lengths"):
        imported(lines(*[response()] * 2, *[response(num_draft_tokens=250)] * 8))


def test_sglang_lengths(imported):
    """spec_num_proposed_drafts is the length at the end of a request times its steps."""
    short, long = {"meta_info": meta_info([20, 80])}, {"meta_info": meta_info()}
    with pytest.raises(InvalidInput, match=r"proposed 1 to 3 tokens a step: the server adapted.*a file for each"):
        imported(json.dumps([short, long]))
    calibration, _ = imported(json.dumps([short]), json.dumps([long]))
    assert calibration.meta["draft_lengths"] == {"1": 100, "3": 100}


# Drafters that end their drafts themselves.


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "dspark"])
def test_ends_are_misses(imported, drafter):
    """A limit of j tokens accepts as many drafts at j as are accepted now, whatever their lengths."""
    calibration, notes = imported(exposition(drafted=2500), drafter=drafter)
    assert calibration.meta["survival"] == pytest.approx([0.8, 0.6, 0.42])
    assert (calibration.meta["drafts"], calibration.meta["draft_lengths"]) == (1000, {})
    assert any("count as misses" in note or "an end counts as a miss" in note for note in notes)
    assert any("drafts of up to 3 tokens" in note for note in notes)
    assert MIXED not in notes
    caveats = source_of(calibration).caveats(Tree.chain(3), budget=4, most=4)
    assert "Ends of drafts were counted as misses." in caveats[0]
    assert "found nothing were not counted" in caveats[1]


def test_recorded_ends_are_misses(imported):
    """40 drafts of one token, all right, and 60 of two of which 30 are: a limit of 2 accepts .3 at depth 2, not .5."""
    steps = {"per_step_accepted": [1] * 40 + [2] * 30 + [1] * 30, "per_step_drafted": [1] * 40 + [2] * 60}
    one = response([0, 70, 30], num_draft_tokens=160, **steps)
    assert imported(one)[0].meta["survival"] == pytest.approx([1, 0.5])
    assert imported(one, drafter="suffix")[0].meta["survival"] == pytest.approx([1, 0.3])


def test_drafters_can_be_named(imported):
    """Every drafter that an engine runs can be named."""
    assert {kind for engine in ENGINES.values() for method in engine.methods for kind in method.drafters} <= set(
        COUNTED
    )
    assert any("a block in one pass" in note for note in imported(exposition(), drafter="dflash")[1])


# Bounds.


@given(st.integers(2, 4), st.integers(0, 3), st.data())
def test_unknown_lengths(k, empty, data):
    """Whatever lengths the drafts had, survival is off by no more than is said."""
    had = sorted(data.draw(st.lists(st.integers(1, 9), min_size=k, max_size=k)), reverse=True)
    reached = []
    for most in had:
        reached.append(data.draw(st.integers(0, min(most, reached[-1] if reached else most))))
    drafts = Drafts.of(had[0] + empty, reached, sum(had), "x")
    had[0] += empty  # an empty draft is a miss
    depth = len(drafts.reached)
    true, read = (np.array(reached[:depth]) / d for d in (np.array(had[:depth]), drafts.had))
    assert (abs(true - read) <= drafts.unsure + 1e-12).all() or drafts.lengths
