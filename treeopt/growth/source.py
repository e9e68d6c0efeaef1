"""Sources that trees are grown on and judged by.

trace        The text is fixed, so replay tells exactly how many steps a tree takes.
probe        The steps are fixed, so it tells how many tokens a tree emits: exactly for the tree that it was decoded with.
calibration  There are accuracies alone: a path has their product, as if heads erred independently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from treeopt.growth import probed, replay
from treeopt.growth.grow import TraceGrowth, grow, grow_products, product_values
from treeopt.growth.heldout import HeldOut, folds
from treeopt.growth.probed import COVERAGE, grow_coverage
from treeopt.growth.rates import Rates, by_conversation
from treeopt.records.calibration import ENGINE_LOG, STEPS_WITHOUT, Calibration
from treeopt.records.drafters import BLOCKS, depth_noun
from treeopt.records.inputs import Accuracies
from treeopt.records.probe import Probe
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import Draft, draft_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import MOST_DEPTH, Choice, GrownTrees, IntArray, Tree

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Source(ABC):
    """A record of accuracies that trees are grown on and judged by.

    kind     : trace, probe or calibration
    grown_by : the name of the growth in a plan
    is_exact : whether the text is the same with every tree, so that replay tells what decoding takes
    """

    record: Accuracies
    kind: ClassVar[str]
    grown_by: ClassVar[str]
    is_exact: ClassVar[bool] = False

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the record says of its origin: drafter, acceptance, provenance, ..."""
        return self.record.meta

    @property
    def num_heads(self) -> int:
        """Depth of the deepest trees that can be judged."""
        return self.record.num_heads

    @property
    @abstractmethod
    def num_ranks(self) -> int:
        """Number of ranks that are told apart."""

    @property
    def answers(self) -> RankTrace | Probe | None:
        """The recorded sequences; None for accuracies alone."""
        return None

    @property
    def pooled(self) -> RankTrace | None:
        """The trace, if dynamic trees or trees over marginals can be replayed on it."""
        return None

    @property
    @abstractmethod
    def observed(self) -> tuple[int, str]:
        """The number of counted states, steps or drafts, and the word for one of them."""

    @property
    def calibration(self) -> Calibration | None:
        """The accuracies by head and rank; None where there are none."""
        return None

    @property
    def drafter_heads(self) -> int | None:
        """The guesses that the drafter has heads or a block for; None where there may be any number."""
        drafter = self.meta.get("drafter") or {}
        kind = drafter.get("kind", "" if self.meta.get("source") == ENGINE_LOG else "medusa")
        has_limit = depth_noun({"kind": kind}) == "head" or kind in BLOCKS
        return drafter.get("num_heads", self.num_heads) if has_limit else None

    @property
    def usual_context(self) -> float | None:
        """Mean length of a sequence when a step is taken [tokens]; None where prompts were not counted."""
        if (answers := self.answers) is None or answers.prompt_tokens is None:
            return None
        at_middle = answers.prompt_tokens + answers.lengths / 2
        return float((at_middle * answers.lengths).sum() / answers.lengths.sum())

    @abstractmethod
    def grow(self, limits: Limits) -> GrownTrees:
        """The best trees on the whole record, in-sample."""

    @abstractmethod
    def crossfit(self, limits: Limits) -> HeldOut:
        """The best trees with their rates on answers that they were not grown on."""

    @abstractmethod
    def knows(self, draft: Draft) -> bool:
        """Whether the record tells all guesses of a draft apart."""

    @abstractmethod
    def nested_rates(self, paths: tuple[Choice, ...], sizes: IntArray) -> list[Rates]:
        """The rates of nested trees: the first ``sizes`` of the nodes ``paths``."""

    def rates(self, draft: Draft) -> Rates:
        """The rates of a draft; nodes that the record does not tell apart are never accepted."""
        tree = draft_tree(draft).cut(max_depth=self.num_heads, max_rank=self.num_ranks - 1)
        return self.nested_rates(tree.paths, np.array([len(tree)]))[0]

    def visits(self, tree: Tree) -> IntArray | None:
        """(n,) steps that accept each node; all steps accept the root. None for accuracies alone."""
        return None

    @abstractmethod
    def guess_counts(self, draft: Draft) -> Floats | IntArray:
        """(D+1,) steps that emit 0, 1, ... guesses with a draft; their shares of all steps for accuracies alone."""

    def guess_shares(self, draft: Draft) -> Floats:
        """(D+1,) share of the steps that emit 0, 1, ... guesses with a draft."""
        counts = self.guess_counts(draft)
        return np.asarray(counts / max(counts.sum(), 1))

    def row_counts(self, size: int) -> IntArray | None:
        """(size + 1,) how many steps verify 0, 1, ... rows with a tree of so many; None where all verify all of them."""
        return None

    def held_out_shares(self, held_out: HeldOut, size: int) -> Floats:
        """(D+1,) the same for a grown tree, on answers that it was not grown on if there are answers."""
        tree, record, counts = held_out.grown.tree(size), self.answers, np.zeros(MOST_DEPTH + 1)
        if record is None:
            return self.guess_shares(tree)
        for test, grown in held_out.by_fold:
            fold_counts = source_of(record.select(test)).guess_counts(grown.largest(size))
            counts[: len(fold_counts)] += fold_counts
        most = int(np.flatnonzero(counts).max(initial=tree.depth))
        return np.asarray(counts[: 1 + most] / max(counts.sum(), 1))

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        """Cautions about the figures of a tree, where trees of up to ``most`` rows were grown and ``budget`` asked for."""
        return []


