"""Engines' counts of drafts, trap by trap: what is read of each form, and what is refused."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeopt.engines.llama_cpp import CUMULATIVE
from treeopt.engines.measured.exposition import SINCE_START, six_digits
from treeopt.engines.measured.rates import CUT
from treeopt.engines.measured.survival import CHAIN, MIXED, OPTIMISTIC
from treeopt.engines.sglang import UNKNOWN_LENGTHS
from treeopt.errors import InvalidInput

from .helpers.engine_files import (
    ALIASES,
    DRAFTS,
    OLDER,
    REACHED,
    SURVIVAL,
    aiperf,
    bench,
    exposition,
    lines,
    llama_metrics,
    llama_pair,
    llama_process,
    llama_request,
    meta_info,
    response,
    rows_of,
    stats,
    trtllm,
    trtllm_choice,
    vllm_line,
)

approx = pytest.approx
ALL = approx(SURVIVAL)
OLD_LLAMA = "draft acceptance rate = 0.57576 (  171 accepted /   297 generated)"
OLD_VLLM = "SpecDecoding metrics: Draft acceptance rate: 100.0%, Accepted: 66 tokens, Drafted: 66 tokens"
OLDER_VLLM = (
    "Speculative metrics: Draft acceptance rate: 0.800, System efficiency: 0.600, Number of speculative tokens: 4, "
    "Number of accepted tokens: 32, Number of draft tokens: 40, Number of emitted tokens: 30."
)
FOUR = (
    "draft acceptance = 0.66237 (  257 accepted /   388 generated), mean acceptance length =  3.65, acceptance rate per "
    "position = (0.804, 0.701, 0.629, 0.515)"
)
TWO = (
    "draft acceptance = 0.62008 ( 1797 accepted /  2898 generated), mean acceptance length =  2.24, acceptance rate per "
    "position = (0.727, 0.513)"
)
MOD = (
    "statistics        ngram-mod: #calls(b,g,a) =    4    542     31, #gen drafts =     31, #acc drafts =    28, "
    "#gen tokens =    920, #acc tokens =   527, #mean acc len = 18.00, #acc rate/pos = (0.903, 0.806), dur"
)
IDLE = (
    "statistics     ngram-simple: #calls(b,g,a) =    2     40      0, #gen drafts =      0, #acc drafts =     0, #gen "
    "tokens =      0, #acc tokens =     0, dur(b,g,a) = 0.001, 0.031, 0.000 ms"
)
TASK = "slot print_timing: id  0 | task 3 | "
NO_HIT = f"{TASK}draft acceptance = 0.00000 (    0 accepted /    51 generated), mean len =  1.00"
NOT_VERIFIED = f"{TASK}draft acceptance = 0.00000 (    0 accepted /     3 generated), mean len =  1.00"
(A, A_RATES), (B, B_RATES) = llama_pair(90, [81], task=7), llama_pair(10, [1], slot=1, task=7)
SILENT = dict.fromkeys(meta_info(), 0) | {"spec_correct_drafts_histogram": []}
DETAILS = [meta_info(), meta_info([0, 0, 0, 100]), SILENT]
TWICE = {"choices": [{"meta_info": meta_info()}], "sglext": {"spec_tokens_details": meta_info()}}
UNTOLD = [{k: v for k, v in meta_info(h).items() if "proposed" not in k} for h in ([5, 5], [0, 0, 10])]
NOTHING = {**stats(), "acceptance_histogram": [0] * 4, "num_spec_steps": 0, "num_accepted_draft_tokens": 0}
NULL = [{"metrics": {"speculative_decoding": record}} for record in (None, NOTHING)]
STEPS = (
    [(2, 0)] * 30 + [(2, 1)] * 20 + [(2, 2)] * 50 + [(3, 0)] * 170 + [(3, 1)] * 180 + [(3, 2)] * 130 + [(3, 3)] * 420
)
STEP_BY_STEP = {"per_step_drafted": [k for k, _ in STEPS], "per_step_accepted": [a for _, a in STEPS]}
FEW = {"per_step_accepted": [0, 1, 3, 2], "per_step_drafted": [2, 2, 3, 2]}

# Texts, what is made of them (meta, hits and trials), and words of notes; those after a minus are not there.
READ = {
    "one scrape": ([exposition()], {"requests": None, "served_model": "m", "draft_length": 3}, SINCE_START, OPTIMISTIC, CHAIN, f"-{MIXED}"),
    "two scrapes": ([exposition(0, [0, 0, 0]), exposition()], {"survival": ALL}, f"-{SINCE_START}"),
    "lengths are no others'": ([exposition()], {}, "drafts of 3 tokens. For any other length it is an estimate",
                               "Beyond depth 3 nothing is known"),
    "the prefix of Ray": ([exposition().replace("vllm:", "ray_vllm_")], {"drafts": DRAFTS}),
    "sums off by 1": ([exposition(accepted=1821).replace(" 800.0", " 800.3").replace(" 600.0", " 600.3").replace(" 420.0", " 420.4")],
                      {"drafts": DRAFTS}),
    "an engine that was added": ([exposition(100, [80, 60, 42]),
                                  exposition(400, [300, 200, 62]) + exposition(700, [580, 460, 400], engine=1)],
                                 {"drafts": DRAFTS, "survival": ALL}),
    "depths that no draft reached": ([exposition(10, [4, 2, 0, 0])], {"survival": approx([0.4, 0.2, 0, 0]), "draft_length": 4},
                                     "Beyond depth 4"),
    "lines weighted by drafts": ([lines(vllm_line(900, [810]), vllm_line(100, [10]))], {"survival": [0.82], "drafts": 1000}),
    "1,122 print as .801": ([vllm_line(1400, [1122])], {"hits": [1121], "trials": [1400]}),
    "fields of forks": ([vllm_line(extra="Draft length histogram: 2:10, 3:990, ", after=", Avg tree nodes per depth: 1.0, 2.0")],
                        {"survival": ALL}),
    "drafts that were not full": ([vllm_line(997, [798, 598, 419], drafted=2971)],
                                  {"drafts": approx(997, abs=3), "survival": approx(SURVIVAL, abs=0.01)}),
    "a log that begins as JSON": (["[12:00:00] " + vllm_line()], {"drafts": DRAFTS}),
    "older lines": ([lines(OLD_VLLM, OLDER_VLLM, vllm_line())], {"drafts": DRAFTS}, "2 lines without rates"),
    "a rate in percent": ([bench(spec_decode_acceptance_rate=-1.0)], {"survival": ALL}),
    "runs without speculation": ([lines(bench(), {"backend": "vllm", "mean_tpot_ms": 6.0})], {"drafts": DRAFTS}, "1 of 2 runs"),
    "runs of several lengths": ([lines(bench(), bench(1000, [800, 600]))],
                                {"survival": ALL, "draft_lengths": {"2": 1000, "3": 1000}}, MIXED),
    "responses that say nothing": ([lines(response(), NULL[0], response(), {"choices": []}, NULL[1])], {"requests": 2},
                                   "3 of 5 responses"),
    "AIPerf's warm-up": ([lines(aiperf([100, 0, 0, 0], phase="warmup"), aiperf(), aiperf())], {"survival": ALL}),
    "a sparse histogram": ([aiperf([50, 50, 0, 0])], {"draft_length": 3, "survival": [0.5, 0.0, 0.0]}),
    "one request": ([response()], {"requests": 1, "survival_stderr_is_optimistic": True}, OPTIMISTIC),
    "lengths by those at risk": ([response([200, 200, 180, 420], num_draft_tokens=2900, **STEP_BY_STEP)],  # naively .42 / .62
                                 {"trials": [1000, 800, 550], "hits": [800, 600, 420], "draft_length": None,
                                  "draft_lengths": {"2": 100, "3": 900}}, MIXED),
    "steps that tell lengths": ([response([1, 1, 1, 1], num_draft_tokens=9, **FEW)],
                                {"draft_lengths": {"2": 3, "3": 1}, "trials": [4, 3, 1]}),
    "steps that are cut short": ([response(per_step_accepted=[3, 0, 2], per_step_drafted=[3, 3, 3])], {"survival": ALL}),
    "a length that SGLang reports": ([{"meta_info": meta_info()}], {"survival": ALL}, UNKNOWN_LENGTHS),
    "a histogram that grows on demand": ([json.dumps([{"meta_info": meta_info([5, 4], k=3)}, {"meta_info": meta_info([0, 0, 3, 3])}])],
                                         {"draft_lengths": {"3": 15}, "trials": [15, 10, 6]}),
    "the longest of the file": ([json.dumps([{"meta_info": record} for record in UNTOLD])], {"survival": [0.75, 0.5]}),
    "the newest names": ([{"meta_info": {**meta_info([1, 0, 0, 0], names=ALIASES), **meta_info([1, 0, 0, 0], names=OLDER),
                                         **meta_info()}}], {"drafts": 100}),
    "several choices": ([{"choices": [{}, {}, {}], "sglext": {"spec_tokens_details": DETAILS}}],
                        {"requests": 2, "survival": approx([0.9, 0.8, 0.71])}, "1 of 3 responses"),
    "what is said twice": ([json.dumps([TWICE] * 5)], {"drafts": 500, "requests": 5}),
    "a gauge": ([trtllm().replace("acceptance_length 2.5", "acceptance_length 1.0")], {"survival": ALL}),
    "a position without a hit": ([trtllm([10] * 3, [5, 2])], {"survival": approx([0.5, 0.2, 0])}),
    "positions that tell lengths": ([trtllm([1000, 1000, 500], [800, 600, 210])],  # over all drafts .21
                                    {"survival": ALL, "trials": [1000, 800, 300], "draft_lengths": {"2": 500, "3": 500}}, MIXED),
    "a length that is scheduled": ([trtllm_choice(num_spec_tokens=None, total_draft_tokens=300)], {"survival": ALL}),
    "old lines of llama.cpp": ([lines(OLD_LLAMA, llama_request())], {"drafts": 100}, "1 lines without rates"),
    "statistics": ([lines(llama_process(10, [9, 9, 9]), llama_process(1000, REACHED))], {"drafts": DRAFTS, "requests": None},
                   CUMULATIVE),
    "a real log": ([FOUR], {"hits": [78, 68, 61, 50]}),
    "another": ([TWO], {"hits": [1053, 743], "trials": [1449, 1053]}),
    "positions that are not printed": ([MOD], {"hits": [28, 25]}, CUT),  # drafts of 30 tokens
    "slots": ([lines(A, A_RATES, B, B_RATES)], {"survival": [0.82], "requests": 2}),
    "slots that interleave": ([lines(A, B, B_RATES, A_RATES)], {"survival": [0.82], "requests": 2}),
    "slots with noise": ([lines(A, B, "noise", A_RATES, B_RATES)], {"survival": [0.82], "requests": 2}),
    "a server without trace before": ([lines(*llama_pair(10, [1], mean_only=True), *llama_pair(90, [81]))], {"survival": [0.9]},
                                      "1 lines without rates"),
    "17 of 3 are no better a guess": ([lines(NO_HIT, f"{TASK}     acc per pos = ({', '.join(['0.000'] * 8)})")],
                                      {"drafts": 7, "survival": [0.0] * 8}),
    "a request that verified nothing": ([lines(NOT_VERIFIED, f"{TASK}     acc per pos = ()", *llama_pair())], {"drafts": 100}),
    "drafts that were not verified": ([llama_process(made=102)], {"drafts": 100, "draft_length": 3, "survival": ALL}),
    "a position that is not accepted": ([llama_process(reached=(80, 60, 0)).replace(", 0.000)", ")")],
                                        {"survival": approx([0.8, 0.6, 0.0])}, f"-{CUT}"),
    # Rates without counts: survival, of which the error is not known.
    "a log with rates alone": (["SpecDecoding metrics: Per-position acceptance rate: 0.844, 0.599, 0.385, 0.271"],
                               {"survival": approx([0.844, 0.599, 0.385, 0.271]), "drafts": None, "draft_length": 4},
                               "taken as survival", "no counts", CHAIN),
    "a table of one accuracy a head": (["head,top_k,accuracy\n1,1,0.8\n2,1,0.6\n3,1,0.42\n"], {"survival": ALL}, "taken as survival"),
    "a table by subset": (["subset,head,accuracy\ncode,0,0.8\ncode,1,0.6\nchat,0,0.6\nchat,1,0.2\n"],
                          {"survival": approx([0.7, 0.4])}, "All 2 groups count alike"),
    "EAGLE's training log": ([lines(*[f"{{'test/{depth}_acc': {rate}}}" for rates in ([0.1] * 3, SURVIVAL) for depth, rate in enumerate(rates)])],
                             {"survival": ALL}, "no counts"),
    "the summary of a training run": (["wandb: test/0_acc 0.80\nwandb: test/1_acc 0.60\nwandb: test/top_1_acc 0.9\n"], {"survival": approx([0.8, 0.6])}),
    "counters that a fork averages over ranks": ([exposition(accepted=1820.5).replace(" 800.0", " 800.5")],
                                                 {"survival": approx(SURVIVAL, abs=1e-3)}),
    "a table by position": (["| position | acceptance_rate |\n|---|---|\n| 0 | 0.8 |\n| 1 | 0.6 |\n"], {"survival": approx([0.8, 0.6])}),
    # The same in other wrappings.
    "a stream that curl saved": (["".join(f"data: {json.dumps(chunk)}\n\n" for chunk in ({"object": "chat.completion.chunk"}, response())) + "data: [DONE]\n"],
                                 {"survival": ALL, "requests": 1}, "-say nothing"),
    "a client's data": ([{"data": [response()] * 3}], {"survival": ALL, "requests": 3}),
    "what vllm bench serve prints": (["== Serving Benchmark Result ==\nDrafts:    1000\nDraft tokens:   3000\nAccepted tokens: 1820\nPer-position acceptance (%):\n"
                                      "  Position 0: 80.00\n  Position 1: 60.00\n  Position 2: 42.00\n"], {"survival": ALL}),
    "what spec_decode.py prints": (["total_num_output_tokens: 4820\nnum_drafts: 1000\nnum_draft_tokens: 3000\nnum_accepted_tokens: 1822\n"
                                    "acceptance at token 0: 0.80\nacceptance at token 1: 0.60\nacceptance at token 2: 0.42\n"],
                                   {"survival": ALL, "steps_without_draft": 2000}, "2,000 steps had no draft"),
    "a benchmark with steps without a draft": ([json.dumps(bench(total_output_tokens=3340, completed=20))], {"steps_without_draft": 500, "requests": 20}),
    "a benchmark whose steps all draft": ([json.dumps(bench(total_output_tokens=2830, completed=20))], {"steps_without_draft": 0}),
    "responses with steps without a draft": ([lines({**response(), "usage": {"completion_tokens": 333}}, {"usage": {"completion_tokens": 21}})],
                                             {"steps_without_draft": 70}),
    "counters of tokens": ([exposition() + "vllm:generation_tokens_total 3340\nvllm:time_to_first_token_seconds_count 20\n"],
                           {"steps_without_draft": 500}),
    "TensorRT-LLM before its first draft": (['trtllm_request_success_total{worker="0"} 0\n', trtllm()], {"survival": ALL, "drafts": DRAFTS}),
    # Each length keeps its own rates.
    "two lengths": ([lines(vllm_line()), lines(vllm_line(500, [450, 300, 200, 100, 50]))],
                    {"by_length": {"3": {"hits": [[800], [600], [420]], "trials": [1000, 800, 600]},
                                   "5": {"hits": [[450], [300], [200], [100], [50]], "trials": [500, 450, 300, 200, 100]}}}, MIXED),
    "a drafter that is broken": ([exposition(5000, [40, 10, 0])], {"drafts": 5000}),
}  # fmt: skip


@rows_of(READ)
def test_counts(imported, name):
    """Counts, metadata and notes of an import."""
    texts, expected, *all_words = READ[name]
    calibration, notes = imported(*texts)
    numbers = {**calibration.meta, "hits": calibration.hits[:, 0].tolist(), "trials": calibration.trials.tolist()}
    assert {key: numbers[key] for key in expected} == expected
    for words in all_words:
        assert any(words.lstrip("-") in note for note in notes) == (not words.startswith("-")), words


def changed(words, instead):
    assert words in llama_process()
    return llama_process().replace(words, instead)


SGLANG_MEANS = r"only means of its drafts.*return_spec_tokens_details"
TRTLLM_MEANS = r"only means of its drafts.*per_request_spec_decode_stats"
REFUSED = {
    "a restart": ([exposition(), exposition(500, [400, 300, 210])], "without a restart"),
    "scrapes in the wrong order": ([exposition(1050, [840, 630, 440]), exposition()], "scraped after"),
    "the restart of one engine that the other hides": ([exposition(100, [80, 60, 42]) + exposition(engine=1),
                                                        exposition(9000, [8000, 6000, 4200]) + exposition(10, [8, 6, 4], engine=1)],
                                                       "without a restart"),
    "nothing between": ([exposition(), exposition()], "none was verified"),
    "no drafts": ([exposition(0, [0, 0, 0])], "none was verified"),
    "a sum that is not the accepted": ([exposition(accepted=1800)], "sum to 1820, and 1800 were accepted"),
    "rising counts": ([exposition(reached=[600, 800, 420])], "never rise"),
    "more first guesses than drafts": ([exposition(reached=[1001, 600, 420])], "never rise, the drafts first"),
    "two models": ([exposition() + exposition(model="n", engine=1)], "counters of m, n"),
    "three scrapes": ([exposition()] * 3, "before and after"),
    "a scrape twice in a file": ([exposition() * 2], "twice"),
    "a position missing": ([re.sub(r'.*position="1".*\n', "", exposition())], "every position"),
    "no positions": ([re.sub(r".*position=.*\n", "", exposition())], "num_accepted_tokens_per_pos"),
    "a negative count": ([exposition().replace(" 800.0", " -800.0")], "counts from 0 to"),
    "NaN": ([exposition().replace(" 800.0", " NaN")], "finite"),
    "a cut line": ([exposition() + 'vllm:spec_decode_num_drafts_total{engine="2'], "Prometheus exposition"),
    "a log beside it": ([exposition(), lines(vllm_line())], "of one form"),
    "counters off by more than rounding": ([exposition(accepted=1822.5).replace(" 800.0", " 800.5")], "sum to the accepted"),
    "older lines": ([OLD_VLLM], r"only means of its drafts.*Per-position acceptance rate"),
    "the oldest": ([OLDER_VLLM], r"only means of its drafts.*Per-position acceptance rate"),
    "rates that rise": ([vllm_line().replace("0.800, 0.600", "0.600, 0.800")], "never rise"),
    "another sum of rates": ([vllm_line().replace("0.420", "0.490")], "sum to the accepted"),
    "more accepted than drafted": ([vllm_line().replace("Accepted: 1820", "Accepted: 3820")], "at most what was drafted"),
    "another mean": ([vllm_line().replace("length: 2.82", "length: 2.92")], "sum to the accepted"),
    "an idle log": ([vllm_line().replace("2.82", "nan")], "no interval with drafts"),
    "runs without rates": ([bench(spec_decode_per_position_acceptance_rates=None)], "writes them only with speculation"),
    "runs without drafts": ([bench(spec_decode_num_drafts=None)], "spec_decode_num_drafts must be a whole number"),
    "runs with percents": ([bench(spec_decode_per_position_acceptance_rates=[80.0, 60.0, 42.0])], "from 0 to"),
    "runs without positions": ([bench(spec_decode_per_position_acceptance_rates=[])], "counts for 1 to 256 positions"),
    **{f"a request with {next(iter(change))} {next(iter(change.values()))}": ([response(**change)], message) for change, message in (
        ({"num_spec_tokens": 10**9}, "num_spec_tokens: must be less than or equal to 256"),
        ({"num_draft_tokens": 1000}, "the nodes of trees"),
        ({"acceptance_histogram": [20, 20, -18, 42]}, "histogram.2: must be greater than or equal to 0"),
        ({"acceptance_histogram": [0.2, 0.2, 0.18, 0.42]}, "valid integer"),
        ({"acceptance_histogram": {"many": 3}}, "under their number"),
        ({"acceptance_histogram": {"99999999999": 3}}, "under their number"))},
    "a histogram that is a number": ([{"meta_info": {**meta_info(), "spec_correct_drafts_histogram": 5}}], "must be a valid array"),
    "the depth of trees": ([{"meta_info": meta_info(k=63)}], r"look like trees.*--speculative-eagle-topk 1"),
    "bench_serving": ([lines({"backend": "sglang", "max_concurrency": 8, "accept_length": 2.82})], SGLANG_MEANS),
    "bench_speculative": ([lines({"batch_size": 8, "steps": 3, "topk": 1, "acc_length": 2.82})], SGLANG_MEANS),
    "server info": ([json.dumps({"internal_states": [{"avg_spec_accept_length": 2.82}]})], SGLANG_MEANS),
    "a log of SGLang": (["[2026-09-01 12:00:00] Decode batch. #running-req: 8, accept len: 2.82, accept rate: 0.61, "], SGLANG_MEANS),
    "a gauge of SGLang": (['sglang:spec_accept_length{model_name="m",tp_rank="0"} 2.82\n'], SGLANG_MEANS),
    "an SGLang without histograms": ([{"meta_info": {k: v for k, v in meta_info(names=OLDER).items() if "histogram" not in k}}],
                                     SGLANG_MEANS),
    "a restart of TensorRT-LLM": ([trtllm(), trtllm([9] * 3, [8, 7, 6])], "without a restart"),
    "more at a deeper position": ([trtllm([500, 1000, 1000], [400, 300, 200])], "never rise"),
    "more than was drafted": ([trtllm([1000, 500, 500], [800, 600, 420])], "at most what was drafted"),
    "a position that was not drafted": ([trtllm([1000], [800, 600])], "at most what was drafted"),
    "no token_position": ([re.sub(".*token_position.*\n", "", trtllm())], "token_position.*return_perf_metrics"),
    "iterations": ([json.dumps([{"iter": 57, "specDecodingStats": {"numDraftTokens": 24}}])], TRTLLM_MEANS),
    "a report": ([{"decoding_stats": {"acceptance_length_percentiles": {"average": 2.8}}}], TRTLLM_MEANS),
    "perf metrics": ([[{"perf_metrics": {"speculative_decoding": {"acceptance_rate": 0.6}}}]], TRTLLM_MEANS),
    "a choice without histogram": ([{"choices": [{"speculative_decoding": {"total_draft_tokens": 300}}]}], TRTLLM_MEANS),
    "an old line of llama.cpp": ([OLD_LLAMA], "PR #24536"),
    "a log without trace": ([lines(*llama_pair(mean_only=True))], r"'acc per pos'\).*Start the server with --verbosity 4"),
    "two drafters": ([lines(*llama_pair(), llama_process(), llama_process(name="ngram-mod"))], "drafts of draft-eagle3, ngram-mod"),
    "a server that never drafted": ([IDLE], "none was verified"),
    "counters that never rose": ([llama_metrics(0, [])], "none was verified"),
    "huge numbers": ([changed("#gen tokens =    300", f"#gen tokens = {9 * 10**15}")], "only means|looks like none"),
    "rates that are none": ([changed("0.600, 0.420", "NaN, 0.420")], "only means"),
    "a set among a training log": (["{'test/0_acc': 0.7}\n{'test/1_acc', 0.3}\n{'test/2_acc': 0.1}\n"], "every depth from 0 on"),
    "rates of another sum": ([changed("0.600, 0.420", "0.620, 0.420")], "sum to the accepted"),
}  # fmt: skip


@rows_of(REFUSED)
def test_refused_counts(imported, name):
    """Counts that cannot be, or that tell too little, are refused."""
    texts, message = REFUSED[name]
    with pytest.raises(InvalidInput, match=message):
        imported(*texts, kind="vllm-metrics" if name.startswith("runs") else None)


# Counts, printed lines, and counts again.

SAME = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


@SAME
@given(st.integers(1, 20_000), st.lists(st.floats(0.2, 1), min_size=1, max_size=6))
def test_printed_line_roundtrip(imported, drafts, rates):
    """Counts come back from the line that prints them, to within the rounding of three decimals."""
    reached = [drafts]
    for rate in rates:
        reached.append(round(reached[-1] * rate))
    calibration, _ = imported(vllm_line(drafts, reached[1:]))
    hits = calibration.hits[:, 0].tolist()
    if hits[0]:
        assert calibration.meta["drafts"] == drafts
        assert hits == approx(reached[1 : len(hits) + 1], abs=1 + 0.001 * drafts)
        printed = [round(count / drafts, 3) for count in reached[1 : len(hits) + 1]]
        assert [count / drafts for count in hits] == approx(printed, abs=0.0005 + 1e-8)


# Totals of six digits, as C++ prints them; counters by position stay whole.


@given(st.integers(0, 10**15))
def test_six_digits(total):
    """Six digits move a total by no more than `six_digits` says."""
    printed = float(f"{total:.6g}")
    assert abs(printed - total) <= six_digits(printed) <= 5e-6 * printed


def six(text):
    names = "num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total"
    pairs = [line.rsplit(" ", 1) for line in text.splitlines()]
    return lines(*[f"{a} {float(b):.6g}" if a.endswith(names) and a[0] != "#" else f"{a} {b}" for a, b in pairs])


@SAME
@given(st.integers(10**5, 10**9), st.lists(st.floats(0.3, 1), min_size=1, max_size=5), st.floats(0, 1))
def test_six_digit_totals(imported, drafts, rates, begin):
    """Totals with six digits are read to within their rounding."""
    reached = [drafts]
    for rate in rates:
        reached.append(int(reached[-1] * rate))
    before, after = ([int(share * count) for count in reached] for share in (begin / 2, 1))
    calibration, _ = imported(*(six(llama_metrics(counts[0], counts[1:])) for counts in (before, after)))
    expected = [b - a for a, b in zip(before, after, strict=True)]
    kept = calibration.num_heads
    assert calibration.hits[:, 0].tolist() == expected[1 : kept + 1]
    assert calibration.trials[0] == approx(expected[0], rel=3e-5)


def test_six_digits_refused(imported):
    """A sum that is off by more than six digits explain is refused."""
    text = six(llama_metrics(2_000_000, [1_234_567, 600_000]))
    assert imported(text)[0].hits[:, 0].tolist() == [1_234_567, 600_000]
    for accepted in (1_834_561, 1_834_573, 1_834_580):  # not six digits, or not those of the sum
        with pytest.raises(InvalidInput, match="sum to the accepted"):
            imported(text.replace(" 1.83457e+06", f" {accepted}"))


def test_six_digits_in_errors(imported):
    """1,009,800 drafts behind a thousand million print as a million: .8078 seem right, and .8 are."""
    begin = 10**9 + 5100
    info = imported(*(six(llama_metrics(n, [n * 4 // 5])) for n in (begin, begin + 1_009_800)))[0].meta
    assert (info["drafts"], info["survival"][0]) == (1_000_000, approx(0.80784))
    assert info["survival"][0].stderr > 0.00784
    with pytest.raises(InvalidInput, match=r"known to within 10,000 only.*restart the server"):
        imported(*(six(llama_metrics(n, [n // 2])) for n in (10**9, 10**9 + 1000)))
