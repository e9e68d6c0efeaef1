"""What engines counted while they served, in each of their formats and with each of its traps."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from treeopt.calibration import Calibration
from treeopt.cli import cli
from treeopt.errors import InvalidInput
from treeopt.importing import read_measurement
from treeopt.importing.exposition import SINCE_START
from treeopt.importing.llama_cpp import CUMULATIVE, CUT
from treeopt.importing.printed import Printed
from treeopt.importing.sglang import ADAPTIVE
from treeopt.importing.survival import BIASED, CHAIN, DRAFTERS, MIXED, OPTIMISTIC, Drafts, histogram_of
from treeopt.importing.vllm_requests import NO_LENGTH

from .engine_files import (
    ALIASES,
    DRAFTS,
    EVERYTHING,
    HISTOGRAM,
    OLDER,
    REACHED,
    REQUEST,
    SURVIVAL,
    aiperf,
    bench,
    exposition,
    iteration,
    lines,
    llama_metrics,
    llama_process,
    llama_request,
    meta_info,
    response,
    stats,
    sweep,
    trtllm,
    trtllm_choice,
    vllm_line,
)

MIXED_ROWS = {2: [30, 20, 50], 3: [170, 180, 130, 420]}
MIXED_SURVIVAL = [0.8, 0.62, 0.62 * 420 / 550]


@pytest.fixture
def imported(tmp_path):
    """Files of these texts, imported: calibration and notes."""

    def read(*texts, kind=None, **options):
        paths = []
        for n, text in enumerate(texts):
            paths.append(tmp_path / f"{n}.txt")
            paths[-1].write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
        found = read_measurement(paths, kind, **options)[1]
        return found.source, found.notes

    return read


def treeopt(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_same_drafts_give_the_same_survival_in_every_format(tmp_path, name):
    expected, texts = EVERYTHING[name]
    paths = [tmp_path / f"{n}.txt" for n in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    kind, found = read_measurement(paths)
    assert kind == expected
    info = found.source.info
    assert info["survival"] == pytest.approx(SURVIVAL, abs=1e-12)
    assert found.source.hits.tolist() == [[c] for c in REACHED]
    assert found.source.trials.tolist() == [DRAFTS, 800, 600]
    assert (info["source"], info["drafts"], info["draft_length"]) == ("engine log", DRAFTS, 3)
    assert info["draft_lengths"] == {"3": DRAFTS}
    assert CHAIN in found.notes
    assert BIASED not in found.notes
    assert MIXED not in found.notes


def test_rates_along_the_chain_multiply_to_its_survival(imported):
    calibration, _ = imported(exposition())
    assert np.cumprod(calibration.accept[:, 0]) == pytest.approx(SURVIVAL)
    assert calibration.accept[:, 0].tolist() == [0.8, 0.75, 0.7]  # not the 0.8, 0.6, 0.42 that are printed
    assert np.cumprod(calibration.accept[:, 0]).tolist() == calibration.info["survival"]


# Errors.


def test_errors_without_requests_are_binomial_and_said_to_be_too_small(imported):
    calibration, notes = imported(exposition())
    expected = [np.sqrt(s * (1 - s) / DRAFTS) for s in SURVIVAL]
    assert calibration.info["survival_stderr"] == pytest.approx(expected)
    assert calibration.info["survival_stderr_is_optimistic"] is True
    assert calibration.info["requests"] is None
    assert OPTIMISTIC in notes


def test_errors_with_requests_are_bootstrapped_over_them(imported):
    """Requests that are all right or all wrong: 40 independent things, however many drafts they have.

    The bootstrap's spread is within 12 % of the truth in 2,000 draws but for 1 in a million seeds; it is fixed.
    """
    texts = [response([0, 0, 0, 25]), response([25, 0, 0, 0])] * 20
    calibration, notes = imported(lines(*texts))
    assert calibration.info["survival"] == [0.5, 0.5, 0.5]
    assert calibration.info["survival_stderr"] == pytest.approx([np.sqrt(0.25 / 40)] * 3, rel=0.12)
    assert calibration.info["survival_stderr_is_optimistic"] is False
    assert calibration.info["requests"] == 40
    assert OPTIMISTIC not in notes


def test_one_request_has_nothing_to_bootstrap(imported):
    calibration, notes = imported(response())
    assert calibration.info["requests"] == 1
    assert calibration.info["survival_stderr_is_optimistic"] is True
    assert OPTIMISTIC in notes


# Lengths.


def test_mixed_lengths_rest_on_those_at_risk(imported):
    """The naive rate of guess 3 is .42 / .62; of those that had one and reached it .7636 were right."""
    whole = np.add([200, 200, 180, 420], 0).tolist()
    by_length = {"2": MIXED_ROWS[2], "3": MIXED_ROWS[3]}
    one = stats(whole, acceptance_histogram_by_draft_length=by_length, num_draft_tokens=2 * 100 + 3 * 900)
    calibration, notes = imported({"metrics": {"speculative_decoding": one}})
    assert calibration.trials.tolist() == [1000, 800, 550]
    assert calibration.hits[:, 0].tolist() == [800, 600, 420]
    assert calibration.accept[2, 0] == pytest.approx(0.7636, abs=5e-5)
    assert calibration.info["draft_length"] is None
    assert calibration.info["draft_lengths"] == {"2": 100, "3": 900}
    assert MIXED in notes
    assert BIASED not in notes


def test_steps_tell_the_lengths_where_their_arrays_are_there(imported):
    one = stats(
        [1, 1, 1, 1], num_draft_tokens=9, per_step_accepted=[0, 1, 3, 2], per_step_drafted=[2, 2, 3, 2]
    )
    calibration, notes = imported({"metrics": {"speculative_decoding": one}})
    assert calibration.info["draft_lengths"] == {"2": 3, "3": 1}
    assert calibration.trials.tolist() == [4, 3, 1]
    assert BIASED not in notes


def test_arrays_that_are_cut_short_are_not_used(imported):
    calibration, _ = imported(response(per_step_accepted=[3, 0, 2], per_step_drafted=[3, 3, 3]))
    assert calibration.info["survival"] == pytest.approx(SURVIVAL)


def test_a_draft_that_was_wholly_invalid_is_no_trial(imported):
    one = stats(
        [30, 20, 18, 42], acceptance_histogram_by_draft_length={"0": [10], "3": REQUEST}, num_draft_tokens=300
    )
    calibration, _ = imported({"metrics": {"speculative_decoding": one}})
    assert calibration.info["drafts"] == 100
    assert calibration.info["survival"] == pytest.approx(SURVIVAL)


def test_runs_of_several_lengths_are_pooled_by_those_at_risk(imported):
    """Summed up by position, as if the shorter drafts had missed, depth 3 would survive .21 instead of .42."""
    calibration, notes = imported(sweep(bench(), bench(1000, [800, 600])))
    assert calibration.info["survival"] == pytest.approx(SURVIVAL)
    assert calibration.info["draft_lengths"] == {"2": 1000, "3": 1000}
    assert MIXED in notes


def test_positions_that_tell_how_many_drafts_were_so_long_make_mixed_lengths_right(imported):
    """Half of the drafts have two tokens; over all drafts depth 3 would survive .21."""
    calibration, notes = imported(trtllm([1000, 1000, 500], [800, 600, 210]))
    assert calibration.info["survival"] == pytest.approx(SURVIVAL)
    assert calibration.trials.tolist() == [1000, 800, 300]
    assert calibration.info["draft_lengths"] == {"2": 500, "3": 500}
    assert MIXED in notes


@pytest.mark.parametrize(
    "text",
    [
        exposition(drafted=2900),
        lines(vllm_line(drafted=2900)),
        json.dumps(bench(spec_decode_draft_tokens=2900)),
        lines(*[response(num_draft_tokens=290)] * 3),
        lines(*[trtllm_choice(total_draft_tokens=290)] * 3),
        lines(*[llama_request(drafted=290)] * 3),
        json.dumps([{"meta_info": {**meta_info(), "spec_num_proposed_drafts": 290}}] * 3),
    ],
    ids=["counters", "log", "bench", "requests", "tensorrt-llm", "llama.cpp", "sglang"],
)
def test_lengths_that_were_mixed_and_not_recorded_are_warned_of(imported, text):
    calibration, notes = imported(text)
    assert BIASED in notes
    assert calibration.info["survival"] == pytest.approx(SURVIVAL)


def test_a_length_does_not_predict_others_and_that_is_said(imported):
    _, notes = imported(exposition())
    said = next(note for note in notes if "drafts of 3 tokens" in note)
    assert "an estimate for any other" in said
    assert "beyond depth 3 nothing is known" in said


def test_depths_that_no_draft_reached_are_left_out(imported):
    calibration, notes = imported(exposition(10, [4, 2, 0, 0]))
    assert calibration.info["survival"] == pytest.approx([0.4, 0.2, 0])
    assert calibration.info["draft_length"] == 4
    assert any("beyond depth 3" in note for note in notes)


# vLLM: counters.


def test_one_scrape_has_the_warm_up_in_it_and_that_is_said(imported):
    assert SINCE_START in imported(exposition())[1]
    assert SINCE_START not in imported(exposition(0, [0, 0, 0]), exposition())[1]


def test_the_times_of_creation_are_no_counts(imported):
    assert imported(exposition(created=1.7876e9))[0].info["drafts"] == DRAFTS


def test_ray_writes_the_prefix_otherwise(imported):
    assert imported(exposition().replace("vllm:", "ray_vllm_"))[0].info["drafts"] == DRAFTS


BAD_SCRAPES = {
    "a restart": ([exposition(), exposition(500, [400, 300, 210])], "without a restart"),
    "scrapes in the wrong order": ([exposition(1050, [840, 630, 440]), exposition()], "scraped after"),
    "the restart of one engine that the other hides": (
        [exposition(100, [80, 60, 42]) + exposition(engine=1),
         exposition(9000, [8000, 6000, 4200]) + exposition(10, [8, 6, 4], engine=1)],
        "without a restart",
    ),
    "a restart that has overtaken": ([exposition(10, [8, 6, 4]), exposition(created=1.8e9)], "count anew"),
    "nothing between": ([exposition(), exposition()], "none was verified"),
    "no drafts": ([exposition(0, [0, 0, 0])], "none was verified"),
    "a sum that is not the accepted": ([exposition(accepted=1800)], "sum to 1820, and 1800 were accepted"),
    "rising counts": ([exposition(reached=[600, 800, 420])], "never rise"),
    "more first guesses than drafts": ([exposition(reached=[1001, 600, 420])], "1001 of 1000"),
    "two models": ([exposition() + exposition(model="n", engine=1)], "counters of m, n"),
    "three scrapes": ([exposition()] * 3, "before and after"),
    "a position missing": ([re.sub(r'.*position="1".*\n', "", exposition())], "every position"),
    "no positions": ([re.sub(r".*position=.*\n", "", exposition())], "num_accepted_tokens_per_pos_total"),
    "half a draft": ([exposition().replace(" 800.0", " 800.5")], "whole counts"),
    "NaN": ([exposition().replace(" 800.0", " NaN")], "finite"),
    "a cut line": ([exposition() + 'vllm:spec_decode_num_drafts_total{engine="2'], "Prometheus exposition"),
    "a log beside it": ([exposition(), lines(vllm_line())], "of one form"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SCRAPES)
def test_counters_that_cannot_be_are_refused(imported, name):
    texts, message = BAD_SCRAPES[name]
    with pytest.raises(InvalidInput, match=message):
        imported(*texts, kind="vllm-metrics")


def test_an_engine_that_was_added_counts_from_zero(imported):
    calibration, _ = imported(
        exposition(100, [80, 60, 42]),
        exposition(400, [300, 200, 62]) + exposition(700, [580, 460, 400], engine=1),
    )
    assert calibration.info["drafts"] == DRAFTS
    assert calibration.info["survival"] == pytest.approx(SURVIVAL)


# vLLM: log and benchmarks.


def test_log_lines_are_weighted_by_their_drafts(imported):
    """A plain mean of the two lines would say .5."""
    calibration, _ = imported(lines(vllm_line(900, [810]), vllm_line(100, [10])))
    assert calibration.info["survival"] == [0.82]
    assert calibration.info["drafts"] == 1000


def test_lines_with_the_fields_of_forks_are_read(imported):
    line = vllm_line(
        extra="Draft length histogram: 2:10, 3:990, ", after=", Avg tree nodes per depth: 1.0, 2.0"
    )
    assert imported(line)[0].info["survival"] == pytest.approx(SURVIVAL)


def test_drafts_of_a_line_come_from_the_mean_where_they_were_not_full(imported):
    calibration, notes = imported(vllm_line(997, [798, 598, 419], drafted=2801))
    assert calibration.info["drafts"] == pytest.approx(997, abs=3)
    assert calibration.info["survival"] == pytest.approx([0.8, 0.6, 0.42], abs=1e-3)
    assert BIASED in notes


@pytest.mark.parametrize(
    "line",
    [
        "SpecDecoding metrics: Draft acceptance rate: 100.0%, Accepted: 66 tokens, Drafted: 66 tokens",
        "Speculative metrics: Draft acceptance rate: 0.800, System efficiency: 0.600, Number of speculative tokens: 4, "
        "Number of accepted tokens: 32, Number of draft tokens: 40, Number of emitted tokens: 30.",
    ],
)
def test_older_lines_have_means_only_and_are_refused(imported, line):
    with pytest.raises(InvalidInput, match="only means of its drafts.*Per-position acceptance rate"):
        imported(line)
    assert any("1 lines without rates" in note for note in imported(lines(line, vllm_line()))[1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (vllm_line().replace("0.800, 0.600", "0.600, 0.800"), "never rise"),
        (vllm_line().replace("0.420", "0.490"), "sum to the accepted"),
        (vllm_line().replace("Accepted: 1820", "Accepted: 3820"), "at most what was drafted"),
        (vllm_line().replace("length: 2.82", "length: 2.92"), "sum to the accepted"),
        (vllm_line().replace("length: 2.82", "length: 2.8.2"), "mean acceptance length"),
    ],
)
def test_lines_that_contradict_themselves_are_refused(imported, line, message):
    with pytest.raises(InvalidInput, match=message):
        imported(line)


def test_an_idle_log_is_refused(imported):
    with pytest.raises(InvalidInput, match="no interval with drafts"):
        imported(vllm_line().replace("2.82", "nan"))


def test_a_log_whose_lines_begin_as_json_does_is_a_log(imported):
    assert imported("[12:00:00] " + vllm_line())[0].info["drafts"] == DRAFTS


def test_the_rate_in_percent_is_not_read(imported):
    assert imported(bench(spec_decode_acceptance_rate=-1.0))[0].info["survival"] == pytest.approx(SURVIVAL)


def test_runs_without_speculation_are_left_out(imported):
    calibration, notes = imported(lines(bench(), {"backend": "vllm", "mean_tpot_ms": 6.0}))
    assert calibration.info["drafts"] == DRAFTS
    assert any("1 of 2 runs" in note for note in notes)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (bench(spec_decode_per_position_acceptance_rates=None), "leaves them out"),
        (bench(spec_decode_num_drafts=None), "whole number as spec_decode_num_drafts"),
        (bench(spec_decode_accepted_tokens=1500), "sum to"),
        (bench(spec_decode_per_position_acceptance_rates=[80.0, 60.0, 42.0]), "from 0 to"),
        (bench(spec_decode_per_position_acceptance_rates=[]), "1 to 1024 positions"),
    ],
)
def test_runs_that_cannot_be_are_refused(imported, run, message):
    with pytest.raises(InvalidInput, match=message):
        imported(run, kind="vllm-metrics")


def test_a_table_with_broken_lists_is_refused(imported):
    with pytest.raises(InvalidInput, match="lists of rates"):
        imported(sweep(bench()).replace("0.42]", ""))


# Requests.


def test_responses_that_say_nothing_are_left_out_and_counted(imported):
    """With n > 1 vLLM writes null; a response of one token has no step."""
    null = {"metrics": {"speculative_decoding": None}}
    none = {"metrics": {"speculative_decoding": {**stats(), "acceptance_histogram": [0, 0, 0, 0],
                                                 "num_spec_steps": 0, "num_accepted_draft_tokens": 0}}}  # fmt: skip
    calibration, notes = imported(lines(response(), null, response(), {"choices": []}, none))
    assert calibration.info["requests"] == 2
    assert any("3 of 5 responses" in note for note in notes)


def test_what_aiperf_wrote_while_it_warmed_up_is_left_out(imported):
    calibration, _ = imported(lines(aiperf([100, 0, 0, 0], phase="warmup"), aiperf(), aiperf()))
    assert calibration.info["survival"] == pytest.approx(SURVIVAL)


def test_sparse_histograms_are_as_long_as_the_draft(imported):
    """Their last keys are missing where no draft was taken whole."""
    record = aiperf([50, 50, 0, 0])
    assert record["spec_decode_acceptance"]["acceptance_histogram"] == {"0": 50, "1": 50}
    calibration, _ = imported(record)
    assert calibration.info["draft_length"] == 3
    assert calibration.info["survival"] == [0.5, 0.0]


def test_a_pooled_histogram_does_not_tell_its_length(imported):
    pooled = {"pooled_spec_decode_acceptance_histogram": {"0": 200, "3": 800}}
    calibration, notes = imported(pooled)
    assert calibration.info["requests"] is None
    assert NO_LENGTH in notes
    with pytest.raises(InvalidInput, match="import it alone"):
        imported(pooled, pooled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_spec_steps": 99}, "as many steps"),
        ({"num_accepted_draft_tokens": 183}, "as many accepted tokens"),
        ({"mean_acceptance_length": 1.82}, "the mean length of its histogram, 2.82"),
        ({"num_spec_tokens": 2}, "0 to 2 tokens taken"),
        ({"num_spec_tokens": 4}, "0 to 4 tokens taken"),
        ({"num_spec_tokens": 10**9}, "1 to 1024"),
        ({"num_draft_tokens": 1000}, "the nodes of trees"),
        ({"acceptance_histogram": [20, 20, -18, 42]}, "counts from 0"),
        ({"acceptance_histogram": [0.2, 0.2, 0.18, 0.42]}, "valid integer"),
        ({"acceptance_histogram": {"many": 3}}, "under their number"),
        ({"acceptance_histogram": {"99999999999": 3}}, "under their number"),
        ({"acceptance_histogram_by_draft_length": {"3": [20, 20, 18, 40]}}, "sum to the whole one"),
        ({"acceptance_histogram_by_draft_length": {"2": REQUEST}}, "for drafts of 2"),
        (
            {"acceptance_histogram_by_draft_length": {"3": REQUEST}, "num_draft_tokens": 290},
            "draft lengths sum to, 300",
        ),
    ],
)
def test_requests_that_contradict_themselves_are_refused(imported, change, message):
    with pytest.raises(InvalidInput, match=message):
        imported(response(**change))


# SGLang.


def test_the_length_that_sglang_reports_is_not_used(imported):
    """spec_accept_length has the prefill's token in it; here it is 9.9, and the rate .99."""
    assert imported({"meta_info": meta_info()})[0].info["survival"] == pytest.approx(SURVIVAL)


