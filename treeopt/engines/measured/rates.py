"""Counts from tables of accuracies or hits, as CSV with a header.

head,rank,accuracy,trials     share of the trials at exactly this rank; ranks count from 0
head,rank,hits,trials         the same as counts
head,top_k,accuracy,trials    share at or below rank k - 1 (cumulative); k counts from 1; hits as well
head,top1,top2,...            one line a head, cumulative; with or without trials

Heads count from 0 or from 1. The lines may come in any order; --trials stands in for the column. The classical slip is to take a
cumulative share for that of one rank: it makes deep candidates look nearly certain.

table  : (K, R)  of head k at rank r, or up to it
trials : (K,)    states at which head k had something to guess
"""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from treeopt.engines.measured.files import Measurement, head_order
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import limit_rows
from treeopt.files.fields import MOST, Count, Positive, Share, checked
from treeopt.records.calibration import Calibration
from treeopt.trees.tree import MOST_DEPTH, MOST_RANK

SLACK = 1e-3  # shares may sum to this much above one: tools round what they print
CUMULATIVE = "The shares are cumulative (top-1, top-2, ...) and were turned into differences."
ASSUMED = "The file has no counts: {} trials a head were assumed, and every standard error rests on that."
MOST_COLUMNS = 1000
WIDE = re.compile(r"top[-_ ]?([1-9]\d{0,4})\Z", re.ASCII)


class TableRow(BaseModel):
    """A head's cells of a table, at one rank or up to one."""

    head: str
    rank: Count | None = None
    top_k: Positive | None = None
    accuracy: Share | None = None
    hits: Count | None = None
    trials: Positive | None = None


class Columns(NamedTuple):
    """The columns of a table: "rank" or "top_k", "accuracy" or "hits"; and columns such as "top3" with their k."""

    place: str
    value: str
    wide: dict[str, int]


def is_table(content: Any) -> bool:
    return isinstance(content, str) and "head" in _cells(content.partition("\n")[0])


def read_table(content: Any, path: Path, *, trials: int | None = None) -> Measurement:
    """The calibration of a table. ``trials`` are those of every head if the table has none."""
    columns = columns_of(_cells(content.partition("\n")[0]), path)
    by_head: dict[str, list[TableRow]] = {}
    for row in limit_rows(_rows(content, columns.wide, path), path):
        by_head.setdefault(row.head, []).append(row)
    if not by_head:
        raise InvalidInput(f"{path} must have lines below its header, but it has none.")
    heads = [_of_head(by_head[head], columns, path) for head in head_order(by_head, path)]
    of_heads, notes = trials_of([tried for _, tried in heads if tried is not None], len(heads), path, trials)
    table = check_table([values for values, _ in heads], path)
    upto = table if columns.place == "top_k" else table.cumsum(1)
    if columns.place == "top_k":
        notes.insert(0, CUMULATIVE)
        if (falls := (np.diff(table, axis=1) < 0).any(1)).any():
            raise InvalidInput(
                f"{path} must have cumulative shares that never fall, but those of head {falls.argmax() + 1} do."
            )
    if columns.value == "accuracy":
        k = int(upto[:, -1].argmax())
        if upto[k, -1] > 1 + SLACK:
            raise InvalidInput(
                f"{path} must have shares of single ranks that sum to 1 at most, but those of head {k + 1} sum to "
                f"{upto[k, -1]:.3g}."
            )
        upto = np.rint(np.minimum(upto, 1) * np.array(of_heads)[:, None])
    ends: NDArray[np.int64] = upto.astype(np.int64)
    hits = np.concatenate([ends[:, :1], ends[:, 1:] - ends[:, :-1]], axis=1)
    return Measurement(counted(hits, of_heads, path), tuple(notes))


def columns_of(header: Sequence[str], path: Path) -> Columns:
    if len(set(header)) < len(header) or len(header) > MOST_COLUMNS:
        raise InvalidInput(f"{path} must name up to {MOST_COLUMNS:,} columns, each once, but has {quoted(header)}.")
    places = [name for name in ("top_k", "rank") if name in header]
    values = [name for name in ("hits", "accuracy") if name in header]
    wide = {name: int(match[1]) for name in header if (match := WIDE.fullmatch(name))}
    if wide and not places and not values:
        head_order(wide, path)  # refuses columns that leave a k out
        return Columns("top_k", "accuracy", wide)
    if len(places) == len(values) == 1:
        return Columns(places[0], values[0], {})
    raise InvalidInput(
        f"{path} must have the columns head, rank or top_k, accuracy or hits, or head, top1, top2, ..., "
        f"but has {quoted(header)}."
    )


