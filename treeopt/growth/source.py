"""What trees are grown on and judged by: a trace, a probe or a calibration, each asked in the same words.

trace        the text is fixed, so replay tells exactly how many steps a tree takes
probe        the steps are fixed, so it tells how much of each a tree accepts: exact for the tree it was decoded with
calibration  accuracies alone: the product of those along a path, as if heads erred independently

`source_of` is the only place that tells the three apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.coverage import COVERAGE, grow_coverage
from treeopt.growth.heldout import HeldOut, Rates, crossfit, crossfit_probe, from_calibration, rate_on_probe, rate_tree
from treeopt.growth.objectives import OBJECTIVES, grow, grow_independent
from treeopt.growth.probed import AcceptedNodes, guess_counts, node_visits, replay_probe
from treeopt.growth.replay import accepted_counts, count_visits, replay
from treeopt.growth.worth import product_values
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import Accuracies
from treeopt.records.probe import Probe
from treeopt.records.trace import Answers, RankTrace
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray, Tree, TreeFamily


class Source(Protocol):
    """What can be asked of accuracies, whatever record they are.

    kind       : trace, probe or calibration
    meta       : what the record says of itself: drafter, acceptance, provenance, ...
    num_heads  : no tree that is deeper can be judged
    num_ranks  : ranks that are told apart
    objectives : that trees can be grown by
    answers    : the sequences that were recorded; None for accuracies alone
    observed   : how many things were counted, and what they are
    is_exact   : whether the text is the same with every tree, so that replay tells what decoding takes
    approximate: of which trees the figures are approximate; None for none
    """

    @property
    def record(self) -> Accuracies: ...
    @property
    def kind(self) -> str: ...
    @property
    def meta(self) -> dict[str, Any]: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def objectives(self) -> tuple[str, ...]: ...
    @property
    def answers(self) -> Answers | None: ...
    @property
    def observed(self) -> tuple[int, str]: ...
    @property
    def is_exact(self) -> bool: ...
    @property
    def approximate(self) -> str | None: ...
    @property
    def calibration(self) -> Calibration | None:
        """The accuracies by head and rank; None where there are none."""

    @property
    def usual_context(self) -> float | None:
        """Tokens that a sequence has on average when a step is taken; None where that was not recorded."""

    def grow(self, limits: Limits, objective: str) -> TreeFamily:
        """The best trees on the whole record, in-sample."""

    def crossfit(self, limits: Limits, objective: str) -> HeldOut:
        """The best trees, and what they reach on answers that they were not grown on."""

    def knows(self, tree: Tree) -> bool:
        """Whether the record tells all nodes of a tree apart."""

    def tokens_per_step(self, tree: Tree) -> float:
        """What a given tree reaches on the whole record."""

    def rate(self, tree: Tree) -> Rates:
        """The same by all predictions, with the standard error; unknown nodes are never accepted."""

    def visits(self, tree: Tree) -> IntArray | None:
        """(n,) steps at which each node is accepted, all steps for the root; None for accuracies alone."""

    def guess_shares(self, tree: Tree) -> NDArray[np.float64]:
        """(D+1,) share of the steps that emit 0, 1, ... guesses with a given tree."""

    def held_out_shares(self, held_out: HeldOut, size: int) -> NDArray[np.float64]:
        """(D+1,) the same for a grown tree, on answers that it was not grown on."""

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        """What to beware of in the figures of a tree; ``most`` rows were grown, ``budget`` asked for."""


ENGINE_LOG = "engine log"  # the source that calibrations of engines' counters name
R = TypeVar("R", RankTrace, Probe, Calibration)


@dataclass(frozen=True)
class _Recorded(Generic[R]):
    """What all records say in the same words."""

    record: R

    @property
    def meta(self) -> dict[str, Any]:
        return self.record.meta

    @property
    def num_heads(self) -> int:
        return self.record.num_heads


@dataclass(frozen=True)
class TraceSource(_Recorded[RankTrace]):
    """A rank trace as a source."""

    kind = "trace"
    is_exact = True
    approximate = None
    objectives = OBJECTIVES

    @property
    def num_ranks(self) -> int:
        return self.record.top_k

    @property
    def answers(self) -> RankTrace:
        return self.record

    @property
    def observed(self) -> tuple[int, str]:
        return int(self.record.has_step.sum()), "state"

    @cached_property
    def calibration(self) -> Calibration:
        return Calibration.from_trace(self.record)

    @property
    def usual_context(self) -> float | None:
        return _usual_context(self.record)

    def grow(self, limits: Limits, objective: str) -> TreeFamily:
        return grow(self.record, limits, objective=objective)

    def crossfit(self, limits: Limits, objective: str) -> HeldOut:
        return crossfit(self.record, limits, objective=objective)

    def knows(self, tree: Tree) -> bool:
        return tree.max_rank < self.num_ranks

    def tokens_per_step(self, tree: Tree) -> float:
        return replay(self.record, tree).tokens_per_step

    def rate(self, tree: Tree) -> Rates:
        return rate_tree(self.record, tree)

    def visits(self, tree: Tree) -> IntArray:
        return count_visits(self.record, tree)

    def guess_shares(self, tree: Tree) -> NDArray[np.float64]:
        return _shares(accepted_counts(self.record, tree.paths))

    def held_out_shares(self, held_out: HeldOut, size: int) -> NDArray[np.float64]:
        return held_out.accepted(size, lambda test, paths: accepted_counts(self.record.select(test), paths))

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        return []


@dataclass(frozen=True)
class ProbeSource(_Recorded[Probe]):
    """A probe as a source; its trees are parts of the probe tree, and their objective is coverage."""

    kind = "probe"
    is_exact = False
    objectives = (COVERAGE,)
    calibration = None

    @property
    def num_ranks(self) -> int:
        return 1 + self.record.tree.max_rank

    @property
    def answers(self) -> Probe:
        return self.record

    @property
    def observed(self) -> tuple[int, str]:
        return len(self.record.accepted), "probed step"

    @property
    def usual_context(self) -> float | None:
        return _usual_context(self.record)

    @property
    def approximate(self) -> str:
        rows = len(self.record.policy)
        return f"approximate but for the tree that was probed with ({rows} row{'s' * (rows > 1)})"

    @cached_property
    def _accepted(self) -> AcceptedNodes:
        return AcceptedNodes.of(self.record)

    @cached_property
    def _nodes(self) -> frozenset[tuple[int, ...]]:
        return frozenset(self.record.tree.paths)

    def grow(self, limits: Limits, objective: str) -> TreeFamily:
        return grow_coverage(self.record, limits)

    def crossfit(self, limits: Limits, objective: str) -> HeldOut:
        return crossfit_probe(self.record, limits)

    def knows(self, tree: Tree) -> bool:
        return self._nodes.issuperset(tree.paths)

    def tokens_per_step(self, tree: Tree) -> float:
        return replay_probe(self.record, tree, self._accepted).tokens_per_step

    def rate(self, tree: Tree) -> Rates:
        return rate_on_probe(self.record, tree)

    def visits(self, tree: Tree) -> IntArray:
        return node_visits(self.record, tree)

    def guess_shares(self, tree: Tree) -> NDArray[np.float64]:
        return _shares(guess_counts(self.record, tree.paths))

    def held_out_shares(self, held_out: HeldOut, size: int) -> NDArray[np.float64]:
        return held_out.accepted(size, lambda test, paths: guess_counts(self.record.select(test), paths))

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        found, policy, rows = [], self.record.policy, len(self.record.tree)
        if tree != policy:
            found.append(
                "These tokens per step are approximate: the probe's steps begin where the tree that it was decoded with led "
                f"(rows: {len(policy)}; of this one: {len(tree)}). treeopt bench measures them."
            )
        if rows == most < budget:
            found.append(f"The probe tree has {rows} rows, so larger trees were left out.")
        return found


@dataclass(frozen=True)
class CalibrationSource(_Recorded[Calibration]):
    """Accuracies by head and rank as a source: the objective is `independent`, and nothing is held out."""

    kind = "calibration"
    is_exact = False
    approximate = None
    objectives = ("independent",)
    answers = None
    usual_context = None

    @property
    def num_ranks(self) -> int:
        return self.record.top_k

    @property
    def observed(self) -> tuple[int, str]:
        is_log = self.meta.get("source") == ENGINE_LOG
        return (int(self.record.trials[0]), "draft") if is_log else (int(self.record.trials.min()), "state")

    @property
    def calibration(self) -> Calibration:
        return self.record

    def grow(self, limits: Limits, objective: str) -> TreeFamily:
        return grow_independent(self.record.accept, limits)

    def crossfit(self, limits: Limits, objective: str) -> HeldOut:
        return from_calibration(self.record, limits)

    def knows(self, tree: Tree) -> bool:
        return tree.depth <= self.num_heads and tree.max_rank < self.num_ranks

    def tokens_per_step(self, tree: Tree) -> float:
        return self.rate(tree).product

    def rate(self, tree: Tree) -> Rates:
        known = tree.cut(max_depth=self.num_heads, max_rank=self.num_ranks - 1)
        return Rates(float(product_values(self.record.accept, known.paths).sum()), None, None, None, None)

    def visits(self, tree: Tree) -> None:
        return None

    def guess_shares(self, tree: Tree) -> NDArray[np.float64]:
        reached = np.bincount(tree.depths, product_values(self.record.accept, tree.paths))
        shares: NDArray[np.float64] = reached - np.append(reached[1:], 0.0)
        return shares

    def held_out_shares(self, held_out: HeldOut, size: int) -> NDArray[np.float64]:
        return held_out.accepted(size, None)

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        if self.meta.get("source") == ENGINE_LOG:
            return [
                f"An engine's log tells of chains only, here up to {self.num_heads} long, and of decoding with that "
                "length: for other lengths it is an estimate."
            ]
        return ["Predicted from marginal accuracies alone: independent heads, nothing held out."]


@singledispatch
def source_of(record: Accuracies) -> Source:
    """A trace, a probe or a calibration as a source.

    >>> source_of(RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))).tokens_per_step(Tree.chain(1))
    1.5
    """
    raise TypeError(f"Trees are grown on a trace, a probe or a calibration, but got {type(record).__name__}.")


source_of.register(RankTrace, TraceSource)
source_of.register(Probe, ProbeSource)
source_of.register(Calibration, CalibrationSource)


def objective_for(source: Source, wanted: str) -> str:
    """The objective that trees of a source are grown by: the wanted one, or the only one that it has."""
    return wanted if wanted in source.objectives else source.objectives[0]


def _usual_context(record: RankTrace | Probe) -> float | None:
    """Tokens that a sequence has on average when a step is taken."""
    if record.prompt_tokens is None:
        return None
    at_middle = record.prompt_tokens + record.lengths / 2
    return float((at_middle * record.lengths).sum() / record.lengths.sum())


def _shares(counts: IntArray) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = counts / max(int(counts.sum()), 1)
    return shares
