"""Choose the tree with the best throughput for each batch size, or one for a mix of them.

throughput = batch_size x tokens per step / step latency, over every size and depth. Both factors are
measured, so both have noise; `treeopt.planning.candidates` says what it cannot tell apart. Where drafting is paid by the
expanding node, there are also the trees grown under the prices of every batch size (`treeopt.planning.throughput`), which are
found once, on all conversations, and used in every fold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.growth.coverage import COVERAGE
from treeopt.growth.heldout import crossfit, crossfit_probe, from_calibration
from treeopt.growth.objectives import Worth, check_objective, worth_of
from treeopt.planning.candidates import Candidates, Grown, candidates_of, common, select
from treeopt.planning.entries import entry_of, unconstrained
from treeopt.planning.schedule import one_for_all, schedule_of
from treeopt.planning.throughput import best_prices, is_costly, rest_of_step
from treeopt.records.calibration import Calibration
from treeopt.records.plan import Plan
from treeopt.records.probe import Probe
from treeopt.records.profile import LatencyProfile
from treeopt.records.trace import RankTrace
from treeopt.trees.tree import MAX_RANK

ROUNDING = 1e-6  # share of a ratio that is no gap


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
    contexts = {size: profile.context(size, wanted) for size in sizes} if profile else {}

    def grown(limits: dict[str, Any], deepest: int) -> tuple[list[Grown], Priced, list[Candidates]]:
        families = [_grown(source, objective, limits, max_depth=depth) for depth in range(1, deepest + 1)]
        priced = Priced(source, objective, limits, deepest)
        if profile is not None:
            for batch_size, at in contexts.items():
                priced.grow(profile, batch_size, at, measured_only)
        everything = [*families, *priced.families]
        return (
            families,
            priced,
            [
                candidates_of(everything, profile, batch_size, contexts.get(batch_size), measured_only)
                for batch_size in sizes
            ],
        )

    families, priced, options = grown(limits, depth_limit)
    mix = dict(batch_sizes) if isinstance(batch_sizes, Mapping) else None
    if mix is not None:
        options = common(options)
        shares = [mix[c.batch_size] / sum(mix.values()) for c in options]
        selections = [select(options, shares)] * len(options)
    else:
        selections = [select([c], [1.0], take=(take or {}).get(c.batch_size)) for c in options]
    constraint = {**limits, "max_depth": depth_limit, "measured_only": measured_only, "mix": mix, "engine": engine}
    gaps = [priced.gap(c, selection.chosen) for c, selection in zip(options, selections, strict=True)]
    entries = [
        entry_of(c, selection, families, source, profile, budget, measured_only, context, gap)
        for c, selection, gap in zip(options, selections, gaps, strict=True)
    ]
    unbound: dict[str, Any] = {"budget": budget, "max_rank": max(max_rank, MAX_RANK), **(free or {})}
    unbound["shape"] = "any" if shape == "any" else "sibling-closed"
    deepest = min(unbound.pop("max_depth", source.num_heads), source.num_heads)
    if mix is None and (unbound, deepest) != (limits, depth_limit):
        _, _, free_options = grown(unbound, deepest)
        entries = [replace(e, unconstrained=unconstrained(c)) for e, c in zip(entries, free_options, strict=True)]
    return Plan(
        entries=tuple(entries),
        schedule=schedule_of(options, selections) if mix is None else one_for_all(),
        objective=objective,
        drafter={**(meta.get("drafter") or {}), "num_heads": source.num_heads},
        acceptance=meta.get("acceptance"),
        constraint=constraint,
        runtime=profile.runtime if profile else None,
        inputs=inputs or {},
    )


def _grown(
    source: RankTrace | Calibration | Probe,
    objective: str,
    limits: dict[str, Any],
    *,
    max_depth: int,
    prices: tuple[float, ...] = (),
) -> Grown:
    """The trees of a depth limit, from a trace with what they reach on answers not seen."""
    options = {**limits, "max_depth": max_depth, **({"prices": prices} if prices else {})}
    if isinstance(source, RankTrace):
        return Grown(crossfit(source, objective=objective, **options), max_depth, prices)
    if isinstance(source, Probe):
        return Grown(crossfit_probe(source, **options), max_depth, prices)
    return Grown(from_calibration(source, **options), max_depth, prices)


@dataclass
class Priced:
    """The families grown under prices, and for every batch size the best ratio that any tree can have."""

    source: RankTrace | Calibration | Probe
    objective: str
    limits: dict[str, Any]
    max_depth: int
    families: list[Grown] = field(default_factory=list)
    bounds: dict[int, float] = field(default_factory=dict)  # batch size: tokens per ms
    _worth: dict[int, Worth] = field(default_factory=dict)

    def grow(self, profile: LatencyProfile, batch_size: int, context: int, measured_only: bool) -> None:
        """Add the families of a batch size, if its drafting costs enough to speak of."""
        costs = profile.draft_costs(batch_size, context)
        if costs is None or not is_costly(profile, batch_size, costs) or isinstance(self.source, Probe):
            return
        budget, shape = self.limits["budget"], self.limits["shape"]
        bound = 1 / profile.plain(batch_size, context).ms
        for depth in range(1, self.max_depth + 1):
            rest_ms = rest_of_step(
                profile, batch_size, context, depth=depth, budget=budget, measured_only=measured_only
            )
            found = best_prices(self.worth(depth), rest_ms, costs.node_ms[:depth], budget=budget, shape=shape)
            if found is None:
                continue
            bound = max(bound, found.bound)
            known = {(grown.max_depth, grown.prices) for grown in self.families}
            if shape != "chain" and any(found.per_node) and (depth, found.per_node) not in known:
                self.families.append(
                    _grown(self.source, self.objective, self.limits, max_depth=depth, prices=found.per_node)
                )
        self.bounds[batch_size] = bound

    def worth(self, max_depth: int) -> Worth:
        """What nodes bring in, in sums, for the trees up to a depth."""
        assert not isinstance(self.source, Probe), "the worth of its nodes does not add up"
        if max_depth not in self._worth:
            self._worth[max_depth] = worth_of(
                self.source,
                objective=self.objective,
                max_depth=max_depth,
                max_rank=self.limits["max_rank"],
                shape=self.limits["shape"],
            )
        return self._worth[max_depth]

    def gap(self, c: Candidates, chosen: int) -> float | None:
        """How much slower the chosen tree is than the bound by the values that add up, a share of it.

        None where no prices were sought, or trees may have gaps, of which the bound knows nothing.
        """
        if c.batch_size not in self.bounds or c.ms is None or self.limits["shape"] == "any":
            return None
        tree = c.held_out[chosen].family.tree(int(c.sizes[chosen]))
        ratio = self.worth(max(tree.depth, 1)).tokens(tree.paths) / float(c.ms[chosen])
        gap = 1 - ratio / self.bounds[c.batch_size]
        return gap if gap > ROUNDING else 0.0


def _usual_context(trace: RankTrace | Calibration | Probe) -> float | None:
    """Tokens that a sequence of the trace has on average when a step is taken."""
    if isinstance(trace, Calibration) or trace.prompt_tokens is None:
        return None
    at_middle = trace.prompt_tokens + trace.lengths / 2
    return float((at_middle * trace.lengths).sum() / trace.lengths.sum())
