"""Measurements that other tools wrote, as calibrations and traces.

medusa_pt.py    hit tensors of Medusa's heads_accuracy.py -> a whole trace
recall.py       recall@k per head, JSON
acceptance.py   one acceptance vector for all depths, as Sequoia keeps it
table.py        accuracies or counts, CSV
ranks.py        ranks that an engine logged, JSON lines -> a whole trace
files.py        what a file holds, before anything is made of it · rates.py   counts from shares

A kind is recognised by what the file holds. Where ranks are known state by state a `RankTrace` comes
out, so that trees can be replayed; else a `Calibration` of marginal counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.importing import acceptance, medusa_pt, ranks, recall, table
from treeopt.importing.files import Found, load_file


@dataclass(frozen=True)
class Kind:
    """A kind of file: what it is, how it is recognised and read, and the options that reading takes."""

    about: str
    matches: Callable[[Any], bool]
    read: Callable[..., Found]
    options: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    "medusa-pt": Kind("NAME_heads_accuracy.pt of Medusa's heads_accuracy.py", medusa_pt.matches, medusa_pt.read),
    "recall": Kind("recall@k of each head, JSON", recall.matches, recall.read, ("trials",)),
    "acceptance": Kind("an acceptance vector as Sequoia keeps it, .pt or JSON", acceptance.matches,
                       acceptance.read, ("trials", "heads")),
    "csv": Kind("head, rank or top_k, accuracy or hits, trials; or head, top1, top2, ...", table.matches,
                table.read, ("trials",)),
    "ranks": Kind('JSON lines of {"ranks": [[...], ...]}, one sequence each', ranks.matches, ranks.read),
}  # fmt: skip


def read_measurement(path: Path, kind: str | None = None, **options: int | None) -> tuple[str, Found]:
    """What ``path`` holds, and its kind: the one of `KINDS` that is asked for, or that the file tells.

    ``options`` that are not None go to the kind's reader; one that it does not take is refused.
    """
    if kind is not None and kind not in KINDS:
        raise InvalidInput(f"--from must be one of {', '.join(KINDS)}, but got {kind!r}.")
    content = load_file(path)
    if kind is None:
        kind = next((name for name, known in KINDS.items() if known.matches(content)), None)
    if kind is None:
        raise InvalidInput(
            f"{path} must be of a kind that treeopt import knows ({', '.join(KINDS)}), but looks like none: "
            "say which with --from."
        )
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in KINDS[kind].options:
            raise InvalidInput(f"--{name} does not go with a file of the kind {kind}: leave it out.")
    return kind, KINDS[kind].read(content, path, **given)