def trials_of(in_file: list[int], heads: int, path: Path, assumed: int | None) -> tuple[list[int], list[str]]:
    """The trials of every head, and a note if --trials assumes them. A file has them, or they are assumed; never both."""
    if not in_file and assumed is None:
        raise InvalidInput(f"{path} does not say how many trials its shares rest on: pass `trials`.")
    if in_file and assumed is not None:
        raise InvalidInput(f"{path} says how many trials its shares rest on: leave `trials` out.")
    of_heads, notes = in_file, list[str]()
    if assumed is not None:
        of_heads, notes = [assumed] * heads, [ASSUMED.format(assumed)]
    if len(of_heads) != heads or not all(1 <= n <= MOST for n in of_heads):
        raise InvalidInput(
            f"{path} must have trials for each of its {heads} heads, at least 1, but has {quoted(of_heads)}."
        )
    return of_heads, notes


def check_table(rows: Sequence[Sequence[float]], path: Path) -> NDArray[np.float64]:
    """(K, R) values. Raises InvalidInput for rows of different lengths, or too many."""
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise InvalidInput(f"{path} must have as many ranks for every head, but has {quoted(sorted(widths))}.")
    if len(rows) > MOST_DEPTH or max(widths) > MOST_RANK + 1:
        raise InvalidInput(
            f"{path} may have {MOST_DEPTH} heads and {MOST_RANK + 1:,} ranks, but has {len(rows):,} and {max(widths):,}."
        )
    return np.array(rows, dtype=np.float64)


def counted(hits: NDArray[np.int64], trials: Sequence[int], path: Path) -> Calibration:
    """The calibration of these counts; InvalidInput names the file."""
    try:
        return Calibration(hits, np.array(trials))
    except InvalidInput as error:
        raise InvalidInput(f"{path} cannot be a calibration: {error}") from None


def _rows(content: str, wide: dict[str, int], path: Path) -> Iterator[TableRow]:
    """The rows of a table, one a line. A line with ``wide`` columns becomes a row for each of them.

    Empty cells are left out.
    """
    lines = content.splitlines()
    header = _cells(lines[0])
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        cells = _cells(line)
        if len(cells) != len(header):
            raise InvalidInput(f"{path} line {number} must have {len(header)} cells, but it has {len(cells)}.")
        record: dict[str, object] = {name: cell for name, cell in zip(header, cells, strict=True) if cell}
        records = [{**record, "top_k": k, "accuracy": record.get(name, "")} for name, k in wide.items()] or [record]
        try:
            yield from [checked(TableRow, row) for row in records]
        except InvalidInput as error:
            raise InvalidInput(f"{path} line {number}: {error}") from None


def _of_head(rows: Sequence[TableRow], columns: Columns, path: Path) -> tuple[list[float], int | None]:
    """The values of one head in order of rank, and its trials. Raises InvalidInput for a rank that is missing or comes twice."""
    place, value = columns.place, columns.value
    first = 1 if place == "top_k" else 0
    cells = {getattr(row, place): getattr(row, value) for row in rows}
    places = range(first, first + len(rows))
    if cells.keys() != set(places) or None in cells.values():
        raise InvalidInput(
            f"{path} must give every head each {place} from {first} on once, with its {value}, but head "
            f"{quoted(rows[0].head)} has {quoted(list(cells))}."
        )
    trials = {row.trials for row in rows}
    if len(trials) > 1:
        raise InvalidInput(f"{path} must give a head the same trials in all its lines, but has {quoted(trials)}.")
    return [cells[rank] for rank in places], trials.pop()


def _cells(line: str) -> list[str]:
    """The cells of a line; the whole line as one cell if it is no CSV."""
    try:
        return [cell.strip() for cell in next(csv.reader([line.replace("\0", "")]), [])]
    except csv.Error:
        return [line]
