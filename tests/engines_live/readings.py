"""What treeopt reads of an engine: keys to look up, and texts that are made by the engine's own formats and read back.

A reading takes an engine's log format or metric names out of its source, fills in the counts below, and has
`treeopt.engines.measured` read the text. The same counts must come out.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from tests.engines_live.finders import cpp_format, cpp_logged, cpp_strings, cpp_sum, filled, python_format, strings
from tests.engines_live.written import Word, advised
from treeopt.engines import sglang, vllm
from treeopt.engines.imports import KINDS, read_measurement
from treeopt.engines.measured import requests

DRAFTS, REACHED = 1000, (800, 600, 420)
MANY = 2345  # scrapes have so many times as much: counts that do not fit six digits
DRAFTED, ACCEPTED = DRAFTS * len(REACHED), sum(REACHED)
RATES = ", ".join(f"{count / DRAFTS:.3f}" for count in REACHED)
MEAN = 1 + ACCEPTED / DRAFTS


@dataclass(frozen=True)
class Reading:
    """A text that is made from sources and read by ``kind``; ``words`` are what it must not do without."""

    what: str
    kind: str
    where: str  # patterns
    words: tuple[str, ...]
    text_of: Callable[[Mapping[str, str]], str]

    def problem(self, texts: Mapping[str, str]) -> str | None:
        """What is wrong with it; None where the counts come back."""
        path = Path()
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "read.txt"
                path.write_text(self.text_of(texts), encoding="utf-8")
                source = read_measurement(path, self.kind)[1].calibration
        except Exception as error:
            return f"{type(error).__name__}: {str(error).replace(str(path), 'it')}"
        survival = source.meta["survival"]
        if not source.meta.get("survival_stderr"):
            return "reads as rates without counts"
        return None if survival == pytest.approx([c / DRAFTS for c in REACHED], abs=1e-3) else f"reads as {survival}"


def only(texts: Mapping[str, str], found: Callable[[str], str | None], what: str) -> str:
    """What a finder finds in one of the texts; LookupError where it is in none."""
    for text in texts.values():
        if one := found(text):
            return one
    raise LookupError(f"no text with {what!r} in the source")


def vllm_log(texts: Mapping[str, str]) -> str:
    pattern = only(texts, lambda text: python_format(text, "SpecDecoding metrics: "), "SpecDecoding metrics: ")
    return filled(pattern, {
        "Mean acceptance length: ": MEAN, " Accepted: ": ACCEPTED, " Drafted: ": DRAFTED, "Per-position acceptance rate: ": RATES,
    })  # fmt: skip


def llama_log(texts: Mapping[str, str]) -> str:
    """The lines of two requests, and then those of their rates where these stand apart: by slot and task they are told."""
    source = {"": "\n".join(texts.values())}
    first = only(source, lambda text: cpp_logged(text, "draft acceptance = "), "draft acceptance = ")
    said = ""
    for line in filter(None, (first, cpp_logged(source[""], " per pos = ("))):
        for slot, drafts in ((0, 400), (1, 600)):
            accepted, drafted, mean = ACCEPTED // 2, drafts * len(REACHED), 1 + ACCEPTED / 2 / drafts
            rates = ", ".join(f"{count / 2 / drafts:.3f}" for count in REACHED)
            said += filled(line, {
                "slot ": "print_timing", "id ": slot, "task ": 42 + slot, "acceptance = ": accepted / drafted,
                " accepted": accepted, " generated": drafted, "mean len = ": mean, "mean acceptance length = ": mean,
                "rate per position = (": rates, "per pos = (": rates,
            })  # fmt: skip
    return said


def llama_jsonl(texts: Mapping[str, str]) -> str:
    """The same as --log-jsonl prints it: what comes from ``data()`` is the line."""
    source = "".join(text for path, text in texts.items() if path.endswith("/log.cpp"))
    pairs = re.findall(r'^ *\{"(\w+)", *(?:"(\w+)"|\w+\.data\(\))\},$', source, re.MULTILINE)
    lines = llama_log(texts).splitlines(keepends=True)
    return "".join(json.dumps({key: constant or line for key, constant in pairs}) + "\n" for line in lines)


def llama_statistics(texts: Mapping[str, str]) -> str:
    """The process's line: its mean and rates are put together apart."""
    line = only(texts, lambda text: cpp_format(text, "#gen drafts = "), "#gen drafts = ")
    tail = only(texts, lambda text: cpp_sum(text, "str_stats"), "str_stats = ")
    return filled(line, {
        "statistics ": "draft-simple", "#gen drafts = ": DRAFTS, "#acc drafts = ": REACHED[0], "#gen tokens = ": DRAFTED,
        "#acc tokens = ": ACCEPTED, "calls(b,g,a) = ": 1, " ": DRAFTS,
    }).rstrip("\n") + filled(tail, {"#mean acc len = ": f"{MEAN:.2f}", "#acc rate/pos = (": RATES}) + "\n"  # fmt: skip


