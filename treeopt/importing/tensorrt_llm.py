"""What TensorRT-LLM counted of its drafts: /prometheus/metrics by position, or each choice's histogram.

trtllm_spec_decode_{drafted,accepted}_tokens_total{token_position}   with return_perf_metrics: true
    (tensorrt_llm/metrics/collector.py); drafted tells how many drafts were long enough
choices[].speculative_decoding.acceptance_histogram                  with per_request_spec_decode_stats: true

--iteration_log (lines of Python's repr, read as literals), /perf_metrics and the reports of trtllm-bench
have means only. Of drafts of one token a mean is all there is to know, so those are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files.bounds import parse_literal
from treeopt.files.storage import typed
from treeopt.importing.exposition import Counters, counters_among, is_exposition
from treeopt.importing.files import File
from treeopt.importing.requests import bodies, choices, gather, read_requests
from treeopt.importing.survival import Counted, Group, Summed, chain_histogram

PREFIX = r"trtllm_spec_decode_"
COUNTERS = ("drafted_tokens", "accepted_tokens")
POSITION = "token_position"
TOTALS = {"num_accepted_draft_tokens": "total_accepted_draft_tokens", "num_draft_tokens": "total_draft_tokens"}
STATS = "specDecodingStats"
MOST_LINE_CHARS = 2**16
MEANS = ("decoding_stats", "perf_metrics", "phases")
WAY = ", or serve with return_perf_metrics: true and save /prometheus/metrics"
ASK = (
    "serve with return_perf_metrics: true and save /prometheus/metrics, which counts by token_position, or with "
    "per_request_spec_decode_stats: true and save the responses"
)


@dataclass(frozen=True)
class Iteration:
    """The draft statistics of an iteration, by the names that TensorRT-LLM gives them."""

    numDraftTokens: int = 0  # noqa: N815
    numAcceptedTokens: int = 0  # noqa: N815
    numRequestsWithDraftTokens: int = 0  # noqa: N815


def matches(content: Any) -> bool:
    if isinstance(content, str):
        return STATS in content or is_exposition(content, PREFIX)
    return any(STATS in body or any(name in body for name in MEANS) or records_of(body) for body in bodies(content))


def read(files: Sequence[File]) -> Counted:
    """Drafts of all files together: scrapes are subtracted, requests and iterations are pooled."""
    path = files[-1][1]
    if counters := counters_among(files, PREFIX, COUNTERS):
        return Counted([from_counters(counters)], path, counters.notes)
    records, skipped = gather(files, records_of)
    drafted = accepted = steps = 0
    for content, one in files:
        for stats in typed(list[Iteration], list(_iterations(content)), one):
            drafted += stats.numDraftTokens
            accepted += stats.numAcceptedTokens
            steps += stats.numRequestsWithDraftTokens
    if any(record.get("acceptance_histogram") for record in records):
        named = [{ours: r.get(ours, r.get(theirs)) for ours, theirs in TOTALS.items()} for r in records]
        return read_requests([{**r, **n} for r, n in zip(records, named, strict=True)], path, skipped=skipped, way=WAY)
    if steps and drafted == steps:  # one token a draft: its mean is its survival
        return Counted([chain_histogram(steps, [accepted], path)], path)
    mean = f" ({1 + accepted / steps:.2f} tokens a step over {steps} drafts)" if steps else ""
    raise InvalidInput(f"{path} has only means of its drafts{mean}: survival needs counts by position. Instead, {ASK}.")


def from_counters(counters: Counters) -> Group:
    """Those at risk at each position; drafted by position tells how many drafts were so long."""
    path = counters.path
    drafted, accepted = (counters.by_position(name, POSITION) for name in COUNTERS)
    accepted += [0] * (len(drafted) - len(accepted))  # a position appears once something was accepted there
    if not drafted:
        raise InvalidInput(
            f"{path} has only means of its drafts: survival needs trtllm_spec_decode_drafted_tokens_total by "
            f"token_position. Instead, {ASK}."
        )
    chain_histogram(drafted[0], drafted, path)  # never rise
    histogram = chain_histogram(drafted[0], accepted, path)
    if len(accepted) > len(drafted) or any(a > d for a, d in zip(accepted, drafted, strict=True)):
        raise InvalidInput(
            f"{path} must accept at most what was drafted at each position, but has {accepted} of {drafted}."
        )
    if drafted[0] == drafted[-1]:
        return histogram
    had = np.array(drafted, dtype=np.int64)
    return Summed(np.array(accepted, dtype=np.int64), had, had)


def records_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The histograms of a response's choices, or of AIPerf's record of it."""
    found = [body.get("spec_decode_acceptance"), *(choice.get("speculative_decoding") for choice in choices(body))]
    return [one for one in found if isinstance(one, dict)]


def _iterations(content: Any) -> Iterator[dict[str, Any]]:
    """The draft statistics of iterations, from JSON or from lines of Python's repr."""
    for body in bodies(content) if not isinstance(content, str) else map(_literal, content.splitlines()):
        stats = body.get(STATS) if isinstance(body, dict) else None
        if isinstance(stats, dict):
            yield stats


def _literal(line: str) -> Any:
    """A line as a literal; None where it is none, or too long to be an iteration's. Nothing in it is run."""
    try:
        return parse_literal(line) if len(line) < MOST_LINE_CHARS and STATS in line else None
    except ValueError:
        return None