def test_a_histogram_that_grows_on_demand_is_as_long_as_the_draft(imported):
    calibration, _ = imported(
        json.dumps([{"meta_info": meta_info([5, 4], k=3)}, {"meta_info": meta_info([0, 0, 3, 3])}])
    )
    assert calibration.info["draft_lengths"] == {"3": 15}
    assert calibration.trials.tolist() == [15, 10, 6]


def test_requests_that_do_not_tell_their_length_take_the_longest_of_the_file(imported):
    """Each by its own longest, depth 2 would rest on the one request that got there."""
    short, long = (
        {k: v for k, v in meta_info(h).items() if "proposed" not in k} for h in ([5, 5], [0, 0, 10])
    )
    calibration, _ = imported(json.dumps([{"meta_info": short}, {"meta_info": long}]))
    assert calibration.info["survival"] == [0.75, 0.5]


def test_newest_names_win_over_their_aliases(imported):
    both = {**meta_info([1, 0, 0, 0], names=ALIASES), **meta_info([1, 0, 0, 0], names=OLDER), **meta_info()}
    assert imported({"meta_info": both})[0].info["drafts"] == 100


def test_sglang_does_not_record_lengths_and_that_is_said(imported):
    assert ADAPTIVE in imported({"meta_info": meta_info()})[1]


