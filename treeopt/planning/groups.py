"""One plan for several groups of prompts: what it costs each of them, and which is least bad for the worst.

shared   grown on all answers as they came: large groups count more
own      grown on the answers of one group
minimax  the tree whose largest loss over the groups, each against its own plan, is the least. Such a tree is the best
         for some mix of the groups (von Neumann), so trees are grown on mixes in which the worst group counts more and
         more, and the best of all these is taken

All are held out as in `treeopt.planning.regret`, and the figures are those of the answers as they came.

G groups · C conversations · n candidates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.growth.objectives import grow
from treeopt.growth.source import Source, TraceSource, source_of
from treeopt.planning.candidates import Candidates
from treeopt.planning.planner import plan_trees
from treeopt.planning.regret import Criterion, Floats, Loss, Taken, best_of, costs_of, options_of, taken_by
from treeopt.planning.request import PlanRequest
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import BoolArray, IntArray, TreeFamily

MODES = ("shared", "own", "minimax")
FEWEST = 5  # conversations of a group that a plan of its own is judged by: one for each fold
ROUNDS, MOST_TIMES = 4, 16  # mixes after the balanced one; how often an answer may count


@dataclass(frozen=True, eq=False)
class MixedTrace(RankTrace):
    """A trace whose sequences count several times where trees are grown on it, and once where they are judged.

    times : (S,)
    """

    times: IntArray | None = None

    def select(self, sequences: IntArray) -> MixedTrace:
        assert self.times is not None
        return mixed(super().select(sequences), self.times[sequences])

    def repeated(self) -> RankTrace:
        """Every sequence as often as it counts, still of its one conversation."""
        assert self.times is not None
        plain = {f.name: getattr(self, f.name) for f in fields(RankTrace)}
        return RankTrace(**{**plain, "weight": self.times, "pool_places": None, "pool_scores": None}).repeated()


@dataclass(frozen=True)
class MixSource(TraceSource):
    """A mixed trace as a source."""

    record: MixedTrace

    def grow(self, limits: Limits, objective: str) -> TreeFamily:
        return grow(self.record.repeated(), limits, objective=objective)


source_of.register(MixedTrace, MixSource)


def mixed(trace: RankTrace, times: IntArray) -> MixedTrace:
    """A trace of which each sequence counts so many times.

    >>> trace = RankTrace(np.array([[0], [-2]] * 2), np.array([0, 2, 4]))
    >>> mixed(trace, np.array([1, 3])).repeated().num_sequences
    4
    """
    return MixedTrace(**{f.name: getattr(trace, f.name) for f in fields(RankTrace)}, times=times)


@dataclass(frozen=True, kw_only=True)
class GroupLoss:
    """What a group of prompts loses with a plan for all groups, against one of its own.

    shared, minimax : against its own, with the shared tree and with that for the worst group
    size, depth     : of its own tree
    """

    batch_size: int
    group: str
    conversations: int
    size: int
    depth: int
    tokens_per_step: float
    shared: Loss
    minimax: Loss


@dataclass(frozen=True, eq=False)
class Grouped:
    """The groups of a trace that can be judged: (C,) number of each conversation's, -1 for the others."""

    trace: RankTrace
    names: tuple[str, ...]
    number: IntArray

    @classmethod
    def of(cls, trace: RankTrace) -> Grouped:
        """Raises InvalidInput where there are fewer than two groups of enough conversations."""
        of = np.array(trace.conversation_groups())
        names, counts = np.unique(of, return_counts=True)
        kept = [str(name) for name, n in zip(names, counts, strict=True) if n >= FEWEST]
        if len(kept) < 2:
            raise InvalidInput(
                f"Plans for groups need two groups of {FEWEST} conversations at least, but the trace has {len(kept)}: "
                "calibrate with --group-by on more prompts."
            )
        return cls(trace, tuple(kept), np.array([kept.index(name) if name in kept else -1 for name in of.tolist()]))

    def among(self, g: int) -> IntArray:
        """The conversations of a group."""
        return np.flatnonzero(self.number == g)

    def part(self, g: int) -> RankTrace:
        """The sequences of a group alone."""
        return self.trace.select(np.flatnonzero(self.number[self.trace.clusters] == g))

    def mix(self, weights: Floats) -> MixedTrace:
        """The trace in which a group counts in proportion to its weight, the least of them once."""
        times = np.clip(np.rint(weights / weights.min()), 1, MOST_TIMES).astype(np.int64)
        return mixed(self.trace, np.append(times, 1)[self.number[self.trace.clusters]])


@dataclass(frozen=True, eq=False)
class Minimax:
    """The mix to grow the least bad trees on, and of each batch size the (size, depth) to take and each group's loss."""

    record: MixedTrace
    take: dict[int, tuple[int, int]]
    losses: list[GroupLoss]


