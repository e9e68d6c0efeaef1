"""Choose the tree with the best throughput for each batch size, or one for a mix of them.

throughput = batch_size x tokens per step / step latency, over every size and depth. Both factors are
measured, so both have noise; `treeopt.planning.select` says what it cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from treeopt.errors import InvalidInput
from treeopt.growth.source import Source, objective_for, source_of
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import common, evidence_of, mixed, tables_of
from treeopt.planning.entries import entry_of, mix_errors
from treeopt.planning.request import PlanRequest
from treeopt.planning.schedule import schedule_of
from treeopt.planning.select import judged, select
from treeopt.records.inputs import Accuracies
from treeopt.records.origins import DrafterRecord
from treeopt.records.plan import BatchRange, Constraint, Plan
from treeopt.records.profile import LatencyProfile
from treeopt.trees.draft import Draft
from treeopt.trees.shapes import Limits

REQUEST = PlanRequest()
ONE_FOR_ALL = BatchRange(first=1, last=None, entry=0)  # the schedule of a single draft, whatever it costs anywhere
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
    source, mix = source_of(record), request.mix
    costs = _step_costs(source, profile, request)
    limits = _useful(request.limits, source, costs)
    wide = limits if mix else _useful(request.unconstrained(), source, costs)
    constraint = _constraint(limits, request, costs)
    options, tables = tables_of(source, limits, request, costs), []
    if wide != limits:
        tables = tables_of(source, wide, replace(request, dynamic=None), costs)
    if mix is None:
        selections = [select(c, take=(take or {}).get(c.batch_size)) for c in options]
    else:
        tables, options = options, common(options)
        whole = mixed(options, [mix[c.batch_size] / sum(mix.values()) for c in options])
        selections = [select(whole)] * len(options)
    free = [(judged(c, best), best.chosen) for c, best in ((c, select(c)) for c in tables)]
    schedule, tests = ([ONE_FOR_ALL], []) if mix else schedule_of(options, selections)
    options = [judged(c, s) for c, s in zip(options, selections, strict=True)]
    budget, entries = request.limits.budget, []
    evidence = [evidence_of(source, c, s.chosen, budget) for c, s in zip(options, selections, strict=True)]
    for b, selection in enumerate(selections):
        entries.append(entry_of(options, selection, b, evidence[b], free[b] if free else None, own=mix is None))
    errors = mix_errors(judged(whole, selections[0]), options[0], selections[0]) if mix else None
    drafter: DrafterRecord = source.meta.get("drafter") or DrafterRecord()
    return Plan(
        entries=tuple(entries),
        schedule=schedule,
        objective=objective_for(source, request.objective),
        drafter={**drafter, "num_heads": source.num_heads},
        acceptance=source.meta.get("acceptance"),
        constraint=constraint,
        runtime=profile.runtime if profile else None,
        part=profile.part if profile else None,
        mix_errors=errors,
        error_between=max(tests, default=None),
        tests_between=len(tests) or None,
    )


def _constraint(limits: Limits, request: PlanRequest, costs: Mapping[int, StepCosts]) -> Constraint:
    """What the trees were allowed to be, for the record."""
    reach = max((c.reach[0] for c in costs.values()), default=limits.budget)
    within = asdict(replace(limits, budget=min(limits.budget, reach)))
    return Constraint(**within, mix=request.mix, engine=request.engine)


def _step_costs(source: Source, profile: LatencyProfile | None, request: PlanRequest) -> dict[int, StepCosts]:
    """Batch size -> what steps cost at the context that is wanted, or usual; empty without a profile."""
    if profile is None:
        return {}
    context = request.context if request.context is not None else source.usual_context
    return {b: StepCosts(profile, b, context, redrafts=request.redrafts) for b in request.sizes}


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
    most, heads = max((c.reach[0] for c in costs.values()), default=limits.budget) + 1, source.num_heads
    depth = min(limits.max_depth or heads, heads)
    return replace(limits, max_depth=depth, budget=min(limits.budget, max(most, LEAST_GROWN)))
