"""What llama.cpp logs and counts, trap by trap."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeopt.engines.llama_cpp import CUMULATIVE
from treeopt.engines.measured.exposition import six_digits
from treeopt.engines.measured.printed import CUT
from treeopt.errors import InvalidInput

from .engine_files import DRAFTS, REACHED, SURVIVAL, lines, llama_metrics, llama_pair, llama_process, llama_request


def test_the_old_line_of_llama_cpp_is_refused(imported):
    with pytest.raises(InvalidInput, match="PR #24536"):
        imported("draft acceptance rate = 0.57576 (  171 accepted /   297 generated)")


def test_old_lines_beside_new_ones_are_counted(imported):
    notes = imported(lines("draft acceptance rate = 0.57576 (  171 accepted /   297 generated)", llama_request()))[1]
    assert any("1 lines without rates" in note for note in notes)


def test_statistics_of_llama_cpp_are_cumulative(imported):
    calibration, notes = imported(lines(llama_process(10, [9, 9, 9]), llama_process(1000, REACHED)))
    assert calibration.meta["drafts"] == DRAFTS
    assert calibration.meta["requests"] is None
    assert CUMULATIVE in notes


def test_requests_of_llama_cpp_are_pooled_by_drafts(imported):
    calibration, _ = imported(lines(llama_request(900, [810]), llama_request(100, [10])))
    assert calibration.meta["survival"] == [0.82]
    assert calibration.meta["requests"] == 2


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
    assert imported(two)[0].hits[:, 0].tolist() == [1054, 743]  # they sum to 1797


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


# The form of 2026: a line of rates of its own, as trace.


def test_requests_of_slots_that_interleave_keep_their_own_rates(imported):
    (a, a_rates), (b, b_rates) = llama_pair(90, [81], slot=0, task=7), llama_pair(10, [1], slot=1, task=7)
    for order in ([a, a_rates, b, b_rates], [a, b, b_rates, a_rates], [a, b, "noise", a_rates, b_rates]):
        calibration, _ = imported(lines(*order))
        assert calibration.meta["survival"] == [0.82]
        assert calibration.meta["requests"] == 2


def test_servers_behind_a_router_are_told_apart_by_their_ports(imported):
    """Their slots and tasks have the same numbers; the router prints each line behind its server's port."""
    a, b = llama_pair(90, [81]), llama_pair(10, [1])
    log = [f"[{port:5d}] {line}" for port, line in ((8081, a[0]), (50123, b[0]), (8081, a[1]), (50123, b[1]))]
    assert imported(lines(*log))[0].meta["survival"] == [0.82]


def test_rates_are_never_paired_with_a_request_of_another_run(imported):
    """A server without trace, then one with it, in one log: the first request has no rates."""
    calibration, notes = imported(lines(*llama_pair(10, [1], mean_only=True), *llama_pair(90, [81])))
    assert calibration.meta["survival"] == [0.9]
    assert any("1 lines without rates" in note for note in notes)


def test_a_log_without_trace_is_refused_and_told_how_to_get_it(imported):
    with pytest.raises(
        InvalidInput, match=r"only means.*'acc per pos'\) as trace\. Start the server with --verbosity 4"
    ):
        imported(lines(*llama_pair(mean_only=True)))


def test_a_server_that_never_drafted_is_said_to_have_not(imported):
    """Its statistics have no rates and /metrics no series by position, as if it were too old for them."""
    idle = (
        "statistics     ngram-simple: #calls(b,g,a) =    2     40      0, #gen drafts =      0, #acc drafts =     0, #gen "
        "tokens =      0, #acc tokens =     0, dur(b,g,a) = 0.001, 0.031, 0.000 ms"
    )
    for text in (idle, llama_metrics(0, [])):
        with pytest.raises(InvalidInput, match="none was verified"):
            imported(text)


