"""What drafting a tree costs where the drafter works level by level: Hydra heads, EAGLE, a draft model.

Such a drafter runs once for every depth 0...D-1 of a tree, on the nodes there that expand, and finds their children.

expanding  e_l of every level l: how many nodes of depth l have children; e_0 = 1, the root
cost       c_l + s_l e_l [ms]: a fixed part of the level, and a part for every expanding node

c_l and s_l are least squares of the medians that were timed, neither below zero. Parts are timed with a
synchronisation after each, so together they may take longer than the step: then they are scaled to it. The line takes
for granted that a level costs the same whatever else the tree has, and that nodes cost alike: hardware that computes
by tiles of rows makes a staircase of it, which the line goes through, also beyond the most nodes that were timed.
Between two levels that were timed costs are those between; a level below the deepest one timed is not estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.latency.interpolation import Anchor, Setting, Weights
from treeopt.trees.tree import Choice

if TYPE_CHECKING:
    from treeopt.records.profile import Latency, StepTiming

HEADS = ("medusa", "hydra", "hydra++")  # kinds of drafters with a head for every depth
PART = "draft "  # in a timing's parts_ms: "draft 0", "draft 1", ... are the levels
LEFT = 0.05  # share of a step that is no drafting at least: parts timed one by one take longer than the whole
NEARLY_FREE = 0.01  # share of a step up to which drafting its expanding nodes is nothing to speak of

Level = tuple[int, int]  # a level, and how many nodes expanded there


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


@dataclass(frozen=True, eq=False)
class DraftCosts:
    """What each level costs at one batch size and context.

    fixed_ms : (L,) c_l of levels 0...L-1
    node_ms  : (L,) s_l, for every expanding node

    >>> DraftCosts(np.array([1.0, 1.0]), np.array([0.5, 0.25])).ms((1, 4))
    3.5
    """

    fixed_ms: NDArray[np.float64]
    node_ms: NDArray[np.float64]

    def ms(self, expanding: Sequence[int]) -> float | None:
        """Drafting a tree with so many expanding nodes on its levels; None for one deeper than was timed."""
        n = len(expanding)
        if n > len(self.fixed_ms):
            return None
        return float(self.fixed_ms[:n].sum() + self.node_ms[:n] @ np.asarray(expanding, dtype=float))

    @property
    def table(self) -> NDArray[np.float64]:
        """(2, L) both."""
        return np.stack([self.fixed_ms, self.node_ms])

    def between(self, other: DraftCosts, share: float) -> DraftCosts:
        """So far on the straight way to ``other``, over the levels that both know."""
        n = min(len(self.fixed_ms), len(other.fixed_ms))
        return DraftCosts(
            (1 - share) * self.fixed_ms[:n] + share * other.fixed_ms[:n],
            (1 - share) * self.node_ms[:n] + share * other.node_ms[:n],
        )


@dataclass(frozen=True, eq=False)
class Drafting:
    """What drafting costs at every setting of a profile, and what everything measured takes without it.

    Only of settings that were timed level by level, all of whose trees say which nodes expand.

    drafted : of everything measured (2, L) whether its trees have each level, and the mean of their expanding nodes
    shifts  : (M, 2, L) what c and s of the levels change by where one of M medians is a standard error higher
    """

    costs: dict[Setting, DraftCosts]
    undrafted_ms: dict[Anchor, float]
    drafted: dict[Anchor, NDArray[np.float64]]
    shifts: dict[Setting, NDArray[np.float64]]

    @classmethod
    def fit(
        cls,
        timings: Sequence[DraftTiming],
        points: Sequence[StepTiming],
        step_ms: Mapping[Anchor, float],
        paired: Callable[[DraftTiming, Setting], Latency],
    ) -> Drafting:
        """From the timings of levels and of whole steps.

        step_ms : of everything measured, of trees that expand otherwise the mean over samples of their medians
        paired  : the median of a level's samples in a setting
        """
        trees = [p for p in points if p.size > 1]
        untold = {(p.batch_size, p.context_tokens) for p in trees if p.expanding is None}
        costs, shifts = {}, {}
        for setting in {anchor[:2] for anchor in step_ms} - untold:
            levels: dict[Level, list[DraftTiming]] = {}
            for t in timings:
                if t.batch_size == setting[0] and t.context_tokens in (None, setting[1]):
                    levels.setdefault((t.level, t.expanding_nodes), []).append(t)
            medians, errors = {}, {}
            for level, alike in levels.items():
                latencies = [paired(t, setting) for t in alike]
                medians[level] = median(found.ms for found in latencies), sum(len(t.ms) for t in alike)
                errors[level] = max(found.stderr_ms for found in latencies)
            fitted = fit_draft_costs(medians)
            if len(fitted.node_ms):
                costs[setting], shifts[setting] = fitted, _shifts(medians, errors)
        samples: dict[Anchor, list[NDArray[np.float64]]] = {
            anchor: [_levels((), costs[anchor[:2]])] for anchor in step_ms if anchor[2] == 1 and anchor[:2] in costs
        }
        for p in trees:
            setting = p.batch_size, p.context_tokens
            if setting in costs and p.depth <= len(costs[setting].fixed_ms):
                own = [_levels(p.expanding or (), costs[setting])] * len(p.step_ms)
                samples.setdefault((*setting, p.size, p.depth), []).extend(own)
        drafted = {anchor: np.mean(of_samples, axis=0) for anchor, of_samples in samples.items()}
        undrafted = {}
        for anchor, levels_of in drafted.items():
            ms = float((costs[anchor[:2]].table * levels_of).sum())
            undrafted[anchor] = max(step_ms[anchor] - ms, LEFT * step_ms[anchor])
        return cls(costs, undrafted, drafted, shifts)

    def rest_ms(self, weights: Weights) -> float | None:
        """The weighted mean of what anchors take without drafting; None where that is not known."""
        if not self.undrafted_ms.keys() >= weights.keys():
            return None
        return sum(w * self.undrafted_ms[anchor] for anchor, w in weights.items())

    def shifts_ms(self, weights: Weights, expanding: Sequence[int]) -> NDArray[np.float64]:
        """(M,) what a tree's drafting changes by, less that of the trees it stands for, with each of all medians.

        Trees that are compared share the medians, so the entries are those of all settings, in the same order.
        """
        found = [np.zeros(0)]
        for setting, shifts in sorted(self.shifts.items()):
            own = _levels(expanding, self.costs[setting])
            change = np.zeros_like(own)
            for anchor, weight in weights.items():
                if anchor[:2] == setting:
                    change += weight * (own - self.drafted[anchor])
            found.append((shifts * change).sum((1, 2)))
        return np.concatenate(found)


def _levels(expanding: Sequence[int], costs: DraftCosts) -> NDArray[np.float64]:
    """(2, L) by which the two costs of every level count for a tree."""
    found = np.zeros_like(costs.table)
    n = min(len(expanding), found.shape[1])
    found[0, :n], found[1, :n] = 1.0, expanding[:n]
    return found


def _shifts(medians: Mapping[Level, tuple[float, int]], errors: Mapping[Level, float]) -> NDArray[np.float64]:
    """(M, 2, L) what the costs change by where one of the medians is a standard error higher."""

    def moved(level: Level, by: float) -> NDArray[np.float64]:
        ms, samples = medians[level]
        return fit_draft_costs({**medians, level: (max(ms + by, 0.0), samples)}).table

    return np.array([(moved(level, error) - moved(level, -error)) / 2 for level, error in errors.items()])


def fit_draft_costs(medians: Mapping[Level, tuple[float, int]]) -> DraftCosts:
    """The costs that medians of levels [ms], with how many samples each has, are nearest to.

    The root is alone on its level, whose cost is all fixed. Another level that was timed with a single number of
    nodes cannot tell its two parts from one another: its nodes cost as those of the levels about it, as far as
    its median allows.

    >>> costs = fit_draft_costs({(0, 1): (3.0, 5), (1, 1): (2.0, 5), (1, 3): (4.0, 5)})
    >>> costs.fixed_ms.round(3).tolist(), costs.node_ms.round(3).tolist()
    ([3.0, 1.0], [0.0, 1.0])
    """
    timed: dict[int, list[tuple[int, float, int]]] = {}
    for (level, nodes), (ms, samples) in sorted(medians.items()):
        timed.setdefault(level, []).append((nodes, ms, samples))
    if 0 not in timed:
        return DraftCosts(np.zeros(0), np.zeros(0))  # nothing encloses the first level
    lines = {level: _line(rows) for level, rows in timed.items() if len(rows) > 1}
    slopes = {level: slope for level, (_, slope) in lines.items()}
    for level, rows in timed.items():
        if level not in lines:
            nodes, ms, _ = rows[0]
            like = float(np.interp(level, list(slopes), list(slopes.values()))) if slopes and level else 0.0
            slope = min(like, ms / nodes)
            lines[level] = ms - slope * nodes, slope
    levels = np.arange(max(timed) + 1)
    fixed, node = np.array([lines[level] for level in timed]).T
    return DraftCosts(np.interp(levels, list(timed), fixed), np.interp(levels, list(timed), node))


def _line(rows: Sequence[tuple[int, float, int]]) -> tuple[float, float]:
    """Constant and slope, neither below zero, of (nodes, ms, weight) by least squares.

    Where the best line has one of them below zero, the best of all allowed ones has it at zero.
    """
    x, y, weight = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
    slope = float((weight * (x - mean_x)) @ (y - mean_y) / ((weight * (x - mean_x)) @ (x - mean_x)))
    constant = float(mean_y - slope * mean_x)
    if slope < 0:
        return float(mean_y), 0.0
    if constant < 0:
        return 0.0, float((weight * x) @ y / ((weight * x) @ x))
    return constant, slope


def guesser(drafter: Mapping[str, Any] | None) -> str:
    """What guesses at one depth: a head, where the drafter has one for each; else it is just the depth.

    >>> guesser({"kind": "hydra"}), guesser({"kind": "ngram"}), guesser(None)
    ('head', 'depth', 'depth')
    """
    return "head" if (drafter or {}).get("kind") in HEADS else "depth"
