"""Looks in an engine's release for every word that treeopt writes for it or reads of it, and names those that are gone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.engines_live.archives import AWAY, NotThereError, Release, newest_archive, release_of
from tests.engines_live.written import words_of_engine
from treeopt.engines import sglang, vllm
from treeopt.engines.measured.exposition import COUNTERS
from treeopt.engines.measured.requests import NAMES
from treeopt.engines.registry import ENGINES

HEADS = ("engine", "release", "checked against", "words", "gone")
NOT_THERE: dict[str, str] = {  # engines of whose exports the archive says nothing, and why
    "modelopt": "examples/specdec_bench is in its repository alone"
}
READ = {  # words of the files that `treeopt import` reads
    "vllm": (
        *("SpecDecoding metrics: ", "Mean acceptance length: ", "Accepted: ", "Drafted: ", "Per-position acceptance rate: "),
        *(str(field.validation_alias or name) for name, field in vllm.Run.model_fields.items()),
        *("speculative_decoding", *NAMES, *COUNTERS),
    ),
    "sglang": (*(names[0] for names in NAMES.values()), "meta_info", "sglext", "spec_tokens_details", *sglang.MEANS_IN_TEXT),
    "llama-cpp": ("draft acceptance = ", "per pos = (", "#gen drafts = ", "#acc tokens = ", "#acc rate/pos", *(f"{name}_total" for name in COUNTERS)),
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What was found of an engine: its release, how many words were looked up, and those that are gone."""

    engine: str
    release: str
    checked: str
    words: int = 0
    gone: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return [f"{self.engine} {self.release}: {line}" for line in self.gone]


def is_there(word: str, source: str) -> bool:
    """Whether a source has a word, or the words of a log line, whatever stands for its hyphens and dots.

    >>> is_there("--num-steps", "num_steps: int"), is_there("lib.run", "lib/run.py"), is_there("--steps", "n_steps")
    (True, True, False)
    """
    parts = [re.escape(part) for part in re.split(r"[-_.]", word.lstrip("-"))]
    before, after = (r"(?<!\w)" if word.lstrip("-")[0].isalnum() else "", r"(?!\w)" if word[-1].isalnum() else "")
    return re.search(before + "[-_./]".join(parts) + after, source) is not None


def report_of(engine: str, release: Release) -> Report:
    """The words of an engine's exports and imports that no source of a release has."""
    source = "\n".join([*release.texts, *release.texts.values()])
    users = {word: ("written by", sorted(methods)) for word, methods in words_of_engine(engine).items()}
    gone = [
        f"{word} is gone ({said} {', '.join(names)})"
        for word, (said, names) in users.items()
        if not is_there(word.text, source)
    ]
    gone += [
        f"{word.strip()!r} is gone (read by import)" for word in READ.get(engine, ()) if not is_there(word, source)
    ]
    return Report(
        engine, release.version, checked_of(engine), len(users) + len(READ.get(engine, ())), tuple(sorted(gone))
    )


def checked_of(engine: str) -> str:
    """The releases that the table's living methods were checked against."""
    return ", ".join(dict.fromkeys(m.checked for m in ENGINES[engine].methods if m.status == "live"))


def look(engine: str, version: str | None = None) -> Report:
    """An engine's newest release, or the one asked for, looked through; without words where there is none to be had."""
    package, checked = ENGINES[engine].package, checked_of(engine)
    assert package is not None
    try:
        if engine in NOT_THERE:
            return Report(engine, f"{newest_archive(package, version)[0]}, but {NOT_THERE[engine]}", checked)
        return report_of(engine, release_of(package, version))
    except AWAY as error:
        said = str(error) if isinstance(error, NotThereError) else f"the index was not reached: {error}"
        return Report(engine, said, checked)


def table(reports: Iterable[Report]) -> str:
    """The reports as a table; a release that is not the one checked is marked."""
    rows = [HEADS]
    for one in reports:
        same = re.search(rf"(?<![\d.]){re.escape(one.release)}(?![\d.])", one.checked)
        checked = one.checked if same or not one.words else f"{one.checked} (differs)"
        counts = (str(one.words), str(len(one.gone))) if one.words else ("–", "–")
        rows.append((one.engine, one.release, checked, *counts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
