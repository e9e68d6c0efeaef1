"""Results of benchmarking tools as records, under the names that the tools give them in JSON.

vllm bench serve, sglang.bench_serving   JSON, JSON lines, summary.csv of a sweep, and the block that they print
spec_decode.py of vLLM's examples        lines such as "num_drafts: 993", under the names of vllm bench serve
"""

import csv
import re
from collections.abc import Iterator, Mapping
from typing import Any

from treeopt.files.bounds import loads

Record = Mapping[str, Any]  # nothing of it is checked
Titled = tuple[list[str], Record]  # texts that may name the setting, the nearest first; and the record
POSITIONS = "spec_decode_per_position_acceptance_rates"
BLOCK = "Serving Benchmark Result"
LABELS = {  # of the block
    "Backend": "backend",
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Maximum request concurrency": "max_concurrency",
    "Max request concurrency": "max_concurrency",
    "Max reqeuest concurrency": "max_concurrency",  # as releases of SGLang print it
    "Request rate configured (RPS)": "request_rate",
    "Traffic request rate": "request_rate",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Output token throughput (tok/s)": "output_throughput",
    "Mean TPOT (ms)": "mean_tpot_ms",
    "P99 TPOT (ms)": "p99_tpot_ms",
    "Accept length": "accept_length",
    "Acceptance length": "spec_decode_acceptance_length",
    "Drafts": "spec_decode_num_drafts",
    "Draft tokens": "spec_decode_draft_tokens",
    "Accepted tokens": "spec_decode_accepted_tokens",
}
OFFLINE = "total_num_output_tokens"
OFFLINE_LABELS = {
    OFFLINE: "total_output_tokens",
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_draft_tokens",
    "num_accepted_tokens": "spec_decode_accepted_tokens",
}
MOST_TITLES = 200  # lines before a block in which it may be named
LINE = re.compile(r"[>\s]*([^:>\s][^:]{0,60}):\s+(\S{1,40})\s*", re.ASCII)
POSITION = re.compile(r"Position \d{1,3}|acceptance at token \d{1,3}", re.ASCII)


def records_of(content: Any) -> Iterator[Titled]:
    """The records in a file's content, as `load_file` gives it."""
    if isinstance(content, str):
        yield from _records_of_text(content)
    for record in content if isinstance(content, list) else [content]:
        if isinstance(record, dict):
            titles = [record.get(name) for name in ("_benchmark_name", "label", "tag")]
            yield [title for title in titles if isinstance(title, str)], record


def _records_of_text(text: str) -> Iterator[Titled]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if BLOCK in text:
        yield from _printed(lines, BLOCK, LABELS, 0.01)
    elif f"{OFFLINE}: " in text:
        yield from _printed(lines, OFFLINE, OFFLINE_LABELS, 1)
    else:
        yield from records_of(_json_lines(lines) or _csv(lines))


def _printed(lines: list[str], head: str, labels: Mapping[str, str], unit: float) -> Iterator[Titled]:
    """A record for each block from its head to a line of =, with the lines between it and the block before.

    unit : of rates by position, as a share
    """
    titles, between = list[str](), list[str]()
    record: dict[str, Any] = {}
    is_inside = False
    for line in lines:
        if head in line:
            if record:
                yield titles, record
            titles, between, record = between[: -MOST_TITLES - 1 : -1], [], {}
            is_inside = True
        is_inside = is_inside and set(line.strip("> ")) != {"="}
        match = LINE.fullmatch(line) if is_inside else None
        if match and match[1] in labels:
            record[labels[match[1]]] = parsed(match[2])
        elif match and POSITION.fullmatch(match[1]):
            rate = parsed(match[2])
            record.setdefault(POSITIONS, []).append(round(rate * unit, 6) if isinstance(rate, int | float) else rate)
        else:
            between.append(line)
    yield titles, record


def _json_lines(lines: list[str]) -> list[Any]:
    found = []
    for line in lines:
        if line.startswith('{"'):
            try:
                found.append(loads(line))
            except ValueError:
                return []
    return found


def _csv(lines: list[str]) -> list[Any]:
    """Rows of summary.csv."""
    if not any("output_throughput" in line for line in lines[:1]):
        return []
    try:
        rows = list(csv.DictReader(lines, strict=True))
    except csv.Error:
        return []
    return [{name: parsed(cell.removesuffix(".0")) for name, cell in row.items() if name and cell} for row in rows]


def parsed(cell: Any) -> Any:
    """The value of a text, where it is JSON; None where it is empty."""
    if not isinstance(cell, str):
        return cell
    text = cell.strip()
    try:
        return loads(text) if text else None
    except ValueError:
        return text