def test_the_depth_of_trees_is_no_survival_of_a_chain(imported):
    """--speculative-eagle-topk 4: 63 nodes a step, of depth 3."""
    with pytest.raises(InvalidInput, match="look like trees.*--speculative-eagle-topk 1"):
        imported({"meta_info": meta_info(k=63)})


MEANS_OF_SGLANG = {
    "bench_serving": lines(
        {"backend": "sglang", "max_concurrency": 8, "mean_tpot_ms": 6.0, "accept_length": 2.82}
    ),
    "bench_speculative": lines(
        {"batch_size": 8, "steps": 3, "topk": 1, "acc_length": 2.82, "step_time": 0.01692}
    ),
    "server info": json.dumps({"internal_states": [{"avg_spec_accept_length": 2.82}]}),
    "log": "[2026-09-01 12:00:00] Decode batch. #running-req: 8, #token: 9216, accept len: 2.82, accept rate: 0.61, ",
    "gauge": 'sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.82\n',
}


@pytest.mark.parametrize("name", MEANS_OF_SGLANG)
def test_means_of_sglang_are_refused_and_told_what_to_ask_for(imported, name):
    with pytest.raises(InvalidInput, match="only means of its drafts.*return_spec_tokens_details"):
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
    assert imported(text)[0].info["survival"] == pytest.approx(SURVIVAL)