@dataclass(frozen=True)
class TraceSource(Source):
    """A rank trace as a source: a tree changes how many steps the text takes."""

    record: RankTrace
    kind = "trace"
    is_exact = True
    grown_by = "replay"

    @property
    def num_ranks(self) -> int:
        return self.record.top_k

    @property
    def answers(self) -> RankTrace:
        return self.record

    @property
    def pooled(self) -> RankTrace | None:
        record = self.record
        return record if record.pools or record.marginals else None

    @property
    def observed(self) -> tuple[int, str]:
        return int(self.record.has_step.sum()), "state"

    @cached_property
    def calibration(self) -> Calibration:
        return Calibration.from_trace(self.record)

    @cached_property
    def _growths(self) -> dict[int, TraceGrowth]:
        """Number of ranks to the growth on all sequences, and on those of all folds but one."""
        return {}

    def grow(self, limits: Limits) -> GrownTrees:
        return grow(self.record, limits)

    def crossfit(self, limits: Limits) -> HeldOut:
        record, tests = self.record, [test for _, test in folds(self.record)]
        top = min(limits.num_ranks, record.top_k)
        if top not in self._growths:
            grown_on = np.ones((1 + len(tests), record.num_sequences), dtype=bool)
            for row, test in zip(grown_on[1:], tests, strict=True):
                row[test] = False
            self._growths[top] = TraceGrowth(record, top, grown_on)
        growth, by_fold = self._growths[top].grow(limits), []
        whole, _ = next(growth)
        taken = np.empty((len(whole), record.num_sequences), dtype=np.int64)
        for test, (grown, steps) in zip(tests, growth, strict=True):
            taken[:, test] = steps[:, test]
            by_fold.append((test, grown))
        return HeldOut(whole, replay.rates_of(record, taken), by_fold)

    def knows(self, draft: Draft) -> bool:
        return replay.tells(self.record, draft)

    def nested_rates(self, paths: tuple[Choice, ...], sizes: IntArray) -> list[Rates]:
        return replay.rates_of(self.record, replay.replay_trees(self.record, paths, sizes))

    def rates(self, draft: Draft) -> Rates:
        steps = replay.replay_lengths(self.record, replay.accepted_lengths(self.record, draft))
        return replay.rates_of(self.record, steps[None])[0]

    def visits(self, tree: Tree) -> IntArray:
        return replay.count_visits(self.record, tree)

    def guess_counts(self, draft: Draft) -> IntArray:
        return replay.length_counts(self.record, replay.accepted_lengths(self.record, draft), draft.depth)


