"""Choose the tree with the best throughput for each batch size, or one for a mix of them.

throughput = batch_size x tokens per step / step latency, over every size and depth. Both factors are
measured, so both have noise; `treeopt.selection` says what it cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treeopt.calibration import Calibration
from treeopt.errors import InvalidInput
from treeopt.growth import MAX_RANK, check_objective, product_values
from treeopt.heldout import HeldOut, crossfit, from_calibration
from treeopt.latency import LatencyProfile
from treeopt.plan import Plan, PlanEntry
from treeopt.rebuilds import worth_building
from treeopt.replay import replay
from treeopt.schedule import one_for_all, schedule_of
from treeopt.selection import Candidates, Selection, candidates_of, common, runner_up, select
from treeopt.statistics import BOOTSTRAPS, interval95, stderr
from treeopt.trace import RankTrace
from treeopt.tree import Tree


def plan_trees(
    source: RankTrace | Calibration,
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
    rebuilds: int = 0,
    engine: dict[str, Any] | None = None,
    free: dict[str, int] | None = None,
    inputs: dict[str, str] | None = None,
) -> Plan:
    """The best tree within ``budget`` rows (root included) for each batch size, and a schedule of them.

    With a profile: highest predicted throughput over all sizes and depths; ties inside the noise go to
    the smaller tree. Without: the whole budget. From a calibration the objective is always `independent`.

    shape         one of `shapes.SHAPES`; by default siblings have ranks without gaps, as nearly every engine needs
    batch_sizes   a mapping to shares of the time asks for one tree: that with the most tokens in all
    context       tokens that a sequence has, of the profile's range (default: as in the trace)
    measured_only consider only sizes that were timed at that batch size
    take          (size, depth) to take at a batch size instead of the best by prediction
    rebuilds      how many sizes to name that are worth building an engine for, at each batch size
    engine        what the limits stand for, for the record
    free          budget, max_rank and max_depth without the engine, for what its limits cost

    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> plan_trees(calibration, budget=3).entries[0].medusa_choices
    [[0], [0, 0]]
    """
    for name, value, least in (("--budget", budget, 1), ("--max-rank", max_rank, 0),
                               ("--max-depth", max_depth, 1), ("--context", context, 1)):  # fmt: skip
        if value is not None and value < least:
            raise InvalidInput(f"{name} must be at least {least}, but got {value}.")
    check_objective(objective)
    depth_limit = min(source.num_heads, max_depth or source.num_heads)
    limits: dict[str, Any] = {"budget": budget, "max_rank": max_rank, "shape": shape}
    if not isinstance(source, RankTrace):
        objective = "independent"
    elif shape == "level-uniform" and objective == "replay":
        objective = "joint"  # which is what `grow_replay` hands over to
    families = _families(source, objective, depth_limit, limits)
    trace = source if isinstance(source, RankTrace) else None
    meta = source.meta if isinstance(source, RankTrace) else source.info
    wanted = context if context is not None else _usual_context(trace)

    def candidates(families: list[HeldOut], batch_size: int) -> Candidates:
        at = profile.context(batch_size, wanted) if profile else None
        return candidates_of(families, profile, batch_size, at, measured_only)

    options = [candidates(families, batch_size) for batch_size in sorted(set(batch_sizes))]
    mix = dict(batch_sizes) if isinstance(batch_sizes, Mapping) else None
    if mix is not None:
        options = common(options)
        shares = [mix[c.batch_size] / sum(mix.values()) for c in options]
        selections = [select(options, shares)] * len(options)
    else:
        selections = [select([c], [1.0], take=(take or {}).get(c.batch_size)) for c in options]
    constraint = {**limits, "max_depth": depth_limit, "measured_only": measured_only, "mix": mix,
                  "engine": engine}  # fmt: skip
    entries = [
        _entry(c, selection, families, source, profile, budget, measured_only, context)
        for c, selection in zip(options, selections, strict=True)
    ]
    unbound: dict[str, Any] = {"budget": budget, "max_rank": max(max_rank, MAX_RANK), **(free or {})}
    unbound["shape"] = "any" if shape == "any" else "sibling-closed"
    deepest = min(unbound.pop("max_depth", source.num_heads), source.num_heads)
    if mix is None and (unbound, deepest) != (limits, depth_limit):
        best = _families(source, objective, deepest, unbound)
        found = [candidates(best, c.batch_size) for c in options]
        entries = [replace(e, unconstrained=_unconstrained(c)) for e, c in zip(entries, found, strict=True)]
    if rebuilds:
        entries = [replace(e, rebuilds=_rebuilds(families, e, rebuilds)) for e in entries]
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


def _families(
    source: RankTrace | Calibration, objective: str, max_depth: int, limits: dict[str, Any]
) -> list[HeldOut]:
    """The trees of every depth limit."""
    depths = range(1, max_depth + 1)
    if isinstance(source, RankTrace):
        return [crossfit(source, objective=objective, max_depth=depth, **limits) for depth in depths]
    return [from_calibration(source, max_depth=depth, **limits) for depth in depths]


def _unconstrained(c: Candidates) -> dict[str, Any]:
    """What the best tree of all would reach."""
    i = select([c], [1.0]).chosen
    return {"size": int(c.sizes[i]), "depth": int(c.depths[i]), "tokens_per_step": float(c.rates[i]),
            "tokens_per_s": None if c.ms is None else float(c.throughput[i])}  # fmt: skip


def _rebuilds(families: list[HeldOut], entry: PlanEntry, count: int) -> dict[str, Any]:
    """The sizes worth building an engine for, with their trees, and what is lost with only them."""
    c = candidates_of(families, None, entry.batch_size, None, measured_only=False)
    chosen = entry.size if entry.step_ms is not None else None  # without latencies it is the whole budget
    found = worth_building(c.rates, c.sizes, batch_size=entry.batch_size, count=count, first=chosen)
    trees = []
    for size in found.sizes:
        i = int(np.searchsorted(c.sizes, size))
        trees.append({"size": size, "depth": int(c.depths[i]), "tokens_per_step": float(c.rates[i]),
                      "medusa_choices": c.held_out[i].family.tree(size).choices})  # fmt: skip
    return {"trees": trees, "mean_loss": found.mean_loss, "worst_loss": found.worst_loss}


def _usual_context(trace: RankTrace | None) -> float | None:
    """Tokens that a sequence of the trace has on average when a step is taken."""
    if trace is None or trace.prompt_tokens is None:
        return None
    at_middle = trace.prompt_tokens + trace.lengths / 2
    return float((at_middle * trace.lengths).sum() / trace.lengths.sum())


def _entry(
    c: Candidates,
    selection: Selection,
    families: list[HeldOut],
    source: RankTrace | Calibration,
    profile: LatencyProfile | None,
    budget: int,
    measured_only: bool,
    wanted: float | None,
) -> PlanEntry:
    trace = source if isinstance(source, RankTrace) else None
    i = selection.chosen
    noisy = trace is not None or (c.ms_stderr is not None and c.ms_stderr.max() > 0)
    best, size, depth = c.held_out[i], int(c.sizes[i]), int(c.depths[i])
    tree, n = best.family.tree(size), best.conversations or BOOTSTRAPS
    rate, throughput = float(c.rates[i]), float(c.throughput[i]) if c.ms is not None else None
    intervals: dict[str, list[float]] = {}
    if trace is not None:
        intervals["tokens_per_step"] = interval95(c.rate_draws[i], n)
    speedup = speedup_draws = None
    if c.ms is not None and c.plain_ms is not None and c.ms_draws is not None:
        speedup = rate * float(c.plain_ms[0] / c.ms[i])
        speedup_draws = c.rate_draws[i] * c.plain_ms[1:] / c.ms_draws[i]
        if noisy:
            intervals["tokens_per_s"] = interval95(c.throughput_draws[i], n)
            intervals["speedup"] = interval95(speedup_draws, n)
            intervals["size"] = [float(end) for end in selection.sizes95]
    steps = best.steps
    whole = len(best.family) if best.family.nested else size
    growth = zip(best.family.nodes(whole)[1:], best.family.gains_of(whole)[1:], strict=True)
    return PlanEntry(
        batch_size=c.batch_size,
        context_tokens=c.context,
        size=size,
        depth=depth,
        medusa_choices=tree.choices,
        tokens_per_step=rate,
        tokens_per_step_stderr=stderr(c.rate_draws[i], n) if steps is not None else None,
        step_ms=float(c.ms[i]) if c.ms is not None else None,
        step_ms_stderr=float(c.ms_stderr[i]) if c.ms_stderr is not None and c.ms_stderr.any() else None,
        tokens_per_s=throughput,
        tokens_per_s_stderr=stderr(c.throughput_draws[i], n) if throughput and noisy else None,
        speedup=speedup,
        speedup_stderr=stderr(speedup_draws, n) if speedup_draws is not None and noisy else None,
        growth_order=[[list(path), float(gain)] for path, gain in growth],
        predicted={
            **best.rates(size).document(),
            "sequences": None if trace is None else trace.num_sequences,
            "conversations": best.conversations or None,
            "steps": None if steps is None else int(steps[best.family.index(size)].sum()),
        },
        interval95=intervals or None,
        tied_sizes=sorted({int(s) for s in c.sizes[selection.tied]}),
        runner_up=runner_up(c, selection),
        accepted=best.accepted(size, trace).tolist(),
        verified=None,
        best_chain=_best_chain(source, len(families), profile, c, budget, measured_only),
        warnings=_warnings(c, families, source, profile, wanted, measured_only),
        groups=_groups(best, size, trace, (speedup or 0.0) / rate),
        curve=_curve(c),
    )


def _warnings(
    c: Candidates,
    families: list[HeldOut],
    source: RankTrace | Calibration,
    profile: LatencyProfile | None,
    wanted: float | None,
    measured_only: bool,
) -> list[str]:
    warnings = []
    if profile is None or c.context is None:
        warnings.append("No profile was used: this is the largest tree of the budget, whatever a step costs.")
    else:
        most = max(len(f.family) for f in families)
        largest, deepest = profile.reach(c.batch_size, c.context)
        known = {int(size) for f in families for size in f.family.sizes}
        gaps = sorted(size for size in known - set(c.sizes.tolist()) if size <= largest and not measured_only)
        if gaps:
            warnings.append(
                f"The profile has nothing about trees of {', '.join(map(str, gaps[:8]))}{' ...' * (len(gaps) > 8)} rows, so "
                "they were left out: time these sizes too."
            )
        if wanted is not None and wanted != c.context:
            warnings.append(
                f"The profile has no context of {wanted} tokens: this is for {c.context}, the nearest measured."
            )
        if largest < most:
            warnings.append(
                f"The profile covers sizes up to {largest}, so larger trees (to {most}) were left out."
            )
        if deepest < len(families):
            warnings.append(
                f"The profile covers depths up to {deepest}, so deeper trees (to {len(families)}) were left out."
            )
    if isinstance(source, Calibration) and source.info.get("source") == "engine log":
        warnings.append(
            f"An engine's log tells of chains only, here up to {source.num_heads} long, and of decoding with that "
            "length: for other lengths it is an estimate."
        )
    elif isinstance(source, Calibration):
        warnings.append("Predicted from marginal accuracies alone: independent heads, nothing held out.")
    return warnings


def _groups(
    held_out: HeldOut, size: int, trace: RankTrace | None, faster: float
) -> dict[str, dict[str, float | None]]:
    """What the chosen tree is expected to reach on each group."""
    rates = held_out.by_group(size, trace) if trace else {}
    return {
        name: {"tokens_per_step": rate, "tokens_per_step_stderr": error, "speedup": rate * faster or None}
        for name, (rate, error) in rates.items()
    }


def _curve(c: Candidates) -> list[dict[str, Any]]:
    """The best candidate of every size."""
    points = []
    for size in np.unique(c.sizes).tolist():
        here = np.flatnonzero(c.sizes == size)
        i = here[c.throughput[here].argmax()]
        points.append({
            "size": size, "depth": int(c.depths[i]), "tokens_per_step": float(c.rates[i]),
            "step_ms": None if c.ms is None else float(c.ms[i]),
            "tokens_per_s": None if c.ms is None else float(c.throughput[i]),
            "tokens_per_s_stderr": None if c.ms is None else float(c.throughput_draws[i].std()),
        })  # fmt: skip
    return points


def _best_chain(
    source: RankTrace | Calibration,
    max_depth: int,
    profile: LatencyProfile | None,
    c: Candidates,
    budget: int,
    measured_only: bool,
) -> dict[str, Any] | None:
    """The fastest chain of top-1 guesses: a fixed tree, so its replay is not in-sample."""
    chains: list[dict[str, Any]] = []
    for depth in range(1, min(max_depth, budget - 1) + 1):
        if isinstance(source, RankTrace):
            rate = replay(source, Tree.chain(depth)).tokens_per_step
        else:
            rate = float(product_values(source.accept, Tree.chain(depth).paths).sum())
        latency = None
        if profile is not None and c.context is not None:
            latency = profile.step(c.batch_size, c.context, depth + 1, depth, measured_only=measured_only)
            if latency is None:
                continue
        tokens_per_s = 1e3 * c.batch_size * rate / latency.ms if latency else None
        chains.append({"size": depth + 1, "depth": depth, "tokens_per_step": rate,
                       "step_ms": latency.ms if latency else None, "tokens_per_s": tokens_per_s})  # fmt: skip
    return max(chains, key=lambda chain: chain["tokens_per_s"] or chain["tokens_per_step"], default=None)
