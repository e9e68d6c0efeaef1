"""What a plan says of the tree that was chosen for a batch size: its figures, their errors, and what to beware of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treeopt.growth.heldout import HeldOut
from treeopt.growth.source import Source
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates, Floats
from treeopt.planning.request import PlanRequest
from treeopt.planning.select import Selection, runner_up, select, throughput, throughput_draws
from treeopt.records.bootstrap import BOOTSTRAPS, interval95, stderr
from treeopt.records.expected import (
    BestChain,
    CurvePoint,
    GroupFigures,
    Interval95,
    Mixture,
    PlanPredicted,
    TreeFigures,
)
from treeopt.records.plan import PlanEntry
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import Choice, Tree


def entry_of(
    c: Candidates,
    selection: Selection,
    families: list[HeldOut],
    source: Source,
    costs: StepCosts | None,
    request: PlanRequest,
) -> PlanEntry:
    """The chosen candidate and its rivals; those of a mix are the mix's (`mixture_of`).

    families : of depth limits 1, 2, ...
    """
    i = selection.chosen
    best, size = c.held_out[i], int(c.sizes[i])
    tree, n = best.family.tree(size), best.conversations or BOOTSTRAPS
    speedups, is_timed = _speedups(c, i), c.ms is not None
    noisy = _is_noisy(c, i)
    speedup = None if speedups is None else float(speedups[0])
    rate = float(c.rates[i])
    return PlanEntry(
        batch_size=c.batch_size,
        context_tokens=c.context,
        size=size,
        depth=int(c.depths[i]),
        medusa_choices=tree.choices,
        tokens_per_step=rate,
        tokens_per_step_stderr=stderr(c.rate_draws[i], n) if best.steps is not None else None,
        step_ms=float(c.ms[i]) if c.ms is not None else None,
        step_ms_stderr=float(c.ms_stderr[i]) if c.ms_stderr is not None and c.ms_stderr.any() else None,
        tokens_per_s=float(c.throughput[i]) if is_timed else None,
        tokens_per_s_stderr=stderr(c.throughput_draws[i], n) if is_timed and noisy else None,
        speedup=speedup,
        speedup_stderr=stderr(speedups[1:], n) if speedups is not None and noisy else None,
        growth_order=_growth_order(best, size),
        predicted=_predicted(best, size, source),
        interval95=_intervals(c, selection, speedups if noisy else None, mixed=request.mix is not None),
        tied_sizes=tied_sizes(c, selection) if request.mix is None else [],
        runner_up=runner_up([c], [1.0], selection) if request.mix is None else None,
        accepted=source.held_out_shares(best, size).tolist(),
        best_chain=_best_chain(source, request.limits, costs, c.batch_size),
        warnings=[
            *_profile_warnings(c, families, costs, request),
            *source.caveats(tree, budget=request.limits.budget, most=len(best.family)),
        ],
        groups=_groups(best, size, source, (speedup or 0.0) / rate),
        curve=_curve(c),
    )


def _is_noisy(c: Candidates, i: int) -> bool:
    """Whether anything is known of how uncertain a candidate's throughput is."""
    return c.held_out[i].steps is not None or (c.ms_stderr is not None and bool(c.ms_stderr.max() > 0))


def _speedups(c: Candidates, i: int) -> Floats | None:
    """(1 + B,) speedup of a candidate over plain decoding, first the estimate; None without latencies."""
    if c.ms is None or c.plain_ms is None or c.ms_draws is None:
        return None
    return np.append(c.rates[i] * (c.plain_ms[0] / c.ms[i]), c.rate_draws[i] * c.plain_ms[1:] / c.ms_draws[i])


def _intervals(c: Candidates, selection: Selection, speedups: Floats | None, *, mixed: bool) -> Interval95 | None:
    """What is uncertain; ``speedups`` None where latencies are not known, or nothing is noisy.

    mixed : whether the size was chosen for other batch sizes too
    """
    i = selection.chosen
    best = c.held_out[i]
    n = best.conversations or BOOTSTRAPS
    found: dict[str, list[float]] = {}
    if best.steps is not None:
        found["tokens_per_step"] = interval95(c.rate_draws[i], n)
    if speedups is not None:
        found["tokens_per_s"] = interval95(c.throughput_draws[i], n)
        found["speedup"] = interval95(speedups[1:], n)
        if not mixed:
            found["size"] = [float(end) for end in selection.sizes95]
    return Interval95(**found) if found else None


def _growth_order(best: HeldOut, size: int) -> list[tuple[Choice, float]]:
    """The paths of the chosen tree with their gains, and on to the whole budget where trees are nested."""
    whole = len(best.family) if best.family.nested else size
    nodes = zip(best.family.nodes(whole)[1:], best.family.gains_of(whole)[1:], strict=True)
    return [(path, float(gain)) for path, gain in nodes]


