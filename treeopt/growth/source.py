"""Sources that trees are grown on and judged by: a trace, a probe or a calibration, each asked in the same words.

trace        the text is fixed, so replay tells exactly how many steps a tree takes
probe        the steps are fixed, so it tells how much of each a tree accepts: exact for the tree it was decoded with
calibration  accuracies alone: the product of those along a path, as if heads erred independently
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from treeopt.growth import probed, replay
from treeopt.growth.heldout import GrownTogether, HeldOut, Reached, folds
from treeopt.growth.objectives import OBJECTIVES, grow, grow_independent
from treeopt.growth.probed import COVERAGE, grow_coverage
from treeopt.growth.replay import TreeRates, by_conversation
from treeopt.growth.worth import product_values
from treeopt.records.calibration import ENGINE_LOG, Calibration, count_hits
from treeopt.records.inputs import Accuracies
from treeopt.records.probe import Probe
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import Draft, DynamicLimits, DynamicTree, draft_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MOST_DEPTH, Choice, IntArray, Tree, TreeFamily

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Source(ABC):
    """Accuracies, asked in the same words whatever record they are.

    kind        : trace, probe or calibration
    objectives  : that trees can be grown by
    is_exact    : whether the text is the same with every tree, so that replay tells what decoding takes
    answers     : the sequences that were recorded; None for accuracies alone
    pooled      : the trace, if trees that are built anew at every step can be replayed on it
    approximate : says of which trees the figures are approximate; None for none
    calibration : the accuracies by head and rank; None where there are none
    """

    record: Accuracies
    kind: ClassVar[str]
    objectives: ClassVar[tuple[str, ...]]
    is_exact: ClassVar[bool] = False

    @property
    def meta(self) -> Mapping[str, Any]:
        """Notes of the record on itself: drafter, acceptance, provenance, ..."""
        return self.record.meta

    @property
    def num_heads(self) -> int:
        """No tree that is deeper can be judged."""
        return self.record.num_heads

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """Ranks that are told apart."""

    @property
    def answers(self) -> RankTrace | Probe | None:
        return None

    @property
    def pooled(self) -> RankTrace | None:
        return None

    @property
    @abstractmethod
    def observed(self) -> tuple[int, str]:
        """How many things were counted, and what they are."""

    @property
    def approximate(self) -> str | None:
        return None

    @property
    def calibration(self) -> Calibration | None:
        return None

    @property
    def usual_context(self) -> float | None:
        """Tokens that a sequence has on average when a step is taken; None where that was not recorded."""
        if (answers := self.answers) is None or answers.prompt_tokens is None:
            return None
        at_middle = answers.prompt_tokens + answers.lengths / 2
        return float((at_middle * answers.lengths).sum() / answers.lengths.sum())

    @abstractmethod
    def grow(self, limits: Limits, objective: str) -> TreeFamily:
        """The best trees on the whole record, in-sample."""

    @abstractmethod
    def crossfit(self, limits: Limits, objective: str) -> HeldOut:
        """The best trees, and what they reach on answers that they were not grown on."""

    @abstractmethod
    def knows(self, tree: Tree) -> bool:
        """Whether the record tells all nodes of a tree apart."""

    @abstractmethod
    def rate(self, draft: Draft) -> TreeRates:
        """Tokens per step of a draft by all predictions, with the standard error; unknown nodes are never accepted."""

    def chains(self, longest: int) -> list[TreeRates]:
        """Tokens per step of the chains of 1 ... ``longest`` guesses."""
        return [self.rate(Tree.chain(depth)) for depth in range(1, longest + 1)]

    def dynamic(self, limits: DynamicLimits) -> dict[DynamicTree, TreeRates]:
        """What the dynamic trees within limits reach that can be replayed."""
        return {}

    def visits(self, tree: Tree) -> IntArray | None:
        """(n,) steps at which each node is accepted, all steps for the root; None for accuracies alone."""
        return None

    @abstractmethod
    def guess_shares(self, draft: Draft) -> Floats:
        """(D+1,) share of the steps that emit 0, 1, ... guesses with a given draft."""

    @abstractmethod
    def held_out_shares(self, held_out: HeldOut, size: int) -> Floats:
        """(D+1,) share of the steps that emit 0, 1, ... guesses with a grown tree, on answers that it was not grown on."""

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        """Cautions about the figures of a tree; ``most`` rows were grown, ``budget`` asked for."""
        return []


@dataclass(frozen=True)
class AnswersSource(Source):
    """A record of answers, which can be divided: trees are grown on some of them and judged on the others."""

    record: RankTrace | Probe

    @property
    def answers(self) -> RankTrace | Probe:
        return self.record

    @abstractmethod
    def reach(self, paths: tuple[Choice, ...], sizes: IntArray) -> Reached:
        """Steps and tokens of nested trees, of the first ``sizes`` of the nodes ``paths``."""

    @abstractmethod
    def guess_counts(self, draft: Draft) -> IntArray:
        """(D+1,) how many steps emit 0, 1, ... guesses with a draft."""

    def _part(self, sequences: IntArray) -> AnswersSource:
        return type(self)(self.record.select(sequences))

    def crossfit(self, limits: Limits, objective: str) -> HeldOut:
        splits, family = list(folds(self.record)), self.grow(limits, objective)
        grown = [(test, self._part(train).grow(limits, objective)) for train, test in splits]
        found = [self._part(test).reach(trees.paths, family.sizes) for test, trees in grown]
        steps, tokens, product, joint, states = zip(*found, strict=True)
        order = np.argsort(np.concatenate([test for test, _ in grown]))
        taken, emitted = (np.concatenate(each, axis=-1)[..., order] for each in (steps, tokens))
        whole = Reached(taken, emitted, np.sum(product, axis=0), np.sum(joint, axis=0), sum(states))
        return HeldOut(family, whole.rates(self.record, len(family)), grown)

    def rate(self, draft: Draft) -> TreeRates:
        known = draft_tree(draft).cut(max_depth=self.num_heads, max_rank=self.num_ranks - 1)
        return self.reach(known.paths, np.array([len(known)])).rates(self.record, 1)[0]

    def chains(self, longest: int) -> list[TreeRates]:
        """Tokens per step of the chains of 1 ... ``longest`` guesses, all at once."""
        sizes = np.arange(2, longest + 2)
        return self.reach(Tree.chain(longest).paths, sizes).rates(self.record, longest) if longest else []

    def guess_shares(self, draft: Draft) -> Floats:
        counts = self.guess_counts(draft)
        return np.asarray(counts / max(int(counts.sum()), 1))

    def held_out_shares(self, held_out: HeldOut, size: int) -> Floats:
        depth, counts = held_out.family.tree(size).depth, np.zeros(MOST_DEPTH + 1)
        for test, family in held_out.grown:
            part = self._part(test).guess_counts(family.largest(size))
            counts[: len(part)] += part
        most = int(np.flatnonzero(counts).max(initial=depth))
        return np.asarray(counts[: 1 + most] / max(counts.sum(), 1))


@dataclass(frozen=True)
class TraceSource(AnswersSource):
    """A rank trace as a source: a tree changes how many steps the text takes."""

    record: RankTrace
    states: int | None = None  # at which a step can be taken, where the record repeats some
    kind = "trace"
    is_exact = True
    objectives = OBJECTIVES

    @property
    def num_ranks(self) -> int:
        return self.record.top_k

    @property
    def pooled(self) -> RankTrace | None:
        record = self.record
        return record if record.pools or record.marginals else None

    @property
    def observed(self) -> tuple[int, str]:
        return self.states or int(self.record.has_step.sum()), "state"

    @cached_property
    def calibration(self) -> Calibration:
        return Calibration.from_trace(self.record)

    @cached_property
    def _together(self) -> GrownTogether:
        return GrownTogether(self.record)

    def grow(self, limits: Limits, objective: str) -> TreeFamily:
        return grow(self.record, limits, objective=objective)

    def crossfit(self, limits: Limits, objective: str) -> HeldOut:
        if objective != "replay":
            return super().crossfit(limits, objective)
        tests = [test for _, test in folds(self.record)]
        (family, *others), steps = self._together.families(limits)
        grown, sums = list(zip(tests, others, strict=True)), []
        for test, trees in grown:
            part = type(self)(self.record.select(test))
            order = replay.growth_index(part.record.ranks, trees.paths)
            sums.append(part._sums(order, trees.paths, family.sizes))
        product, joint, states = (np.sum(each, axis=0) for each in zip(*sums, strict=True))
        tokens = by_conversation(self.record, self.record.lengths - 1)
        known = zip((product / states).tolist(), (joint / states).tolist(), steps, strict=True)
        return HeldOut(family, [TreeRates(*each, tokens) for each in known], grown)

    def knows(self, tree: Tree) -> bool:
        return tree.max_rank < self.num_ranks

    def reach(self, paths: tuple[Choice, ...], sizes: IntArray) -> Reached:
        trace, order = self.record, replay.growth_index(self.record.ranks, paths)
        steps = replay.steps_of(trace, order, replay.lacking(paths, sizes))
        return Reached(steps, trace.lengths - 1, *self._sums(order, paths, sizes))

    def _sums(self, order: NDArray[Any], paths: tuple[Choice, ...], sizes: IntArray) -> tuple[Floats, IntArray, int]:
        """Tokens of n trees by the marginals and tokens that they emit, over all states, and how many states these are.

        order : (P, D) the node of each guess, `treeopt.growth.replay.growth_index`
        """
        trace, states = self.record, self.record.has_step
        nodes = np.bincount(order[states].ravel(), minlength=1 + len(paths))[:-1]  # the last is of what is no node
        hits, trials = count_hits(trace.ranks[states], trace.top_k)
        product = product_values(hits / np.maximum(trials, 1)[:, None], paths).cumsum()
        count, last = int(states.sum()), np.minimum(sizes, len(paths)) - 1
        return count * product[last], count + nodes.cumsum()[last], count

    def rate(self, draft: Draft) -> TreeRates:
        return replay.rate_anew(self.record, draft) if draft.drafted else super().rate(draft)

    def dynamic(self, limits: DynamicLimits) -> dict[DynamicTree, TreeRates]:
        return replay.dynamic_rates(self.record, limits)

    def visits(self, tree: Tree) -> IntArray:
        return replay.count_visits(self.record, tree)

    def guess_counts(self, draft: Draft) -> IntArray:
        return replay.length_counts(self.record, replay.accepted_lengths(self.record, draft), draft.depth)


@dataclass(frozen=True)
class ProbeSource(AnswersSource):
    """A probe as a source: a tree changes how many tokens its steps emit; approximate but for the probe's own policy."""

    record: Probe
    kind = "probe"
    objectives = (COVERAGE,)

    @property
    def num_ranks(self) -> int:
        return 1 + self.record.tree.max_rank

    @property
    def observed(self) -> tuple[int, str]:
        return len(self.record.accepted), "probed step"

    @property
    def approximate(self) -> str:
        rows = len(self.record.policy)
        return f"approximate, except for the tree that was probed with ({rows} row{'s' * (rows > 1)})"

    def grow(self, limits: Limits, objective: str) -> TreeFamily:
        return grow_coverage(self.record, limits)

    def knows(self, tree: Tree) -> bool:
        return set(self.record.tree.paths).issuperset(tree.paths)

    def reach(self, paths: tuple[Choice, ...], sizes: IntArray) -> Reached:
        return Reached(np.diff(self.record.starts), probed.tokens_of_trees(self.record, paths, sizes))

    def visits(self, tree: Tree) -> IntArray:
        return probed.node_visits(self.record, tree)

    def guess_counts(self, draft: Draft) -> IntArray:
        return probed.guess_counts(self.record, draft_tree(draft).paths)

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        found, policy, rows = [], self.record.policy, len(self.record.tree)
        if tree != policy:
            other = f"another tree ({len(policy)} rows; this one has {len(tree)})"
            found.append(
                f"These tokens per step are approximate. The probe was decoded with {other}, so its steps begin at "
                "other places. treeopt bench measures them."
            )
        if rows == most < budget:
            found.append(f"The probe tree has {rows} rows, so larger trees were left out.")
        return found


