"""An acceptance vector as Sequoia keeps it (Infini-AI-Lab/Sequoia, tests/test_accept.py, commit 0ff3ff7).

vector : (R + 2,)  entry 0 is not used, entry i is the chance that child i of a node is accepted, and the
                   last one the chance that none is; so entries 1... sum to 1

One vector serves all depths; --heads says how many. tests/fast_test.py there leaves out the last entry,
but its reader drops it all the same and with it the chance of the last child; a vector that sums to less
than 1 is taken as it is, child by child.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.files.storage import typed
from treeopt.importing.files import Found
from treeopt.importing.rates import SLACK, check_shares, from_shares
from treeopt.trees.tree import MOST_DEPTH

NAMES = ("acceptance", "acceptance_rate_vector")
ALL_CHILDREN = (
    "The vector sums to less than 1, so its last entry was taken as that of a child, not as the "
    "chance that no child is accepted."
)


def matches(content: Any) -> bool:
    if isinstance(content, dict):
        return any(name in content for name in NAMES)
    if isinstance(content, np.ndarray):
        return content.ndim == 1
    return isinstance(content, list) and bool(content) and all(type(one) in (int, float) for one in content)


def read(content: Any, path: Path, *, trials: int | None = None, heads: int | None = None) -> Found:
    """Counts of the same shares at every depth."""
    if heads is None:
        raise InvalidInput(f"{path} is one vector for all depths: pass the number of depths with --heads.")
    if not 1 <= heads <= MOST_DEPTH:
        raise InvalidInput(f"--heads must be 1 to {MOST_DEPTH}, but got {heads}.")
    vector = next(content[name] for name in NAMES if name in content) if isinstance(content, dict) else content
    chances = typed(list[float], vector.tolist() if isinstance(vector, np.ndarray) else vector, path)
    if len(chances) < 3 or chances[0] != 0:
        raise InvalidInput(
            f"{path} must have an unused entry of 0, one for each child and one for none of them, but it has "
            f"{len(chances)} entries, the first {chances[0] if chances else 'missing'}."
        )
    total = float(check_shares([chances], path).sum())
    if total > 1 + SLACK:
        raise InvalidInput(f"{path} must have chances that sum to 1 at most, but they sum to {total:.3g}.")
    whole = total > 1 - SLACK
    children = chances[1:-1] if whole else chances[1:]
    found = from_shares([children] * heads, None, path, assumed=trials, cumulative=False)
    notes = [f"One vector was taken for all {heads} depths.", *([] if whole else [ALL_CHILDREN])]
    return Found(found.calibration, (*notes, *found.notes))