def _predicted(best: HeldOut, size: int, source: Source) -> PlanPredicted:
    """Tokens per step in three ways, and what they were counted on."""
    steps = best.steps
    return PlanPredicted(
        **best.rates(size).document(),
        sequences=None if source.answers is None else source.answers.num_sequences,
        conversations=best.conversations or None,
        steps=None if steps is None else int(steps[best.family.index(size)].sum()),
    )


def _profile_warnings(
    c: Candidates, families: list[HeldOut], costs: StepCosts | None, request: PlanRequest
) -> list[str]:
    """What the profile does not tell: sizes and depths that it does not cover, the context that is wanted."""
    if costs is None:
        return ["No profile was used, so this is the largest tree of the budget. What a step costs was not considered."]
    warnings = []
    if costs.below_plain:
        warnings.append(
            "Some trees were timed faster than a plain step. That is noise, so the plan takes them to cost as much as a "
            "plain step."
        )
    most = max(len(held_out.family) for held_out in families)
    largest, deepest = costs.reach
    known = {int(size) for held_out in families for size in held_out.family.sizes}
    gaps = sorted(size for size in known - set(c.sizes.tolist()) if size <= largest and not costs.measured_only)
    if gaps:
        warnings.append(
            "The profile has no latency for trees of "
            f"{', '.join(map(str, gaps[:8]))}{' ...' * (len(gaps) > 8)} rows, so they were left out."
        )
    if request.context is not None and request.context != c.context:
        warnings.append(
            f"The profile has no context of {request.context} tokens. The nearest measured one was taken: {c.context}."
        )
    if largest < most:
        warnings.append(
            f"The profile covers sizes up to {largest}, so larger trees were left out, although the budget is "
            f"{request.limits.budget:,}: time larger sizes to have them considered."
        )
    if deepest < len(families):
        warnings.append(
            f"The profile covers depths up to {deepest}, so deeper trees (to {len(families)}) were left out."
        )
    return warnings


def _groups(held_out: HeldOut, size: int, source: Source, faster: float) -> dict[str, GroupFigures]:
    """What the chosen tree is expected to reach on each group."""
    rates = held_out.by_group(size, source.answers) if source.answers else {}
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


def _best_chain(source: Source, limits: Limits, costs: StepCosts | None, batch_size: int) -> BestChain | None:
    """The fastest chain of top-1 guesses: a fixed tree, so its replay is not in-sample."""
    chains, longest = [], min(limits.depth(source.num_heads), limits.budget - 1)
    for depth in range(1, longest + 1):
        latency = costs.step(depth + 1, depth) if costs else None
        if costs and latency is None:
            continue
        rate = source.tokens_per_step(Tree.chain(depth))
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


def tied_sizes(c: Candidates, selection: Selection) -> list[int]:
    """Sizes that the data cannot tell from the fastest."""
    return sorted({int(size) for size in c.sizes[selection.tied]})


def best_of(c: Candidates) -> TreeFigures:
    """What the best tree of all would reach."""
    i = select([c], [1.0]).chosen
    return TreeFigures(
        size=int(c.sizes[i]),
        depth=int(c.depths[i]),
        tokens_per_step=float(c.rates[i]),
        tokens_per_s=None if c.ms is None else float(c.throughput[i]),
    )


def mixture_of(
    options: list[Candidates], shares: Sequence[float], selection: Selection, own: Sequence[TreeFigures]
) -> Mixture | None:
    """What the tree for a mix reaches over all of it; None without latencies.

    own : of every batch size what its own best tree reaches
    """
    i, plain = selection.chosen, []
    for share, c in zip(shares, options, strict=True):
        if c.plain_ms is None:
            return None
        plain.append(share * 1e3 * c.batch_size / c.plain_ms)  # (1 + B,) tokens per second
    total, draws = throughput(options, shares)[i], throughput_draws(options, shares)[i]
    alone, n = np.sum(plain, axis=0), options[0].held_out[i].conversations or BOOTSTRAPS
    noisy = any(_is_noisy(c, i) for c in options)
    return Mixture(
        tokens_per_s=float(total),
        tokens_per_s_stderr=stderr(draws, n) if noisy else None,
        speedup=float(total / alone[0]),
        speedup_stderr=stderr(draws / alone[1:], n) if noisy else None,
        own_tokens_per_s=float(sum(w * (figures.tokens_per_s or 0.0) for w, figures in zip(shares, own, strict=True))),
        tied_sizes=tied_sizes(options[0], selection),
        runner_up=runner_up(options, shares, selection) if noisy else None,
    )
