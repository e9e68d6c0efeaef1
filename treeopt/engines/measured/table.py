"""Accuracies or counts as CSV, with a header.

head,rank,accuracy,trials     share of the trials at exactly this rank; ranks count from 0
head,rank,hits,trials         the same as counts
head,top_k,accuracy,trials    share at or below rank k - 1 (cumulative); k counts from 1; hits as well
head,top1,top2,...            one line a head, cumulative; with or without trials

Heads count from 0 or from 1. The lines may come in any order; --trials stands in for the column.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from treeopt.engines.measured.files import Found, head_order
from treeopt.engines.measured.rates import CUMULATIVE, counted, from_shares, known_trials
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import limit_rows
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
    return isinstance(content, str) and "head" in _cells(content.partition("\n")[0])


def read(content: Any, path: Path, *, trials: int | None = None) -> Found:
    """Counts of a table, long or wide."""
    header = _cells(content.partition("\n")[0])
    if len(set(header)) < len(header) or len(header) > MOST_COLUMNS:
        raise InvalidInput(f"{path} must name up to {MOST_COLUMNS:,} columns, each once, but has {quoted(header)}.")
    wide = {name: int(found[1]) for name in header if (found := WIDE.fullmatch(name))}
    places = [name for name in ("top_k", "rank") if name in header]
    values = [name for name in ("hits", "accuracy") if name in header]
    if wide and not places and not values:
        head_order(wide, path)  # refuses columns that leave a k out
        places, values = ["top_k"], ["accuracy"]
    elif (len(places), len(values)) != (1, 1):
        raise InvalidInput(
            f"{path} must have the columns head, rank or top_k, accuracy or hits, or head, top1, top2, ..., "
            f"but has {quoted(header)}."
        )
    else:
        wide = {}
    (place,), (value,) = places, values
    by_head: dict[str, list[TableRow]] = {}
    for row in limit_rows(_rows(content, header, wide, path), path):
        by_head.setdefault(row.head, []).append(row)
    if not by_head:
        raise InvalidInput(f"{path} must have lines below its header, but it has none.")
    heads = [_of_head(by_head[head], place, value, path) for head in head_order(by_head, path)]
    table = [row for row, _ in heads]
    given = [tried for _, tried in heads if tried is not None] or None
    if value == "accuracy":
        return from_shares(table, given, path, assumed=trials, cumulative=place == "top_k")
    if len({len(row) for row in table}) > 1:
        raise InvalidInput(f"{path} must have as many ranks for every head, but has {quoted([len(r) for r in table])}.")
    known, assumption = known_trials(given, len(heads), path, trials)
    hits = np.array(table, dtype=np.int64)
    if place == "rank":
        return Found(counted(hits, known, path), tuple(assumption))
    return Found(counted(np.diff(hits, axis=1, prepend=0), known, path), (CUMULATIVE, *assumption))


def _rows(content: str, header: list[str], wide: dict[str, int], path: Path) -> Iterator[TableRow]:
    """One row a line, or of ``wide`` columns (name to k) one for each; empty cells are left out."""
    for number, line in enumerate(content.splitlines()[1:], 2):
        if not line.strip():
            continue
        cells = _cells(line)
        if len(cells) != len(header):
            raise InvalidInput(f"{path} line {number} must have {len(header)} cells, but it has {len(cells)}.")
        record: dict[str, object] = {name: cell for name, cell in zip(header, cells, strict=True) if cell}
        spread = [{**record, "top_k": k, "accuracy": record.get(name, "")} for name, k in wide.items()]
        try:
            yield from [checked(TableRow, one) for one in spread or [record]]
        except InvalidInput as error:
            raise InvalidInput(f"{path} line {number}: {error}") from None


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


def _cells(line: str) -> list[str]:
    """The cells of a line; one where it is no CSV."""
    try:
        return [cell.strip() for cell in next(csv.reader([line.replace("\0", "")]), [])]
    except csv.Error:
        return [line]
