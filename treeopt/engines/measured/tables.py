"""Counts from tables of accuracies or hits, as CSV or Markdown with a header.

head,rank,accuracy,trials     share of the trials at exactly this rank; ranks count from 0
head,rank,hits,trials         the same as counts
head,top_k,accuracy,trials    share at or below rank k - 1 (cumulative); k counts from 1; hits as well
head,top1,top2,...            one line a head, cumulative; with or without trials

Heads count from 0 or from 1. The lines may come in any order; --trials stands in for the column. The classical slip is to take a
cumulative share for that of one rank: it makes deep candidates look nearly certain. Another is to take the rates by position that
engines print for accuracies: a table of one rate a head that never rises has survivals, unless --rates says otherwise.

table  : (K, R)  of head k at rank r, or up to it
trials : (K,)    states at which head k had something to guess
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from treeopt.engines.measured.files import Measurement, counted, head_order
from treeopt.engines.measured.rates import Meaning, PrintedRates
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import limit_rows
from treeopt.files.fields import MOST, Count, Positive, Share, checked
from treeopt.files.table import table_rows
from treeopt.records.calibration import Calibration
from treeopt.trees.tree import MOST_DEPTH, MOST_RANK

SLACK = 1e-3  # shares may sum to this much above one: tools round what they print
CUMULATIVE = "The shares are cumulative (top-1, top-2, ...) and were turned into differences."
ASSUMED = "The file has no counts: {} trials a head were assumed, and every standard error rests on that."
MOST_HEADER = 2**16  # characters
WIDE = re.compile(r"top[-_ ]?([1-9]\d{0,4})\Z", re.ASCII)
SYNONYMS = {  # of columns
    "subset": "group", "dataset": "group", "position": "head", "depth": "head",
    "rate": "accuracy", "acceptance": "accuracy", "acceptance_rate": "accuracy", "survival": "accuracy",
}  # fmt: skip


class TableRow(BaseModel):
    """A head's cells of a table, at one rank or up to one."""

    head: str
    rank: Count = 0
    top_k: Positive = 1
    accuracy: Share | None = None
    hits: Count | None = None
    trials: Positive | None = None
    group: str = ""


class Heads(NamedTuple):
    """Rows of a table: (K, R) values, trials of each head, and the ranks that were left out behind a gap."""

    values: NDArray[np.float64]
    trials: list[int]
    left_out: list[int]


def is_table(content: Any) -> bool:
    header = _header(content) if isinstance(content, str) else []
    return "head" in header and any(name in ("accuracy", "hits") or WIDE.fullmatch(name) for name in header)


def read_table(
    content: Any, path: Path, *, trials: int | None = None, rates: Meaning | None = None
) -> Measurement | PrintedRates:
    """The calibration of a table.

    trials : of every head, if the table has none
    rates  : what shares of one rank are; by default survival where they never rise
    """
    place, value, by_group = _columns(content, path)
    groups = {name: heads_of(rows, place, value, path) for name, rows in by_group.items()}
    heads = next(iter(groups.values()))
    first = heads.values[:, 0].tolist()
    is_chain = {part.values.shape for part in groups.values()} == {(len(first), 1)} and not heads.left_out
    never_rises = len(set(heads.trials)) <= 1 and all(a >= b for a, b in pairwise(first))
    if is_chain and value == "accuracy" and (rates or len(groups) > 1 or (never_rises and len(first) > 1)):
        shares = {name: part.values[:, 0].tolist() for name, part in groups.items()}
        return PrintedRates(shares, path, drafts=next(iter(heads.trials), None))
    if rates not in (None, "marginal") or len(groups) > 1:
        raise InvalidInput(
            f"{path} must have one accuracy a head for groups, and for `rates` of {rates or 'survival'}, but has several ranks, or hits."
        )
    if bool(heads.trials) == (trials is not None):
        what = "says" if heads.trials else "does not say"
        cure = "leave `trials` out" if heads.trials else "pass `trials`"
        raise InvalidInput(f"{path} {what} how many trials its shares rest on: {cure}.")
    of_heads = heads.trials or [trials or 0] * len(first)
    if len(of_heads) != len(first) or not all(1 <= n <= MOST for n in of_heads):
        raise InvalidInput(
            f"{path} must have trials for each of its {len(first)} heads, at least 1, but has {quoted(of_heads)}."
        )
    notes = [CUMULATIVE] if place == "top_k" else []
    if trials is not None:
        notes.append(ASSUMED.format(trials))
    if heads.left_out:
        taken, left_out = heads.values.shape[1], ", ".join(map(str, heads.left_out))
        notes.append(
            f"Of each head {taken} rank{'s' * (taken > 1)} from the first on were taken; {place} {left_out} lies behind a gap."
        )
    upto = heads.values if place == "top_k" else heads.values.cumsum(1)
    return Measurement(_calibration(upto, value == "accuracy", of_heads, path), tuple(notes))