def exposition(names: Iterable[str], position: str, number: Callable[[float], str]) -> str:
    """A scrape with these counters, without ``_total``; the one by position has a label for it."""
    lines = []
    for name in sorted(set(names)):
        counts = {"num_drafts": DRAFTS, "num_draft_tokens": DRAFTED, "num_accepted_tokens": ACCEPTED}
        if name.endswith("_per_pos"):
            lines += [f'{name}_total{{{position}="{i}"}} {MANY * count}' for i, count in enumerate(REACHED)]
        else:
            count = next((count for suffix, count in counts.items() if name.endswith(suffix)), 1)
            lines.append(f"{name}_total {number(MANY * count)}")
    return "\n".join([*lines, ""])


def vllm_scrape(texts: Mapping[str, str]) -> str:
    found = {one for text in texts.values() for one in strings(text)}
    label = "position" if "position" in found else "unknown"
    return exposition((one for one in found if re.fullmatch(r"vllm:spec_decode_\w+", one)), label, lambda n: f"{n:.1f}")


def llama_scrape(texts: Mapping[str, str]) -> str:
    """C++ prints a double with six digits, and the counters by position whole."""
    found = {one for text in texts.values() for one in cpp_strings(text)}
    labelled = [m for one in found if (m := re.match(r"(llamacpp:\w+_per_pos)_total\{(\w+)=", one))]
    prefix = "llamacpp:" if any(one.startswith("llamacpp:") for one in found) else ""
    names = [prefix + one.removesuffix("_total") for one in found if re.fullmatch(r"spec_decode_\w+_total", one)]
    return exposition([*names, *(m[1] for m in labelled)], labelled[0][2] if labelled else "", lambda n: f"{n:g}")


SERVER, COMMON = "vendor/llama.cpp/tools/server/", "vendor/llama.cpp/common/"
READINGS: dict[str, tuple[Reading, ...]] = {
    "vllm": (
        Reading("log line 'SpecDecoding metrics'", "vllm-metrics", "vllm/v1/spec_decode/metrics.py",
                ("SpecDecoding metrics", "Mean acceptance length", "Accepted: ", "Drafted: ", "Per-position acceptance rate"), vllm_log),
        Reading("scrape of /metrics", "vllm-metrics", "vllm/v1/spec_decode/metrics.py",
                ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos", "position"), vllm_scrape),
    ),
    "llama-cpp": (
        Reading("log line 'draft acceptance'", "llama-cpp", f"{SERVER}server-context.cpp {SERVER}server-common.h",
                ("draft acceptance", "accepted", "generated", "mean len", "per pos", "id", "task"), llama_log),
        Reading("line of --log-jsonl", "llama-cpp", f"{SERVER}server-context.cpp {SERVER}server-common.h {COMMON}log.cpp",
                ("type", "log", "msg"), llama_jsonl),
        Reading("log line 'statistics'", "llama-cpp", f"{COMMON}speculative.cpp",
                ("statistics", "#gen drafts", "#acc drafts", "#gen tokens", "#acc tokens", "#mean acc len", "#acc rate/pos"),
                llama_statistics),
        Reading("scrape of /metrics", "llama-cpp", f"{SERVER}server-task.cpp",
                ("llamacpp", "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_per_pos_total", "position"), llama_scrape),
    ),
}  # fmt: skip


KINDS_OF = {"vllm": ("vllm-metrics", "vllm-requests"), "sglang": ("sglang",), "llama-cpp": ("llama-cpp",)}


def words_read(engine: str) -> dict[Word, set[str]]:
    """The keys of JSON that are read, the texts by which files are known, and the options that readers tell of."""
    vllm_requests = {field.name for field in fields(requests.RequestDrafts)} | {"speculative_decoding"}
    runs = {field.alias for field in vllm.Run.model_fields.values() if field.alias}
    names = {names[0] for names in requests.NAMES.values()}
    keys = {
        "vllm-metrics": runs | {"spec_decode_acceptance_length"},
        "vllm-requests": vllm_requests,
        "sglang": names | {"meta_info", "sglext", "spec_tokens_details", *sglang.MEANS},
        "llama-cpp": {"timings", "draft_n"},
    }
    others = {
        "vllm-requests": {Word("read key", "metrics", "a response"), Word("read key", "choices", "a response")},
        "sglang": {
            Word("read key", "choices", "a response"),
            *(Word("read text", one) for one in sglang.MEANS_IN_TEXT),
        },
    }
    found: dict[Word, set[str]] = {}
    for kind in KINDS_OF.get(engine, ()):
        said = f"{KINDS[kind].needed} {inspect.getsource(inspect.getmodule(KINDS[kind].read))}"
        asked = {Word("read key", key) for key in re.findall(r'"(\w+)": true', said)}
        levels = {Word("value", level, flag) for flag, level in re.findall(r"(--per-request-[a-z-]+) (\w+)", said)}
        read = {Word("read key", key) for key in keys[kind]} | others.get(kind, set())
        for word in read | set(advised(said)) | asked | levels:
            found.setdefault(word, set()).add(kind)
    return found
