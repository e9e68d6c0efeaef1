"""Counts from the shares that tools print, cumulative or rank by rank.

shares : (K, R)  of head k, the true token among its first r + 1 candidates, or at exactly rank r
trials : (K,)    states at which head k had something to guess

recall@k of each head as JSON: the share of states that have the true token among the first k candidates.

{"recall": {"head_0": {"1": 0.6, "2": 0.7, ...}, ...}, "total_predictions": {"0": 5000, ...}}
    as cactus-compute/fmtp writes it (scripts/measure_head_accuracy.py, commit da360d4)
{"head_0": {"recall@1": 0.6, "recall@2": 0.7, ...}, ...}
{"recall": [[0.6, 0.7, ...], ...], "trials": [5000, ...]}

Named by k, shares are cumulative; a bare table of rows tells by itself: rows that never fall are. Taking
recall@k for the share of one rank is the classical slip: it makes deep candidates look nearly certain.

Accuracies or counts as CSV, with a header:

head,rank,accuracy,trials     share of the trials at exactly this rank; ranks count from 0
head,rank,hits,trials         the same as counts
head,top_k,accuracy,trials    share at or below rank k - 1 (cumulative); k counts from 1; hits as well
head,top1,top2,...            one line a head, cumulative; with or without trials

Heads count from 0 or from 1. The lines may come in any order; --trials stands in for the column.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from treeopt.engines.measured.files import Found, head_order
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import limit_rows
from treeopt.files.fields import MOST, Count, Positive, Share, checked
from treeopt.files.storage import typed
from treeopt.records.calibration import Calibration
from treeopt.trees.tree import MOST_DEPTH, MOST_RANK

SLACK = 1e-3  # shares may sum to this much above one: tools round what they print
K_NAME = re.compile(r"(?:recall@|top[-_ ]?|@)?([1-9]\d{0,4})\Z", re.ASCII | re.IGNORECASE)
TOTALS = ("trials", "totals", "total", "total_predictions")
CUMULATIVE = "The shares are cumulative (top-1, top-2, ...) and were turned into differences."
PER_RANK = "The shares fall along the ranks, so they were taken as those of single ranks."
ASSUMED = "The file has no counts: {} trials a head were assumed, and every standard error rests on that."
LEFT_OUT = "Ranks beyond {} were left out: the file skips values of k after that."
MOST_COLUMNS = 1000
WIDE = re.compile(r"top[-_ ]?([1-9]\d{0,4})\Z", re.ASCII)


def from_shares(
    rows: Sequence[Sequence[float]],
    trials: Sequence[int] | None,
    path: Path,
    *,
    assumed: int | None = None,
    cumulative: bool | None = None,
) -> Found:
    """Counts of shares.

    assumed    : trials of every head where the file has none (--trials)
    cumulative : whether the shares are; None to tell by themselves, since cumulative ones never fall

    >>> measurement = from_shares([[0.6, 0.8], [0.4, 0.5]], [10, 10], Path("x.json"))
    >>> measurement.source.hits.tolist(), measurement.notes[0][:25]
    ([[6, 2], [4, 1]], 'The shares are cumulative')
    """
    shares = check_shares(rows, path)
    falls = (np.diff(shares, axis=1) < 0).any(1)
    notes = []
    if cumulative is None:
        cumulative = not falls.any() and shares.shape[1] > 1
        notes += [CUMULATIVE if cumulative else PER_RANK] if shares.shape[1] > 1 else []
    elif cumulative:
        notes.append(CUMULATIVE)
    if cumulative and falls.any():
        raise InvalidInput(
            f"{path} must have cumulative shares that never fall, but those of head {falls.argmax() + 1} do."
        )
    upto = shares if cumulative else shares.cumsum(1)
    if upto[:, -1].max() > 1 + SLACK:
        k = int(upto[:, -1].argmax())
        raise InvalidInput(
            f"{path} must have shares of single ranks that sum to 1 at most, or cumulative ones that never "
            f"fall, but those of head {k + 1} sum to {upto[k, -1]:.3g}."
        )
    of_heads, assumption = trials_of(trials, len(shares), path, assumed)
    ends = np.rint(np.minimum(upto, 1) * np.array(of_heads)[:, None]).astype(np.int64)
    return Found(counted(np.diff(ends, axis=1, prepend=0), of_heads, path), (*notes, *assumption))


def check_shares(rows: Sequence[Sequence[float]], path: Path) -> NDArray[np.float64]:
    """(K, R) shares; InvalidInput where they are no table of numbers from 0 to 1."""
    widths = {len(row) for row in rows}
    if len(widths) != 1 or 0 in widths:
        raise InvalidInput(
            f"{path} must have as many ranks for every head, at least one, but has {quoted(widths or 'none')}."
        )
    if len(rows) > MOST_DEPTH or max(widths) > MOST_RANK + 1:
        raise InvalidInput(
            f"{path} may have {MOST_DEPTH} heads and {MOST_RANK + 1:,} ranks, but has {len(rows):,} and {max(widths):,}."
        )
    shares = np.array(rows, dtype=np.float64)
    if (odd := shares[~((shares >= 0) & (shares <= 1))]).size:
        raise InvalidInput(f"{path} must have shares from 0 to 1, but has {odd[0]:g}.")
    return shares


def trials_of(trials: Sequence[int] | None, heads: int, path: Path, assumed: int | None) -> tuple[list[int], list[str]]:
    """The trials of every head, and a note where --trials assumes them. A file has them, or they are assumed; never both."""
    if trials is None and assumed is None:
        raise InvalidInput(f"{path} does not say how many trials its shares rest on: pass `trials`.")
    if trials is not None and assumed is not None:
        raise InvalidInput(f"{path} says how many trials its shares rest on: leave `trials` out.")
    of_heads, notes = list(trials or ()), list[str]()
    if assumed is not None:
        of_heads, notes = [assumed] * heads, [ASSUMED.format(assumed)]
    if len(of_heads) != heads or not all(1 <= n <= MOST for n in of_heads):
        raise InvalidInput(
            f"{path} must have trials for each of its {heads} heads, at least 1, but has {quoted(of_heads)}."
        )
    return of_heads, notes


def counted(hits: NDArray[np.int64], trials: Sequence[int], path: Path) -> Calibration:
    """The calibration of these counts; InvalidInput names the file."""
    try:
        return Calibration(hits, np.array(trials))
    except InvalidInput as error:
        raise InvalidInput(f"{path} cannot be a calibration: {error}") from None


def is_recall(content: Any) -> bool:
    return isinstance(content, dict) and ("recall" in content or bool(_named_heads(content)))


def read_recall(content: Any, path: Path, *, trials: int | None = None) -> Found:
    table = content["recall"] if "recall" in content else _named_heads(content)
    if isinstance(table, list):
        rows = typed(list[list[float]], table, path)
        return from_shares(rows, _totals(content, len(rows), path), path, assumed=trials)
    heads = typed(dict[str, dict[str, float]], table, path)
    rows, notes = [], []
    for name in head_order(heads, path):
        row = _row(heads[name], name, path)
        rows.append(row)
        if len(row) < len(heads[name]):
            notes.append(LEFT_OUT.format(len(row)))
    measurement = from_shares(rows, _totals(content, len(heads), path), path, assumed=trials, cumulative=True)
    return replace(measurement, notes=(*measurement.notes, *dict.fromkeys(notes)))


def _named_heads(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries that are objects with recall@k."""
    heads = ((name, head) for name, head in content.items() if isinstance(head, dict))
    return {name: head for name, head in heads if any(key.lower().startswith("recall@") for key in head)}


