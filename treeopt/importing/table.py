"""Accuracies or counts as CSV, with a header.

head,rank,accuracy,trials     share of the trials at exactly this rank; ranks count from 0
head,rank,hits,trials         the same as counts
head,top_k,accuracy,trials    share at or below rank k - 1 (cumulative); k counts from 1; hits as well
head,top1,top2,...            one line a head, cumulative; with or without trials

Heads count from 0 or from 1. The lines may come in any order; --trials stands in for the column.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.importing.files import Found, head_order, quoted
from treeopt.importing.rates import CUMULATIVE, assumption, counted, from_shares, known_trials

Row = dict[str, str]
N = TypeVar("N", int, float)
WIDE = re.compile(r"top[-_ ]?([1-9]\d{0,4})\Z", re.ASCII)


def matches(content: Any) -> bool:
    return isinstance(content, str) and "head" in _fields(content.splitlines()[0])


def read(content: Any, path: Path, *, trials: int | None = None) -> Found:
    """Counts of a table, long or wide."""
    if not matches(content):
        raise InvalidInput(f"{path} must be CSV with a column 'head' in its first line.")
    lines = [line for line in content.splitlines() if line.strip()]
    header = _fields(lines[0])
    if len(set(header)) < len(header):
        raise InvalidInput(f"{path} must name every column once, but its header is {quoted(lines[0])}.")
    rows = [dict(zip(header, _fields(line), strict=False)) for line in lines[1:]]
    if not rows or any(len(_fields(line)) != len(header) for line in lines[1:]):
        raise InvalidInput(f"{path} must have lines of {len(header)} cells below its header, but it has not.")
    wide = [name for name in header if WIDE.fullmatch(name)]
    place, value = _one(("top_k", "rank"), header, path), _one(("hits", "accuracy"), header, path)
    if wide and not place and not value:
        rows = [{**row, "top_k": str(k), "accuracy": row[name]} for row in rows for k, name in _by_k(wide, path)]
        place, value = "top_k", "accuracy"
    if not place or not value:
        raise InvalidInput(
            f"{path} must have the columns head, rank or top_k, accuracy or hits, or head, top1, top2, ..., "
            f"but has {quoted(header)}."
        )
    heads = head_order(dict.fromkeys(row["head"] for row in rows), path)
    table = [_cells([row for row in rows if row["head"] == head], place, value, path) for head in heads]
    tried = [_trials([row for row in rows if row["head"] == head], path) for head in heads]
    given = None if "trials" not in header else tried
    if value == "accuracy":
        return from_shares(table, given, path, assumed=trials, cumulative=place == "top_k")
    if len({len(row) for row in table}) > 1:
        raise InvalidInput(f"{path} must have as many ranks for every head, but has {[len(r) for r in table]}.")
    if any(hits < 0 or hits != int(hits) or hits > 2**53 for row in table for hits in row):
        raise InvalidInput(f"{path} must have hits that are whole numbers from 0 on, but has others.")
    known = known_trials(given, len(heads), path, trials)
    hits = np.array(table, dtype=np.int64)
    notes = [CUMULATIVE] * (place == "top_k") + [assumption(known[0])] * (given is None)
    if place == "top_k":
        hits = np.diff(hits, axis=1, prepend=0)
    return Found(counted(hits, known, path), tuple(notes))


def _cells(rows: list[Row], place: str, value: str, path: Path) -> list[float]:
    """The values of one head in order of rank, none missing and none twice."""
    first = 1 if place == "top_k" else 0
    cells = {_number(int, row, place, path): _number(float, row, value, path) for row in rows}
    if len(cells) < len(rows) or sorted(cells) != list(range(first, first + len(cells))):
        raise InvalidInput(
            f"{path} must give every head each {place} from {first} on once, but head {quoted(rows[0]['head'])} "
            f"has {quoted([row[place] for row in rows])}."
        )
    return [cells[at] for at in sorted(cells)]


def _trials(rows: list[Row], path: Path) -> int:
    """The trials of one head, the same in all of its lines."""
    found = {_number(int, row, "trials", path) for row in rows if "trials" in row}
    if len(found) > 1:
        raise InvalidInput(f"{path} must give a head the same trials in all its lines, but has {quoted(found)}.")
    return found.pop() if found else 0


def _number(kind: Callable[[str], N], row: Row, column: str, path: Path) -> N:
    try:
        value = kind(row[column])
        if not math.isfinite(value):
            raise ValueError
    except (ValueError, OverflowError):
        raise InvalidInput(f"{path} must have numbers under {column!r}, but has {quoted(row[column])}.") from None
    return value


def _by_k(names: list[str], path: Path) -> list[tuple[int, str]]:
    """The wide columns by k."""
    return [(int(name.lstrip("top-_ ")), name) for name in head_order(names, path)]


def _one(names: tuple[str, ...], header: list[str], path: Path) -> str | None:
    """Which of two columns is there."""
    there = [name for name in names if name in header]
    if len(there) > 1:
        raise InvalidInput(f"{path} must have one of the columns {' and '.join(names)}, but has both.")
    return there[0] if there else None


def _fields(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line.replace("\0", "")]), [])]
