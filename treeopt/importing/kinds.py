"""The kinds of files that are imported: how each is recognised, and what reads it."""

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
    sequoia,
    sglang,
    table,
    tensorrt_llm,
    vllm_metrics,
    vllm_requests,
)
from treeopt.importing.drafters import DRAFTERS
from treeopt.importing.files import Found, load_file
from treeopt.importing.survival import Counted


@dataclass(frozen=True)
class Kind:
    """A kind of file: what it must hold, how that is recognised and read, and the options that reading takes."""

    needed: str
    matches: Callable[[Any], bool]
    read: Callable[..., Found | Counted]
    options: tuple[str, ...] = ()
    takes_several: bool = False  # whether reading takes a list of files


KINDS: dict[str, Kind] = {
    "medusa-pt": Kind("one table of hits a head, as Medusa's heads_accuracy.py saves it", medusa_pt.matches, medusa_pt.read),
    "recall": Kind('{"recall": ...} or heads with "recall@1"', recall.matches, recall.read, ("trials",)),
    "acceptance": Kind("one vector of chances, or an object with 'acceptance'", sequoia.matches, sequoia.read, ("trials", "heads")),
    "csv": Kind("CSV with a column 'head' in its first line", table.matches, table.read, ("trials",)),
    "ranks": Kind('{"ranks": [[...], ...]} in every line', ranks.matches, ranks.read),
    "vllm-metrics": Kind("vLLM's /metrics, its log lines 'SpecDecoding metrics', or results of vllm bench serve with speculation",
                         vllm_metrics.matches, vllm_metrics.read, takes_several=True),
    "vllm-requests": Kind("responses with metrics.speculative_decoding (serve with --per-request-spec-decode-metrics summary, and ask "
                          "streams for stream_options.include_usage), or AIPerf's records of them",
                          vllm_requests.matches, vllm_requests.read, takes_several=True),
    "sglang": Kind("responses of SGLang with meta_info or sglext", sglang.matches, sglang.read, takes_several=True),
    "tensorrt-llm": Kind(f"TensorRT-LLM's figures of drafts, as all files of an import ({tensorrt_llm.ASK})",
                         tensorrt_llm.matches, tensorrt_llm.read, takes_several=True),
    "llama-cpp": Kind("log lines 'draft acceptance = ...' of llama.cpp", llama_cpp.matches, llama_cpp.read, takes_several=True),
}  # fmt: skip


def read_measurement(
    paths: Path | Sequence[Path], kind: str | None = None, *, drafter: str | None = None, **options: int | str | None
) -> tuple[str, Found]:
    """What files hold, and their kind: the one of `KINDS` that is asked for, or that the first file tells.

    ``drafter`` is the kind in `DRAFTERS` that made the drafts.
    ``options`` that are not None go to the kind's reader; one that it does not take is refused.
    """
    if kind is not None and kind not in KINDS:
        raise InvalidInput(f"--from must be one of {', '.join(KINDS)}, but got {kind!r}.")
    if drafter is not None and drafter not in DRAFTERS:
        raise InvalidInput(f"--drafter must be one of {', '.join(DRAFTERS)}, but got {drafter!r}.")
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
    for content, path in zip(contents, paths, strict=True):
        if not known.matches(content):
            raise InvalidInput(f"{path} must hold {known.needed}, but holds none.")
    if not known.takes_several and len(paths) > 1:
        raise InvalidInput(f"A file of the kind {kind} is imported alone, but got {len(paths)} files.")
    where = (list(zip(contents, paths, strict=True)),) if known.takes_several else (contents[0], paths[0])
    found = known.read(*where, **given)
    return kind, found.calibration(drafter) if isinstance(found, Counted) else found
