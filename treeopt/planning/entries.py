"""What a plan says of the tree that was chosen for a batch size: its figures, their errors, and what to beware of."""

from __future__ import annotations

import numpy as np

from treeopt.growth.coverage import replay_probe
from treeopt.growth.heldout import HeldOut
from treeopt.growth.objectives import product_values
from treeopt.growth.replay import replay
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates
from treeopt.planning.select import Selection, runner_up, select
from treeopt.records.bootstrap import BOOTSTRAPS, interval95, stderr
from treeopt.records.calibration import Calibration
from treeopt.records.plan import BestChain, CurvePoint, GroupFigures, Interval95, PlanEntry, PlanPredicted, TreeFigures
from treeopt.records.probe import Probe
from treeopt.records.trace import RankTrace
from treeopt.trees.tree import Tree


def entry_of(
    c: Candidates,
    selection: Selection,
    families: list[HeldOut],
    source: RankTrace | Calibration | Probe,
    costs: StepCosts | None,
    budget: int,
    wanted: float | None,
) -> PlanEntry:
    """The chosen candidate and its rivals.

    families : of depth limits 1, 2, ... · wanted : the context asked for
    """
    trace = None if isinstance(source, Calibration) else source
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
        growth_order=[(path, float(gain)) for path, gain in growth],
        predicted=PlanPredicted(
            **best.rates(size).document(),
            sequences=None if trace is None else trace.num_sequences,
            conversations=best.conversations or None,
            steps=None if steps is None else int(steps[best.family.index(size)].sum()),
        ),
        interval95=Interval95(**intervals) if intervals else None,
        tied_sizes=sorted({int(s) for s in c.sizes[selection.tied]}),
        runner_up=runner_up(c, selection),
        accepted=best.accepted(size, trace).tolist(),
        verified=None,
        best_chain=_best_chain(source, min(len(families), budget - 1), costs, c.batch_size),
        warnings=[
            *_warnings(c, families, source, costs, wanted),
            *(_probe_warnings(source, tree, budget, best) if isinstance(source, Probe) else []),
        ],
        groups=_groups(best, size, trace, (speedup or 0.0) / rate),
        curve=_curve(c),
    )


def _warnings(
    c: Candidates,
    families: list[HeldOut],
    source: RankTrace | Calibration | Probe,
    costs: StepCosts | None,
    wanted: float | None,
) -> list[str]:
    warnings = []
    if costs is None:
        warnings.append("No profile was used: this is the largest tree of the budget, whatever a step costs.")
    else:
        most = max(len(held_out.family) for held_out in families)
        largest, deepest = costs.reach
        known = {int(size) for held_out in families for size in held_out.family.sizes}
        gaps = sorted(size for size in known - set(c.sizes.tolist()) if size <= largest and not costs.measured_only)
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
            warnings.append(f"The profile covers sizes up to {largest}, so larger trees (to {most}) were left out.")
        if deepest < len(families):
            warnings.append(
                f"The profile covers depths up to {deepest}, so deeper trees (to {len(families)}) were left out."
            )
    if isinstance(source, Calibration) and source.meta.get("source") == "engine log":
        warnings.append(
            f"An engine's log tells of chains only, here up to {source.num_heads} long, and of decoding with that "
            "length: for other lengths it is an estimate."
        )
    elif isinstance(source, Calibration):
        warnings.append("Predicted from marginal accuracies alone: independent heads, nothing held out.")
    return warnings


def _probe_warnings(probe: Probe, tree: Tree, budget: int, best: HeldOut) -> list[str]:
    warnings = []
    if tree != probe.policy:
        warnings.append(
            "These tokens per step are approximate: the probe's steps begin where the tree that it was decoded with led "
            f"(rows: {len(probe.policy)}; of this one: {len(tree)}). treeopt bench measures them."
        )
    if len(probe.tree) == len(best.family) < budget:
        warnings.append(f"The probe tree has {len(probe.tree)} rows, so larger trees were left out.")
    return warnings


def _groups(held_out: HeldOut, size: int, trace: RankTrace | Probe | None, faster: float) -> dict[str, GroupFigures]:
    """What the chosen tree is expected to reach on each group."""
    rates = held_out.by_group(size, trace) if trace else {}
    return {
        name: GroupFigures(tokens_per_step=rate, tokens_per_step_stderr=error, speedup=rate * faster or None)
        for name, (rate, error) in rates.items()
    }


def _curve(c: Candidates) -> list[CurvePoint]:
    """The best candidate of every size."""
    points = []
    for size in np.unique(c.sizes).tolist():
        here = np.flatnonzero(c.sizes == size)
        i = here[c.throughput[here].argmax()]
        points.append(
            CurvePoint(
                size=size,
                depth=int(c.depths[i]),
                tokens_per_step=float(c.rates[i]),
                step_ms=None if c.ms is None else float(c.ms[i]),
                tokens_per_s=None if c.ms is None else float(c.throughput[i]),
                tokens_per_s_stderr=None if c.ms is None else float(c.throughput_draws[i].std()),
            )
        )
    return points


def _best_chain(
    source: RankTrace | Calibration | Probe, longest: int, costs: StepCosts | None, batch_size: int
) -> BestChain | None:
    """The fastest chain of top-1 guesses: a fixed tree, so its replay is not in-sample."""
    chains = []
    for depth in range(1, longest + 1):
        latency = costs.step(depth + 1, depth) if costs else None
        if costs and latency is None:
            continue
        if isinstance(source, RankTrace):
            rate = replay(source, Tree.chain(depth)).tokens_per_step
        elif isinstance(source, Probe):
            rate = replay_probe(source, Tree.chain(depth)).tokens_per_step
        else:
            rate = float(product_values(source.accept, Tree.chain(depth).paths).sum())
        chains.append(
            BestChain(
                size=depth + 1,
                depth=depth,
                tokens_per_step=rate,
                step_ms=latency.ms if latency else None,
                tokens_per_s=1e3 * batch_size * rate / latency.ms if latency else None,
            )
        )
    return max(chains, key=lambda chain: chain.rate, default=None)


def unconstrained(c: Candidates) -> TreeFigures:
    """What the best tree of all would reach."""
    i = select([c], [1.0]).chosen
    return TreeFigures(
        size=int(c.sizes[i]),
        depth=int(c.depths[i]),
        tokens_per_step=float(c.rates[i]),
        tokens_per_s=None if c.ms is None else float(c.throughput[i]),
    )