def test_a_position_at_which_nothing_was_accepted_may_be_missing(imported):
    calibration, _ = imported(trtllm([10] * 3, [5, 2]))
    assert calibration.info["survival"] == pytest.approx([0.5, 0.2, 0])


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
    assert calibration.info["survival"] == pytest.approx(SURVIVAL)


MEANS_OF_TENSORRT_LLM = {
    "iteration log": lines(iteration(), iteration(24, 14), "{'iter': 58, 'specDecodingStats': None}"),
    "iterations": json.dumps([{"iter": 57, "specDecodingStats": {"numDraftTokens": 24, "numAcceptedTokens": 29, "numRequestsWithDraftTokens": 16}}]),
    "report": json.dumps({"performance": {}, "decoding_stats": {"acceptance_length_percentiles": {"average": 2.8}}}),
    "perf metrics": json.dumps([{"request_id": 1, "perf_metrics": {"speculative_decoding": {"acceptance_rate": 0.6}}}]),
    "choice": json.dumps({"choices": [{"speculative_decoding": {"total_accepted_draft_tokens": 182, "total_draft_tokens": 300}}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS_OF_TENSORRT_LLM)
def test_means_of_tensorrt_llm_are_refused_and_told_what_to_ask_for(imported, name):
    with pytest.raises(
        InvalidInput, match="only means of its drafts.*per_request_spec_decode_stats"
    ) as error:
        imported(MEANS_OF_TENSORRT_LLM[name])
    if name.startswith("iteration"):  # pooled over drafts, own token included
        assert f"{1 + 29 / 16:.2f} tokens a step over 16 drafts" in str(error.value)


def test_of_drafts_of_one_token_a_mean_is_all_there_is(imported):
    calibration, _ = imported(lines(iteration(8, 6, 8), iteration(4, 3, 4)))
    assert calibration.info["survival"] == [0.75]
    assert calibration.info["drafts"] == 12


def test_iteration_logs_are_literals_and_nothing_in_them_is_run(imported, tmp_path):
    call = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    with pytest.raises(InvalidInput, match="only means"):
        imported(lines("{'iterLatencyMS': 1, 'specDecodingStats': " + call + "}"))
    assert not (tmp_path / "ran").exists()


# llama.cpp.


def test_the_old_line_of_llama_cpp_is_refused(imported):
    with pytest.raises(InvalidInput, match="PR #24536"):
        imported("draft acceptance rate = 0.57576 (  171 accepted /   297 generated)")


def test_old_lines_beside_new_ones_are_counted(imported):
    notes = imported(
        lines("draft acceptance rate = 0.57576 (  171 accepted /   297 generated)", llama_request())
    )[1]
    assert any("1 lines without rates" in note for note in notes)


def test_statistics_of_llama_cpp_are_cumulative(imported):
    calibration, notes = imported(lines(llama_process(10, [9, 9, 9]), llama_process(1000, REACHED)))
    assert calibration.info["drafts"] == DRAFTS
    assert calibration.info["requests"] is None
    assert CUMULATIVE in notes


def test_requests_of_llama_cpp_are_pooled_by_drafts(imported):
    calibration, _ = imported(lines(llama_request(900, [810]), llama_request(100, [10])))
    assert calibration.info["survival"] == [0.82]
    assert calibration.info["requests"] == 2


def test_lines_as_llama_cpp_wrote_them_are_read(imported):
    """Two requests of real logs; 97 drafts of 4 tokens, and 1449 of 2."""
    four = (
        "draft acceptance = 0.66237 (  257 accepted /   388 generated), mean acceptance length =  3.65, acceptance rate per "
        "position = (0.804, 0.701, 0.629, 0.515)"
    )
    two = (
        "draft acceptance = 0.62008 ( 1797 accepted /  2898 generated), mean acceptance length =  2.24, acceptance rate per "
        "position = (0.727, 0.513)"
    )
    assert imported(four)[0].hits[:, 0].tolist() == [78, 68, 61, 50]
    assert imported(two)[0].trials[0] == 1449
    assert imported(two)[0].hits[:, 0].sum() == 1797


def test_positions_that_are_not_printed_are_left_out(imported):
    """Drafts of 30 tokens with the rates of two positions, as ngram-mod has them."""
    line = (
        "statistics        ngram-mod: #calls(b,g,a) =    4    542     31, #gen drafts =     31, #acc drafts =    28, "
        "#gen tokens =    920, #acc tokens =   527, #mean acc len = 18.00, #acc rate/pos = (0.903, 0.806), dur"
    )
    calibration, notes = imported(line)
    assert calibration.hits[:, 0].tolist() == [28, 25]
    assert CUT in notes


def test_statistics_of_two_drafters_are_refused(imported):
    with pytest.raises(InvalidInput, match="of one drafter, but has statistics of draft-eagle3, ngram-mod"):
        imported(lines(llama_process(), llama_process(name="ngram-mod")))


def test_timings_of_llama_cpp_are_means(imported):
    with pytest.raises(InvalidInput, match="only means"):
        imported({"timings": {"predicted_n": 283, "draft_n": 300, "draft_n_accepted": 182}})


def test_statistics_that_contradict_themselves_are_refused(imported):
    with pytest.raises(InvalidInput, match="first guess"):
        imported(llama_process().replace("#acc drafts =    80", "#acc drafts =    90"))


# What is asked for.


def test_the_drafter_is_as_the_user_says(imported):
    assert imported(exposition())[0].info["drafter"] is None
    for kind in DRAFTERS:
        assert imported(exposition(), drafter=kind)[0].info["drafter"] == {"kind": kind}
    with pytest.raises(InvalidInput, match="--drafter must be one of"):
        imported(exposition(), drafter="psychic")


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in EVERYTHING.values()}))
def test_a_file_of_another_kind_is_refused(imported, kind):
    for text in ("head,top1\n1,0.6\n", {"a": 1}, [0.5], "nothing"):
        with pytest.raises(InvalidInput):
            imported(text, kind=kind)


