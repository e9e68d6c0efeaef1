"""TensorRT-LLM: chains, schedules and dynamic trees of its PyTorch backend, and its counts of drafts.

The keys of draft_len_schedule are upper bounds: {4: 4, 8: 2} is up to 4: 4, 5 to 8: 2, above: 0. They were lower bounds before
PR #10860 of January 2026, so a comment in the file names the meaning. For a dynamic tree max_draft_len is its levels, and
max_total_draft_tokens its nodes without the root. The trees of its old TensorRT engines are in `tensorrt_trees`.

It counts drafts in two places:

trtllm_spec_decode_{drafted,accepted}_tokens_total{token_position}   with return_perf_metrics: true
    (tensorrt_llm/metrics/collector.py); drafted tells how many drafts were long enough
choices[].speculative_decoding.acceptance_histogram                  with per_request_spec_decode_stats: true

--iteration_log, /perf_metrics and the reports of trtllm-bench have means only, and are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from treeopt.engines import tensorrt_trees
from treeopt.engines.base import LAST, About, Kind, Method, ServingEngine, Written, in_words
from treeopt.engines.measured.exposition import Counters, counters_among, is_exposition
from treeopt.engines.measured.files import File
from treeopt.engines.measured.requests import bodies, read_requests, records_in
from treeopt.engines.measured.survival import CountedDrafts, Drafts, check_counts
from treeopt.engines.templates import launch, plain
from treeopt.errors import InvalidInput
from treeopt.records.drafters import LOOKED_UP
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import Draft, DynamicLimits
from treeopt.trees.limits import EngineLimits

FILE = "llm_api_options.yml"
IN_BLOCKS = {"dflash": "DFlash", "dspark": "DSpark", "pard": "PARD"}
TYPES = {"eagle3": "Eagle3", "mtp": "MTP", "draft-model": "Draft_Target", "ngram": "NGram", **IN_BLOCKS}
OWN_MODEL = ("eagle3", "draft-model", *IN_BLOCKS)
TREE_NOTES = (
    "TensorRT-LLM builds no dynamic trees for targets with sliding windows or MLA (gpt-oss, DeepSeek).",
    "It makes room for a tree of every sequence of its --max_batch_size.",
)


def rising(served: Ranges[Draft], about: About) -> str | None:
    """Why TensorRT-LLM refuses a schedule. The first range must have the longest chain."""
    if served[0][2].depth < max(draft.depth for *_, draft in served):
        return (
            "needs max_draft_len at the smallest key of its draft_len_schedule, so no range may have a longer chain than the "
            f"first, but the plan has {in_words(served)}; export one with `batch_size`"
        )
    return None


def write(served: Ranges[Draft], about: About) -> Written:
    """The options of ``trtllm-serve``."""
    kind, longest = about.drafter, served[0][2].depth
    if longest == 0:
        return plain("trtllm-serve MODEL")
    options: dict[str, object] = {"decoding_type": TYPES[kind], "max_draft_len": longest}
    if kind in OWN_MODEL:
        options["speculative_model"] = "DRAFTER"
    if kind == "ngram":
        options["max_matching_ngram_size"] = LOOKED_UP
    notes = []
    if kind == "dspark":
        notes.append("TensorRT-LLM refuses a DSpark drafter that guesses a part of the vocabulary (d2t).")
    if about.rule != "greedy" and kind != "ngram":
        options["use_rejection_sampling"] = "true" if about.rule == "reject" else "false"
        notes.append("use_rejection_sampling is a setting of releases since PR #12588 of May 2026.")
    comment = ""
    if len(served) > 1:
        # A last range without speculation needs no key.
        schedule = {last or LAST: draft.depth for _, last, draft in served if last or draft.depth}
        comment, options["draft_len_schedule"] = "# draft_len_schedule: upper-bound\n", schedule
        notes += _notes([draft.depth for *_, draft in served], kind)
    return _launch(options, notes, comment)


def _launch(options: Mapping[str, object], notes: Sequence[str], comment: str = "") -> Written:
    lines = [f"{comment}speculative_config:\n", *(f"  {name}: {value}\n" for name, value in options.items())]
    return launch(f"trtllm-serve MODEL --config {FILE}", notes, {FILE: "".join(lines)})


def write_tree(served: Ranges[Draft], about: About) -> Written:
    """The options of ``trtllm-serve`` for a dynamic tree; a chain is written as one."""
    tree = only(served)
    if tree.depth == 0:
        return plain("trtllm-serve MODEL", "tree")
    if (tree.topk or 1) == 1:
        return write(served, about)
    options: dict[str, object] = {
        "decoding_type": TYPES["eagle3"],
        "max_draft_len": tree.depth,
        "max_total_draft_tokens": tree.rows - 1,
        "use_dynamic_tree": "true",
        "dynamic_tree_max_topK": tree.topk,
        "speculative_model": "DRAFTER",
    }
    if about.rule != "greedy":
        options["use_rejection_sampling"] = "false"
    return _launch(options, TREE_NOTES)


def _notes(lengths: Sequence[int], kind: str) -> list[str]:
    """Notes on the meaning of the keys, and on what releases do otherwise."""
    notes = [
        "A key of draft_len_schedule means up to that batch size. Releases before PR #10860 silently read it as from that "
        "batch size on."
    ]
    if lengths[-1]:
        notes.append(f"Its last key is {LAST}: above it TensorRT-LLM does not speculate.")
    if kind != "ngram" and 0 in lengths:
        notes.append("Some releases silently draft one token where the schedule has 0, to keep the drafter warm.")
    return notes


PREFIX = r"trtllm_"
COUNTERS = ("spec_decode_drafted_tokens", "spec_decode_accepted_tokens")
POSITION = "token_position"
PLACES = ("spec_decode_acceptance", "choices.speculative_decoding")  # of AIPerf's records and of responses
STATS = "specDecodingStats"  # in a line of --iteration_log
MEANS = ("decoding_stats", "perf_metrics", "phases", STATS)  # in files that have means only
REMEDY = ", or serve with return_perf_metrics: true and save /prometheus/metrics"
ASK = (
    "serve with return_perf_metrics: true and save /prometheus/metrics, which counts by token_position, or with "
    "per_request_spec_decode_stats: true and save the responses"
)


def is_of_drafts(content: Any) -> bool:
    if isinstance(content, str):
        return is_exposition(content, PREFIX)
    return any(any(name in body for name in MEANS) or records_in(body, PLACES) for body in bodies(content))


def read_drafts(files: Sequence[File]) -> CountedDrafts:
    """Drafts of all files together: scrapes are subtracted, requests are pooled."""
    path = files[-1][1]
    if counters := counters_among(files, PREFIX, COUNTERS, POSITION):
        return CountedDrafts([by_length(counters)], path, counters.notes)
    return read_requests(files, PLACES, ask=ASK, remedy=REMEDY)


def by_length(counters: Counters) -> Drafts:
    """Drafts from counters by position, which also tell how many drafts had each length."""
    path = counters.path
    drafted, accepted = (counters.positions.get(name, []) for name in COUNTERS)
    accepted += [0] * (len(drafted) - len(accepted))  # a position appears once something was accepted there
    if not drafted:
        raise InvalidInput(f"{path} has only means of its drafts: survival needs counts by {POSITION}. Instead, {ASK}.")
    check_counts(drafted[0], drafted, path)
    if len(accepted) > len(drafted) or any(a > d for a, d in zip(accepted, drafted, strict=True)):
        raise InvalidInput(
            f"{path} must accept at most what was drafted at each position, but has {accepted} of {drafted}."
        )
    full = Drafts.of(drafted[0], accepted, None, path)
    had = np.array(drafted, dtype=np.int64)
    lengths = dict(enumerate((had - np.append(had[1:], 0)).tolist(), 1))
    return replace(full, had=np.maximum(had, 1), lengths={k: n for k, n in lengths.items() if n})


MAIN, ARGS = "main 0004396, reference of 1.4.0rc1", "NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py"
CARRIER = "speculative_config in the YAML of trtllm-serve --config"
chains_by = partial(Method, checked=MAIN, carrier=CARRIER, by_batch_size=True, refuses=rising, write=write)
ENGINE = ServingEngine(
    name="tensorrt-llm", title="TensorRT-LLM", server="trtllm-serve",
    imports={"tensorrt-llm": Kind(f"TensorRT-LLM's figures of drafts, as all files of an import ({ASK})",
                                  is_of_drafts, read_drafts, takes_others=True)},
    methods=(
    Method(name="medusa", checked="main before PR #15918", drafters=("medusa",), limits=tensorrt_trees.limits(shape="any"), refuses=tensorrt_trees.refuses,
           carrier="medusa_choices: YAML of the LLM API, list of trtllm-bench, --medusa_choices",
           versions="TensorRT engines, up to 1.2", status="removed upstream in PR #15918",
           source="NVIDIA/TensorRT-LLM tensorrt_llm/runtime/medusa_utils.py, "
                  "cpp/tensorrt_llm/runtime/utils/speculativeChoicesUtils.cpp",
           write=tensorrt_trees.write),
    chains_by(name="draft-len", drafters=("eagle3", "mtp", "draft-model"), rules=("greedy", "sample", "reject"),
              versions="PR #10860 on; before it the keys were lower bounds",
              source=f"{ARGS}, PRs #8194, #10860, #12262, #12588"),
    chains_by(name="block", drafters=tuple(IN_BLOCKS), wider="does not start with them",
              versions="DFlash and PARD in 1.3.0rc27, DSpark in 1.4.0rc1", source=f"{ARGS}, tensorrt_llm/_torch/speculative/dflash.py"),
    chains_by(name="ngram", drafters=("ngram",), rules=("greedy", "sample"), looks_up="in a pool of all requests",
              versions="PR #10860 on; it refuses use_rejection_sampling",
              source=f"{ARGS}, tensorrt_llm/_torch/speculative/ngram.py"),
    Method(name="dynamic-tree", checked=MAIN, drafters=("eagle3",),
           limits=EngineLimits(dynamic=DynamicLimits(within_levels=True), fills_levels="all"),
           rules=("greedy", "sample"), carrier=CARRIER,
           versions="PR #13081 on; not for targets with sliding windows or MLA",
           source=f"{ARGS}, tensorrt_llm/_torch/speculative/eagle3_dynamic_tree.py", write=write_tree),
))  # fmt: skip
