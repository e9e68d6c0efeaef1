"""What llama.cpp's server logged of its drafts, since PR #24536 (June 2026), or shows under /metrics.

draft acceptance = 0.60667 (  182 accepted /   300 generated), mean acceptance length =  2.82,
    acceptance rate per position = (0.800, 0.600, 0.420)            a request
statistics draft-eagle3: ..., #gen drafts = 100, #acc drafts = 80, #gen tokens = 300, #acc tokens = 182,
    #mean acc len = 2.82, #acc rate/pos = (0.800, 0.600, 0.420)     the process so far: the last line counts
llamacpp:spec_decode_num_accepted_tokens_per_pos_total              counters, read as those of vLLM

Rates are survivals over verified drafts, the mean has the target's own token in it. Lines of requests are
read where there are some, since only they tell requests apart; both count the same drafts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.importing.exposition import counters_among, is_exposition
from treeopt.importing.files import File, Found
from treeopt.importing.printed import RATE, Printed, number, pooled, whole
from treeopt.importing.survival import Drafts, Histograms, to_calibration
from treeopt.importing.vllm_metrics import from_counters

PREFIX = r"llamacpp:spec_decode_"
RATES = r"\(([^)]{1,20000})\)"
REQUEST = re.compile(
    r"draft acceptance(?: rate)? = ([\d.]+) \(\s*(\d+) accepted /\s*(\d+) generated\)"
    rf"(?:, mean acceptance length =\s*([\d.]+), acceptance rate per position = {RATES})?"
)
PROCESS = re.compile(
    r"statistics\s+(\S+): (?:(?!statistics).)*?#gen drafts =\s*(\d+), #acc drafts =\s*(\d+), #gen tokens =\s*(\d+), "
    rf"#acc tokens =\s*(\d+)(?:, #mean acc len =\s*([\d.]+), #acc rate/pos = {RATES})?"
)
NEEDED = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
OLD_LINE = (
    "only means of its drafts: survival needs 'acceptance rate per position', which llama.cpp prints since "
    "PR #24536 of June 2026. Update it"
)
NUMBERS = "numbers in its lines of drafts"
CUMULATIVE = "The lines 'statistics' count since the start of the process: only the last one was read."


def matches(content: Any) -> bool:
    if isinstance(content, str):
        return is_exposition(content, PREFIX) or bool(REQUEST.search(content) or PROCESS.search(content))
    return isinstance(content, dict) and isinstance(content.get("timings"), dict) and "draft_n" in content["timings"]


def read(files: Sequence[File]) -> Found:
    """Survival of all files together: scrapes are subtracted, logs are pooled."""
    for content, one in files:
        if not isinstance(content, str):
            raise InvalidInput(
                f"{one} has only means of its drafts, and survival needs rates by position: import the log."
            )
    if counters := counters_among(files, PREFIX):
        return from_counters(counters, NEEDED)
    groups: list[Histograms] = []
    said: list[str] = []
    are_requests = True
    for text, one in files:
        found, notes, of_requests = _from_log(text, one)
        groups += found
        said += notes
        are_requests &= of_requests
    return to_calibration(Drafts.of(groups, are_requests=are_requests), files[-1][1], notes=said)


def _from_log(text: str, path: Path) -> tuple[list[Histograms], list[str], bool]:
    """Histograms of a log, notes, and whether they are of requests."""
    requests = [found for line in text.splitlines() if (found := REQUEST.search(line))]
    detailed = [found for found in requests if found[5] is not None]
    if detailed:
        lines = [_printed(found[5], found[2], found[3], found[4], path) for found in detailed if whole(found[3])]
        groups, notes = pooled([(f"{path}, draft line {n},", line) for n, line in enumerate(lines, 1)])
        if left := len(requests) - len(detailed):
            notes.append(f"{left} lines without rates by position were left out.")
        return groups, notes, True
    last = {found[1]: found for line in text.splitlines() if (found := PROCESS.search(line))}
    used = {name: found for name, found in last.items() if found[7] is not None and whole(found[2])}
    if not used:
        raise InvalidInput(f"{path} has {OLD_LINE}.")
    if len(used) > 1:
        raise InvalidInput(
            f"{path} must be of one drafter, but has statistics of {', '.join(sorted(used))}: their drafts differ. "
            "Serve with one of them."
        )
    (found,) = used.values()
    drafts, first = whole(found[2]), whole(found[3])
    line = _printed(found[7], found[5], found[4], found[6], path, drafts)
    if abs(line.rates[0] * drafts - first) > RATE * drafts + 0.5:
        raise InvalidInput(
            f"{path} must accept the first guess of as many drafts as it says, {first}, but the rate is {line.rates[0]}."
        )
    groups, notes = pooled([(f"{path}, draft line 1,", line)])
    return groups, [CUMULATIVE, *notes], False


def _printed(rates: str, accepted: str, drafted: str, mean: str, path: Path, drafts: int | None = None) -> Printed:
    numbers = [number(part, path, NUMBERS) for part in [*rates.split(","), mean]]
    return Printed(numbers[:-1], whole(accepted), whole(drafted), numbers[-1], drafts, may_be_cut=True)
