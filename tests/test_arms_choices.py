"""What a table of arms says: repeats, groups that are decided apart, choices and their figures."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.arms.arm import Arm, Arms
from treeopt.arms.choices import decide_arms
from treeopt.arms.groups import apart, merged
from treeopt.arms.tuned import columns_of, engine_of_all, launch_lines
from treeopt.errors import InvalidInput
from treeopt.report.arms_table import headline


def arm(drafter="none", k=0, c=1, speed=None, **more):
    return Arm(drafter=drafter, k=k, concurrency=c, tokens_per_s=speed, **more)


TABLE = [  # the first rows of a public table: Qwen3.8-Flash-Next on a GB10, off and MTP 2 and 3
    *(arm(c=c, speed=v) for c, v in ((1, 17.1), (2, 33.4), (4, 44.1), (8, 87.5), (16, 131.6))),
    *(arm("MTP", 2, c, v) for c, v in ((1, 28.5), (2, 41.3), (4, 50.7), (8, 89.0), (16, 143.7))),
    *(arm("MTP", 3, c, v) for c, v in ((1, 27.4), (2, 38.7), (4, 60.6), (8, 93.4), (16, None))),
]


def decided(arms, **options):
    return decide_arms(Arms(arms=tuple(arms)), **options)


def test_table_is_decided_as_its_figures_say():
    found = decided(TABLE)
    chosen = {choice.arm.concurrency: choice.arm.name for choice in found.choices}
    assert chosen == {1: "MTP 2", 2: "MTP 2", 4: "MTP 3", 8: "MTP 3", 16: "MTP 2"}
    for choice in found.choices:
        off = next(a for a in TABLE if a.k == 0 and a.concurrency == choice.arm.concurrency)
        assert choice.over_off == pytest.approx(choice.arm.tokens_per_s / off.tokens_per_s)
        assert choice.over_off.low < choice.over_off < choice.over_off.high


def test_measured_figures_are_as_measured_and_others_predicted():
    found = decided(TABLE)
    (posterior,) = found.posteriors
    for i, a in enumerate(posterior.arms):
        estimate = posterior.throughput(i)
        assert estimate.low < estimate.value < estimate.high
        if a.tokens_per_s:
            assert estimate.value == a.tokens_per_s
        else:
            assert 100 < estimate.value < 220


def test_without_off_ratios_to_other_arms_are_answered():
    """Two lengths that tie alone; at 8 requests the shorter has 1.45 times the throughput of the longer."""
    arms = [arm("MTP", k, c, v) for k, c, v in ((4, 1, 55.6), (2, 1, 54.9), (4, 8, 210.0), (2, 8, 303.6))]
    alone, loaded = decided(arms).choices
    assert [alone.posterior.arms[i].name for i in alone.tied] == [({"MTP 2", "MTP 4"} - {alone.arm.name}).pop()]
    assert loaded.arm.k == 2
    assert loaded.over_off is None
    assert loaded.posterior.ratio(loaded.chosen, loaded.run["MTP", 4]) == pytest.approx(303.6 / 210)


@given(st.lists(st.floats(1, 1e4), min_size=2, max_size=6))
def test_repeats_are_one_arm_by_their_geometric_mean(speeds):
    (mean,) = merged([arm(speed=v) for v in speeds])
    logs = np.log(speeds)
    assert np.log(mean.tokens_per_s) == pytest.approx(logs.mean())
    assert (mean.stderr or 0.0) == pytest.approx(logs.std(ddof=1) / np.sqrt(len(logs)))
    assert mean.repeats == len(speeds)


@pytest.mark.parametrize(
    ("about", "datasets"),
    [
        pytest.param(
            [{"temperature": "0"}, {"temperature": "1"}], ["chat, temperature 0", "chat, temperature 1"], id="condition"
        ),
        pytest.param([{"kv_type": "f16"}, {}], ["chat", "chat"], id="not-said"),
        pytest.param([{"output_tokens": "251"}, {"output_tokens": "249"}], ["chat", "chat"], id="nearly-as-long"),
        pytest.param([{"block": "8"}, {"block": "16"}], ["chat", "chat"], id="says-more-of-the-drafter"),
        pytest.param([{"engine": "vLLM"}, {"engine": "vLLM 2"}], ["chat", "chat"], id="an engine of each drafter"),
        pytest.param(
            [{"hardware": "H100"}, {"hardware": "L40S"}], ["chat, hardware H100", "chat, hardware L40S"], id="machine"
        ),
    ],
)
def test_arms_that_were_run_otherwise_are_decided_apart(about, datasets):
    arms = [arm("MTP", k, speed=10.0, dataset="chat", about=a) for k, a in enumerate(about, 2)]
    found, notes = apart(arms)
    assert [a.dataset for a in found] == datasets
    assert bool(notes) == (len(set(datasets)) > 1)


def test_two_plain_arms_that_differ_set_all_apart():
    """One off arm for each KV type; the drafter's arm names one of them, and is compared with that alone."""
    arms = [
        arm(speed=10.0, about={"kv": "f16"}),
        arm(speed=14.0, about={"kv": "q8"}),
        arm("MTP", 2, speed=12.0, about={"kv": "f16"}),
    ]
    found = decided(arms)
    assert [(c.arm.name, c.arm.dataset) for c in found.choices] == [("MTP 2", "kv f16"), ("off", "kv q8")]
    assert "kv (f16, q8)" in found.notes[0]


