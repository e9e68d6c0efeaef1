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

from dataclasses import dataclass, replace

import numpy as np

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.rates import Rates
from treeopt.growth.source import Source, source_of
from treeopt.latency.costs import StepCosts
from treeopt.planning.candidates import tree_tables
from treeopt.planning.entries import figure_of
from treeopt.planning.request import REQUEST, PlanRequest
from treeopt.planning.select import select
from treeopt.planning.table import Candidate, Floats, Table, priced, unpriced
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


@dataclass(frozen=True, kw_only=True)
class Regret:
    """A draft that is served on some answers, beside the best for these answers.

    loss    : share of the throughput that the served one loses against the best; below 0 it is a gain
    served  : the plan's draft on these answers; where groups are compared, the draft for all groups on all answers
    best    : what would be chosen for these answers alone
    planned : tokens per step that the plan expected; None for another draft than the plan's
    group   : the prompts that were answered; None for all
    conversations : how many were answered; None where there are counts alone
    accepted : share of first guesses that are right, of a group
    """

    loss: Estimate
    served: Figure
    best: Figure
    planned: float | None = None
    group: str | None = None
    conversations: int | None = None
    accepted: float | None = None

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


@dataclass(frozen=True, eq=False)
class Taken:
    """What decoding takes, conversation by conversation, with what was chosen for each.

    steps, tokens : (C,) · which : (C,) row of ms · ms : (n, 1 + B) latency of a step, first the estimate
    """

    steps: IntArray
    tokens: IntArray
    which: IntArray
    ms: Floats

    def rates(self) -> Floats:
        """(1 + B,) tokens over time, then with other conversations and rounds of timing, drawn alike for all."""
        drawn = conversation_draws(len(self.steps))
        ms = self.ms[:, 1 : 1 + len(drawn)]
        time = sum((drawn @ np.where(self.which == k, self.steps, 0)) * ms[k] for k in np.unique(self.which))
        rate = self.tokens.sum() / max((self.steps * self.ms[self.which, 0]).sum(), 1e-12)
        return np.append(rate, drawn @ self.tokens / np.maximum(time, 1e-12))


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
        table, costs = _table(source, plan, entry, limits, profile, engine)
        rates, n = source.rates(draft), None if source.answers is None else source.answers.num_conversations
        ms = _ms_of(draft, rates, table, costs)
        over_best = _over(source, draft, rates, ms, table)
        over_plain = _over(source, draft, rates, ms, table.only(np.array([table.plain])))
        served = Figure(
            draft=draft,
            batch_size=entry.batch_size,
            tokens_per_step=rates.estimate,
            step_ms=None if costs is None else Estimate(ms[0]),
            plain_ms=None if costs is None else float(table.ms[table.plain]),
            speedup=Estimate.of_draws(over_plain[0], over_plain[1:], n or BOOTSTRAPS),
        )
        loss = Estimate.of_draws(1 - over_best[0], 1 - over_best[1:], n or BOOTSTRAPS)
        best = figure_of(table, int(table.throughput.argmax()))
        planned = entry.chosen.tokens_per_step.value if draft == entry.draft else None
        regrets.append(Regret(loss=loss, served=served, best=best, planned=planned, conversations=n))
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
        table, _ = _table(whole, plan, entry, limits, profile, engine)
        shared, served = best_of(table, whole), figure_of(table, select(table).chosen)
        for name, part in sources.items():
            alone, costs = _table(part, plan, entry, limits, profile, engine)
            among = np.flatnonzero(names == name)
            n, which, ms = len(among), shared.which[among], shared.ms.copy()  # in the context of the group
            for i in np.unique(which).tolist() if costs else ():
                candidate = table.candidates[i]
                ms[i] = _ms_of(candidate.draft, candidate.rates, alone, costs)
            ours = Taken(shared.steps[among], shared.tokens[among], which, ms)
            lost = 1 - ours.rates() / best_of(alone, part).rates()
            loss = Estimate.of_draws(lost[0], lost[1:], n)
            best = figure_of(alone, select(alone).chosen)
            accepted = float(part.calibration.accept[0, 0]) if part.calibration else None
            regrets.append(Regret(loss=loss, served=served, best=best, group=name, conversations=n, accepted=accepted))
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


