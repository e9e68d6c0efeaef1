"""What serving engines write of the same 1,000 drafts of 3 tokens: 800, 600 and 420 reached depth 1, 2 and 3.

Accepted 1,820, drafted 3,000, 2.82 tokens a step; 10 requests of 100 drafts where requests are told apart.
"""

import json
import re

import pytest

DRAFTS, REACHED = 1000, [800, 600, 420]
SURVIVAL = [0.8, 0.6, 0.42]
REQUEST = [20, 20, 18, 42]  # histogram of a request


def rows_of(table):
    """A test for each row of a table by name, with an id that ``pytest -k`` takes."""
    return pytest.mark.parametrize("name", table, ids=[re.sub(r"\W+", "-", name).strip("-") for name in table])


def exposition(drafts=DRAFTS, reached=REACHED, drafted=None, accepted=None, engine=0, model="m"):
    labels = f'engine="{engine}",model_name="{model}"'
    drafted = drafts * len(reached) if drafted is None else drafted
    accepted = sum(reached) if accepted is None else accepted
    said = ""
    for name, count in (("drafts", drafts), ("draft_tokens", drafted), ("accepted_tokens", accepted)):
        said += f"""\
# HELP vllm:spec_decode_num_{name}_total Number of things.
# TYPE vllm:spec_decode_num_{name}_total counter
vllm:spec_decode_num_{name}_total{{{labels}}} {float(count)}
# TYPE vllm:spec_decode_num_{name}_created gauge
vllm:spec_decode_num_{name}_created{{{labels}}} 1.7e9
"""
    for place, count in enumerate(reached):
        said += f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {float(count)}\n'
    return f'{said}vllm:inter_token_latency_seconds_sum{{engine="0"}} 16.9\n'


def vllm_line(drafts=DRAFTS, reached=REACHED, drafted=None, extra="", after=""):
    accepted = sum(reached)
    drafted = drafts * len(reached) if drafted is None else drafted
    rates = ", ".join(f"{c / drafts:.3f}" for c in reached)
    return (
        f"INFO 05-21 21:11:56 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted throughput: 182.00 tokens/s, Drafted throughput: 300.00 tokens/s, Accepted: {accepted} tokens, "
        f"Drafted: {drafted} tokens, Per-position acceptance rate: {rates}, {extra}"
        f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%{after}"
    )


NAN_LINE = (
    "SpecDecoding metrics: Mean acceptance length: nan, Accepted throughput: 0.00 tokens/s, Drafted throughput: 0.00 "
    "tokens/s, Accepted: 0 tokens, Drafted: 0 tokens, Per-position acceptance rate: nan, nan, nan, Avg Draft "
    "acceptance rate: nan%"
)


def bench(drafts=DRAFTS, reached=REACHED, **others):
    accepted, drafted = sum(reached), drafts * len(reached)
    return {
        "backend": "vllm",
        "max_concurrency": 8,
        "mean_tpot_ms": 6.0,
        "mean_itl_ms": 16.9,
        "request_rate": "inf",
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [c / drafts for c in reached],
        **others,
    }


def stats(histogram=REQUEST, **others):
    """vLLM's own, of one request."""
    steps, taken, k = sum(histogram), sum(a * n for a, n in enumerate(histogram)), len(histogram) - 1
    return {
        "mean_acceptance_length": 1 + taken / steps,
        "draft_acceptance_rate": taken / (k * steps),
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": taken,
        "num_draft_tokens": k * steps,
        "num_spec_tokens": k,
        **others,
    }


def response(histogram=REQUEST, **others):
    return {
        "usage": {"completion_tokens": 283},
        "metrics": {"time_to_first_token_ms": 41.0, "speculative_decoding": stats(histogram, **others)},
    }


def aiperf(histogram=REQUEST, phase="profiling", **others):
    record = stats(histogram, engine="vllm", **others)
    sparse = {str(a): n for a, n in enumerate(histogram) if n}
    return {
        "metadata": {"benchmark_phase": phase},
        "metrics": {"spec_decode_mean_acceptance_length": {"value": 2.82}},
        "spec_decode_acceptance": {**record, "acceptance_histogram": sparse},
    }


NEW = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram")
ALIASES = ("spec_verify_ct", "spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram")
OLDER = ("spec_verify_ct", "spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram")


def meta_info(histogram=REQUEST, names=NEW, k=None):
    steps, taken = sum(histogram), sum(a * n for a, n in enumerate(histogram))
    drafted = steps * (len(histogram) - 1 if k is None else k)
    figures = dict(zip(names, (steps, taken, drafted, histogram), strict=True))
    # both mislead: the prefill's token is in the length, and the rate has had two meanings
    return {"completion_tokens": steps + taken + 1, "spec_accept_length": 9.9, "spec_accept_rate": 0.99, **figures}


def trtllm(drafted=(1000, 1000, 1000), accepted=REACHED, worker=0):
    lines = ["# TYPE trtllm_spec_decode_drafted_tokens_total counter"]
    for what, counts in (("drafted", drafted), ("accepted", accepted)):
        for place, count in enumerate(counts):
            labels = f'token_position="{place}",worker="{worker}"'
            lines.append(f"trtllm_spec_decode_{what}_tokens_total{{{labels}}} {float(count)}")
            lines.append(f"trtllm_spec_decode_{what}_tokens_created{{{labels}}} 1.7e9")
    return "\n".join([*lines, "trtllm_spec_decode_acceptance_length 2.5", ""])