@dataclass(frozen=True)
class CalibrationSource(Source):
    """Accuracies by head and rank as a source: the objective is `independent`, and nothing is held out."""

    record: Calibration
    kind = "calibration"
    objectives = ("independent",)

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
        family = self.grow(limits, objective)
        return HeldOut(family, [TreeRates(rate) for rate in family.gains.cumsum().tolist()])

    def knows(self, tree: Tree) -> bool:
        return tree.depth <= self.num_heads and tree.max_rank < self.num_ranks

    def rate(self, draft: Draft) -> TreeRates:
        known = draft_tree(draft).cut(max_depth=self.num_heads, max_rank=self.num_ranks - 1)
        return TreeRates(float(product_values(self.record.accept, known.paths).sum()))

    def guess_shares(self, draft: Draft) -> Floats:
        tree = draft_tree(draft)
        reached = np.bincount(tree.depths, product_values(self.record.accept, tree.paths))
        return np.asarray(reached - np.append(reached[1:], 0.0))

    def held_out_shares(self, held_out: HeldOut, size: int) -> Floats:
        return self.guess_shares(held_out.family.tree(size))

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        if self.meta.get("source") == ENGINE_LOG:
            said = f"This one is of up to {self.num_heads} guesses, so figures for other lengths are estimates."
            ends = " Ends of drafts were counted as misses." if self.meta.get("ends_are_misses") else ""
            return [f"An engine's log covers chains only. {said}{ends}"]
        return ["Predicted from marginal accuracies alone: independent heads, nothing held out."]


@singledispatch
def source_of(record: Accuracies) -> Source:
    """A trace, a probe or a calibration as a source.

    >>> source_of(RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))).rate(Tree.chain(1)).tokens_per_step
    1.5
    """
    raise TypeError(f"Trees are grown on a trace, a probe or a calibration, but got {type(record).__name__}.")


source_of.register(RankTrace, lambda trace: TraceSource(trace, int(trace.has_step.sum())))
source_of.register(Probe, ProbeSource)
source_of.register(Calibration, CalibrationSource)


def objective_for(source: Source, wanted: str) -> str:
    """The objective that trees of a source are grown by: the wanted one, or the only one that it has."""
    return wanted if wanted in source.objectives else source.objectives[0]
