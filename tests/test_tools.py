"""Arms of benchmarking tools' results. Figures are of public runs, or of runs made for tests/data (its README says how)."""

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.arms.arm import Arms
from treeopt.arms.tools import read_sweep, read_tool
from treeopt.engines.measured.files import load_file
from treeopt.errors import InvalidInput

# Two runs of one server, without and with more guesses, as their author pasted them (a public thread on vLLM, 2026).
CONSOLE = """MTP 1

============ Serving Benchmark Result ============
Maximum request concurrency:             64
Benchmark duration (s):                  275.18
Output token throughput (tok/s):         1646.15
-----Time per Output Token (excl. 1st token)------
Median TPOT (ms):                        37.18
P99 TPOT (ms):                           45.42
---------------Inter-token Latency----------------
Median ITL (ms):                         22.40
---------------Speculative Decoding---------------
Acceptance rate (%):                     83.59
Acceptance length:                       1.84
Drafts:                                  246348
Draft tokens:                            246348
Accepted tokens:                         205916
Per-position acceptance (%):
  Position 0:                            83.59
==================================================

MTP 3

============ Serving Benchmark Result ============
Successful requests:                     1320
Failed requests:                         2
Maximum request concurrency:             64
Request rate configured (RPS):           8.00
Benchmark duration (s):                  214.95
Total generated tokens:                  452520
Output token throughput (tok/s):         2148.42
Mean TPOT (ms):                          27.90
Acceptance length:                       2.82
Drafts:                                  160000
Draft tokens:                            480000
Accepted tokens:                         291200
  Position 0:                            80.00
  Position 1:                            60.00
  Position 2:                            42.00
==================================================
"""
# vLLM's issue "Speculative Decoding Issue with VLLM_ENABLE_V1_MULTIPROCESSING=0"
OFFLINE = """python examples/offline_inference/spec_decode.py --method ngram
--------------------------------------------------
total_num_output_tokens: 248291
num_drafts: 74097
num_draft_tokens: 147899
num_accepted_tokens: 141162
mean acceptance length: 2.91
--------------------------------------------------
acceptance at token 0: 0.96
acceptance at token 1: 0.94
"""
SERVED = {
    "backend": "openai", "label": None, "model_id": "m", "num_prompts": 64, "gpu": "H100", "request_rate": "inf", "max_concurrency": 8,
    "duration": 12.9, "completed": 64, "failed": 0, "total_input_tokens": 8192, "total_output_tokens": 16420,
    "output_throughput": 1272.9, "mean_tpot_ms": 6.0, "p99_tpot_ms": 7.2, "median_itl_ms": 16.5,
}  # fmt: skip
DRAFTED = {
    "spec_decode_acceptance_rate": 60.67, "spec_decode_acceptance_length": 2.82, "spec_decode_num_drafts": 5800,
    "spec_decode_draft_tokens": 17400, "spec_decode_accepted_tokens": 10556,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.42],
}  # fmt: skip
SGLANG = (
    '{"tag": null, "backend": "sglang", "dataset_name": "sharegpt", "request_rate": Infinity, "max_concurrency": 8, "duration": 12.9, '
    '"completed": 64, "total_input_tokens": 8192, "total_output_tokens": 16420, "output_throughput": 1272.9, "mean_tpot_ms": 6.0, '
    '"p99_tpot_ms": 7.2, "mean_itl_ms": 6.0, "concurrency": 7.8, "accept_length": %s, "server_info": %s}\n'
)
FLAGS = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
DATA = Path(__file__).parent / "data"


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def read(folder, text, name="result.txt"):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return read_tool(load_file(file), file)


def steps(*values):
    names = ("batch_size", "steps", "topk", "num_draft_tokens", "acc_length", "step_time", "speed", "completion_tokens")
    return dict(zip(names, values, strict=True))


