"""How long drafting each level of a tree took, where the drafter works level by level: Hydra heads, EAGLE, a draft model.

Such a drafter runs once for every depth 0...D-1 of a tree, on the nodes there that expand, and finds their children.

expanding  of every level: how many nodes of that depth have children; 1 on level 0, the root

Parts of a step are timed with a synchronisation after each, so together they may take longer than the step: then
they are scaled to it. The timings are recorded; plans take trees of one size and depth to cost the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.trees.tree import Choice

if TYPE_CHECKING:
    from treeopt.records.profile import StepTiming

HEADS = ("medusa", "hydra", "hydra++")  # kinds of drafters with a head for every depth
PART = "draft "  # in a timing's parts_ms: "draft 0", "draft 1", ... are the levels


@dataclass(frozen=True)
class DraftTiming:
    """Samples of drafting the children of so many nodes of one depth: a record of ``draft`` in ``profile.json``."""

    batch_size: int
    level: int
    expanding_nodes: int
    ms: tuple[float, ...]
    context_tokens: int | None = None  # None: whatever the context
    round: tuple[int, ...] | None = None  # the round in which each sample was taken

    def __post_init__(self) -> None:
        if not self.ms or not all(np.isfinite(ms) and ms >= 0 for ms in self.ms):
            raise InvalidInput(f"draft ms must be samples of at least 0 ms, but got {self.ms[:3]}.")
        if self.batch_size < 1 or self.level < 0 or self.expanding_nodes < 1:
            raise InvalidInput(
                "A draft timing needs batch_size >= 1, level >= 0 and expanding_nodes >= 1, but got "
                f"{self.batch_size}, {self.level}, {self.expanding_nodes}."
            )
        if self.level == 0 and self.expanding_nodes != 1:
            raise InvalidInput(
                f"On level 0 of a draft timing the root expands alone, but it says {self.expanding_nodes} nodes."
            )


def expanding_nodes(paths: Iterable[Choice]) -> tuple[int, ...]:
    """How many nodes of depth 0, 1, ... have children.

    >>> expanding_nodes([(), (0,), (1,), (0, 0), (0, 1)])
    (1, 1)
    """
    parents = {path[:-1] for path in paths if path}
    counts = np.bincount([len(path) for path in parents]) if parents else np.zeros(0, dtype=np.int64)
    return tuple(counts.tolist())


def check_expanding(expanding: Sequence[int], size: int, depth: int) -> None:
    """Raise InvalidInput unless a tree of so many rows and levels can have these expanding nodes."""
    first = min(depth, 1)
    if (
        len(expanding) != depth
        or min(expanding, default=1) < 1
        or sum(expanding[:1]) != first
        or sum(expanding) >= size
    ):
        raise InvalidInput(
            f"expanding must have {depth} numbers for depth {depth}, of the nodes with children on every level, the "
            f"root's 1 first, for {size} rows less than {size} together, but is {list(expanding)}."
        )


def draft_timings(points: Sequence[StepTiming]) -> tuple[DraftTiming, ...]:
    """What the timings of trees say of each level, by their parts "draft 0", "draft 1", ...; levels alike pooled.

    Timings that do not tell the levels apart, or not which nodes of the tree expand, say nothing. Where the parts of
    a timing take longer than its step, its levels are shorter by that share.
    """
    found: dict[tuple[int, int, int, int], list[tuple[float, int | None]]] = {}
    for point in points:
        share = _room(point)
        for part, samples in (point.parts_ms or {}).items():
            number = part.removeprefix(PART)
            if point.expanding is None or number == part or not number.isdecimal():
                continue
            level, rounds = int(number), sorted(set(point.round or ()))
            known = len(rounds) == len(samples)  # one of each round
            key = (point.batch_size, point.context_tokens, level, point.expanding[level])
            found.setdefault(key, []).extend(
                zip((share * ms for ms in samples), rounds if known else [None] * len(samples), strict=True)
            )
    return tuple(
        DraftTiming(
            batch_size,
            level,
            nodes,
            tuple(ms for ms, _ in samples),
            context,
            tuple(n for _, n in samples if n is not None) if all(n is not None for _, n in samples) else None,
        )
        for (batch_size, context, level, nodes), samples in sorted(found.items())
    )


def _room(point: StepTiming) -> float:
    """The share of its parts that a timing's step has room for, 1 at most; parts are compared with steps of their round."""
    in_round: dict[int, list[float]] = {}
    for number, ms in zip(point.round or (), point.step_ms, strict=False):
        in_round.setdefault(number, []).append(ms)
    steps, together = [median(in_round[number]) for number in sorted(in_round)], 0.0
    for samples in filter(None, (point.parts_ms or {}).values()):
        known = steps if len(steps) == len(samples) else [median(point.step_ms)] * len(samples)
        together += median(ms / step for ms, step in zip(samples, known, strict=True))
    return min(1 / together, 1.0) if together > 0 else 1.0


def whole_parts(parts_ms: Mapping[str, Sequence[float]] | None) -> dict[str, list[float]]:
    """The parts of steps with the levels of drafting taken together, sample by sample.

    >>> whole_parts({"draft 0": (1.0, 2.0), "draft 1": (0.5, 0.5), "target": (3.0, 3.0)})
    {'draft': [1.5, 2.5], 'target': [3.0, 3.0]}
    """
    found: dict[str, list[float]] = {}
    for name, samples in (parts_ms or {}).items():
        part = name.split(" ")[0]
        found[part] = [a + b for a, b in zip(found[part], samples, strict=True)] if part in found else list(samples)
    return found


def guesser(drafter: Mapping[str, Any] | None) -> str:
    """What guesses at one depth: a head, where the drafter has one for each; else it is just the depth.

    >>> guesser({"kind": "hydra"}), guesser({"kind": "ngram"}), guesser(None)
    ('head', 'depth', 'depth')
    """
    return "head" if (drafter or {}).get("kind") in HEADS else "depth"