def test_other_kinds_take_one_file_and_no_drafter(imported):
    table = "head,rank,hits,trials\n0,0,5,9\n"
    with pytest.raises(InvalidInput, match="imported alone"):
        imported(table, table)
    with pytest.raises(InvalidInput, match="--drafter does not go"):
        imported(table, drafter="mtp")


def test_the_command_keeps_the_source_and_shows_survival(tmp_path):
    before, after, run = tmp_path / "before.txt", tmp_path / "after.txt", tmp_path / "run"
    before.write_text(exposition(50, [40, 30, 20]))
    after.write_text(exposition(1050, [840, 630, 440]))
    shown = treeopt("import", before, after, "--run", run, "--drafter", "eagle3")
    assert "0.600 ±0.015" in shown.stdout
    assert "0.750 ±0.015" in shown.stdout
    assert "1,000 drafts" in shown.stdout
    assert "too small" in shown.stderr
    info = Calibration.load(run / "calibration.json").info
    assert info["source"] == "engine log"
    assert info["survival"] == pytest.approx(SURVIVAL)
    assert any("an estimate for any other" in note for note in info["notes"])
    imported = info["provenance"]["imported"]
    assert imported["kind"] == "vllm-metrics"
    assert [file["file"] for file in imported["files"]] == ["before.txt", "after.txt"]