def test_lengths_are_candidates():
    found = decided(TABLE, lengths=[1, 2])
    one = [a for a in found.arms if a.k == 1]
    assert [a.concurrency for a in one] == [1, 2, 4, 8, 16]
    assert not any(a.tokens_per_s for a in one)
    document = found.document()
    assert sum(not e["run"] for e in document["estimates"]) == 6  # and MTP 3 at 16


def test_limit_on_time_per_token():
    """At 8 requests an arm of 93.4 tokens/s takes 86 ms per token; within 70 ms is MTP 3 at 4 requests (66 ms)."""
    found = decided(TABLE, tpot_limit=70.0)
    within = {c.arm.concurrency: c.within_limit for c in found.choices}
    assert within == {1: True, 2: True, 4: True, 8: False, 16: False}
    each = [replace(a, unit="request", tokens_per_s=a.tokens_per_s and a.tokens_per_s / a.concurrency) for a in TABLE]
    for decision in (found, decided(each, tpot_limit=70.0)):
        assert any("no percentile" in text and "MTP 3 at 4 requests" in text for text in headline(decision))
    faster = decided([replace(a, tpot_p99_ms=1.0) for a in TABLE], tpot_limit=70.0)
    assert all(c.within_limit for c in faster.choices)


def test_document_is_json_of_figures():
    document = json.loads(json.dumps(decided(TABLE).document()))
    first = document["decisions"][0]
    assert (first["drafter"], first["k"], first["concurrency"]) == ("MTP", 2, 1)
    assert set(first["tokens_per_s"]) == set(first["over_off"]) == {"value", "low", "high"}
    assert len(document["estimates"]) == len(TABLE)


def test_minutes_of_the_next_run_are_by_its_speed():
    arms = [
        arm(speed=10.0, seconds=120.0, prompts=80),
        arm("MTP", 2, speed=20.0, seconds=60.0, prompts=80),
        arm("MTP", 4),
    ]
    document = decided(arms).document()
    run = document["next_run"]
    assert run["prompts"] == 80
    assert run["minutes"] == pytest.approx(
        1200 / next(e for e in document["estimates"] if e["k"] == run["k"])["tokens_per_s"]["value"] / 60
    )


NOTHING_ADDED = "Only settings in the files were weighed. `lengths` adds some that could be run."


