"""Times that decisions depend on: ranks begin together, and what took them longest is what it took.

All ranks read the same seconds, so that all decide the same; without ranks it is `time.perf_counter`.
"""

from __future__ import annotations

import time

from treeopt.runtime import ranks


def start() -> float:
    """Now, when all ranks are here; `elapsed` takes it."""
    ranks.wait()
    return time.perf_counter()


def elapsed(started: float) -> float:
    """Seconds since then, on the rank that took longest."""
    return ranks.greatest(time.perf_counter() - started)
