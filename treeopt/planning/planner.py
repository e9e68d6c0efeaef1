"""Choose the tree with the best throughput for each batch size, or one for a mix of them.

throughput = batch_size x tokens per step / step latency, over every size and depth. Both factors are
measured, so both have noise; `treeopt.planning.select` says what it cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.growth.coverage import COVERAGE
from treeopt.growth.heldout import HeldOut, crossfit, crossfit_probe, from_calibration
from treeopt.growth.objectives import check_objective
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates, candidates_of, common
from treeopt.planning.entries import entry_of, unconstrained
from treeopt.planning.schedule import one_for_all, schedule_of
from treeopt.planning.select import select
from treeopt.records.calibration import Calibration
from treeopt.records.origins import Drafter
from treeopt.records.plan import Constraint, Plan, PlannedEngine
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace
from treeopt.trees.tree import MAX_RANK


def plan_trees(
    source: RankTrace | Calibration | Probe,
    profile: LatencyProfile | None = None,
    *,
    batch_sizes: Sequence[int] | Mapping[int, float] = (1,),
    budget: int = 64,
    max_rank: int = MAX_RANK,
    max_depth: int | None = None,
    shape: str = "sibling-closed",
    objective: str = "replay",
    context: int | None = None,
    measured_only: bool = False,
    take: Mapping[int, tuple[int, int]] | None = None,
    engine: dict[str, Any] | None = None,
    free: dict[str, int] | None = None,
    inputs: dict[str, str] | None = None,
) -> Plan:
    """The best tree within ``budget`` rows (root included) for each batch size, and a schedule of them.

    With a profile: highest predicted throughput over all sizes and depths; ties inside the noise go to
    the smaller tree. Without: the whole budget. From a calibration the objective is always `independent`,
    from a probe always `coverage`.

    shape         one of `shapes.SHAPES`; by default siblings have ranks without gaps, as nearly every engine needs
    batch_sizes   a mapping to shares of the time asks for one tree: that with the most tokens in all
    context       tokens that a sequence has, of the profile's range (default: as in the trace)
    measured_only consider only sizes that were timed at that batch size
    take          (size, depth) to take at a batch size instead of the best by prediction
    engine        what the limits stand for, for the record
    free          budget, max_rank and max_depth without the engine, for what its limits cost

    >>> import numpy as np
    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> plan_trees(calibration, budget=3).entries[0].medusa_choices
    [[0], [0, 0]]
    """
    for name, value, least in (
        ("--budget", budget, 1),
        ("--max-rank", max_rank, 0),
        ("--max-depth", max_depth, 1),
        ("--context", context, 1),
    ):
        if value is not None and value < least:
            raise InvalidInput(f"{name} must be at least {least}, but got {value}.")
    check_objective(objective)
    depth_limit = min(source.num_heads, max_depth or source.num_heads)
    limits: dict[str, Any] = {"budget": budget, "max_rank": max_rank, "shape": shape}
    if isinstance(source, Calibration):
        objective = "independent"
    elif isinstance(source, Probe):
        objective = COVERAGE
    meta = source.meta
    wanted = context if context is not None else _usual_context(source)

    sizes = sorted(set(batch_sizes))
    costs = {b: StepCosts(profile, b, wanted, measured_only=measured_only) for b in sizes} if profile else {}

    def grown(limits: dict[str, Any], deepest: int) -> tuple[list[HeldOut], list[Candidates]]:
        families = [_grown(source, objective, limits, max_depth=depth) for depth in range(1, deepest + 1)]
        return families, [candidates_of(families, b, costs.get(b)) for b in sizes]

    families, options = grown(limits, depth_limit)
    mix = dict(batch_sizes) if isinstance(batch_sizes, Mapping) else None
    if mix is not None:
        options = common(options)
        shares = [mix[c.batch_size] / sum(mix.values()) for c in options]
        selections = [select(options, shares)] * len(options)
    else:
        selections = [select([c], [1.0], take=(take or {}).get(c.batch_size)) for c in options]
    constraint = Constraint(
        **limits,
        max_depth=depth_limit,
        measured_only=measured_only,
        mix=mix,
        engine=PlannedEngine(**engine) if engine else None,
    )
    entries = [
        entry_of(c, selection, families, source, costs.get(c.batch_size), budget, context)
        for c, selection in zip(options, selections, strict=True)
    ]
    unbound: dict[str, Any] = {"budget": budget, "max_rank": max(max_rank, MAX_RANK), **(free or {})}
    unbound["shape"] = "any" if shape == "any" else "sibling-closed"
    deepest = min(unbound.pop("max_depth", source.num_heads), source.num_heads)
    if mix is None and (unbound, deepest) != (limits, depth_limit):
        _, free_options = grown(unbound, deepest)
        entries = [replace(e, unconstrained=unconstrained(c)) for e, c in zip(entries, free_options, strict=True)]
    drafter: Drafter = meta.get("drafter") or Drafter()
    drafter = {**drafter, "num_heads": source.num_heads}
    return Plan(
        entries=tuple(entries),
        schedule=schedule_of(options, selections) if mix is None else one_for_all(),
        objective=objective,
        drafter=drafter,
        acceptance=meta.get("acceptance"),
        constraint=constraint,
        runtime=profile.runtime if profile else None,
        inputs=inputs or {},
    )


def _grown(
    source: RankTrace | Calibration | Probe, objective: str, limits: dict[str, Any], *, max_depth: int
) -> HeldOut:
    """The trees of a depth limit, from a trace with what they reach on answers not seen."""
    if isinstance(source, RankTrace):
        return crossfit(source, objective=objective, **limits, max_depth=max_depth)
    if isinstance(source, Probe):
        return crossfit_probe(source, **limits, max_depth=max_depth)
    return from_calibration(source, **limits, max_depth=max_depth)


def _usual_context(trace: RankTrace | Calibration | Probe) -> float | None:
    """Tokens that a sequence of the trace has on average when a step is taken."""
    if isinstance(trace, Calibration) or trace.prompt_tokens is None:
        return None
    at_middle = trace.prompt_tokens + trace.lengths / 2
    return float((at_middle * trace.lengths).sum() / trace.lengths.sum())
