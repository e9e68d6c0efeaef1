"""llama.cpp: the longest chain as a flag; and its server's counts of drafts, in the log and under /metrics.

It stops a chain earlier where its drafter is unsure, and takes no tree from outside.

draft acceptance = 0.60667 (  182 accepted /   300 generated), mean len =  2.82      a request
     acc per pos = (0.800, 0.600, 0.420)               its rates, later in the log: --verbosity 4 alone
draft acceptance = ..., mean acceptance length =  2.82, acceptance rate per position = (0.800, 0.600, 0.420)
                                                       both in one line, from PR #24536 (June 2026) on
statistics draft-eagle3: ..., #gen drafts = 100, #acc drafts = 80, #gen tokens = 300, #acc tokens = 182,
    #mean acc len = 2.82, #acc rate/pos = (0.800, 0.600, 0.420)     the process so far: the last line counts
llamacpp:spec_decode_num_accepted_tokens_per_pos_total              counters, read as those of vLLM

Rates are survivals over verified drafts; the mean counts the target's own token. Lines of requests are read
if there are some, since only they tell requests apart; 'statistics' count the same drafts.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeopt.engines import copied
from treeopt.engines.base import About, Kind, Method, ServingEngine, Written
from treeopt.engines.measured.exposition import counters_among, is_exposition
from treeopt.engines.measured.files import File
from treeopt.engines.measured.rates import RATE, Printed, drafters_named, pooled
from treeopt.engines.measured.survival import MOST_LENGTH, NONE, CountedDrafts, Drafts
from treeopt.engines.speculation import Speculation
from treeopt.engines.templates import Templates
from treeopt.errors import InvalidInput
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import CopiedText

OF_DRAFTERS = (
    "llama.cpp stops before the first guess of which its drafter is less sure than --spec-draft-p-min: at 0 it drafts to the end.",
    "Builds that do not know --spec-type have other names for these options: treeopt list engines llama-cpp",
)
DRAFT = "--spec-draft-n-max {length} --spec-draft-n-min 0 --spec-draft-p-min 0"
write = Templates(
    command="llama-server --model MODEL.gguf",
    slots=(4, " --parallel {batch_size} --kv-unified"),  # one context for all, as where it is not told
    options={
        "draft-model": f"--spec-type draft-simple --spec-draft-model DRAFTER.gguf {DRAFT}",
        "eagle3": f"--spec-type draft-eagle3 --spec-draft-model DRAFTER.gguf {DRAFT}",
        "mtp": f"--spec-type draft-mtp {DRAFT}",
        **dict.fromkeys(("dflash", "dflash2"), f"--spec-type draft-dflash --spec-draft-model DRAFTER.gguf {DRAFT}"),
        "dspark": f"--spec-type draft-dspark --spec-draft-model DRAFTER.gguf {DRAFT}",
        "ngram": "--spec-type ngram-simple --spec-ngram-simple-size-n {looked_up} --spec-ngram-simple-size-m {length}",
    },
    notes_of={
        **dict.fromkeys(("draft-model", "eagle3"), OF_DRAFTERS),
        "mtp": (
            "It drafts with MODEL's own layers; --spec-draft-model names them where they are a file of their own. From a "
            "model of several such layers it silently drafts no more tokens than it has layers.",
        ),
        "ngram": ("It looks up that number of tokens and no fewer, and drafts only where as many follow in the text.",),
    },
)


def write_copied(served: Ranges[CopiedText], about: About) -> Written:
    """Drafters that copy text."""
    draft = only(served)
    if draft.depth == 0:
        return write(served, about)
    types = draft.drafter.partition(":")[2]
    options = {copied.KIND: f"--spec-type {types}{copied.flags(draft.options)}"}
    return replace(write, options=options)(served, about)


# Kinds of drafter by the names of --spec-type, which the lines 'statistics' have.
TYPES = {
    "draft-simple": ("draft-model",),
    "draft-eagle3": ("eagle3",),
    "draft-mtp": ("mtp",),
    "draft-dflash": ("dflash", "dflash2"),
    "draft-dspark": ("dspark",),
    "ngram-simple": ("ngram", copied.KIND),
    **dict.fromkeys(("ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), (copied.KIND,)),
}
PREFIX = r"llamacpp:"
COUNT, MEAN = r"\d{1,13}", r"\d{1,4}\.\d{1,4}"
RATES = r"\((?P<rates>(?:\d\.\d{1,9}(?:, \d\.\d{1,9}){0,255})?)\)"
REQUEST = re.compile(
    rf"draft acceptance(?: rate)? = [\d.]+ \(\s*(?P<accepted>{COUNT}) accepted /\s*(?P<drafted>{COUNT}) generated\)"
    rf"(?:, mean (?:acceptance length|len) =\s*(?P<mean>{MEAN})(?:, acceptance rate per position = {RATES})?)?"
)
POSITIONS = re.compile(rf"acc per pos = {RATES}")
SLOT = re.compile(r"\bid\s{1,3}(-?\d+) \| task (-?\d+) \|")  # in both lines of a request
STATISTICS = re.compile(
    r"statistics\s+(?P<name>\S+): (?:#calls\(b,g,a\) =\s*\d+\s+\d+\s+(?P<verified>\d{1,13}), )?(?:(?!statistics).)*?"
    rf"#gen drafts =\s*(?P<made>{COUNT}), #acc drafts =\s*{COUNT}, #gen tokens =\s*(?P<drafted>{COUNT}), "
    rf"#acc tokens =\s*(?P<accepted>{COUNT})(?:, #mean acc len =\s*(?P<mean>{MEAN}), #acc rate/pos = {RATES})?"
)
NO_RATES = (
    "only means of its drafts: survival needs rates by position ('acc per pos'), which llama.cpp prints since PR #24536 of June "
    "2026. Start the server with --verbosity 4, or with --metrics and save /metrics before and after"
)
REMEDY = ", all of them full: --spec-draft-p-min 0 and --spec-draft-n-min 0"
CUMULATIVE = (
    "The lines 'statistics' count since the start of the process: only the last one was read. For recurrent and hybrid "
    "models they count the target's own token as accepted: use the lines of requests there."
)
Line = dict[str, str | None]  # name to text of the numbers of a line; the mean and the rates may be missing


def is_of_drafts(content: Any) -> bool:
    if not isinstance(content, str):
        return False
    return is_exposition(content, PREFIX) or any(form.search(content) for form in (REQUEST, STATISTICS))


def read_drafts(files: Sequence[File]) -> CountedDrafts:
    """Drafts of all files together: scrapes are subtracted, logs are pooled."""
    if counters := counters_among(files, PREFIX):
        return counters.drafts(REMEDY)
    groups, notes, path = list[Drafts](), list[str](), files[-1][1]
    for text, file in files:
        more, remarks = _from_log(text, file)
        groups, notes = [*groups, *more], [*notes, *remarks]
    drafters = drafters_named((name for text, _ in files for name in _drafting(text)), TYPES, path)
    are_requests = CUMULATIVE not in notes
    requests = [replace(group, request=number) for number, group in enumerate(groups)]
    return CountedDrafts(requests, path, notes, are_requests, remedy=REMEDY, drafters=drafters)


def lines_of_requests(text: str) -> Iterator[Line]:
    """Requests of a log, with the rates of the same slot and task that follow before its next request."""
    waiting: dict[tuple[str, ...], Line] = {}
    for text_line in text.splitlines():
        slot = SLOT.search(text_line)
        key = slot.groups() if slot else ()
        if request := REQUEST.search(text_line):
            if key in waiting:
                yield waiting.pop(key)
            waiting[key] = request.groupdict()
        elif (positions := POSITIONS.search(text_line)) and key in waiting:
            line = waiting.pop(key)
            yield {**line, "rates": line["rates"] or positions["rates"]}
    yield from waiting.values()


def _drafting(text: str) -> dict[str, dict[str, str]]:
    """Name of each drafter that drafted anything to its last 'statistics' line."""
    last: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if statistics := STATISTICS.search(line):
            last[statistics["name"]] = statistics.groupdict()
    return {name: totals for name, totals in last.items() if int(totals["made"])}


def _from_log(text: str, path: Path) -> tuple[list[Drafts], list[str]]:
    """Drafts of a log, and notes: of its requests where there are some, else of its statistics."""
    drafting = _drafting(text)
    requests = list(lines_of_requests(text))
    if complete := [line for line in requests if line["mean"] is not None and line["rates"]]:
        lines = [_printed(line, f"{path}, draft line {n},") for n, line in enumerate(complete, 1)]
        return pooled([line for line in lines if line.drafted], len(requests) - len(complete))
    if STATISTICS.search(text) and not drafting and not requests:
        raise InvalidInput(NONE.format(path))
    for totals in drafting.values():
        if totals["rates"]:
            groups, notes = pooled([_of_process(totals, path)])
            return groups, [CUMULATIVE, *notes]
    raise InvalidInput(f"{path} has {NO_RATES}.")


def _of_process(totals: dict[str, str], path: Path) -> Printed:
    """Counts of a 'statistics' line, scaled to the drafts that were verified."""
    line = _printed({**totals}, f"{path}, draft line 1,")
    made = int(totals["made"])
    drafts = int(totals["verified"]) if totals["verified"] else made
    rates = list(line.rates)
    if drafts and abs(sum(rates) * drafts - line.accepted) <= RATE * len(rates) * drafts + 1e-6:
        length = min(-(-line.drafted // made), MOST_LENGTH + 1)
        rates += [0.0] * (length - len(rates))  # positions at which nothing was accepted are not printed
    return replace(line, rates=rates, drafted=round(line.drafted * drafts / made), drafts=drafts)


def _printed(line: Line, where: str) -> Printed:
    rates = [float(rate) for rate in (line["rates"] or "").split(", ") if rate]
    accepted, drafted = (int(line[name] or 0) for name in ("accepted", "drafted"))
    return Printed(where, rates, accepted, drafted, float(line["mean"] or 0), may_be_cut=True)


KIND = Kind("log lines 'draft acceptance = ...' of llama.cpp", is_of_drafts, read_drafts)
OPTIONS = Speculation(
    program="llama-server",
    flags=r"--(?:no-)?spec-\S+|--\S+-draft|--draft\S*|-(?:hfd|hfrd|td|tbd|Cd|Crd|Cbd|Crbd|ctkd|ctvd|otd|cmoed|ncmoed|devd|ngld|md)",
    named_by="--spec-type",
    lengths={
        "ngram-mod": "--spec-ngram-mod-n-min 0 --spec-ngram-mod-n-max {length}",
        "ngram-(simple|map-k|map-k4v)": "--spec-{drafter}-size-m {length}",
        ".*": "--spec-draft-n-min 0 --spec-draft-n-max {length}",
    },
    parameter="speculative.n_max",
)
ENGINE = ServingEngine(name="llama-cpp", title="llama.cpp", package="llama-cpp-python", server="llama-server",
                       options=OPTIONS, imports={"llama-cpp": KIND}, methods=(
    Method(name="number", checked="llama-cpp-python 0.3.36 (0c1e570)", drafters=tuple(write.options), rules=("greedy", "sample"),
           carrier="--spec-type, --spec-draft-n-max",
           looks_up="from the latest place of n-grams of one size",
           wider="would draft no more than the block, with a warning in its log",
           versions="current; older builds have --draft-max and --draft-min, and no --spec-type",
           source="ggml-org/llama.cpp common/arg.cpp, common/speculative.cpp, common/ngram-map.cpp", write=write),
    copied.method("llama.cpp", write=write_copied, checked="llama-cpp-python 0.3.36 (0c1e570)", carrier="--spec-type, and options of the types",
                  source="ggml-org/llama.cpp common/arg.cpp, common/speculative.cpp"),
))  # fmt: skip
