"""What a tree loses on answers against the best that could be chosen for them.

throughput = tokens / (steps x latency of a step)

The best is grown on four fifths of the conversations and judged on the rest, and its size and depth are chosen for each
fifth by the others: neither growing nor choosing flatters it. Conversations and rounds of timing are drawn again for
both trees together, so that what is common to them cancels. A calibration has no conversations: its counts are drawn
again, and its best tree is not held out.

C conversations · n candidates · K depths · R ranks · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.heldout import HeldOut
from treeopt.growth.source import Source, source_of
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates, candidates_of, families_of
from treeopt.records.bootstrap import BOOTSTRAPS, SEED, conversation_draws, interval95, stderr
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import Accuracies
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import Answers, fold_numbers
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import BoolArray, IntArray, Tree

Floats = NDArray[np.float64]
Criterion = Callable[[BoolArray], Floats]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Share of a throughput that is lost, with its standard error and 95 % interval; below 0 it is a gain."""

    share: float
    stderr: float
    interval95: tuple[float, float]

    @classmethod
    def of(cls, samples: Floats, n: int) -> Loss:
        """Of (1 + B,) shares over ``n`` conversations, first the estimate."""
        low, high = interval95(samples[1:], n)
        return cls(share=float(samples[0]), stderr=stderr(samples[1:], n), interval95=(low, high))


@dataclass(frozen=True, kw_only=True)
class PlanLoss:
    """What a plan's tree reaches on other answers at one batch size, and what it loses there.

    planned         : tokens per step that the plan expected
    tokens_per_step : of the tree on these answers; None for stderr without conversations
    best_*          : what would be chosen for these answers
    """

    batch_size: int
    size: int
    depth: int
    planned: float | None
    tokens_per_step: float
    tokens_per_step_stderr: float | None
    best_size: int
    best_depth: int
    best_tokens_per_step: float
    loss: Loss


@dataclass(frozen=True, eq=False)
class Taken:
    """What decoding takes, conversation by conversation, with what was chosen for each.

    steps, tokens : (C,) · which : (C,) row of ms · ms : (n, 1 + B) latency of a step, first the estimate; (n, 1) without
    """

    steps: IntArray
    tokens: IntArray
    which: IntArray
    ms: Floats

    @property
    def rate(self) -> float:
        """Tokens over time."""
        return float(self.tokens.sum() / max((self.steps * self.ms[self.which, 0]).sum(), 1e-12))

    def on(self, among: IntArray) -> Taken:
        """What is taken on some of the conversations."""
        return replace(self, steps=self.steps[among], tokens=self.tokens[among], which=self.which[among])

    def draws(self) -> Floats:
        """(B,) its rate with other conversations and rounds of timing, drawn alike for all."""
        drawn = conversation_draws(len(self.steps))
        ms = self.ms[:, 1 : 1 + len(drawn)] if self.ms.shape[1] > 1 else self.ms
        time = sum((drawn @ np.where(self.which == k, self.steps, 0)) * ms[k] for k in np.unique(self.which))
        found: Floats = drawn @ self.tokens / np.maximum(time, 1e-12)
        return found

    def loss(self, best: Taken) -> Loss:
        """What it loses against another on the same conversations."""
        return Loss.of(1 - np.append(self.rate / best.rate, self.draws() / best.draws()), len(self.steps))