def test_requests_without_a_hit_are_of_full_drafts_as_nearly_as_can_be(imported):
    """51 guesses in drafts of up to 8: the mean of 1 does not tell how many drafts, and 17 of 3 are no better a guess."""
    line = "slot print_timing: id  0 | task 3 | draft acceptance = 0.00000 (    0 accepted /    51 generated), mean len =  1.00"
    rates = f"slot print_timing: id  0 | task 3 |      acc per pos = ({', '.join(['0.000'] * 8)})"
    calibration, _ = imported(lines(line, rates))
    assert calibration.meta["drafts"] == 7
    assert calibration.meta["survival"] == [0.0]


def test_a_request_that_verified_nothing_is_left_out(imported):
    idle = "slot print_timing: id  0 | task 3 | draft acceptance = 0.00000 (    0 accepted /     3 generated), mean len =  1.00"
    rates = "slot print_timing: id  0 | task 3 |      acc per pos = ()"
    assert imported(lines(idle, rates, *llama_pair()))[0].meta["drafts"] == 100


def test_a_log_of_json_lines_with_something_else_between_is_read(imported):
    said = [{"type": "log", "level": "info", "msg": f"{line}\n"} for line in llama_pair(1000, REACHED)]
    assert imported(lines(said[0], "ggml: a line of plain text", said[1]))[0].meta["survival"] == pytest.approx(
        SURVIVAL
    )


def test_requests_of_two_drafters_are_refused_as_their_statistics_are(imported):
    with pytest.raises(InvalidInput, match="of one drafter"):
        imported(lines(*llama_pair(), llama_process(), llama_process(name="ngram-mod")))


def test_statistics_are_over_the_drafts_that_were_verified(imported):
    """Two of 102 drafts were made and never verified."""
    calibration, _ = imported(llama_process(made=102))
    assert calibration.meta["drafts"] == 100
    assert calibration.meta["draft_length"] == 3
    assert calibration.meta["survival"] == pytest.approx(SURVIVAL)


def test_statistics_end_at_the_deepest_position_that_was_accepted(imported):
    """Drafts of 3 tokens of which none was accepted beyond 2: the third position is not printed, and survives 0."""
    calibration, notes = imported(llama_process(reached=(80, 60, 0)).replace(", 0.000)", ")"))
    assert calibration.meta["survival"] == pytest.approx([0.8, 0.6, 0.0])
    assert CUT not in notes


# Counts, printed lines, and counts again.


@st.composite
def chains(draw):
    reached = draw(
        st.lists(st.integers(0, 700), min_size=1, max_size=8).map(lambda counts: sorted(counts, reverse=True))
    )
    return draw(st.integers(max(reached[0], 1), 900)), reached


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(chains(), min_size=1, max_size=4))
def test_random_requests_come_back_from_the_lines_they_print(imported, requests):
    """Three decimals tell counts of up to 900 drafts."""
    depth = max(len(reached) for _, reached in requests)
    pairs = [llama_pair(drafts, reached, slot=n) for n, (drafts, reached) in enumerate(requests)]
    calibration, _ = imported(lines(*[first for first, _ in pairs], *[second for _, second in pairs]))
    expected = [sum(reached[j] for _, reached in requests if j < len(reached)) for j in range(depth)]
    kept = calibration.num_heads
    assert calibration.meta["drafts"] == sum(drafts for drafts, _ in requests)
    assert calibration.hits[:, 0].tolist() == expected[:kept]
    assert not any(expected[kept:])


@given(st.integers(0, 10**15))
def test_six_digits_move_a_total_by_no_more_than_is_said(total):
    printed = float(f"{total:.6g}")
    assert abs(printed - total) <= six_digits(printed)
    assert six_digits(printed) <= 5e-6 * printed


def six(text):
    """Totals as C++ prints them; counters by position stay whole."""
    names = "num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total"
    said = [line.rsplit(" ", 1) for line in text.splitlines()]
    return lines(*[f"{a} {float(b):.6g}" if a.endswith(names) and a[0] != "#" else f"{a} {b}" for a, b in said])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.integers(10**5, 10**9), st.lists(st.floats(0.3, 1), min_size=1, max_size=5), st.floats(0, 1))
