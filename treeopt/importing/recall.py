"""recall@k of each head as JSON: the share of states with the true token among the first k candidates.

{"recall": {"head_0": {"1": 0.6, "2": 0.7, ...}, ...}, "total_predictions": {"0": 5000, ...}}
    as cactus-compute/fmtp writes it (scripts/measure_head_accuracy.py, commit da360d4)
{"head_0": {"recall@1": 0.6, "recall@2": 0.7, ...}, ...}
{"recall": [[0.6, 0.7, ...], ...], "trials": [5000, ...]}

Named by k, shares are cumulative; a bare table of rows tells by itself: rows that never fall are. Taking
recall@k for the share of one rank is the classical slip: it makes deep candidates look nearly certain.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput, quoted
from treeopt.files.storage import typed
from treeopt.importing.files import Found, head_order
from treeopt.importing.rates import from_shares

K_NAME = re.compile(r"(?:recall@|top[-_ ]?|@)?([1-9]\d{0,4})\Z", re.ASCII | re.IGNORECASE)
TOTALS = ("trials", "totals", "total", "total_predictions")


def matches(content: Any) -> bool:
    return isinstance(content, dict) and ("recall" in content or bool(_named_heads(content)))


def read(content: Any, path: Path, *, trials: int | None = None) -> Found:
    """Counts of recall@k, differenced."""
    table = content["recall"] if "recall" in content else _named_heads(content)
    if isinstance(table, list):
        rows = typed(list[list[float]], table, path)
        return from_shares(rows, _totals(content, len(rows), path), path, assumed=trials)
    heads = typed(dict[str, dict[str, float]], table, path)
    read_rows = [_row(heads[name], name, path) for name in head_order(heads, path)]
    totals = _totals(content, len(heads), path)
    found = from_shares([row for row, _ in read_rows], totals, path, assumed=trials, cumulative=True)
    return Found(found.calibration, (*found.notes, *dict.fromkeys(note for _, note in read_rows if note)))


def _named_heads(content: dict[str, Any]) -> dict[str, Any]:
    """Those entries that are objects with recall@k."""
    return {
        name: head
        for name, head in content.items()
        if isinstance(head, dict) and any(key.lower().startswith("recall@") for key in head)
    }


def _row(shares: dict[str, float], name: str, path: Path) -> tuple[list[float], str | None]:
    """Shares of k = 1, 2, ... as far as no k is left out, and a note of the rest."""
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
    if len(row) == len(by_k):
        return row, None
    return (
        row,
        (
            f"Ranks beyond {len(row)} were left out: the file skips values of k after that, so single ranks "
            "cannot be told apart."
        ),
    )


def _totals(content: dict[str, Any], n_heads: int, path: Path) -> list[int] | None:
    """Trials of every head: one number for all, a list, or an object by head."""
    given = next((content[key] for key in TOTALS if content.get(key) is not None), None)
    if isinstance(given, dict):
        totals = typed(dict[str, int], given, path)
        return [totals[name] for name in head_order(totals, path)]
    if given is None or isinstance(given, list):
        return typed(list[int], given, path) if given is not None else None
    return [typed(int, given, path)] * n_heads