def plan_losses(plan: Plan, record: Accuracies, profile: LatencyProfile | None = None) -> list[PlanLoss]:
    """What each of a plan's trees loses on a record, within the limits that the plan had.

    Without latencies the best has as many rows as the plan's tree at most. Where a record tells of chains alone, the
    plan's best chain is judged, among chains.

    >>> from treeopt.planning.planner import plan_trees
    >>> before, after = (Calibration(np.array([[60, 20]]), np.array([100])), Calibration(np.array([[60, 30]]), np.array([100])))
    >>> (found,) = plan_losses(plan_trees(before), after)
    >>> round(found.tokens_per_step, 6), found.loss.share
    (1.9, 0.0)
    """
    source, found = source_of(record), []
    for entry in plan.entries:
        tree, limits = judged(entry, source, plan.limits(Limits()))
        limits = limits if profile else replace(limits, budget=len(tree))
        costs = costs_of(profile, entry, source)
        options = options_of(source, limits, costs, entry.batch_size, plan.objective or "replay")
        given, rates = ms_of(tree, options, costs), source.rate(tree)
        i = int(options.throughput.argmax())
        if rates.steps is None or rates.tokens is None:
            loss = _loss_by_counts(source, tree, given, options, i)
        else:
            ours = Taken(rates.steps, rates.tokens, np.zeros(len(rates.steps), dtype=np.int64), given)
            loss = ours.loss(best_of(options, source))
        found.append(
            PlanLoss(
                batch_size=entry.batch_size,
                size=len(tree),
                depth=tree.depth,
                planned=entry.tokens_per_step if tree == entry.tree else None,
                tokens_per_step=rates.tokens_per_step,
                tokens_per_step_stderr=rates.stderr,
                best_size=int(options.sizes[i]),
                best_depth=int(options.depths[i]),
                best_tokens_per_step=float(options.rates[i]),
                loss=loss,
            )
        )
    return found


def judged(entry: PlanEntry, source: Source, limits: Limits) -> tuple[Tree, Limits]:
    """The tree of an entry, or its best chain where the source tells of chains alone; the limits of its rivals."""
    if source.num_ranks > 1 or entry.tree == Tree.chain(entry.depth):
        return entry.tree, limits if source.num_ranks > 1 else replace(limits, shape="chain")
    depth = entry.best_chain.depth if entry.best_chain else entry.depth
    return Tree.chain(depth), replace(limits, shape="chain")


def costs_of(profile: LatencyProfile | None, entry: PlanEntry, source: Source) -> StepCosts | None:
    """What steps cost at an entry's batch size, in the context of the source, or else of the entry."""
    context = source.usual_context or entry.context_tokens
    return None if profile is None else StepCosts(profile, entry.batch_size, context)


def options_of(source: Source, limits: Limits, costs: StepCosts | None, batch_size: int, objective: str) -> Candidates:
    """All trees that could be chosen for a source at a batch size."""
    most = limits.budget if costs is None else min(limits.budget, max(costs.reach[0], 2))
    families = families_of(source, replace(limits, budget=most), objective, timed=costs is not None)
    return candidates_of(families, batch_size, costs)


def ms_of(tree: Tree, options: Candidates, costs: StepCosts | None) -> Floats:
    """(1, 1 + B) latency of a tree's step, by the same draws as those of the candidates; OutOfRange if it is not known."""
    if costs is None:
        return np.ones((1, 1))
    size, depth = len(tree), tree.depth
    same = np.flatnonzero((options.sizes == size) & (options.depths == depth))
    if len(same) and options.ms is not None and options.ms_draws is not None:
        return np.append(options.ms[same[0]], options.ms_draws[same[0]])[None]
    ms = costs.ms([size], [depth])
    if np.isnan(ms[0]):
        raise OutOfRange(
            f"The profile must cover the plan's tree of {size} rows, {depth} deep, but ends at {costs.reach[0]} rows, "
            f"{costs.reach[1]} deep: add it with treeopt profile --sizes {size}."
        )
    count = BOOTSTRAPS if options.ms_draws is None else options.ms_draws.shape[1]
    draws = costs.draws_ms([size], [depth], count, np.random.default_rng([SEED, options.batch_size]))
    return np.hstack([ms[:, None], draws])