# There and back.

HISTOGRAMS = st.lists(st.integers(0, 400), min_size=2, max_size=7).filter(lambda h: sum(h) > 0)


def chain_of(histogram):
    """Drafts and those that reached each depth."""
    return sum(histogram), [sum(histogram[j:]) for j in range(1, len(histogram))]


@given(HISTOGRAMS)
def test_counters_and_histograms_hold_the_same(histogram):
    assert histogram_of(*chain_of(histogram)) == histogram


def writers(histogram):
    drafts, reached = chain_of(histogram)
    yield exposition(drafts, reached)
    yield json.dumps(bench(drafts, reached))
    yield sweep(bench(drafts, reached))
    yield json.dumps(response(histogram))
    yield json.dumps(aiperf(histogram))
    yield json.dumps({"meta_info": meta_info(histogram)})
    yield trtllm([drafts] * len(reached), reached)
    yield json.dumps(trtllm_choice(histogram))
    if drafts <= 900:  # three decimals tell the counts
        yield vllm_line(drafts, reached)
        yield llama_request(drafts, reached)
        yield llama_process(drafts, reached)


@settings(deadline=None, max_examples=60)
@given(HISTOGRAMS)
def test_random_histograms_come_back_from_every_format(tmp_path_factory, histogram):
    drafts, reached = chain_of(histogram)
    expected = [c / drafts for c in reached]
    folder = tmp_path_factory.mktemp("e")
    for n, text in enumerate(writers(histogram)):
        path = folder / str(n)
        path.write_text(text)
        source = read_measurement(path)[1].source
        kept = source.num_heads
        assert source.hits[:, 0].tolist() == reached[:kept], text
        assert source.info["survival"] == pytest.approx(expected[:kept])
        assert not any(expected[kept:])