def test_totals_of_six_digits_are_read_to_within_their_rounding(imported, drafts, rates, begin):
    reached = [drafts]
    for rate in rates:
        reached.append(int(reached[-1] * rate))
    before, after = ([int(share * count) for count in reached] for share in (begin / 2, 1))
    calibration, notes = imported(*(six(llama_metrics(counts[0], counts[1:])) for counts in (before, after)))
    expected = [b - a for a, b in zip(before, after, strict=True)]
    kept = calibration.num_heads
    assert calibration.hits[:, 0].tolist() == expected[1 : kept + 1]
    assert calibration.trials[0] == pytest.approx(expected[0], rel=3e-5)
    assert any("six digits" in note for note in notes) == any(
        six_digits(float(f"{c:.6g}")) > 0 for c in after_totals(after)
    )


def after_totals(counts):
    return counts[0], sum(counts[1:]), counts[0] * (len(counts) - 1)


def test_drafts_that_six_digits_put_below_their_first_guesses_are_as_many(imported):
    text = six(llama_metrics(1_234_564, [1_234_564, 600_000]))
    assert "num_drafts_total 1.23456e+06" in text
    calibration, notes = imported(text)
    assert calibration.trials.tolist() == [1_234_564, 1_234_564]
    assert any("num_drafts to within 5" in note for note in notes)


def test_more_than_the_rounding_of_six_digits_is_refused(imported):
    text = llama_metrics(2_000_000, [1_234_567, 600_000])
    assert "accepted_tokens_total 1834567.0" in text
    assert imported(six(text))[0].hits[:, 0].tolist() == [1_234_567, 600_000]
    for accepted in (1_834_561, 1_834_573, 1_834_580):  # not six digits, or not those of the sum
        with pytest.raises(InvalidInput, match="sum to the accepted"):
            imported(six(text).replace(" 1.83457e+06", f" {accepted}"))


def test_what_six_digits_hide_of_the_drafts_is_in_the_errors(imported):
    """1,009,800 drafts behind a thousand million print as a million: .8078 seem right, and .8 are."""
    begin = 10**9 + 5100
    before, after = (six(llama_metrics(n, [n * 4 // 5])) for n in (begin, begin + 1_009_800))
    info = imported(before, after)[0].meta
    assert info["drafts"] == 1_000_000
    assert info["survival"][0] == pytest.approx(0.80784)
    assert info["survival_stderr"][0] > 0.00784


def test_what_six_digits_hide_of_mixed_lengths_widens_their_bounds(imported):
    """960,000 to 980,000 of a million drafts had two guesses, and 940,000 to 985,000 since totals are off by 10,000."""
    begin, drafts = 10**9, 10**6
    before = llama_metrics(begin, [begin, begin])
    after = llama_metrics(begin + drafts, [begin + 800_000, begin + 500_000])
    after = after.replace(f"{2 * (begin + drafts)}.0", f"{2 * begin + 1_960_000}.0")
    calibration, notes = imported(six(before), six(after))
    middle = 0.5 / 0.9625
    assert calibration.meta["survival"][1] == pytest.approx(middle, abs=1e-5)
    assert any("unsure by up to 0.012" in note for note in notes)
    assert calibration.meta["survival_stderr"][1] > 0.5 / 0.94 - middle


def test_a_stretch_that_six_digits_do_not_tell_is_refused(imported):
    """A thousand drafts on top of a thousand million."""
    before, after = (six(llama_metrics(n, [n // 2])) for n in (10**9, 10**9 + 1000))
    with pytest.raises(InvalidInput, match=r"known to within 10,000 only.*restart the server"):
        imported(before, after)


@pytest.mark.parametrize(
    ("said", "instead", "message"),
    [
        ("#acc drafts =    80", "#acc drafts =    90", "first guess"),
        ("#gen tokens =    300", f"#gen tokens = {9 * 10**15}", "1 to 256 positions|at most what was drafted"),
        ("0.600, 0.420", "NaN, 0.420", "numbers in its lines"),
        ("0.600, 0.420", "1e999, 0.420", "numbers in its lines"),
        ("0.600, 0.420", "0.620, 0.420", "sum to the accepted"),
    ],
)
def test_statistics_that_contradict_themselves_are_refused(imported, said, instead, message):
    assert said in llama_process()
    with pytest.raises(InvalidInput, match=message):
        imported(llama_process().replace(said, instead))
