"""What SGLang and TensorRT-LLM count, trap by trap."""

import json
import re

import pytest

from treeopt.engines.sglang import UNKNOWN_LENGTHS
from treeopt.errors import InvalidInput

from .engine_files import ALIASES, OLDER, SURVIVAL, iteration, lines, meta_info, trtllm, trtllm_choice

# SGLang.


def test_the_length_that_sglang_reports_is_not_used(imported):
    """spec_accept_length has the prefill's token in it; here it is 9.9, and the rate .99."""
    assert imported({"meta_info": meta_info()})[0].meta["survival"] == pytest.approx(SURVIVAL)


def test_a_histogram_that_grows_on_demand_is_as_long_as_the_draft(imported):
    calibration, _ = imported(
        json.dumps([{"meta_info": meta_info([5, 4], k=3)}, {"meta_info": meta_info([0, 0, 3, 3])}])
    )
    assert calibration.meta["draft_lengths"] == {"3": 15}
    assert calibration.trials.tolist() == [15, 10, 6]


def test_requests_that_do_not_tell_their_length_take_the_longest_of_the_file(imported):
    """Each by its own longest, depth 2 would rest on the one request that got there."""
    short, long = ({k: v for k, v in meta_info(h).items() if "proposed" not in k} for h in ([5, 5], [0, 0, 10]))
    calibration, _ = imported(json.dumps([{"meta_info": short}, {"meta_info": long}]))
    assert calibration.meta["survival"] == [0.75, 0.5]


def test_newest_names_win_over_their_aliases(imported):
    both = {**meta_info([1, 0, 0, 0], names=ALIASES), **meta_info([1, 0, 0, 0], names=OLDER), **meta_info()}
    assert imported({"meta_info": both})[0].meta["drafts"] == 100


def test_with_several_choices_sglang_has_a_list_of_details(imported):
    """One that drafted nothing has an empty histogram in it."""
    silent = dict.fromkeys(meta_info(), 0) | {"spec_correct_drafts_histogram": []}
    details = [meta_info(), meta_info([0, 0, 0, 100]), silent]
    calibration, notes = imported({"choices": [{}, {}, {}], "sglext": {"spec_tokens_details": details}})
    assert calibration.meta["requests"] == 2
    assert calibration.meta["survival"] == pytest.approx([0.9, 0.8, 0.71])
    assert any("1 of 3 responses" in note for note in notes)


def test_what_sglang_says_of_a_request_twice_is_counted_once(imported):
    """Both "return_spec_tokens_details" and "return_meta_info" were asked for."""
    body = {"choices": [{"meta_info": meta_info()}], "sglext": {"spec_tokens_details": meta_info()}}
    calibration, _ = imported(json.dumps([body] * 5))
    assert (calibration.meta["drafts"], calibration.meta["requests"]) == (500, 5)


def test_sglang_does_not_record_lengths_and_that_is_said(imported):
    assert UNKNOWN_LENGTHS in imported({"meta_info": meta_info()})[1]


def test_the_depth_of_trees_is_no_survival_of_a_chain(imported):
    """--speculative-eagle-topk 4: 63 nodes a step, of depth 3."""
    with pytest.raises(InvalidInput, match=r"look like trees.*--speculative-eagle-topk 1"):
        imported({"meta_info": meta_info(k=63)})


MEANS_OF_SGLANG = {
    "bench_serving": lines({"backend": "sglang", "max_concurrency": 8, "mean_tpot_ms": 6.0, "accept_length": 2.82}),
    "bench_speculative": lines({"batch_size": 8, "steps": 3, "topk": 1, "acc_length": 2.82, "step_time": 0.01692}),
    "server info": json.dumps({"internal_states": [{"avg_spec_accept_length": 2.82}]}),
    "log": "[2026-09-01 12:00:00] Decode batch. #running-req: 8, #token: 9216, accept len: 2.82, accept rate: 0.61, ",
    "gauge": 'sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.82\n',
}


@pytest.mark.parametrize("name", MEANS_OF_SGLANG)
def test_means_of_sglang_are_refused_and_told_what_to_ask_for(imported, name):
    with pytest.raises(InvalidInput, match=r"only means of its drafts.*return_spec_tokens_details"):
        imported(MEANS_OF_SGLANG[name])