FORMS = {  # text and name of a file: for each arm its drafter, K, concurrency, tokens/s, tokens per step
    "vllm": (lines(SERVED | DRAFTED, SERVED), "mtp.json", ("mtp", 3, 8, 1272.9, 2.82), ("none", 0, 8, 1272.9, None)),
    "vllm, a position without acceptance": (
        lines(SERVED | DRAFTED | {"spec_decode_draft_tokens": 5800 * 4}), "mtp.json", ("mtp", 4, 8, 1272.9, 2.82)),
    "vllm by name": (lines(SERVED), "eagle3-k4.json", ("eagle3", 4, 8, 1272.9, None)),
    "vllm off beside drafts": (
        lines(SERVED | DRAFTED, SERVED), "eagle3-k3.json", ("eagle3", 3, 8, 1272.9, 2.82), ("none", 0, 8, 1272.9, None),
    ),
    "vllm without a limit": (lines(SERVED | {"max_concurrency": None}), "a.json", ("none", 0, 64, 1272.9, None)),
    "vllm metadata": (
        lines(SERVED | DRAFTED | {"method": "eagle3"}, SERVED | {"num_speculative_tokens": "2"}),
        "a.json", ("eagle3", 3, 8, 1272.9, 2.82), ("drafter", 2, 8, 1272.9, None),
    ),
    "vllm config": (
        lines(SERVED | DRAFTED | {"run_number": 0, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        "run=0.json", ("ngram", 3, 8, 1272.9, 2.82),
    ),
    "vllm schedule": (
        lines(SERVED | DRAFTED | {"run_number": 0, "speculative_config.method": "mtp",
                                  "speculative_config.num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 64, 1]]}),
        "run=0.json", ("mtp by batch size", None, 8, 1272.9, 2.82),
    ),
    "console": (CONSOLE, "mtp.txt", ("MTP", 1, 64, 1646.15, 1.8359), ("MTP", 3, 64, 2148.42, 2.82)),
    "commands": (
        CONSOLE.replace("MTP 1", """vllm serve m --speculative-config '{"method": "eagle3", "num_speculative_tokens": 1}'""").replace(
            "MTP 3", "## K=3, with DFlash\n\nNamespace(subparser='bench', bench_type='serve', request_id_prefix=None, plain=None, speed='none')"
        ), "a.md", ("eagle3", 1, 64, 1646.15, 1.8359), ("DFlash", 3, 64, 2148.42, 2.82),
    ),
    "adaptive": (lines(SERVED | DRAFTED), "mtp-adaptive.json", ("mtp adaptive", None, 8, 1272.9, 2.82)),
    "titles": (
        CONSOLE.replace("MTP 1", "### MTP = 1\n\n```").replace("MTP 3", "```\n#### [SpecBench], Padding Enabled, K=10:\n"),
        "a.md", ("MTP", 1, 64, 1646.15, 1.8359), ("drafter", 3, 64, 2148.42, 2.82),
    ),
    "offline": (OFFLINE, "out.txt", ("ngram", 2, 1, None, 248291 / (248291 - 141162))),
    "offline counts": (lines(DRAFTED), "ngram.json", ("ngram", 3, 1, None, 2.82)),
    "bench_serving": (SGLANG % ("2.82", json.dumps(FLAGS)), "a.jsonl", ("EAGLE3", 3, 8, 1272.9, 2.82)),
    "bench_serving off": (SGLANG % ("null", "null"), "eagle3.jsonl", ("none", 0, 8, 1272.9, None)),
    "bench_serving tree": (
        SGLANG % ("3.1", json.dumps(FLAGS | {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16})),
        "a.jsonl", ("EAGLE3 tree (topk 4, 16 tokens)", 3, 8, 1272.9, 3.1),
    ),
    "bench_speculative": (
        lines(steps(8, 0, 0, 0, 1.0, 0.01, 100.0, 512.0), steps(8, 3, 1, 4, 2.82, 0.01692, 166.667, 512.0),
              steps(8, 3, 4, 16, 3.1, 0.02, 155.0, 512.0)),
        "output.jsonl", ("none", 0, 8, 100.0, None), ("EAGLE", 3, 8, 166.667, 2.82), ("EAGLE tree (topk 4, 16 tokens)", 3, 8, 155.0, 3.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_arms_that_were_run(form, tmp_path):
    text, name, *expected = FORMS[form]
    read(tmp_path, text, name).save(tmp_path / "arms.json")
    arms = Arms.load(tmp_path / "arms.json").arms
    assert [(arm.drafter, arm.k, arm.concurrency) for arm in arms] == [arm[:3] for arm in expected]
    assert [arm.tokens_per_s for arm in arms] == [arm[3] and pytest.approx(arm[3], rel=1e-3) for arm in expected]
    assert [arm.tokens_per_step for arm in arms] == [arm[4] and pytest.approx(arm[4], abs=1e-3) for arm in expected]


def test_what_else_is_said_of_a_run(tmp_path):
    """Conditions, prompts and seconds are kept; a median is no mean, a failed request and a rate of requests are noted."""
    arm = read(tmp_path, lines(SERVED | DRAFTED)).arms[0]
    assert dict(arm.about) == {"gpu": "H100", "engine": "vllm", "input_tokens": "128", "output_tokens": "257"}
    assert (arm.model, arm.tpot_ms, arm.tpot_p99_ms, arm.prompts, arm.seconds) == ("m", 6.0, 7.2, 64, 12.9)
    assert arm.positions == (0.8, 0.6, 0.42)
    first, second = (found := read(tmp_path, CONSOLE)).arms
    assert (first.tpot_ms, first.tpot_p99_ms, second.tpot_ms) == (None, 45.42, 27.9)
    assert second.about["request_rate"] == "8.0"
    assert "2 of 1322 requests failed" in found.notes[0]
    assert "8.0 requests a second were sent" in found.notes[1]
    tree = read(tmp_path, lines(steps(8, 3, 4, 16, 3.1, 0.02, 155.0, 512.0))).arms[0]
    assert (tree.unit, tree.about["output_tokens"]) == ("request", "512")


def test_steps_without_a_draft_count(tmp_path):
    """Acceptance lengths are of steps with a draft; drafts of other requests are noted."""
    drafts = DRAFTED | {
        "spec_decode_num_drafts": 1000,
        "spec_decode_accepted_tokens": 1820,
        "spec_decode_draft_tokens": 3000,
    }
    found = read(tmp_path, lines(SERVED | drafts | {"total_output_tokens": 64 + 1820 + 1000 + 500}))
    assert found.arms[0].tokens_per_step == pytest.approx(3320 / 1500)
    assert "many steps had no draft" in found.notes[0]
    others = read(tmp_path, lines(SERVED | DRAFTED | {"total_output_tokens": 8000}))
    assert others.arms[0].tokens_per_step == pytest.approx(2.82)
    assert "of other requests too" in others.notes[0]


def test_a_sweep_is_read_run_by_run(tmp_path):
    """An arm for each run, with what the sweep changed; warm-ups and summaries are no runs, a failure is noted."""
    for folder, extra in (("off", {}), ("k3", DRAFTED | {"speculative_config.method": "mtp"})):
        (tmp_path / folder).mkdir()
        record = SERVED | extra | {"run_number": 0, "max_concurrency": 4, "temperature": 0.5}
        for name in ("run=0.json", "run=1.json", "warmup.json"):
            (tmp_path / folder / name).write_text(json.dumps(record))
        (tmp_path / folder / "summary.json").write_text(json.dumps([record, record]))
    (tmp_path / "k3" / "run=2.failure.json").write_text("{}")
    found = read_sweep(tmp_path)
    assert [(arm.name, arm.concurrency) for arm in found.arms] == [("mtp 3", 4)] * 2 + [("off", 4)] * 2
    assert {arm.about["temperature"] for arm in found.arms} == {"0.5"}
    assert found.notes == (f"{tmp_path / 'k3' / 'run=2.failure.json'}: this run failed.",)
    with pytest.raises(InvalidInput, match="must have results of a benchmarking tool"):
        read_sweep(tmp_path / "elsewhere")


def test_a_real_sweep_is_the_same_as_its_table():
    """All answers have 48 tokens, the first of the prompt's pass: with A of 376 accepted there were 376 - A steps."""
    folder = read_sweep(DATA / "vllm_sweep").arms
    steps = {"ngram 2": 376 / (376 - 34), "ngram 4": 376 / (376 - 38), "off": None}
    assert Counter((arm.name, arm.concurrency) for arm in folder) == dict.fromkeys(product(steps, (1, 4)), 2)
    assert [arm.tokens_per_step for arm in folder] == [pytest.approx(steps[arm.name]) for arm in folder]
    file = DATA / "vllm_sweep" / "console.txt"  # of its first two runs
    assert [(arm.name, arm.concurrency) for arm in read_tool(load_file(file), file).arms] == [("off", 1), ("off", 4)]
    assert {(arm.model, arm.prompts, arm.about["output_tokens"]) for arm in folder} == {("smollm2", 8, "48")}
    file = DATA / "vllm_sweep" / "summary.csv"
    table = read_tool(load_file(file), file)
    assert by_speed(table.arms) == by_speed(folder)


def by_speed(arms):
    return sorted((replace(arm, source="") for arm in arms), key=lambda arm: arm.tokens_per_s)


OTHER = ("k,tokens_per_s\n0,10\n2,20\n", "| K | tok/s |\n|---|---|\n| 2 | 20 |\n", "words\n", '{"a": 1}\n', "[1, 2]\n")


@pytest.mark.parametrize("text", OTHER)
def test_other_files_are_of_no_tool(text, tmp_path):
    assert read(tmp_path, text) is None


DAMAGED = (
    ({"output_throughput": "fast"}, "run 1: output_throughput must be a number of at least 0"),
    ({"spec_decode_per_position_acceptance_rates": [80, 60]}, "run 1: .* must be a share from 0 to 1"),
    ({"spec_decode_num_drafts": -1}, "run 1: spec_decode_num_drafts must be a whole number"),
    ({"max_concurrency": 0}, "run 1: max_concurrency must be a whole number of at least 1"),
)


@pytest.mark.parametrize(("change", "message"), DAMAGED)
def test_a_damaged_record_is_refused_by_its_place(change, message, tmp_path):
    with pytest.raises(InvalidInput, match=message):
        read(tmp_path, lines(SERVED | DRAFTED | change))


NAMES = st.sampled_from(sorted({*SERVED, *DRAFTED, *FLAGS, *steps(*range(8)), "server_info",
                                "speculative_config", "method", "k", "run_number", "label"}))  # fmt: skip
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(allow_nan=False, allow_infinity=False),
                   st.text(max_size=4), st.lists(st.floats(0, 1), max_size=3), st.just(FLAGS))  # fmt: skip
FORMED = st.sampled_from((SERVED | DRAFTED, steps(*range(8))))


@given(FORMED, st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_record_is_arms_that_can_be_kept_or_a_sentence(tmp_path_factory, record, changes):
    file = tmp_path_factory.mktemp("any") / "arms.json"
    try:
        found = read_tool([record | changes], file)
    except InvalidInput:
        return
    if found:
        found.save(file)
        assert Arms.load(file) == found
