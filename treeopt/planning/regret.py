"""What a draft loses on some answers against the best that could be chosen for them.

throughput = tokens / (steps x latency of a step)

The best is grown on four fifths of the conversations and judged on the rest, and its size and depth are chosen for each
fifth by the others: neither growing nor choosing flatters it. Conversations and rounds of timing are drawn again for
both trees together, so that what is common to them cancels. A calibration has no conversations: its counts are drawn
again, and its best tree is not held out.

One plan for several groups of prompts is judged alike: *shared* is the tree grown on all answers as they came, so that large
groups count more; *alone* is the tree grown on the answers of one group.

C conversations · n candidates · K depths · R ranks · B bootstrap draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.source import Source, source_of
from treeopt.latency.costs import StepCosts
from treeopt.planning.candidates import tree_tables
from treeopt.planning.entries import figure_of
from treeopt.planning.request import REQUEST, PlanRequest
from treeopt.planning.select import select
from treeopt.planning.table import Candidate, Floats, Table
from treeopt.records.bootstrap import BOOTSTRAPS, SEED, conversation_draws
from treeopt.records.calibration import Calibration
from treeopt.records.estimate import Estimate
from treeopt.records.figure import Figure
from treeopt.records.inputs import Accuracies
from treeopt.records.plan import Plan, PlanEntry
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace, fold_numbers
from treeopt.trees.draft import Draft, draft_tree
from treeopt.trees.limits import EngineLimits
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray, Tree

FEWEST = 5  # conversations that a group needs to be judged: one for each fold
ONLY_CHAINS = EngineLimits(shape="chain")
SERVED = "served"  # group of the candidates that the plan has for these answers


@dataclass(frozen=True, kw_only=True)
class Regret:
    """A draft that is served on some answers, beside the best for these answers.

    loss    : share of the throughput that the served one loses against the best; below 0 it is a gain
    served  : the plan's draft on these answers; where groups are compared, the draft for all groups on all answers
    best    : what would be chosen for these answers alone
    planned : tokens per step that the plan expected; None for another draft than the plan's
    group   : the prompts that were answered; None for all
    conversations : how many were answered; None where there are counts alone
    """

    loss: Estimate
    served: Figure
    best: Figure
    planned: float | None = None
    group: str | None = None
    conversations: int | None = None

    @property
    def batch_size(self) -> int:
        return self.best.batch_size

    @property
    def gain(self) -> Estimate:
        """Throughput of the best draft over that of the served one."""
        return Estimate(1 / (1 - self.loss), None, *(1 / (1 - end) for end in self.loss.ends))

    def exceeds(self, tolerance: float) -> bool:
        """Whether more is lost than the tolerance, beyond noise."""
        return self.loss.ends[0] > tolerance


def plan_losses(
    plan: Plan, record: Accuracies, profile: LatencyProfile | None = None, engine: PlanRequest = REQUEST
) -> list[Regret]:
    """What each of a plan's trees loses on a record, within the limits of the plan.

    Without latencies the best has at most as many rows as the plan's tree. Where a record tells of chains alone, the plan's
    best chain is judged, among chains.

    engine : a request for what the plan's engine takes; the best is one of these drafts

    >>> from treeopt.planning.planner import plan_trees
    >>> before, after = (Calibration(np.array([[60, 20]]), np.array([100])), Calibration(np.array([[60, 30]]), np.array([100])))
    >>> (regret,) = plan_losses(plan_trees(before), after)
    >>> print(regret.served.tokens_per_step, regret.loss)
    1.90 0.00 [0.00, 0.00]
    """
    source, regrets = source_of(record), []
    for entry in plan.entries:
        draft, limits = _judged(entry, source, plan.limits(Limits()))
        limits = limits if profile else replace(limits, budget=len(draft))
        served = Candidate(SERVED, draft, source.rates(draft), row_counts=source.row_counts(len(draft)))
        table, rivals = _tables(source, plan, entry, limits, profile, engine, [served])
        n, place = served.conversations, len(rivals.candidates)
        everywhere = np.ones(max(n, 1), dtype=np.int64)
        ours, plain = (_throughput(source, table, i * everywhere) for i in (place, table.plain))
        best = _throughput(source, table, best_places(source, rivals))
        speedup = Estimate.of_draws(ours[0] / plain[0], ours[1:] / plain[1:], n or BOOTSTRAPS)
        figure = replace(
            figure_of(table, place), tokens_per_step=served.rates.estimate, tokens_per_s=None, speedup=speedup
        )
        regrets.append(
            Regret(
                loss=Estimate.of_draws(1 - ours[0] / best[0], 1 - ours[1:] / best[1:], n or BOOTSTRAPS),
                served=figure,
                best=figure_of(table, int(rivals.throughput.argmax())),
                planned=entry.chosen.tokens_per_step.value if draft == entry.draft else None,
                conversations=n or None,
            )
        )
    return regrets


def group_parts(trace: RankTrace) -> dict[str, RankTrace]:
    """The sequences of each group that has enough conversations; InvalidInput where fewer than two groups have."""
    names, parts = np.array(trace.conversation_groups()), {}
    for name in np.unique(names).tolist():
        if (names == name).sum() >= FEWEST:
            parts[name] = trace.select(np.flatnonzero((names == name)[trace.clusters]))
    if len(parts) < 2:
        raise InvalidInput(
            f"Plans for groups need two groups of {FEWEST} conversations at least, but the trace has {len(parts)}: "
            "calibrate with `group_by` on more prompts."
        )
    return parts


def group_losses(
    plan: Plan, trace: RankTrace, profile: LatencyProfile | None, engine: PlanRequest = REQUEST
) -> list[Regret]:
    """What each group loses at each batch size with the best tree for all, within the limits of the shared ``plan``.

    engine : as of `plan_losses`
    """
    parts, limits, regrets = group_parts(trace), plan.limits(Limits()), []
    whole, sources = source_of(trace), {name: source_of(part) for name, part in parts.items()}
    names = np.array(trace.conversation_groups())
    for entry in plan.entries:
        shared, _ = _tables(whole, plan, entry, limits, profile, engine)
        places, served = best_places(whole, shared), figure_of(shared, select(shared).chosen)
        for name, part in sources.items():
            among = np.flatnonzero(names == name)
            which, each = np.unique(places[among], return_inverse=True)
            ours = [
                replace(shared.candidates[i], group=SERVED, rates=shared.candidates[i].rates.on(among)) for i in which
            ]
            table, rivals = _tables(part, plan, entry, limits, profile, engine, ours)  # in the context of the group
            lost = 1 - _throughput(part, table, len(rivals.candidates) + each) / _throughput(
                part, table, best_places(part, rivals)
            )
            loss = Estimate.of_draws(lost[0], lost[1:], len(among))
            best = figure_of(rivals, select(rivals).chosen)
            regrets.append(Regret(loss=loss, served=served, best=best, group=name, conversations=len(among)))
    return regrets


def _judged(entry: PlanEntry, source: Source, limits: Limits) -> tuple[Draft, Limits]:
    """The draft of an entry, or its best chain where the source tells of chains alone; the limits of its rivals."""
    draft = entry.draft if source.knows(entry.draft) else entry.tree
    if source.num_ranks > 1:
        return draft, limits
    if not ONLY_CHAINS.takes(draft, source.num_heads):
        chain = entry.best("chain")
        draft = Tree.chain(chain.depth if chain else entry.chosen.depth)
    return draft, replace(limits, shape="chain")


def _tables(
    source: Source,
    plan: Plan,
    entry: PlanEntry,
    limits: Limits,
    profile: LatencyProfile | None,
    engine: PlanRequest,
    served: Sequence[Candidate] = (),
) -> tuple[Table, Table]:
    """All drafts that could be chosen for a source at an entry's batch size, with those that are served behind them and without.

    Latencies are those of the source's context, or else the entry's. Raises OutOfRange if that of a served draft is not known.
    """
    limits = replace(limits, max_depth=limits.depth(source.num_heads))
    costs = {}
    if profile is not None:
        context = source.usual_context or entry.context_tokens
        cost = StepCosts(profile.as_deep_as(plan.width or source.num_heads), entry.batch_size, context)
        costs = {entry.batch_size: cost}
        limits = replace(limits, budget=min(limits.budget, max(cost.reach[0], 2)))
    request = replace(engine, limits=limits, batch_sizes=[entry.batch_size])
    (table,) = tree_tables(source, limits, request, costs, served=served)
    for candidate in served:
        if candidate not in table.places:
            raise OutOfRange(
                f"The profile must cover the plan's tree of {candidate.size} rows, {candidate.depth} deep: add it with treeopt "
                f"profile --sizes {candidate.size}."
            )
    return table, table.only(np.arange(len(table.candidates) - len(served)))


def best_places(source: Source, table: Table) -> IntArray:
    """(C,) place of the best candidate for each conversation: that which is fastest on the other folds.

    The fastest of all where there are no conversations.
    """
    if source.answers is None:
        return np.array([table.throughput.argmax()])
    steps, tokens = table.steps, table.tokens
    best = np.zeros(steps.shape[1], dtype=np.int64)
    folds = fold_numbers(source.answers)[np.unique(source.answers.clusters, return_index=True)[1]]
    for fold in np.unique(folds):
        others = folds != fold
        rate = tokens[:, others].sum(1) / np.maximum(steps[:, others].sum(1) * table.ms, 1e-12)
        best[folds == fold] = rate.argmax()
    return best


def _throughput(source: Source, table: Table, places: IntArray) -> Floats:
    """(1 + B,) tokens over time, by the (C,) candidate that decodes each conversation; first the estimate, then the draws.

    Counts alone are drawn again.
    """
    if source.answers is None:
        assert source.calibration is not None
        place = int(places[0])  # of a fixed tree: others are not judged by counts
        tree = draft_tree(table.candidates[place].draft).cut(max_depth=source.num_heads, max_rank=source.num_ranks - 1)
        tokens = tokens_of(tree, drawn_accept(source.calibration.of_length(tree.depth)))
        tokens = 1 + source.calibration.drafted * (tokens - 1)
        return np.asarray(tokens / np.append(table.ms[place], table.ms_draws[place]))
    conversations = np.arange(len(places))
    steps, tokens = table.steps[places, conversations], table.tokens[places, conversations]
    drawn = conversation_draws(len(places))
    time = sum(
        (drawn @ np.where(places == i, steps, 0)) * table.ms_draws[i, : len(drawn)] for i in np.unique(places).tolist()
    )
    rate = tokens.sum() / max((steps * table.ms[places]).sum(), 1e-12)
    return np.append(rate, drawn @ tokens / np.maximum(time, 1e-12))


def drawn_accept(calibration: Calibration) -> Floats:
    """(1 + B, K, R) accuracies, first the estimate, then as other samples would have them.

    Counts that depend on one another (an engine's requests) count as so many independent ones as give the error of the
    first guess.
    """
    hits, trials = calibration.hits, np.maximum(calibration.trials, 1)
    misses, first = trials - hits.sum(1), float(calibration.accept[0, 0])
    errors, worth = calibration.survival_stderr, 1.0
    if errors is not None and errors[0] > 0 and 0 < first < 1:
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
