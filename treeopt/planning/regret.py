"""What a tree loses on answers against the best that could be chosen for them.

throughput = tokens / (steps x latency of a step)

The best is grown on four fifths of the conversations and judged on the rest, and its size and depth are chosen for each
fifth by the others: neither growing nor choosing flatters it. Conversations and rounds of timing are drawn again for
both trees together, so that what is common to them cancels. A calibration has no conversations: its counts are drawn
again, and its best tree is not held out.

C conversations · n candidates · K depths · R ranks · B bootstrap draws
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from treeopt.errors import OutOfRange
from treeopt.growth.source import Source, source_of
from treeopt.latency.dynamic import price
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates, DraftPool, Floats, tables_of
from treeopt.planning.entries import figure_of
from treeopt.planning.request import PlanRequest
from treeopt.records.bootstrap import BOOTSTRAPS, SEED, conversation_draws, interval95, stderr
from treeopt.records.calibration import Calibration
from treeopt.records.figure import Errors, Figure
from treeopt.records.inputs import Accuracies
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import Answers, fold_numbers
from treeopt.trees.draft import Draft, draft_tree
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray, Tree


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Share of a throughput that is lost, with its standard error and 95 % interval; below 0 it is a gain."""

    share: float
    stderr: float
    interval95: tuple[float, float]

    @classmethod
    def of(cls, samples: Floats, n: int) -> Loss:
        """The loss by (1 + B,) shares over ``n`` conversations, first the estimate."""
        low, high = interval95(samples[1:], n)
        return cls(share=float(samples[0]), stderr=stderr(samples[1:], n), interval95=(low, high))


@dataclass(frozen=True, kw_only=True)
class PlanLoss:
    """What a plan's draft reaches on other answers at one batch size, and what it loses there.

    planned : tokens per step that the plan expected; None for another draft than the plan's
    reached : the draft on these answers · best : what would be chosen for them
    """

    planned: float | None
    reached: Figure
    best: Figure
    loss: Loss

    @property
    def batch_size(self) -> int:
        """Sequences decoded at once."""
        return self.reached.batch_size


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
    >>> round(found.reached.tokens_per_step, 6), found.loss.share
    (1.9, 0.0)
    """
    source, found = source_of(record), []
    for entry in plan.entries:
        draft, limits = judged(entry, source, plan.limits(Limits()))
        limits = limits if profile else replace(limits, budget=len(draft))
        costs = costs_of(profile, entry, source)
        options = options_of(source, limits, costs, entry.batch_size, plan.objective or "replay")
        given, rates = ms_of(draft, options, costs), source.rate(draft)
        i = int(options.throughput.argmax())
        if rates.steps is None or rates.tokens is None:
            loss = _loss_by_counts(source, draft, given, options, i)
        else:
            ours = Taken(rates.steps, rates.tokens, np.zeros(len(rates.steps), dtype=np.int64), given)
            loss = ours.loss(best_of(options, source))
        reached = Figure(
            draft=draft,
            batch_size=entry.batch_size,
            tokens_per_step=rates.tokens_per_step,
            step_ms=None if costs is None else float(given[0, 0]),
            plain_ms=None if options.plain_ms is None else float(options.plain_ms[0]),
            stderr=Errors(tokens_per_step=rates.stderr),
        )
        planned = entry.chosen.tokens_per_step if draft == entry.draft else None
        found.append(PlanLoss(planned=planned, reached=reached, best=figure_of(options, i), loss=loss))
    return found


def judged(entry: PlanEntry, source: Source, limits: Limits) -> tuple[Draft, Limits]:
    """The draft of an entry, or its best chain where the source tells of chains alone; the limits of its rivals."""
    draft = entry.draft if source.pooled or entry.draft.kind != "dynamic" else entry.tree
    if source.num_ranks > 1 or draft.kind in ("chain", "plain"):
        return draft, limits if source.num_ranks > 1 else replace(limits, shape="chain")
    chain = entry.best("chain")
    return Tree.chain(chain.depth if chain else entry.chosen.depth), replace(limits, shape="chain")


def costs_of(profile: LatencyProfile | None, entry: PlanEntry, source: Source) -> StepCosts | None:
    """What steps cost at an entry's batch size, in the context of the source, or else of the entry."""
    context = source.usual_context or entry.context_tokens
    return None if profile is None else StepCosts(profile, entry.batch_size, context)