class Tried(NamedTuple):
    """Trees grown on a mix, and of each batch size the (n, G) loss of every group with every candidate."""

    record: MixedTrace
    options: list[Candidates]
    worst: list[Floats]

    @property
    def badness(self) -> float:
        """What the worst group loses with the least bad tree, on average over batch sizes."""
        return float(np.mean([losses.max(1).min() for losses in self.worst]))


def least_bad(plan: Plan, trace: RankTrace, profile: LatencyProfile | None) -> Minimax:
    """What groups lose with the best tree for all and with the least bad one; within the limits of the shared ``plan``."""
    groups, limits = Grouped.of(trace), plan.limits(Limits())
    objective = plan.objective or "replay"

    def options(source: Source) -> list[Candidates]:
        return [
            options_of(source, limits, costs_of(profile, entry, source), entry.batch_size, objective)
            for entry in plan.entries
        ]

    parts = [source_of(groups.part(g)) for g in range(len(groups.names))]
    chosen = [options(part) for part in parts]  # of every group, of every batch size
    own = [[best_of(one, part) for one in row] for row, part in zip(chosen, parts, strict=True)]
    tokens = np.array([part.answers.lengths.sum() for part in parts if part.answers is not None])
    weights, tried = np.ones(len(parts)), []
    for number in range(ROUNDS + 2):
        record = groups.mix(weights)
        found = options(source_of(record))
        worst = [_worst(one, groups, [row[b] for row in own]) for b, one in enumerate(found)]
        tried.append(Tried(record, found, worst))
        weights = _heavier(weights, tokens, worst) if number else tokens.max() / tokens
    shared, best, whole = tried[0], min(tried, key=lambda one: one.badness), source_of(trace)
    take, losses = {}, []
    for b, entry in enumerate(plan.entries):
        i = int(best.worst[b].max(1).argmin())
        take[entry.batch_size] = best.options[b].key(i)
        of_shared = best_of(shared.options[b], whole)
        of_best = best_of(best.options[b], whole, _least_bad(best.options[b], groups, [row[b] for row in own]))
        losses += [
            _loss(entry, groups, g, chosen[g][b], own[g][b], (of_shared, of_best)) for g in range(len(groups.names))
        ]
    return Minimax(best.record, take, losses)


def _loss(
    entry: PlanEntry, groups: Grouped, g: int, options: Candidates, own: Taken, others: tuple[Taken, Taken]
) -> GroupLoss:
    """What a group loses with what was chosen for all."""
    among, i = groups.among(g), int(options.throughput.argmax())
    shared, minimax = (one.on(among).loss(own) for one in others)
    return GroupLoss(
        batch_size=entry.batch_size,
        group=groups.names[g],
        conversations=len(among),
        size=int(options.sizes[i]),
        depth=int(options.depths[i]),
        tokens_per_step=float(options.rates[i]),
        shared=shared,
        minimax=minimax,
    )


def _heavier(weights: Floats, tokens: IntArray, worst: Sequence[Floats]) -> Floats:
    """Weights in which the group that loses most with the least bad tree counts double."""
    losses = np.mean([w[w.max(1).argmin()] for w in worst], axis=0)
    return np.asarray(weights * np.where(np.arange(len(weights)) == losses.argmax(), 2.0, 1.0))


def _worst(options: Candidates, groups: Grouped, own: Sequence[Taken]) -> Floats:
    """(n, G) loss of every group with every candidate, against its own."""
    return np.asarray(_losses(options, groups, own)(np.ones(len(groups.number), dtype=bool)))


def _least_bad(options: Candidates, groups: Grouped, own: Sequence[Taken]) -> Criterion:
    """How little the worst group loses, by some of the conversations."""
    losses = _losses(options, groups, own)
    return lambda some: np.asarray(-losses(some).max(1))


def _losses(options: Candidates, groups: Grouped, own: Sequence[Taken]) -> Criterion:
    """(n, G) loss of every group with every candidate, by some of the conversations."""
    steps, tokens, ms = taken_by(options)

    def losses(some: BoolArray) -> Floats:
        found = []
        for g, best in enumerate(own):
            mine = groups.among(g)
            here = mine[some[mine]]
            if not len(here):
                continue
            rate = tokens[:, here].sum(1) / np.maximum(steps[:, here].sum(1) * ms[:, 0], 1e-12)
            found.append(1 - rate / best.on(np.flatnonzero(some[mine])).rate)
        return np.stack(found, axis=1)

    return losses


def plan_for_groups(
    trace: RankTrace, profile: LatencyProfile | None, request: PlanRequest, shared: Plan
) -> tuple[Plan, Minimax]:
    """The plan whose trees are least bad for the worst group, beside the shared one; figures of the answers as they came."""
    found = least_bad(shared, trace, profile)
    return plan_trees(found.record, profile, request, take=found.take), found