def _table(
    source: Source, plan: Plan, entry: PlanEntry, limits: Limits, profile: LatencyProfile | None, engine: PlanRequest
) -> tuple[Table, StepCosts | None]:
    """All drafts that could be chosen for a source at an entry's batch size, in the source's context or else the entry's."""
    limits = replace(limits, max_depth=limits.depth(source.num_heads))
    costs = None
    request = replace(engine, limits=limits, batch_sizes=[entry.batch_size])
    if profile is not None:
        context = source.usual_context or entry.context_tokens
        profile = profile.as_deep_as(plan.width or source.num_heads)
        costs = StepCosts(profile, entry.batch_size, context)
        limits = replace(limits, budget=min(limits.budget, max(costs.reach[0], 2)))
    (table,) = tree_tables(source, limits, request, {} if costs is None else {entry.batch_size: costs})
    return table, costs


def _ms_of(draft: Draft, rates: Rates, table: Table, costs: StepCosts | None) -> Floats:
    """(1 + B,) latency of a draft's step, by the same draws as those of the candidates; OutOfRange if it is not known."""
    for i, candidate in enumerate(table.candidates):
        if costs is None or candidate.outline.cost == draft.cost:
            return np.append(table.ms[i], table.ms_draws[i])
    assert costs is not None
    judged = [Candidate("", draft, rates)]
    alone = priced(unpriced(table.batch_size, judged, table.rates[:1], table.ms_draws[:1]), costs)
    if not alone.candidates:
        raise OutOfRange(
            f"The profile must cover the plan's tree of {len(draft)} rows, {draft.depth} deep: add it with treeopt profile "
            f"--sizes {len(draft)}."
        )
    return np.append(alone.ms, alone.ms_draws)


def best_of(table: Table, source: Source) -> Taken:
    """What the best candidates take: each fold of conversations has the candidate that is fastest on all others."""
    assert source.answers is not None
    rates = [candidate.rates for candidate in table.candidates]
    steps = np.stack([rate.steps for rate in rates if rate.steps is not None])
    tokens = np.stack([rate.tokens for rate in rates if rate.tokens is not None])
    every, which = np.arange(steps.shape[1]), np.zeros(steps.shape[1], dtype=np.int64)
    folds = fold_numbers(source.answers)[np.unique(source.answers.clusters, return_index=True)[1]]
    for fold in np.unique(folds):
        others = folds != fold
        rate = tokens[:, others].sum(1) / np.maximum(steps[:, others].sum(1) * table.ms, 1e-12)
        which[folds == fold] = int(rate.argmax())
    return Taken(steps[which, every], tokens[which, every], which, np.column_stack([table.ms, table.ms_draws]))


def _over(source: Source, draft: Draft, rates: Rates, ms: Floats, rivals: Table) -> Floats:
    """(1 + B,) throughput of a draft over that of the best of its rivals; counts alone are drawn again."""
    if rates.steps is not None and rates.tokens is not None:
        ours = Taken(rates.steps, rates.tokens, np.zeros(len(rates.steps), dtype=np.int64), ms[None])
        return ours.rates() / best_of(rivals, source).rates()
    i = int(rivals.throughput.argmax())
    tree, rival = draft_tree(draft), draft_tree(rivals.candidates[i].draft)  # dynamic trees are not judged by counts
    assert source.calibration is not None
    tokens, best_tokens = (
        1 + source.calibration.drafted * (tokens_of(each, drawn_accept(source.calibration.of_length(each.depth))) - 1)
        for each in (tree.cut(max_depth=source.num_heads, max_rank=source.num_ranks - 1), rival)
    )
    return np.asarray(tokens / best_tokens * np.append(rivals.ms[i], rivals.ms_draws[i]) / ms)


def drawn_accept(calibration: Calibration) -> Floats:
    """(1 + B, K, R) accuracies, first the estimate, then as other samples would have them.

    Counts that depend on one another (an engine's requests) count as so many independent ones as give the error of the
    first guess.
    """
    hits, trials = calibration.hits, np.maximum(calibration.trials, 1)
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