def trtllm_choice(histogram=REQUEST, **others):
    steps, taken, k = sum(histogram), sum(a * n for a, n in enumerate(histogram)), len(histogram) - 1
    said = {
        "acceptance_rate": taken / (k * steps),
        "total_accepted_draft_tokens": taken,
        "total_draft_tokens": k * steps,
    }
    said |= {"num_spec_steps": steps, "acceptance_histogram": histogram, "num_spec_tokens": k, **others}
    return {"choices": [{"avg_decoded_tokens_per_iter": 1 + taken / steps, "speculative_decoding": said}]}


def llama_request(drafts=100, reached=(80, 60, 42), drafted=None):
    """A request in one line, as later servers log it."""
    first, second = llama_pair(drafts, reached, drafted)
    rates = second.partition("per pos = ")[2]
    return f"{first.replace('mean len', 'mean acceptance length')}, acceptance rate per position = {rates}"


def llama_pair(drafts=100, reached=(80, 60, 42), drafted=None, slot=0, task=42, mean_only=False):
    """A request as llama-server logs it at --verbosity 4; without its second line as at 3."""
    accepted = sum(reached)
    drafted = drafts * len(reached) if drafted is None else drafted
    where = f"slot print_timing: id {slot:2d} | task {task} | "
    rates = ", ".join(f"{c / drafts:.3f}" for c in reached)
    first = (
        f"1.16.519.195 I {where}draft acceptance = {accepted / drafted:0.5f} ({accepted:5d} accepted / {drafted:5d} "
        f"generated), mean len = {1 + accepted / drafts:5.2f}"
    )
    return [first] if mean_only else [first, f"1.16.519.203 I {where}     acc per pos = ({rates})"]


def llama_process(drafts=100, reached=(80, 60, 42), name="draft-eagle3", made=None):
    made = drafts if made is None else made
    rates = ", ".join(f"{c / drafts:.3f}" for c in reached)
    return (
        f"0.42.130.640 I spec common_specu: statistics {name:>16}: #calls(b,g,a) =    1 {made:6d} {drafts:6d}, "
        f"#gen drafts = {made:6d}, #acc drafts = {reached[0]:5d}, #gen tokens = {made * len(reached):6d}, "
        f"#acc tokens = {sum(reached):5d}, #mean acc len = {1 + sum(reached) / drafts:.2f}, #acc rate/pos = ({rates}), "
        "dur(b,g,a) = 0.005, 325.555, 0.114 ms"
    )


def lines(*documents):
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in documents) + "\n"


def llama_metrics(drafts=DRAFTS, reached=REACHED):
    text = exposition(drafts, reached).replace("vllm:", "llamacpp:").replace('engine="0",model_name="m"', "")
    return text.replace("{,", "{").replace("{}", "")


TWO = ((400, [300, 200, 20]), (600, [500, 400, 400]))
BATCH = {"id": "x", "response": {"status_code": 200, "body": response()}}
PAIRS = [line for task in range(10) for line in llama_pair(task=task)]
# The same measurement in every format: the kind, and the text of each file.
EVERYTHING = {
    "vllm, two scrapes": ("vllm-metrics", [exposition(50, [40, 30, 20]), exposition(1050, [840, 630, 440])]),
    "vllm, one scrape": ("vllm-metrics", [exposition()]),
    "vllm, two engines": ("vllm-metrics", [exposition(*TWO[0]) + exposition(*TWO[1], engine=1)]),
    "vllm, log": ("vllm-metrics", [lines(vllm_line())]),
    "vllm, log of intervals": ("vllm-metrics", [lines(vllm_line(900, [780, 590, 415]), NAN_LINE, "noise", vllm_line(100, [20, 10, 5]))]),
    "vllm, bench": ("vllm-metrics", [json.dumps(bench(), indent=1)]),
    "vllm, bench lines": ("vllm-metrics", [lines(bench(*TWO[0]), bench(*TWO[1]))]),
    "vllm, responses": ("vllm-requests", [lines(*[response()] * 10)]),
    "vllm, batch": ("vllm-requests", [lines(*[BATCH] * 10)]),
    "aiperf": ("vllm-requests", [lines(*[aiperf()] * 10)]),
    "sglang": ("sglang", [json.dumps([{"text": "x", "meta_info": meta_info()}] * 10)]),
    "sglang, aliases": ("sglang", [lines(*[{"meta_info": meta_info(names=ALIASES)}] * 10)]),
    "sglang, older": ("sglang", [lines(*[{"meta_info": meta_info(names=OLDER)}] * 10)]),
    "sglang, openai": ("sglang", [lines(*[{"choices": [], "sglext": {"spec_tokens_details": meta_info()}}] * 10)]),
    "sglang, choice": ("sglang", [lines(*[{"choices": [{"meta_info": meta_info()}]}] * 10)]),
    "tensorrt-llm": ("tensorrt-llm", [trtllm([50] * 3, [40, 30, 20]), trtllm([1050] * 3, [840, 630, 440])]),
    "tensorrt-llm, workers": ("tensorrt-llm", [trtllm([400] * 3, TWO[0][1]) + trtllm([600] * 3, TWO[1][1], 1)]),
    "tensorrt-llm, choices": ("tensorrt-llm", [lines(*[trtllm_choice()] * 10)]),
    "llama.cpp": ("llama-cpp", [lines(*[llama_request()] * 10)]),
    "llama.cpp, trace": ("llama-cpp", [lines(*PAIRS)]),
    "llama.cpp, statistics": ("llama-cpp", [lines(llama_process(), llama_process(1000, REACHED))]),
    "llama.cpp, both": ("llama-cpp", [lines(*[llama_request(), llama_process()] * 10)]),
    "llama.cpp, counters": ("llama-cpp", [llama_metrics()]),
}  # fmt: skip
