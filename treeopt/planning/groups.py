"""One plan for several groups of prompts: what it costs each of them.

shared   grown on all answers as they came: large groups count more
own      grown on the answers of one group

Both are held out as in `treeopt.planning.regret`, and the figures are those of the answers as they came.

G groups · C conversations · n candidates
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.growth.source import Source, source_of
from treeopt.planning.candidates import Candidates
from treeopt.planning.entries import figure_of
from treeopt.planning.regret import Loss, best_of, costs_of, options_of
from treeopt.records.figure import Figure
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray

FEWEST = 5  # conversations of a group that a plan of its own is judged by: one for each fold


@dataclass(frozen=True, kw_only=True)
class GroupLoss:
    """What a group of prompts loses with the tree that all groups share, against one of its own.

    own : its own draft
    """

    batch_size: int
    group: str
    conversations: int
    own: Figure
    shared: Loss


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
                "calibrate with `group_by` on more prompts."
            )
        return cls(trace, tuple(kept), np.array([kept.index(name) if name in kept else -1 for name in of.tolist()]))

    def among(self, g: int) -> IntArray:
        """The conversations of a group."""
        return np.flatnonzero(self.number == g)

    def part(self, g: int) -> RankTrace:
        """The sequences of a group alone."""
        return self.trace.select(np.flatnonzero(self.number[self.trace.clusters] == g))


def group_losses(plan: Plan, trace: RankTrace, profile: LatencyProfile | None) -> list[GroupLoss]:
    """What each group loses at each batch size with the best tree for all, within the limits of the shared ``plan``."""
    groups, limits, found = Grouped.of(trace), plan.limits(Limits()), []

    def options(source: Source, entry: PlanEntry) -> Candidates:
        costs = costs_of(profile, entry, source)
        return options_of(source, limits, costs, entry.batch_size, plan.objective or "replay")

    whole, parts = source_of(trace), [source_of(groups.part(g)) for g in range(len(groups.names))]
    for entry in plan.entries:
        shared = best_of(options(whole, entry), whole)
        for g, part in enumerate(parts):
            among, own = groups.among(g), options(part, entry)
            i = int(own.throughput.argmax())
            loss = GroupLoss(
                batch_size=entry.batch_size,
                group=groups.names[g],
                conversations=len(among),
                own=figure_of(own, i),
                shared=shared.on(among).loss(best_of(own, part)),
            )
            found.append(loss)
    return found