@dataclass(frozen=True)
class ProbeSource(Source):
    """A probe as a source: a tree changes how many tokens its steps emit. Only the probe's own policy is judged exactly."""

    record: Probe
    kind = "probe"
    grown_by = COVERAGE

    @property
    def answers(self) -> Probe:
        return self.record

    @property
    def num_ranks(self) -> int:
        return 1 + self.record.tree.max_rank

    @property
    def observed(self) -> tuple[int, str]:
        return len(self.record.accepted), "probed step"

    def grow(self, limits: Limits) -> GrownTrees:
        return grow_coverage(self.record, limits)

    def crossfit(self, limits: Limits) -> HeldOut:
        splits, whole, by_fold = list(folds(self.record)), self.grow(limits), []
        tokens = np.zeros((len(whole), self.record.num_sequences), dtype=np.int64)
        for train, test in splits:
            grown = grow_coverage(self.record.select(train), limits)
            tokens[:, test] = probed.tokens_of_trees(self.record.select(test), grown.paths, whole.sizes)
            by_fold.append((test, grown))
        return HeldOut(whole, self._rates(tokens), by_fold)

    def _rates(self, tokens: IntArray) -> list[Rates]:
        """The rates of trees that emit (n, S) tokens."""
        steps = by_conversation(self.record, np.diff(self.record.starts))
        return [Rates(steps, emitted) for emitted in by_conversation(self.record, tokens)]

    def knows(self, draft: Draft) -> bool:
        return isinstance(draft, Tree) and set(self.record.tree.paths).issuperset(draft.paths)

    def nested_rates(self, paths: tuple[Choice, ...], sizes: IntArray) -> list[Rates]:
        return self._rates(probed.tokens_of_trees(self.record, paths, sizes))

    def visits(self, tree: Tree) -> IntArray:
        return probed.node_visits(self.record, tree)

    def guess_counts(self, draft: Draft) -> IntArray:
        return probed.guess_counts(self.record, draft_tree(draft).paths)

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        cautions, policy, rows = [], self.record.policy, len(self.record.tree)
        if tree != policy:
            other = f"another tree ({len(policy)} rows; this one has {len(tree)})"
            cautions.append(
                f"These tokens per step are approximate. The probe was decoded with {other}, so its steps begin at "
                "other places. treeopt bench measures them."
            )
        if rows == most < budget:
            cautions.append(f"The probe tree has {rows} rows, so larger trees were left out.")
        return cautions


@dataclass(frozen=True)
class CalibrationSource(Source):
    """Accuracies by head and rank as a source: their products count, and nothing is held out."""

    record: Calibration
    kind = "calibration"
    grown_by = "independent"

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

    def grow(self, limits: Limits) -> GrownTrees:
        return grow_products(self.record.accept, limits)

    def crossfit(self, limits: Limits) -> HeldOut:
        grown = self.grow(limits)
        return HeldOut(grown, self.nested_rates(grown.families[-1].paths, grown.sizes))

    def knows(self, draft: Draft) -> bool:
        return isinstance(draft, Tree) and draft.depth <= self.num_heads and draft.max_rank < self.num_ranks

    def nested_rates(self, paths: tuple[Choice, ...], sizes: IntArray) -> list[Rates]:
        tokens = product_values(self.record.accept, paths).cumsum()
        for size in sizes.tolist():
            if (own := self.record.of_length(size - 1)) is not self.record:
                tokens[size - 1] = product_values(own.accept, paths[:size]).sum()
        return [Rates.expected(1 + self.record.drafted * (float(tokens[size - 1]) - 1)) for size in sizes]

    def row_counts(self, size: int) -> IntArray | None:
        without = self.meta.get("steps_without_draft") or 0
        return (
            np.bincount([1, size], [without, self.record.trials[0]]).astype(np.int64) if without and size > 1 else None
        )

    def guess_counts(self, draft: Draft) -> Floats:
        tree = draft_tree(draft)
        accept = self.record.of_length(tree.depth).accept
        reached = np.bincount(tree.depths, product_values(accept, tree.paths)) * self.record.drafted
        reached[0] = 1.0
        return np.asarray(reached - np.append(reached[1:], 0.0))

    def caveats(self, tree: Tree, *, budget: int, most: int) -> list[str]:
        if self.meta.get("source") == ENGINE_LOG:
            length = f"This one is of up to {self.num_heads} guesses, so figures for other lengths are estimates."
            ends = " Ends of drafts were counted as misses." if self.meta.get("ends_are_misses") else ""
            cautions = [f"An engine's log covers chains only. {length}{ends}"]
            if ends and self.meta.get("steps_without_draft") is None:
                cautions.append(STEPS_WITHOUT)
            return cautions
        return ["Predicted from marginal accuracies alone: independent heads, nothing held out."]


def source_of(record: Accuracies) -> Source:
    """The source that a trace, a probe or a calibration is.

    >>> source_of(RankTrace(np.array([[0], [3], [0], [-2]]), np.array([0, 4]))).rates(Tree.chain(1)).tokens_per_step
    1.5
    """
    return SOURCES[type(record)](record)


SOURCES: dict[type, Callable[..., Source]] = {
    RankTrace: TraceSource,
    Probe: ProbeSource,
    Calibration: CalibrationSource,
}
