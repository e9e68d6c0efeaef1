"""What vLLM counts: scrapes, logs, benchmarks and requests, trap by trap."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeopt.engines.measured.exposition import SINCE_START
from treeopt.engines.vllm import NO_LENGTH
from treeopt.errors import InvalidInput

from .engine_files import DRAFTS, SURVIVAL, aiperf, bench, exposition, lines, response, stats, sweep, vllm_line

# Counters.


def test_one_scrape_has_the_warm_up_in_it_and_that_is_said(imported):
    assert SINCE_START in imported(exposition())[1]
    assert SINCE_START not in imported(exposition(0, [0, 0, 0]), exposition())[1]


def test_the_times_of_creation_are_no_counts(imported):
    assert imported(exposition(created=1.7876e9))[0].meta["drafts"] == DRAFTS


def test_ray_writes_the_prefix_otherwise(imported):
    assert imported(exposition().replace("vllm:", "ray_vllm_"))[0].meta["drafts"] == DRAFTS


BAD_SCRAPES = {
    "a restart": ([exposition(), exposition(500, [400, 300, 210])], "without a restart"),
    "scrapes in the wrong order": ([exposition(1050, [840, 630, 440]), exposition()], "scraped after"),
    "the restart of one engine that the other hides": (
        [
            exposition(100, [80, 60, 42]) + exposition(engine=1),
            exposition(9000, [8000, 6000, 4200]) + exposition(10, [8, 6, 4], engine=1),
        ],
        "without a restart",
    ),
    "a restart that has overtaken": ([exposition(10, [8, 6, 4]), exposition(created=1.8e9)], "count anew"),
    "nothing between": ([exposition(), exposition()], "none was verified"),
    "no drafts": ([exposition(0, [0, 0, 0])], "none was verified"),
    "a sum that is not the accepted": ([exposition(accepted=1800)], "sum to 1820, and 1800 were accepted"),
    "rising counts": ([exposition(reached=[600, 800, 420])], "never rise"),
    "more first guesses than drafts": ([exposition(reached=[1001, 600, 420])], "never rise, the drafts first"),
    "two models": ([exposition() + exposition(model="n", engine=1)], "counters of m, n"),
    "three scrapes": ([exposition()] * 3, "before and after"),
    "a position missing": ([re.sub(r'.*position="1".*\n', "", exposition())], "every position"),
    "no positions": ([re.sub(r".*position=.*\n", "", exposition())], "num_accepted_tokens_per_pos_total"),
    "a negative count": ([exposition().replace(" 800.0", " -800.0")], "counts from 0 to"),
    "NaN": ([exposition().replace(" 800.0", " NaN")], "finite"),
    "a cut line": ([exposition() + 'vllm:spec_decode_num_drafts_total{engine="2'], "Prometheus exposition"),
    "a log beside it": ([exposition(), lines(vllm_line())], "of one form"),
}


@pytest.mark.parametrize("name", BAD_SCRAPES)
def test_counters_that_cannot_be_are_refused(imported, name):
    texts, message = BAD_SCRAPES[name]
    with pytest.raises(InvalidInput, match=message):
        imported(*texts, kind="vllm-metrics")


def test_counters_of_forks_that_are_not_whole_are_rounded_and_others_are_not_read(imported):
    """A fork that averages over ranks; 812.5 seconds are none of the four counters, and of no concern."""
    text = exposition(accepted=1820.5).replace(" 800.0", " 800.5")
    calibration, notes = imported(text + 'vllm:spec_decode_draft_seconds_total{engine="0"} 812.5\n')
    assert calibration.meta["survival"] == pytest.approx(SURVIVAL, abs=1e-3)
    (note,) = [note for note in notes if "not whole" in note]
    assert "num_accepted_tokens, num_accepted_tokens_per_pos" in note
    assert "seconds" not in note
    with pytest.raises(InvalidInput, match="sum to the accepted"):
        imported(exposition(accepted=1822.5).replace(" 800.0", " 800.5"))


def test_counters_that_agree_but_for_the_rounding_of_floats_are_read(imported):
    """.3 + .3 + .4 are .9999999 in sums of totals, and 1,820 and 1,821 agree to within 1."""
    text = exposition(accepted=1821).replace(" 800.0", " 800.3").replace(" 600.0", " 600.3").replace(" 420.0", " 420.4")
    assert imported(text)[0].meta["drafts"] == DRAFTS


def test_an_engine_that_was_added_counts_from_zero(imported):
    calibration, _ = imported(
        exposition(100, [80, 60, 42]), exposition(400, [300, 200, 62]) + exposition(700, [580, 460, 400], engine=1)
    )
    assert calibration.meta["drafts"] == DRAFTS
    assert calibration.meta["survival"] == pytest.approx(SURVIVAL)


# Log and benchmarks.


def test_log_lines_are_weighted_by_their_drafts(imported):
    """A plain mean of the two lines would say .5."""
    calibration, _ = imported(lines(vllm_line(900, [810]), vllm_line(100, [10])))
    assert calibration.meta["survival"] == [0.82]
    assert calibration.meta["drafts"] == 1000


def test_a_line_of_many_drafts_of_one_token_is_read(imported):
    """1,122 of 1,400 prints as .801, of which the nearest count is 1,121: the accepted tokens say which it was."""
    calibration, _ = imported(vllm_line(1400, [1122]))
    assert calibration.hits.tolist() == [[1122]]
    assert calibration.trials.tolist() == [1400]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(1, 20_000), st.lists(st.floats(0.2, 1), min_size=1, max_size=6))
def test_random_counts_come_back_from_the_line_they_print(imported, drafts, rates):
    """Each to within the rounding of three decimals, and their sum, which is printed, exactly."""
    reached = [drafts]
    for rate in rates:
        reached.append(round(reached[-1] * rate))
    calibration, _ = imported(vllm_line(drafts, reached[1:]))
    hits = calibration.hits[:, 0].tolist()
    assert sum(hits) == sum(reached[1:])
    if hits[0]:
        assert calibration.meta["drafts"] == drafts
        assert hits == pytest.approx(reached[1 : len(hits) + 1], abs=1 + 0.001 * drafts)


def test_lines_with_the_fields_of_forks_are_read(imported):
    line = vllm_line(extra="Draft length histogram: 2:10, 3:990, ", after=", Avg tree nodes per depth: 1.0, 2.0")
    assert imported(line)[0].meta["survival"] == pytest.approx(SURVIVAL)


def test_drafts_of_a_line_come_from_the_mean_where_they_were_not_full(imported):
    calibration, _ = imported(vllm_line(997, [798, 598, 419], drafted=2971))
    assert calibration.meta["drafts"] == pytest.approx(997, abs=3)
    assert calibration.meta["survival"] == pytest.approx([0.8, 0.6, 0.42], abs=0.01)


@pytest.mark.parametrize(
    "line",
    [
        "SpecDecoding metrics: Draft acceptance rate: 100.0%, Accepted: 66 tokens, Drafted: 66 tokens",
        "Speculative metrics: Draft acceptance rate: 0.800, System efficiency: 0.600, Number of speculative tokens: 4, "
        "Number of accepted tokens: 32, Number of draft tokens: 40, Number of emitted tokens: 30.",
    ],
)
def test_older_lines_have_means_only_and_are_refused(imported, line):
    with pytest.raises(InvalidInput, match=r"only means of its drafts.*Per-position acceptance rate"):
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
    assert imported("[12:00:00] " + vllm_line())[0].meta["drafts"] == DRAFTS


def test_the_rate_in_percent_is_not_read(imported):
    assert imported(bench(spec_decode_acceptance_rate=-1.0))[0].meta["survival"] == pytest.approx(SURVIVAL)


def test_runs_without_speculation_are_left_out(imported):
    calibration, notes = imported(lines(bench(), {"backend": "vllm", "mean_tpot_ms": 6.0}))
    assert calibration.meta["drafts"] == DRAFTS
    assert any("1 of 2 runs" in note for note in notes)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (bench(spec_decode_per_position_acceptance_rates=None), "writes them only with speculation"),
        (bench(spec_decode_num_drafts=None), "spec_decode_num_drafts must be a whole number"),
        (bench(spec_decode_accepted_tokens=1500), "sum to"),
        (bench(spec_decode_per_position_acceptance_rates=[80.0, 60.0, 42.0]), "from 0 to"),
        (bench(spec_decode_per_position_acceptance_rates=[]), "1 to 256 positions"),
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
    none = {
        "metrics": {
            "speculative_decoding": {
                **stats(),
                "acceptance_histogram": [0, 0, 0, 0],
                "num_spec_steps": 0,
                "num_accepted_draft_tokens": 0,
            }
        }
    }
    calibration, notes = imported(lines(response(), null, response(), {"choices": []}, none))
    assert calibration.meta["requests"] == 2
    assert any("3 of 5 responses" in note for note in notes)


def test_what_aiperf_wrote_while_it_warmed_up_is_left_out(imported):
    calibration, _ = imported(lines(aiperf([100, 0, 0, 0], phase="warmup"), aiperf(), aiperf()))
    assert calibration.meta["survival"] == pytest.approx(SURVIVAL)


def test_sparse_histograms_are_as_long_as_the_draft(imported):
    """Their last keys are missing where no draft was taken whole."""
    record = aiperf([50, 50, 0, 0])
    assert record["spec_decode_acceptance"]["acceptance_histogram"] == {"0": 50, "1": 50}
    calibration, _ = imported(record)
    assert calibration.meta["draft_length"] == 3
    assert calibration.meta["survival"] == [0.5, 0.0]


def test_a_pooled_histogram_does_not_tell_its_length(imported):
    pooled = {"pooled_spec_decode_acceptance_histogram": {"0": 200, "3": 800}}
    calibration, notes = imported(pooled)
    assert calibration.meta["requests"] is None
    assert NO_LENGTH in notes
    with pytest.raises(InvalidInput, match="import it alone"):
        imported(pooled, pooled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_spec_steps": 99}, "as many steps"),
        ({"num_accepted_draft_tokens": 183}, "as many accepted tokens"),
        ({"mean_acceptance_length": 1.82}, "as many tokens a step as its histogram counts, 2.82"),
        ({"num_spec_tokens": 2}, "0 to 2 tokens taken"),
        ({"num_spec_tokens": 4}, "0 to 4 tokens taken"),
        ({"num_spec_tokens": 10**9}, "num_spec_tokens: must be less than or equal to 256"),
        ({"num_draft_tokens": 1000}, "the nodes of trees"),
        ({"acceptance_histogram": [20, 20, -18, 42]}, "histogram.2: must be greater than or equal to 0"),
        ({"acceptance_histogram": [0.2, 0.2, 0.18, 0.42]}, "valid integer"),
        ({"acceptance_histogram": {"many": 3}}, "under their number"),
        ({"acceptance_histogram": {"99999999999": 3}}, "under their number"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(imported, change, message):
    with pytest.raises(InvalidInput, match=message):
        imported(response(**change))
