"""What TensorRT-LLM counted of its drafts: /prometheus/metrics by position, or each choice's histogram.

trtllm_spec_decode_{drafted,accepted}_tokens_total{token_position}   with return_perf_metrics: true
    (tensorrt_llm/metrics/collector.py); drafted tells how many drafts were long enough
choices[].speculative_decoding.acceptance_histogram                  with per_request_spec_decode_stats: true

--iteration_log (lines of Python's repr, read as literals), /perf_metrics and the reports of trtllm-bench
have means only. Of drafts of one token a mean is all there is to know, so those are read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files.storage import typed
from treeopt.importing.exposition import Counters, read_counters, scrapes_among
from treeopt.importing.files import File, Found
from treeopt.importing.requests import bodies, choices, read_requests
from treeopt.importing.survival import Drafts, check_counts, histogram_of, to_calibration
from treeopt.importing.vllm_requests import is_warm_up

PREFIX = r"trtllm_spec_decode_"
TOTALS = {"num_accepted_draft_tokens": "total_accepted_draft_tokens", "num_draft_tokens": "total_draft_tokens"}
STATS = "specDecodingStats"
MEANS = ("decoding_stats", "perf_metrics", "phases")
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
        return STATS in content or bool(re.search(f"^{PREFIX}", content, re.MULTILINE))
    return any(STATS in body or any(name in body for name in MEANS) or records_of(body) for body in bodies(content))


def read(files: Sequence[File]) -> Found:
    """Survival of all files together: scrapes are subtracted, requests and iterations are pooled."""
    path = files[-1][1]
    if scrapes := scrapes_among(files, PREFIX):
        counters = read_counters(scrapes, PREFIX)
        return to_calibration(from_counters(counters), path, notes=counters.notes)
    records: list[dict[str, Any]] = []
    skipped = drafted = accepted = steps = 0
    for content, one in files:
        for body in [] if isinstance(content, str) else bodies(content):
            if not is_warm_up(body):
                records += records_of(body)
                skipped += not records_of(body)
        for stats in typed(list[Iteration], list(_iterations(content)), one):
            drafted += stats.numDraftTokens
            accepted += stats.numAcceptedTokens
            steps += stats.numRequestsWithDraftTokens
    if any(record.get("acceptance_histogram") for record in records):
        named = [{ours: r.get(ours, r.get(theirs)) for ours, theirs in TOTALS.items()} for r in records]
        return read_requests([{**r, **n} for r, n in zip(records, named, strict=True)], path, skipped=skipped)
    if steps and drafted == steps:  # one token a draft: its mean is its survival
        check_counts(steps, [accepted], None, path)
        return to_calibration(Drafts.of([{1: histogram_of(steps, [accepted])}]), path)
    mean = f" ({1 + accepted / steps:.2f} tokens a step over {steps} drafts)" if steps else ""
    raise InvalidInput(f"{path} has only means of its drafts{mean}: survival needs counts by position. Instead, {ASK}.")


def from_counters(counters: Counters) -> Drafts:
    """Those at risk at each position; drafted by position tells how many drafts were so long."""
    path = counters.path
    drafted, accepted = (counters.by_position(f"{what}_tokens", "token_position") for what in ("drafted", "accepted"))
    accepted += [0] * (len(drafted) - len(accepted))  # a position appears once something was accepted there
    if not drafted:
        raise InvalidInput(
            f"{path} has only means of its drafts: survival needs trtllm_spec_decode_drafted_tokens_total by "
            f"token_position. Instead, {ASK}."
        )
    check_counts(drafted[0], drafted, None, path)
    check_counts(drafted[0], accepted, None, path)
    if len(accepted) > len(drafted) or any(a > d for a, d in zip(accepted, drafted, strict=True)):
        raise InvalidInput(
            f"{path} must accept at most what was drafted at each position, but has {accepted} of {drafted}."
        )
    lengths = dict(enumerate(histogram_of(drafted[0], drafted)))
    if drafted[0] == drafted[-1]:
        return Drafts.of([{len(drafted): histogram_of(drafted[0], accepted)}])
    # S_j = accepted / drafted at j, since what is accepted was drafted; so many had all before j right:
    survival = np.divide(accepted, drafted, out=np.zeros(len(drafted)), where=np.array(drafted) > 0)
    before = np.minimum.accumulate(np.concatenate([[1.0], survival[:-1]]))
    tried = np.maximum(np.rint(before * drafted).astype(np.int64), accepted)
    return Drafts(tried[None], np.array(accepted, dtype=np.int64)[None], {k: n for k, n in lengths.items() if k and n})


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
    """A line as a literal; None where it is none. Nothing in it is run."""
    try:
        return ast.literal_eval(line.strip()) if STATS in line else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