def test_responses_of_an_sglang_without_histograms_are_refused(imported):
    old = {k: v for k, v in meta_info(names=OLDER).items() if "histogram" not in k}
    with pytest.raises(InvalidInput, match="no histograms"):
        imported({"meta_info": old})


def test_a_histogram_that_is_not_of_the_steps_is_refused(imported):
    with pytest.raises(InvalidInput, match="as many steps"):
        imported({"meta_info": {**meta_info(), "spec_verify_ct": 101}})


# TensorRT-LLM.


def test_the_gauge_of_the_last_iteration_is_not_read(imported):
    text = trtllm().replace("acceptance_length 2.5", "acceptance_length 1.0")
    assert imported(text)[0].meta["survival"] == pytest.approx(SURVIVAL)


def test_a_position_at_which_nothing_was_accepted_may_be_missing(imported):
    calibration, _ = imported(trtllm([10] * 3, [5, 2]))
    assert calibration.meta["survival"] == pytest.approx([0.5, 0.2, 0])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([trtllm(), trtllm([9] * 3, [8, 7, 6])], "without a restart"),
        ([trtllm([500, 1000, 1000], [400, 300, 200])], "more first guesses|never rise"),
        ([trtllm([1000, 500, 500], [800, 600, 420])], "at most what was drafted"),
        ([trtllm([1000], [800, 600])], "at most what was drafted"),
        ([re.sub(".*token_position.*\n", "", trtllm())], "token_position.*return_perf_metrics"),
    ],
)
def test_counters_of_tensorrt_llm_that_cannot_be_are_refused(imported, texts, message):
    with pytest.raises(InvalidInput, match=message):
        imported(*texts)


def test_a_choice_whose_length_is_scheduled_takes_the_longest(imported):
    calibration, _ = imported(trtllm_choice(num_spec_tokens=None, total_draft_tokens=300))
    assert calibration.meta["survival"] == pytest.approx(SURVIVAL)


MEANS_OF_TENSORRT_LLM = {
    "iteration log": lines(iteration(), iteration(24, 14), "{'iter': 58, 'specDecodingStats': None}"),
    "iterations": json.dumps(
        [
            {
                "iter": 57,
                "specDecodingStats": {"numDraftTokens": 24, "numAcceptedTokens": 29, "numRequestsWithDraftTokens": 16},
            }
        ]
    ),
    "report": json.dumps({"performance": {}, "decoding_stats": {"acceptance_length_percentiles": {"average": 2.8}}}),
    "perf metrics": json.dumps([{"request_id": 1, "perf_metrics": {"speculative_decoding": {"acceptance_rate": 0.6}}}]),
    "choice": json.dumps(
        {"choices": [{"speculative_decoding": {"total_accepted_draft_tokens": 182, "total_draft_tokens": 300}}]}
    ),
}


@pytest.mark.parametrize("name", MEANS_OF_TENSORRT_LLM)
def test_means_of_tensorrt_llm_are_refused_and_told_what_to_ask_for(imported, name):
    with pytest.raises(InvalidInput, match=r"only means of its drafts.*per_request_spec_decode_stats") as error:
        imported(MEANS_OF_TENSORRT_LLM[name])
    if name.startswith("iteration"):  # pooled over drafts, own token included
        assert f"{1 + 29 / 16:.2f} tokens a step over 16 drafts" in str(error.value)


def test_of_drafts_of_one_token_a_mean_is_all_there_is(imported):
    calibration, _ = imported(lines(iteration(8, 6, 8), iteration(4, 3, 4)))
    assert calibration.meta["survival"] == [0.75]
    assert calibration.meta["drafts"] == 12


def test_iteration_logs_are_literals_and_nothing_in_them_is_run(imported, tmp_path):
    call = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    with pytest.raises(InvalidInput, match="only means"):
        imported(lines("{'iterLatencyMS': 1, 'specDecodingStats': " + call + "}"))
    assert not (tmp_path / "ran").exists()