def taken_by(options: Candidates) -> tuple[IntArray, IntArray, Floats]:
    """(n, C) steps and tokens of every candidate, and (n, 1 + B) their latencies."""

    def row(held_out: HeldOut, size: int) -> tuple[IntArray, IntArray]:
        assert held_out.steps is not None
        assert held_out.tokens is not None
        i = held_out.family.index(size)
        return held_out.steps[i], np.broadcast_to(held_out.tokens, held_out.steps.shape)[i]

    rows = [row(held_out, int(size)) for held_out, size in zip(options.held_out, options.sizes, strict=True)]
    steps, tokens = (np.stack(part) for part in zip(*rows, strict=True))
    if options.ms is None or options.ms_draws is None:
        return steps, tokens, np.ones((len(steps), 1))
    return steps, tokens, np.column_stack([options.ms, options.ms_draws])


def best_of(options: Candidates, source: Source, criterion: Criterion | None = None) -> Taken:
    """What the best candidate takes: for the conversations of each fold the one that is best on all others.

    criterion : (n,) how good each candidate is on some of the conversations; by default its throughput
    """
    assert source.answers is not None
    steps, tokens, ms = taken_by(options)

    def throughput(some: BoolArray) -> Floats:
        return np.asarray(tokens[:, some].sum(1) / np.maximum(steps[:, some].sum(1) * ms[:, 0], 1e-12))

    folds, which = conversation_folds(source.answers), np.zeros(steps.shape[1], dtype=np.int64)
    for fold in np.unique(folds):
        which[folds == fold] = int((criterion or throughput)(folds != fold).argmax())
    every = np.arange(len(which))
    return Taken(steps[which, every], tokens[which, every], which, ms)


def conversation_folds(answers: Answers) -> IntArray:
    """(C,) the fold of each conversation."""
    found: IntArray = fold_numbers(answers)[np.unique(answers.clusters, return_index=True)[1]]
    return found


def _loss_by_counts(source: Source, tree: Tree, ms: Floats, options: Candidates, best: int) -> Loss:
    """The loss against a candidate where there are counts alone, which are drawn again."""
    assert source.calibration is not None
    accept = drawn_accept(source.calibration)
    theirs = tokens_of(options.held_out[best].family.tree(int(options.sizes[best])), accept)
    ours = tokens_of(tree.cut(max_depth=source.num_heads, max_rank=source.num_ranks - 1), accept)
    ratio = ours / theirs
    if options.ms is not None and options.ms_draws is not None:
        ratio *= np.append(options.ms[best], options.ms_draws[best]) / ms[0]
    return Loss.of(1 - ratio, BOOTSTRAPS)


def drawn_accept(calibration: Calibration) -> Floats:
    """(1 + B, K, R) accuracies, first the estimate, then as other samples would have them.

    Counts that depend on one another (an engine's requests) count as so many independent ones as give the error of the
    first guess.
    """
    hits, trials = calibration.hits, calibration.trials
    misses, first = trials - hits.sum(1), float(calibration.accept[0, 0])
    errors, worth = calibration.meta.get("survival_stderr"), 1.0
    if errors and errors[0] > 0 and 0 < first < 1:
        worth = min(first * (1 - first) / errors[0] ** 2 / trials[0], 1.0)
    shape = np.maximum(np.column_stack([hits, misses]) * worth, 1e-3)
    drawn = np.random.default_rng(SEED).gamma(shape, size=(BOOTSTRAPS, *shape.shape))
    drawn /= np.maximum(drawn.sum(-1, keepdims=True), 1e-300)
    return np.concatenate([calibration.accept[None], drawn[..., :-1]])


def tokens_of(tree: Tree, accept: Floats) -> Floats:
    """(1 + B,) tokens per step of a tree by the product of (1 + B, K, R) accuracies.

    >>> tokens_of(Tree.chain(2), np.array([[[0.5], [0.5]]])).tolist()
    [1.75]
    """
    value = np.ones((len(tree), len(accept)))
    for node in range(1, len(tree)):
        value[node] = value[tree.parents[node]] * accept[:, tree.depths[node] - 1, tree.ranks[node]]
    return np.asarray(value.sum(0))