ROWS = st.dictionaries(
    st.integers(1, 6), st.lists(st.integers(0, 50), min_size=7, max_size=7), min_size=1
).map(lambda rows: {k: row[: k + 1] for k, row in rows.items()})


@given(ROWS)
def test_those_at_risk_are_counted_as_one_counts_draft_by_draft(rows):
    drafts = Drafts.of([rows])
    steps = [(k, a) for k, row in rows.items() for a, n in enumerate(row) for _ in range(n)]
    for j in range(1, max(rows) + 1):
        assert drafts.tried[0, j - 1] == sum(k >= j and a >= j - 1 for k, a in steps)
        assert drafts.passed[0, j - 1] == sum(k >= j and a >= j for k, a in steps)


def test_mixed_lengths_come_back_to_the_survival_they_were_drawn_from():
    """Drafts cut at random lengths; the naive share of depth 4 would be off by a factor of 2.

    20,000 drafts: the error of depth 4 is below .006, so that .03 is passed by chance less than once in 10^6.
    """
    rng = np.random.default_rng(0)
    rates = np.array([0.8, 0.75, 0.7, 0.65])
    lengths = rng.choice([2, 4], 20_000)
    taken = np.minimum(np.logical_and.accumulate(rng.random((20_000, 4)) < rates, axis=1).sum(1), lengths)
    rows = {k: np.bincount(taken[lengths == k], minlength=k + 1).tolist() for k in (2, 4)}
    drafts = Drafts.of([rows])
    survival = np.cumprod(drafts.passed[0] / drafts.tried[0])
    assert survival == pytest.approx(np.cumprod(rates), abs=0.03)
    naive = (taken >= 4).mean()
    assert naive < 0.6 * survival[3]


@pytest.mark.parametrize(
    ("drafts", "reached"),
    [(7, [3]), (1000, REACHED), (123_457, [100_001, 70_003, 1]), (10, [10, 10]), (5, [0, 0])],
)
def test_printed_rates_give_counts_that_print_as_they_do(drafts, reached):
    rates = [round(c / drafts, 3) for c in reached]
    printed = Printed(rates, sum(reached), drafts * len(reached), round(1 + sum(reached) / drafts, 2))
    found, counts = printed.counts("x")
    assert found == drafts
    assert [round(c / found, 3) for c in counts] == rates
    assert abs(sum(counts) - sum(reached)) <= 0.0005 * len(rates) * drafts


def test_the_running_example_is_that_of_the_formats():
    assert HISTOGRAM == histogram_of(DRAFTS, REACHED)
    assert "llamacpp:spec_decode_num_drafts_total 1000.0" in llama_metrics()