def _row(shares: Mapping[str, float], name: str, path: Path) -> list[float]:
    """Shares of k = 1, 2, ... as far as no k is left out."""
    by_k = {}
    for key, share in shares.items():
        match = K_NAME.fullmatch(key)
        if match is None or int(match[1]) in by_k:
            raise InvalidInput(f"{path} must name its shares recall@1, recall@2, ..., but {name} has {quoted(key)}.")
        by_k[int(match[1])] = share
    row: list[float] = []
    while len(row) + 1 in by_k:
        row.append(by_k[len(row) + 1])
    if not row:
        raise InvalidInput(f"{path} must have recall@1 for every head, but {quoted(name)} has none.")
    return row


def _totals(content: Mapping[str, Any], n_heads: int, path: Path) -> list[int] | None:
    """Trials of every head, which a file has as one number for all, as a list, or as an object by head; None without."""
    trials = next((content[key] for key in TOTALS if content.get(key) is not None), None)
    if trials is None:
        return None
    if isinstance(trials, dict):
        by_head = typed(dict[str, int], trials, path)
        return [by_head[name] for name in head_order(by_head, path)]
    if isinstance(trials, list):
        return typed(list[int], trials, path)
    return [typed(int, trials, path)] * n_heads


class TableRow(BaseModel):
    """A head's cells of a table, at one rank or up to one."""

    head: str
    rank: Count | None = None
    top_k: Positive | None = None
    accuracy: Share | None = None
    hits: Count | None = None
    trials: Positive | None = None


def is_table(content: Any) -> bool:
    return isinstance(content, str) and "head" in _cells(content.partition("\n")[0])


def read_table(content: Any, path: Path, *, trials: int | None = None) -> Found:
    header = _cells(content.partition("\n")[0])
    if len(set(header)) < len(header) or len(header) > MOST_COLUMNS:
        raise InvalidInput(f"{path} must name up to {MOST_COLUMNS:,} columns, each once, but has {quoted(header)}.")
    wide = {name: int(match[1]) for name in header if (match := WIDE.fullmatch(name))}
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
    in_file = [tried for _, tried in heads if tried is not None] or None
    if value == "accuracy":
        return from_shares(table, in_file, path, assumed=trials, cumulative=place == "top_k")
    if len({len(row) for row in table}) > 1:
        raise InvalidInput(f"{path} must have as many ranks for every head, but has {quoted([len(r) for r in table])}.")
    of_heads, assumption = trials_of(in_file, len(heads), path, trials)
    hits = np.array(table, dtype=np.int64)
    if place == "rank":
        return Found(counted(hits, of_heads, path), tuple(assumption))
    return Found(counted(np.diff(hits, axis=1, prepend=0), of_heads, path), (CUMULATIVE, *assumption))


def _rows(content: str, header: list[str], wide: dict[str, int], path: Path) -> Iterator[TableRow]:
    """The rows of a table, one a line. A line with ``wide`` columns (name to k) becomes a row for each of them.

    Empty cells are left out.
    """
    for number, line in enumerate(content.splitlines()[1:], 2):
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


def _of_head(rows: Sequence[TableRow], place: str, value: str, path: Path) -> tuple[list[float], int | None]:
    """The values of one head in order of rank, and its trials. Raises InvalidInput for a rank that is missing or comes twice."""
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
    """The cells of a line; one where it is no CSV."""
    try:
        return [cell.strip() for cell in next(csv.reader([line.replace("\0", "")]), [])]
    except csv.Error:
        return [line]
