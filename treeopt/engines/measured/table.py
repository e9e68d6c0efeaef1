"""Accuracies or counts as CSV, with a header.

head,rank,accuracy,trials     share of the trials at exactly this rank; ranks count from 0
head,rank,hits,trials         the same as counts
head,top_k,accuracy,trials    share at or below rank k - 1 (cumulative); k counts from 1; hits as well
head,top1,top2,...            one line a head, cumulative; with or without trials

Heads count from 0 or from 1. The lines may come in any order; --trials stands in for the column.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from treeopt.engines.measured.files import Found, head_order
from treeopt.engines.measured.rates import CUMULATIVE, assumption, counted, from_shares, known_trials
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import MOST_ROWS, limit_rows
from treeopt.files.fields import Count, Positive, Share, checked

MOST_COLUMNS = 1000
WIDE = re.compile(r"top[-_ ]?([1-9]\d{0,4})\Z", re.ASCII)


class TableRow(BaseModel):
    """A table's cells of a head at one place."""

    head: str
    rank: Count | None = None
    top_k: Positive | None = None
    accuracy: Share | None = None
    hits: Count | None = None
    trials: Positive | None = None


def matches(content: Any) -> bool:
    return isinstance(content, str) and "head" in _cells(_header(content))


def read(content: Any, path: Path, *, trials: int | None = None) -> Found:
    """Counts of a table, long or wide."""
    header = _cells(_header(content))
    if len(set(header)) < len(header):
        raise InvalidInput(f"{path} must name every column once, but its header is {quoted(header)}.")
    if len(header) > MOST_COLUMNS:
        raise InvalidInput(f"{path} may have {MOST_COLUMNS:,} columns, but has {len(header):,}.")
    wide = {name: int(found[1]) for name in header if (found := WIDE.fullmatch(name))}
    place, value = _one(("top_k", "rank"), header, path), _one(("hits", "accuracy"), header, path)
    if wide and not place and not value:
        head_order(wide, path)  # refuses columns that leave a k out
        place, value = "top_k", "accuracy"
    else:
        wide = {}
    if not place or not value:
        raise InvalidInput(
            f"{path} must have the columns head, rank or top_k, accuracy or hits, or head, top1, top2, ..., "
            f"but has {quoted(header)}."
        )
    rows = _rows(content, header, wide, path)
    heads = head_order(dict.fromkeys(row.head for row in rows), path)
    by_head: dict[str, list[TableRow]] = {head: [] for head in heads}
    for row in rows:
        by_head[row.head].append(row)
    read_heads = [_of_head(of_head, place, value, path) for of_head in by_head.values()]
    table = [values for values, _ in read_heads]
    given = [tried for _, tried in read_heads if tried is not None] or None
    if value == "accuracy":
        return from_shares(table, given, path, assumed=trials, cumulative=place == "top_k")
    if len({len(row) for row in table}) > 1:
        raise InvalidInput(f"{path} must have as many ranks for every head, but has {quoted([len(r) for r in table])}.")
    known = known_trials(given, len(heads), path, trials)
    notes = [CUMULATIVE] * (place == "top_k") + [assumption(known[0])] * (given is None)
    hits = np.array(table, dtype=np.int64)
    return Found(counted(np.diff(hits, axis=1, prepend=0) if place == "top_k" else hits, known, path), tuple(notes))


def _rows(content: str, header: list[str], wide: dict[str, int], path: Path) -> list[TableRow]:
    """One row a line, or of ``wide`` columns (name to k) one for each; empty cells are left out."""
    rows: list[TableRow] = []
    for number, line in enumerate(limit_rows(content.splitlines()[1:], path), 2):
        if not line.strip():
            continue
        if len(rows) > MOST_ROWS:
            raise InvalidInput(f"{path} may have {MOST_ROWS:,} cells, but has more.")
        cells = _cells(line)
        if len(cells) != len(header):
            raise InvalidInput(f"{path} line {number} must have {len(header)} cells, but it has {len(cells)}.")
        record: dict[str, object] = {name: cell for name, cell in zip(header, cells, strict=True) if cell}
        spread = [{**record, "top_k": k, "accuracy": record.get(name, "")} for name, k in wide.items()]
        try:
            rows += [checked(TableRow, one) for one in spread or [record]]
        except InvalidInput as error:
            raise InvalidInput(f"{path} line {number}: {error}") from None
    if not rows:
        raise InvalidInput(f"{path} must have lines below its header, but it has none.")
    return rows


def _of_head(rows: Sequence[TableRow], place: str, value: str, path: Path) -> tuple[list[float], int | None]:
    """The values of one head in order of rank, none missing and none twice, and its trials, the same in all lines."""
    first = 1 if place == "top_k" else 0
    cells = {getattr(row, place): getattr(row, value) for row in rows}
    wanted = range(first, first + len(rows))
    if cells.keys() != set(wanted) or None in cells.values():
        raise InvalidInput(
            f"{path} must give every head each {place} from {first} on once, with its {value}, but head "
            f"{quoted(rows[0].head)} has {quoted(list(cells))}."
        )
    trials = {row.trials for row in rows}
    if len(trials) > 1:
        raise InvalidInput(f"{path} must give a head the same trials in all its lines, but has {quoted(trials)}.")
    return [cells[at] for at in wanted], trials.pop()


def _one(names: tuple[str, ...], header: list[str], path: Path) -> str | None:
    """Which of two columns is there."""
    there = [name for name in names if name in header]
    if len(there) > 1:
        raise InvalidInput(f"{path} must have one of the columns {' and '.join(names)}, but has both.")
    return there[0] if there else None


def _header(content: str) -> str:
    return content.partition("\n")[0]


def _cells(line: str) -> list[str]:
    """The cells of a line; one where it is no CSV."""
    try:
        return [cell.strip() for cell in next(csv.reader([line.replace("\0", "")]), [])]
    except csv.Error:
        return [line]
