"""Choose the tree with the best throughput for each batch size, or one for a mix of them.

throughput = batch_size x tokens per step / step latency, over every size and depth. Both factors are
measured, so both have noise; `treeopt.planning.select` says what it cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from treeopt.growth.heldout import HeldOut
from treeopt.growth.source import Source, objective_for, source_of
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import candidates_of, common
from treeopt.planning.entries import entry_of, unconstrained
from treeopt.planning.request import PlanRequest
from treeopt.planning.schedule import one_for_all, schedule_of
from treeopt.planning.select import select
from treeopt.records.inputs import Accuracies
from treeopt.records.origins import Drafter
from treeopt.records.plan import Constraint, Plan
from treeopt.records.profile import LatencyProfile
from treeopt.trees.shapes import Limits

REQUEST = PlanRequest()


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
    limits = replace(request.limits, max_depth=request.limits.depth(source.num_heads))
    costs = _step_costs(source, profile, request)
    families = _grown(source, request, limits)
    options = [candidates_of(families, batch_size, costs.get(batch_size)) for batch_size in request.sizes]
    mix = request.mix
    if mix is None:
        selections = [select([c], [1.0], take=(take or {}).get(c.batch_size)) for c in options]
    else:
        options = common(options)
        selections = [select(options, [mix[c.batch_size] / sum(mix.values()) for c in options])] * len(options)
    entries = [
        entry_of(c, selection, families, source, costs.get(c.batch_size), request)
        for c, selection in zip(options, selections, strict=True)
    ]
    wide = request.unconstrained()
    wide = replace(wide, max_depth=wide.depth(source.num_heads))
    if mix is None and wide != limits:
        families = _grown(source, request, wide)
        free = [candidates_of(families, batch_size, costs.get(batch_size)) for batch_size in request.sizes]
        entries = [replace(e, unconstrained=unconstrained(c)) for e, c in zip(entries, free, strict=True)]
    drafter: Drafter = source.meta.get("drafter") or Drafter()
    return Plan(
        entries=tuple(entries),
        schedule=schedule_of(options, selections) if mix is None else one_for_all(),
        objective=objective_for(source, request.objective),
        drafter={**drafter, "num_heads": source.num_heads},
        acceptance=source.meta.get("acceptance"),
        constraint=Constraint(
            budget=limits.budget,
            max_rank=limits.max_rank,
            shape=limits.shape,
            max_depth=limits.max_depth,
            measured_only=request.measured_only,
            mix=mix,
            engine=request.engine,
        ),
        runtime=profile.runtime if profile else None,
    )


def _step_costs(source: Source, profile: LatencyProfile | None, request: PlanRequest) -> dict[int, StepCosts]:
    """Batch size -> what steps cost at the context that is wanted, or usual; empty without a profile."""
    if profile is None:
        return {}
    context = request.context if request.context is not None else source.usual_context
    return {b: StepCosts(profile, b, context, measured_only=request.measured_only) for b in request.sizes}


def _grown(source: Source, request: PlanRequest, limits: Limits) -> list[HeldOut]:
    """The trees of depth limits 1, 2, ..., and what they reach on answers that they were not grown on."""
    objective = objective_for(source, request.objective)
    depths = range(1, limits.depth(source.num_heads) + 1)
    return [source.crossfit(replace(limits, max_depth=depth), objective) for depth in depths]