def _calibration(upto: NDArray[np.float64], are_shares: bool, trials: list[int], path: Path) -> Calibration:
    """The calibration of (K, R) hits, or shares, at each rank or a better one."""
    falls = (np.diff(upto, axis=1) < 0).any(1)
    if falls.any():
        raise InvalidInput(
            f"{path} must have cumulative shares that never fall, but those of head {falls.argmax() + 1} do."
        )
    if are_shares:
        k = int(upto[:, -1].argmax())
        if upto[k, -1] > 1 + SLACK:
            raise InvalidInput(
                f"{path} must have shares of single ranks that sum to 1 at most, but those of head {k + 1} sum to "
                f"{upto[k, -1]:.3g}."
            )
        upto = np.rint(np.minimum(upto, 1) * np.array(trials)[:, None])
    ends: NDArray[np.int64] = upto.astype(np.int64)
    return counted(np.concatenate([ends[:, :1], ends[:, 1:] - ends[:, :-1]], axis=1), trials, path)


def heads_of(rows: Sequence[TableRow], place: str, value: str, path: Path) -> Heads:
    """The rows head by head. Raises InvalidInput for a rank that comes twice, and without the first rank."""
    by_head: dict[str, list[TableRow]] = {}
    for row in rows:
        by_head.setdefault(row.head, []).append(row)
    first = 1 if place == "top_k" else 0
    values, trials, ranks = list[list[float]](), list[int](), list[int]()
    for head in head_order(by_head, path):
        cells = {getattr(row, place): getattr(row, value) for row in by_head[head]}
        if len(cells) < len(by_head[head]) or first not in cells or None in cells.values():
            raise InvalidInput(
                f"{path} must give every head each {place} from {first} on once, with its {value}, but head "
                f"{quoted(head)} has {quoted(list(cells))}."
            )
        if values and sorted(cells) != ranks:
            raise InvalidInput(f"{path} must have as many ranks for every head, but head {quoted(head)} has others.")
        ranks = sorted(cells)
        taken = [rank for number, rank in enumerate(ranks, first) if rank == number]
        values.append([cells[rank] for rank in taken])
        tried = {row.trials for row in by_head[head]}
        if len(tried) > 1:
            raise InvalidInput(f"{path} must give a head the same trials in all its lines, but has {quoted(tried)}.")
        trials += [number for number in tried if number is not None]
    if len(values) > MOST_DEPTH or len(values[0]) > MOST_RANK + 1:
        raise InvalidInput(
            f"{path} may have {MOST_DEPTH} heads and {MOST_RANK + 1:,} ranks, but has {len(values):,} and {len(values[0]):,}."
        )
    return Heads(np.array(values, dtype=np.float64), trials, ranks[len(values[0]) :])


def _columns(content: str, path: Path) -> tuple[str, str, dict[str, list[TableRow]]]:
    """The column of ranks, "rank" or "top_k", that of values, "accuracy" or "hits", and the rows of each group.

    A line with several columns "top1", "top2", ... becomes a row for each of them.
    """
    header = _header(content)
    places = [name for name in ("top_k", "rank") if name in header]
    values = [name for name in ("hits", "accuracy") if name in header]
    wide = {name: match[1] for name in header if (match := WIDE.fullmatch(name))}
    if wide and not places and not values:
        places, values = ["top_k"], ["accuracy"]
    elif len(places) > 1 or len(values) != 1:
        raise InvalidInput(
            f"{path} must have the columns head, rank or top_k, accuracy or hits, or head, top1, top2, ..., "
            f"but has {quoted(header)}."
        )
    else:
        wide = {}
    by_group: dict[str, list[TableRow]] = {}
    for row in limit_rows(_rows(content, wide, path), path):
        by_group.setdefault(row.group, []).append(row)
    if not by_group:
        raise InvalidInput(f"{path} must have lines below its header, but it has none.")
    return (places or ["rank"])[0], values[0], by_group


def _rows(content: str, wide: Mapping[str, str], path: Path) -> Iterator[TableRow]:
    for number, record in table_rows(content, path):
        cells = {SYNONYMS.get(name, name): cell for name, cell in record.items()}
        try:
            for row in [cells | {"top_k": k, "accuracy": cells.get(name, "")} for name, k in wide.items()] or [cells]:
                yield checked(TableRow, row)
        except InvalidInput as error:
            raise InvalidInput(f"{path} line {number}: {error}") from None


def _header(content: str) -> list[str]:
    cells = [cell.strip().lower() for cell in re.split(r"[,;\t|]", content.partition("\n")[0][:MOST_HEADER])]
    return [SYNONYMS.get(cell, cell) for cell in cells]
