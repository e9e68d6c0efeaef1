"""Measurements that other tools wrote, as calibrations and traces.

medusa_pt.py    hit tensors of Medusa's heads_accuracy.py -> a whole trace
recall.py       recall@k per head, JSON
acceptance.py   one acceptance vector for all depths, as Sequoia keeps it
table.py        accuracies or counts, CSV
ranks.py        ranks that an engine logged, JSON lines -> a whole trace
vllm_metrics.py vllm_requests.py sglang.py tensorrt_llm.py llama_cpp.py
                what serving engines counted of their drafts -> the survival of a chain, with survival.py,
                exposition.py (Prometheus), requests.py (histograms of requests), printed.py (rounded rates)
files.py        what a file holds, before anything is made of it · rates.py   counts from shares

A kind is recognised by what the file holds. Where ranks are known state by state a `RankTrace` comes
out, so that trees can be replayed; else a `Calibration` of marginal counts, or of those that a chain needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.importing import (
    llama_cpp,
    medusa_pt,
    ranks,
    recall,
    sglang,
    table,
    tensorrt_llm,
    vllm_metrics,
    vllm_requests,
)
from treeopt.importing import sequoia as acceptance
from treeopt.importing.files import Found, load_file


@dataclass(frozen=True)
class Kind:
    """A kind of file: what it is, how it is recognised and read, and the options that reading takes."""

    about: str
    matches: Callable[[Any], bool]
    read: Callable[..., Found]
    options: tuple[str, ...] = ()
    takes_several: bool = False  # whether reading takes a list of files


KINDS: dict[str, Kind] = {
    "medusa-pt": Kind("NAME_heads_accuracy.pt of Medusa's heads_accuracy.py", medusa_pt.matches, medusa_pt.read),
    "recall": Kind("recall@k of each head, JSON", recall.matches, recall.read, ("trials",)),
    "acceptance": Kind("an acceptance vector as Sequoia keeps it, .pt or JSON", acceptance.matches,
                       acceptance.read, ("trials", "heads")),
    "csv": Kind("head, rank or top_k, accuracy or hits, trials; or head, top1, top2, ...", table.matches,
                table.read, ("trials",)),
    "ranks": Kind('JSON lines of {"ranks": [[...], ...]}, one sequence each', ranks.matches, ranks.read),
    "vllm-metrics": Kind("vLLM's /metrics (before and after), log, or results of vllm bench serve and sweep",
                         vllm_metrics.matches, vllm_metrics.read, takes_several=True),
    "vllm-requests": Kind("vLLM's responses with per-request draft metrics, or AIPerf's records", vllm_requests.matches,
                          vllm_requests.read, takes_several=True),
    "sglang": Kind("SGLang's responses with meta_info or sglext", sglang.matches, sglang.read, takes_several=True),
    "tensorrt-llm": Kind("TensorRT-LLM's /prometheus/metrics (before and after), or responses with histograms",
                         tensorrt_llm.matches, tensorrt_llm.read, takes_several=True),
    "llama-cpp": Kind("llama.cpp's log lines of draft acceptance, or its /metrics", llama_cpp.matches, llama_cpp.read, takes_several=True),
}  # fmt: skip


def read_measurement(
    paths: Path | Sequence[Path], kind: str | None = None, **options: int | str | None
) -> tuple[str, Found]:
    """What files hold, and their kind: the one of `KINDS` that is asked for, or that the first file tells.

    ``options`` that are not None go to the kind's reader; one that it does not take is refused.
    """
    if kind is not None and kind not in KINDS:
        raise InvalidInput(f"--from must be one of {', '.join(KINDS)}, but got {kind!r}.")
    paths = [paths] if isinstance(paths, Path) else list(paths)
    contents = [load_file(path) for path in paths]
    if kind is None:
        kind = next((name for name, known in KINDS.items() if known.matches(contents[0])), None)
    if kind is None:
        raise InvalidInput(
            f"{paths[0]} must be of a kind that treeopt import knows ({', '.join(KINDS)}), but looks like none: "
            "say which with --from."
        )
    known = KINDS[kind]
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in known.options:
            raise InvalidInput(f"--{name} does not go with a file of the kind {kind}: leave it out.")
    if known.takes_several:
        return kind, known.read(list(zip(contents, paths, strict=True)), **given)
    if len(paths) > 1:
        raise InvalidInput(f"A file of the kind {kind} is imported alone, but got {len(paths)} files.")
    return kind, known.read(contents[0], paths[0], **given)
