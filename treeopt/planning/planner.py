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
from treeopt.planning.candidates import candidates_of, common, families_of
from treeopt.planning.dynamic import dynamic_rivals
from treeopt.planning.entries import best_of, entry_of, mixture_of
from treeopt.planning.request import PlanRequest
from treeopt.planning.schedule import errors_between, losses_elsewhere, one_for_all, schedule_of
from treeopt.planning.select import select
from treeopt.records.expected import TreeFigures
from treeopt.records.inputs import Accuracies
from treeopt.records.origins import Drafter
from treeopt.records.plan import Constraint, Plan
from treeopt.records.profile import LatencyProfile
from treeopt.trees.shapes import Limits

REQUEST = PlanRequest()
MOST_UNTIMED = 1024  # rows of a tree where nothing was timed
LEAST_GROWN = 8  # rows, so that a profile without trees can be told which to time


def plan_trees(
    record: Accuracies,
    profile: LatencyProfile | None = None,
    request: PlanRequest = REQUEST,
    *,
    take: Mapping[int, tuple[int, int]] | None = None,
) -> Plan:
    """The best tree within the limits for each batch size, and a schedule of them.

    With a profile it takes the size and depth with the highest predicted throughput, and of those that the noise
    does not tell apart the smaller tree. Without a profile it takes the largest tree that the budget allows.

    take : (size, depth) to take at a batch size instead of the best by prediction; not heeded with a mix

    >>> import numpy as np
    >>> from treeopt.records.calibration import Calibration
    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> plan_trees(calibration, request=PlanRequest(Limits(3))).entries[0].medusa_choices
    [[0], [0, 0]]
    """
    source = source_of(record)
    costs = _step_costs(source, profile, request)
    limits = _useful(request.limits, source, costs)
    families = families_of(source, limits, request.objective, timed=bool(costs))
    options = [candidates_of(families, batch_size, costs.get(batch_size)) for batch_size in request.sizes]
    mix, total = request.mix, None
    errors: list[float] = []
    own = [best_of(c) if mix else None for c in options]
    if mix is None:
        selections = [select([c], [1.0], take=(take or {}).get(c.batch_size)) for c in options]
        errors = errors_between(options, selections)
    else:
        options = common(options)
        shares = [mix[c.batch_size] / sum(mix.values()) for c in options]
        selections = [select(options, shares)] * len(options)
        total = mixture_of(options, shares, selections[0], [figures for figures in own if figures])
    entries = [
        entry_of(c, selection, families, source, costs.get(c.batch_size), request)
        for c, selection in zip(options, selections, strict=True)
    ]
    elsewhere = [{} for _ in options] if mix else losses_elsewhere(options, selections)
    free = [None for _ in options] if mix else _unlimited(source, request, limits, costs)
    found = dynamic_rivals(source, options, selections, profile, costs, limits, request)
    entries = [
        replace(e, elsewhere=losses, own=figures, unconstrained=wide, dynamic=one, adaptive=other)
        for e, losses, figures, wide, (one, other) in zip(entries, elsewhere, own, free, found, strict=True)
    ]
    drafter: Drafter = source.meta.get("drafter") or Drafter()
    return Plan(
        entries=tuple(entries),
        schedule=schedule_of(options, selections) if mix is None else one_for_all(),
        objective=objective_for(source, request.objective),
        drafter={**drafter, "num_heads": source.num_heads},
        acceptance=source.meta.get("acceptance"),
        constraint=_constraint(limits, request, costs),
        runtime=profile.runtime if profile else None,
        total=total,
        error_between=max(errors, default=None),
        tests_between=len(errors) or None,
    )


def _unlimited(
    source: Source, request: PlanRequest, limits: Limits, costs: Mapping[int, StepCosts]
) -> list[TreeFigures | None]:
    """What the best tree of every batch size reaches without the limits; None where there are none."""
    wide = _useful(request.unconstrained(), source, costs)
    families = families_of(source, wide, request.objective, timed=bool(costs)) if wide != limits else []
    return [best_of(candidates_of(families, size, costs.get(size))) if families else None for size in request.sizes]


def _constraint(limits: Limits, request: PlanRequest, costs: Mapping[int, StepCosts]) -> Constraint:
    """What the trees were allowed to be, for the record."""
    return Constraint(
        budget=min([limits.budget, *([max(c.reach[0] for c in costs.values())] if costs else [])]),
        max_rank=limits.max_rank,
        shape=limits.shape,
        max_depth=limits.max_depth,
        measured_only=request.measured_only,
        mix=request.mix,
        engine=request.engine,
    )


def _step_costs(source: Source, profile: LatencyProfile | None, request: PlanRequest) -> dict[int, StepCosts]:
    """Batch size -> what steps cost at the context that is wanted, or usual; empty without a profile."""
    if profile is None:
        return {}
    context = request.context if request.context is not None else source.usual_context
    return {b: StepCosts(profile, b, context, measured_only=request.measured_only) for b in request.sizes}


def _useful(limits: Limits, source: Source, costs: Mapping[int, StepCosts]) -> Limits:
    """The limits within which trees are worth growing: no deeper than the heads, and no larger than what was timed.

    One row more than was timed tells whether there are larger trees. Raises InvalidInput for a budget that only a
    profile could make sense of.
    """
    if not costs and limits.budget > MOST_UNTIMED:
        raise InvalidInput(
            f"--budget must be at most {MOST_UNTIMED:,} without a profile, but got {limits.budget:,}: the largest tree "
            "would be taken, whatever a step costs. Measure with: treeopt profile"
        )
    most = max((c.reach[0] for c in costs.values()), default=limits.budget) + 1
    return replace(limits, max_depth=limits.depth(source.num_heads), budget=min(limits.budget, max(most, LEAST_GROWN)))
