"""Choose the tree with the best throughput for each batch size, or one for a mix of them.

throughput = batch_size x tokens per step / step latency, over every size and depth. Both factors are
measured, so both have noise; `treeopt.planning.select` says what it cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from treeopt.errors import InvalidInput
from treeopt.growth.source import Source, objective_for, source_of
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates, DraftPool, common, tables_of
from treeopt.planning.entries import EntryMaker, best_alone, mix_errors
from treeopt.planning.request import PlanRequest
from treeopt.planning.schedule import errors_between, one_for_all, schedule_of
from treeopt.planning.select import Selection, select
from treeopt.records.figure import Figure
from treeopt.records.inputs import Accuracies
from treeopt.records.origins import DrafterRecord
from treeopt.records.plan import Constraint, MixErrors, Plan
from treeopt.records.profile import LatencyProfile
from treeopt.trees.draft import Draft
from treeopt.trees.shapes import Limits

REQUEST = PlanRequest()
MOST_UNTIMED = 1024  # rows of a tree where nothing was timed
LEAST_GROWN = 8  # rows, so that a profile without trees can be told which to time


def plan_trees(
    record: Accuracies,
    profile: LatencyProfile | None = None,
    request: PlanRequest = REQUEST,
    *,
    take: Mapping[int, Draft] | None = None,
) -> Plan:
    """The best draft within the limits for each batch size, and a schedule of them.

    With a profile it takes the draft with the highest predicted throughput, and of those that the noise
    does not tell apart a fixed tree, and the smallest. Without a profile it takes the largest tree that the budget allows.

    take : the draft to take at a batch size instead of the best by prediction; not heeded with a mix

    >>> import numpy as np
    >>> from treeopt.records.calibration import Calibration
    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> plan_trees(calibration, request=PlanRequest(Limits(3))).entries[0].tree.medusa_choices
    [[0], [0, 0]]
    """
    source = source_of(record)
    costs = _step_costs(source, profile, request)
    limits = _useful(request.limits, source, costs)
    drafts = DraftPool.of(source, limits, request, profile)
    options = tables_of(drafts, request.sizes, costs, request)
    own = [best_alone(c) if request.mix else None for c in options]
    errors: list[float] = []
    if request.mix is None:
        selections = [select([c], [1.0], take=(take or {}).get(c.batch_size)) for c in options]
        errors = errors_between(options, selections)
    else:
        options = common(options)
        selections = [select(options, _shares(options, request.mix))] * len(options)
    maker = EntryMaker(source, drafts.families, costs, request)
    entries = [maker.entry(options, selections, b) for b in range(len(options))]
    free = [None for _ in options] if request.mix else _unlimited(source, request, limits, costs)
    drafter: DrafterRecord = source.meta.get("drafter") or DrafterRecord()
    return Plan(
        entries=tuple(replace(e, own=one, unconstrained=wide) for e, one, wide in zip(entries, own, free, strict=True)),
        schedule=schedule_of(options, selections) if request.mix is None else one_for_all(),
        objective=objective_for(source, request.objective),
        drafter={**drafter, "num_heads": source.num_heads},
        acceptance=source.meta.get("acceptance"),
        constraint=_constraint(limits, request, costs),
        runtime=profile.runtime if profile else None,
        mix_errors=_mix_errors(options, request, selections[0]),
        error_between=max(errors, default=None),
        tests_between=len(errors) or None,
    )


def _shares(options: list[Candidates], mix: Mapping[int, float]) -> list[float]:
    """The share of the time of each batch size; they sum to 1."""
    return [mix[c.batch_size] / sum(mix.values()) for c in options]


def _mix_errors(options: list[Candidates], request: PlanRequest, selection: Selection) -> MixErrors | None:
    return None if request.mix is None else mix_errors(options, _shares(options, request.mix), selection)


def _unlimited(
    source: Source, request: PlanRequest, limits: Limits, costs: Mapping[int, StepCosts]
) -> list[Figure | None]:
    """What the best tree of every batch size reaches without the limits; None where there are none."""
    wide = _useful(request.unconstrained(), source, costs)
    if wide == limits:
        return [None for _ in request.sizes]
    fixed = replace(request, dynamic=None)
    profile = next(iter(costs.values())).profile if costs else None
    return [best_alone(c) for c in tables_of(DraftPool.of(source, wide, fixed, profile), request.sizes, costs, fixed)]


def _constraint(limits: Limits, request: PlanRequest, costs: Mapping[int, StepCosts]) -> Constraint:
    """What the trees were allowed to be, for the record."""
    return Constraint(
        budget=min([limits.budget, *([max(c.reach[0] for c in costs.values())] if costs else [])]),
        max_rank=limits.max_rank,
        shape=limits.shape,
        max_depth=limits.max_depth,
        mix=request.mix,
        engine=request.engine,
    )


def _step_costs(source: Source, profile: LatencyProfile | None, request: PlanRequest) -> dict[int, StepCosts]:
    """Batch size -> what steps cost at the context that is wanted, or usual; empty without a profile."""
    if profile is None:
        return {}
    context = request.context if request.context is not None else source.usual_context
    return {b: StepCosts(profile, b, context) for b in request.sizes}


def _useful(limits: Limits, source: Source, costs: Mapping[int, StepCosts]) -> Limits:
    """The limits within which trees are worth growing: no deeper than the heads, and no larger than what was timed.

    One row more than was timed tells whether there are larger trees. Raises InvalidInput for a budget that only a
    profile could make sense of.
    """
    if not costs and limits.budget > MOST_UNTIMED:
        raise InvalidInput(
            f"`budget` must be at most {MOST_UNTIMED:,} without a profile, but got {limits.budget:,}: the largest tree "
            "would be taken, whatever a step costs. Measure with: treeopt profile"
        )
    most = max((c.reach[0] for c in costs.values()), default=limits.budget) + 1
    return replace(limits, max_depth=limits.depth(source.num_heads), budget=min(limits.budget, max(most, LEAST_GROWN)))
