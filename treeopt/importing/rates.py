"""Counts from the shares that tools print: cumulative or rank by rank, with trials given or assumed.

shares : (K, R)  of head k, the true token among its first r + 1 candidates, or at exactly rank r
trials : (K,)    states at which head k had something to guess
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, quoted
from treeopt.importing.files import Found
from treeopt.records.calibration import Calibration
from treeopt.trees.tree import MOST_DEPTH, MOST_RANK

SLACK = 1e-3  # shares may sum to this much above one: tools round what they print
MOST_TRIALS = 2**53  # whole numbers that a float tells apart

CUMULATIVE = "The shares are cumulative (top-1, top-2, ...) and were turned into differences."
PER_RANK = "The shares fall along the ranks, so they were taken as those of single ranks."


def from_shares(
    rows: Sequence[Sequence[float]],
    trials: Sequence[int] | None,
    path: Path,
    *,
    assumed: int | None = None,
    cumulative: bool | None = None,
) -> Found:
    """Counts of shares; ``cumulative`` None lets them tell: shares that never fall are cumulative.

    assumed : trials of every head where the file has none (--trials)

    >>> found = from_shares([[0.6, 0.8], [0.4, 0.5]], [10, 10], Path("x.json"))
    >>> found.calibration.hits.tolist(), found.notes[0][:25]
    ([[6, 2], [4, 1]], 'The shares are cumulative')
    """
    shares = check_shares(rows, path)
    notes = []
    if cumulative is None:
        cumulative = bool((np.diff(shares, axis=1) >= 0).all()) and shares.shape[1] > 1
        notes += [CUMULATIVE if cumulative else PER_RANK] if shares.shape[1] > 1 else []
    elif cumulative:
        notes.append(CUMULATIVE)
    if cumulative and (np.diff(shares, axis=1) < 0).any():
        k = int((np.diff(shares, axis=1) < 0).any(1).argmax())
        raise InvalidInput(f"{path} must have cumulative shares that never fall, but those of head {k + 1} do.")
    upto = shares if cumulative else shares.cumsum(1)
    if upto[:, -1].max() > 1 + SLACK:
        k = int(upto[:, -1].argmax())
        raise InvalidInput(
            f"{path} must have shares of single ranks that sum to 1 at most, or cumulative ones that never "
            f"fall, but those of head {k + 1} sum to {upto[k, -1]:.3g}."
        )
    tried = known_trials(trials, len(shares), path, assumed)
    if trials is None:
        notes.append(assumption(tried[0]))
    ends = np.rint(np.minimum(upto, 1) * np.array(tried)[:, None]).astype(np.int64)
    return Found(counted(np.diff(ends, axis=1, prepend=0), tried, path), tuple(notes))


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
    if not ((shares >= 0) & (shares <= 1)).all():
        odd = shares[~((shares >= 0) & (shares <= 1))][0]
        raise InvalidInput(f"{path} must have shares from 0 to 1, but has {odd:g}.")
    return shares


def known_trials(trials: Sequence[int] | None, heads: int, path: Path, assumed: int | None) -> list[int]:
    """Trials of every head: the file's, or those that --trials assumes; never both."""
    if (trials is None) == (assumed is None):
        raise InvalidInput(
            f"{path} does not say how many trials its shares rest on: pass --trials."
            if trials is None
            else f"{path} says how many trials its shares rest on: leave --trials out."
        )
    found = [assumed or 1] * heads if trials is None else list(trials)
    if len(found) != heads or not all(1 <= n <= MOST_TRIALS for n in found):
        raise InvalidInput(
            f"{path} must have trials for each of its {heads} heads, at least 1, but has {quoted(found)}."
        )
    return found


def assumption(trials: int) -> str:
    return (
        f"The file has no counts: {trials} trials a head were assumed, as --trials says, and every standard "
        "error rests on that."
    )


def counted(hits: NDArray[np.int64], trials: Sequence[int], path: Path) -> Calibration:
    """The calibration of these counts; InvalidInput names the file."""
    try:
        return Calibration(hits, np.array(trials))
    except InvalidInput as error:
        raise InvalidInput(f"{path} cannot be a calibration: {error}") from None