def test_a_speed_that_cannot_be_is_named():
    assert decided([arm(speed=10.0), arm("MTP", 2, speed=29.0)]).notes == (NOTHING_ADDED,)
    (note, *_) = decided([arm(speed=10.0), arm("MTP", 2, speed=31.0)]).notes
    assert note.startswith(
        "MTP 2 at concurrency 1 is 3.1 times as fast as off, but a step of 2 guesses gives at most 3 tokens"
    )


def test_engine_is_told_by_the_arms():
    assert engine_of_all(Arms(arms=(arm(about={"engine": "llama.cpp (fork)"}),))) == "llama-cpp"
    assert engine_of_all(Arms(arms=(arm(about={"engine": "vLLM"}), arm(about={"engine": "SGLang"})))) is None


def test_launch_line_has_the_lengths_by_concurrency():
    lines, _ = launch_lines(decided(TABLE), "vllm")
    (line,) = lines
    assert "[[1, 2, 2], [3, 11, 3], [12, 4096, 2]]" in line
    assert "Above 16 requests at once nothing was run" in launch_lines(decided(TABLE), "vllm")[1][-1]
    (line,), _ = launch_lines(decided(TABLE), "sglang", "EAGLE-3")
    assert re.search(r"cat > adaptive.json <<'END'\n\{.+\}\nEND\npython -m sglang.+ adaptive.json$", line)
    unknown = decided([replace(a, drafter="fast", k=None) if a.k else a for a in TABLE])
    lines, notes = launch_lines(unknown, "vllm", "eagle3")
    assert not lines
    assert "how many guesses fast makes is not known" in notes[0]
    none, _ = launch_lines(decided([a for a in TABLE if a.k == 0]), "vllm")
    assert none[0].endswith("\nvllm serve MODEL")
    slower = decided([arm(speed=10.0), arm("MTP", 2, speed=9.9), arm(c=8, speed=80.0), arm("MTP", 2, 8, 120.0)])
    assert [choice.arm.name for choice in slower.choices] == ["off", "MTP 2"]
    assert "[[1, 2, 0], [3, 4096, 2]]" in launch_lines(slower, "vllm")[0][0]


@pytest.mark.parametrize("column", ["x", "=k", "x="])
def test_columns_are_name_and_meaning(column):
    assert columns_of(["accept=len=k"]) == {"accept=len": "k"}
    with pytest.raises(InvalidInput, match="columns"):
        columns_of([column])


def test_nothing_to_compare_is_refused():
    with pytest.raises(InvalidInput, match=r"tpot_limit`? needs times"):
        decided([replace(arm, unit="ratio") for arm in TABLE], tpot_limit=70.0)
    with pytest.raises(InvalidInput, match="nothing can be compared"):
        decided([arm("MTP", 2)])


def test_groups_that_alternate_are_one_each():
    """Rows of a table may be sorted by concurrency first; each data set is one group, and has one line."""
    arms = [replace(a, dataset=dataset) for a in TABLE for dataset in ("chat", "code")]
    found = decided(sorted(arms, key=lambda a: a.concurrency))
    assert list(found.groups) == [("", "chat"), ("", "code")]
    assert len(launch_lines(found, "vllm")[0]) == 2


def test_off_is_served_only_where_it_was_run_or_between():
    """At 1 a broken drafter alone was run, and off at 4 alone: that off is best at 1 was said by extrapolation."""
    failing = [arm("EAGLE", 4, c, 30.0, tokens_per_step=1.0) for c in (1, 2)]
    found = decided([*failing, arm(c=4, speed=90.0)], lengths=(0,))
    assert [choice.arm.concurrency for choice in found.choices] == [4]
    assert "At concurrency 1 broken drafters alone were run: nothing is chosen there. Run off." in found.notes
    found = decided([*failing, arm(c=1, speed=29.0), arm(c=4, speed=90.0)], lengths=(0,))
    assert {choice.arm.concurrency: choice.arm.name for choice in found.choices} == {1: "off", 2: "off", 4: "off"}