def options_of(source: Source, limits: Limits, costs: StepCosts | None, batch_size: int, objective: str) -> Candidates:
    """All drafts that could be chosen for a source at a batch size."""
    most = limits.budget if costs is None else min(limits.budget, max(costs.reach[0], 2))
    request = PlanRequest(replace(limits, budget=most), [batch_size], objective)
    drafts = DraftPool.of(source, request.limits, request, None if costs is None else costs.profile)
    return tables_of(drafts, [batch_size], {} if costs is None else {batch_size: costs}, request)[0]


def ms_of(draft: Draft, options: Candidates, costs: StepCosts | None) -> Floats:
    """(1, 1 + B) latency of a draft's step, by the same draws as those of the candidates; OutOfRange if it is not known."""
    if costs is None:
        return np.ones((1, 1))
    same = [i for i, one in enumerate(options.all) if (one.size, one.depth) == (len(draft), draft.depth)]
    same = [i for i in same if (options.all[i].group == "dynamic") == (draft.kind == "dynamic")]
    same = [i for i in same if draft.kind != "dynamic" or options.all[i].draft == draft]
    if same and options.ms is not None and options.ms_draws is not None:
        return np.append(options.ms[same[0]], options.ms_draws[same[0]])[None]
    count = BOOTSTRAPS if options.ms_draws is None else options.ms_draws.shape[1]
    rng = np.random.default_rng([SEED, options.batch_size])
    ms, draws = price(costs, draft, count, rng)
    if np.isnan(ms):
        raise OutOfRange(
            f"The profile must cover the plan's tree of {len(draft)} rows, {draft.depth} deep, but ends at "
            f"{costs.reach[0]} rows, {costs.reach[1]} deep: add it with treeopt profile --sizes {len(draft)}."
        )
    return np.append(ms, draws)[None]


def best_of(options: Candidates, source: Source) -> Taken:
    """What the best candidate takes: for the conversations of each fold the one that is fastest on all others."""
    assert source.answers is not None
    steps = np.stack([one.steps for one in options.all if one.steps is not None])
    tokens = np.stack([one.tokens for one in options.all if one.tokens is not None])
    ms = np.ones((len(steps), 1))
    if options.ms is not None and options.ms_draws is not None:
        ms = np.column_stack([options.ms, options.ms_draws])
    folds, which = conversation_folds(source.answers), np.zeros(steps.shape[1], dtype=np.int64)
    for fold in np.unique(folds):
        others = folds != fold
        rate = tokens[:, others].sum(1) / np.maximum(steps[:, others].sum(1) * ms[:, 0], 1e-12)
        which[folds == fold] = int(rate.argmax())
    every = np.arange(len(which))
    return Taken(steps[which, every], tokens[which, every], which, ms)


def conversation_folds(answers: Answers) -> IntArray:
    """(C,) the fold of each conversation."""
    found: IntArray = fold_numbers(answers)[np.unique(answers.clusters, return_index=True)[1]]
    return found


def _loss_by_counts(source: Source, draft: Draft, ms: Floats, options: Candidates, best: int) -> Loss:
    """The loss against a candidate where there are counts alone, which are drawn again."""
    tree, rival = draft_tree(draft), draft_tree(options.all[best].draft)  # dynamic trees are not judged by counts
    assert source.calibration is not None
    accept = drawn_accept(source.calibration)
    theirs = tokens_of(rival, accept)
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
