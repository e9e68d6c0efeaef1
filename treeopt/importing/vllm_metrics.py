"""What a vLLM server counted of its drafts: /metrics, the log, and what its benchmarks save of them.

/metrics                       counters since the start (vllm/v1/spec_decode/metrics.py): one scrape or two
log line "SpecDecoding metrics" sums of an interval, as rates by position (same file)
vllm bench serve               JSON, or JSON lines of --append-result: the difference of two scrapes
vllm bench sweep serve         summary.json, or summary.csv with lists as strings: the same, run by run

The acceptance length of all of them has the target's own token in it, accepted tokens have not, and of
the rates only those by position are used: the plain acceptance rate is in percent here and a share there.
Steps without a draft are not counted. Older log lines have means only.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from treeopt.errors import InvalidInput
from treeopt.files.bounds import few, loads
from treeopt.files.rows import Count, checked
from treeopt.files.storage import typed
from treeopt.importing.exposition import Counters, counters_among, is_exposition
from treeopt.importing.files import File
from treeopt.importing.printed import RATE, Printed, number, pooled, whole
from treeopt.importing.requests import bodies
from treeopt.importing.survival import NONE, Counted, Group, Summed, group_of

PREFIX = r"(?:ray_)?vllm[:_]spec_decode_"
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
RATES = "spec_decode_per_position_acceptance_rates"
# Both are searched for in turn, since a pattern with gaps in it takes hours on a line that repeats its beginning.
MEAN = re.compile(r"SpecDecoding metrics: (?:(?!SpecDecoding).)*?Mean acceptance length: ([\d.]+|nan), ")
COUNTS = re.compile(
    r"Accepted: (\d+) tokens, Drafted: (\d+) tokens, Per-position acceptance rate: ((?:\d\.\d+|nan)(?:, (?:\d\.\d+|nan))*)"
)
ANY_LINE = re.compile(r"(?:SpecDecoding|Speculative) metrics: ")
OLD_LINE = (
    "only means of its drafts: rates by position are needed, and its log lines have none. vLLM prints them as "
    "'Per-position acceptance rate' since 2025; update it, or save /metrics"
)
SUMS = 1e-6  # by which sums of what was rounded may be off
MOST_ROUNDED = 0.01  # of the drafts, by which a rounded count may be off
WAY = ", or serve with --per-request-spec-decode-metrics detailed and save the responses"
NO_POSITIONS = "counters of the tokens accepted at every position (vllm:spec_decode_num_accepted_tokens_per_pos_total)"


def matches(content: Any) -> bool:
    if isinstance(content, str):
        return is_exposition(content, PREFIX) or bool(ANY_LINE.search(content)) or _is_table(content)
    return any("spec_decode_acceptance_length" in run or RATES in run for run in bodies(content))


def read(files: Sequence[File]) -> Counted:
    """Drafts of all files together: scrapes are subtracted, logs and runs are pooled."""
    if counters := counters_among(files, PREFIX, COUNTERS):
        return from_counters(counters, NO_POSITIONS, WAY)
    groups: list[Group] = []
    said: list[str] = []
    for content, one in files:
        is_log = isinstance(content, str) and not _is_table(content)
        found, notes = _from_log(content, one) if is_log else _from_runs(content, one)
        groups += found
        said += notes
    return Counted(groups, files[-1][1], said, may_leave_out=True, way=WAY)


def from_counters(counters: Counters, needed: str, way: str) -> Counted:
    """The counters that vLLM and llama.cpp name alike."""
    path = counters.path
    drafts, drafted, accepted = (counters.sum(name) for name in COUNTERS[:3])
    reached = counters.by_position(COUNTERS[3], "position")
    if drafts == 0 and not any(reached):
        raise InvalidInput(NONE.format(path))
    if drafts is None or not reached:
        raise InvalidInput(f"{path} must have num_drafts and {needed}, but has not.")
    off, slack = (counters.slack(name) for name in COUNTERS[:2])
    if off > max(1, MOST_ROUNDED * drafts):
        raise InvalidInput(
            f"{path} must have totals that tell its drafts, but {drafts:,} drafts are known to within {off:,.0f} only, since "
            "the totals are rounded: restart the server before the measurement, or measure for longer."
        )
    if 0 < reached[0] - drafts <= off + SUMS:
        drafts = reached[0]
    if accepted is not None and abs(sum(reached) - accepted) <= sum(map(counters.slack, COUNTERS[2:])) + SUMS:
        accepted = None
    full = drafts * len(reached)
    if drafted is not None and abs(drafted - full) <= slack + len(reached) * off + SUMS:
        drafted = full
    group = group_of(drafts, reached, drafted, path, accepted)
    if isinstance(group, Summed) and drafted is not None:
        group = group.rounded(drafted, ceil(off), ceil(slack))
    return Counted([group], path, counters.notes, way=way, off=off / max(drafts, 1))


def _from_log(text: str, path: Path) -> tuple[list[Group], list[str]]:
    """One histogram an interval; drafts are worked out from the rates."""
    lines: list[tuple[str, Printed]] = []
    old = 0
    for place, line in enumerate(text.splitlines(), 1):
        mean = MEAN.search(line)
        counts = COUNTS.search(line, mean.end()) if mean else None
        if mean is None or counts is None:
            old += bool(ANY_LINE.search(line))
        elif "nan" not in mean[1] + counts[3]:
            rates = [float(rate) for rate in counts[3].split(", ")]
            length = number(mean[1], path, "a mean acceptance length")
            lines.append((f"{path}, line {place},", Printed(rates, whole(counts[1]), whole(counts[2]), length)))
    if not lines:
        raise InvalidInput(f"{path} has {OLD_LINE if old else 'no interval with drafts'}.")
    groups, notes = pooled(lines)
    return groups, [*notes, *([f"{old} lines without rates by position were left out."] if old else [])]


class Run(BaseModel):
    """What a benchmark says of its drafts; pandas writes 5800.0 where a column has holes."""

    drafts: Count = Field(alias="spec_decode_num_drafts")
    drafted: Count = Field(alias="spec_decode_draft_tokens")
    accepted: Count = Field(alias="spec_decode_accepted_tokens")


def _from_runs(content: Any, path: Path) -> tuple[list[Group], list[str]]:
    """One histogram a run; runs without speculation are left out."""
    records = list(_rows(content, path) if isinstance(content, str) else bodies(content))
    groups: list[Group] = []
    for r, record in enumerate(records, 1):
        where = f"{path}, run {r},"
        if record.get(RATES) is None:
            continue
        rates = typed(list[float], record[RATES], path)
        try:
            run = checked(Run, record)
        except InvalidInput as error:
            raise InvalidInput(f"{where} is not as it should be: {error}") from None
        reached = [round(rate * run.drafts) if 0 <= rate <= 1 else -1 for rate in rates]
        off = [abs(count - rate * run.drafts) for count, rate in zip(reached, rates, strict=True)]
        is_exact = all(one < 1e-6 * max(run.drafts, 1) for one in off)
        groups.append(group_of(run.drafts, reached, run.drafted, where, run.accepted if is_exact else None))
        if abs(sum(reached) - run.accepted) > len(rates) * (RATE * run.drafts + 0.5):
            raise InvalidInput(
                f"{where} must have rates by position that sum to the accepted tokens, {run.accepted}, but they sum to "
                f"{sum(reached)}."
            )
    if not groups:
        raise InvalidInput(
            f"{path} must have {RATES} in some run, but has none: vllm bench serve writes them only with "
            "speculation, and only if it can read the server's /metrics."
        )
    left = len(records) - len(groups)
    return groups, [f"{left} of {len(records)} runs have no drafts and were left out."] if left else []


def _is_table(text: str) -> bool:
    return RATES in text.split("\n", 1)[0].split(",")


def _rows(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """The runs of a sweep's summary.csv, as objects; lists are strings in it and what is missing is empty."""
    try:
        for row in few(csv.DictReader(text.replace("\0", "").splitlines()), path):
            rates = row.get(RATES) or ""
            yield {**row, RATES: loads(rates) if rates.startswith("[") else None}
    except InvalidInput:
        raise
    except (csv.Error, ValueError):
        raise InvalidInput(f"{path} must be CSV with lists of rates under {RATES}, but is not.") from None
