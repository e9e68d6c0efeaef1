"""Choose the tree with the best throughput for each batch size.

throughput = batch_size x tokens per step / step latency, over every size and depth. Tokens per step
are cross-fitted: trees are grown on all folds of sequences but one and replayed on that one, so that
no figure is in-sample. The tree that is delivered is grown on all of them.

S sequences · C conversations, of which they are the turns · N sizes (1...budget)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration, count_hits
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth import MAX_RANK, check_objective, grow, grow_independent, product_values
from treeopt.latency import Latency, LatencyProfile
from treeopt.plan import Plan, PlanEntry
from treeopt.replay import accepted_counts, growth_index, replay, replay_sizes, tokens_per_step
from treeopt.trace import RankTrace
from treeopt.tree import Choice, IntArray, Tree, TreeFamily

FOLDS, BOOTSTRAPS, SEED = 5, 1000, 0


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Trees of every size up to a depth limit, and what they reach on sequences they never saw.

    family  : grown on all sequences; its trees are the ones delivered
    steps   : (N, C) cross-fitted replayed steps of every conversation, None without a trace
    tokens  : (C,)   tokens emitted by them
    product : (N,)   tokens per step, sum of products of held-out marginals
    joint   : (N,)   tokens per step averaged over all held-out states
    """

    family: TreeFamily
    steps: IntArray | None
    tokens: IntArray | None
    product: NDArray[np.float64]
    joint: NDArray[np.float64] | None

    @property
    def tokens_per_step(self) -> NDArray[np.float64]:
        """(N,) the best figure at hand: replayed, or the product where there is no trace."""
        if self.steps is None or self.tokens is None:
            return self.product
        rates: NDArray[np.float64] = self.tokens.sum() / np.maximum(self.steps.sum(1), 1)
        return rates

    def bootstrap(self, size: int, among: IntArray | None = None) -> NDArray[np.float64]:
        """Tokens per step of resampled sets of conversations (``among`` some); (1,) without a trace."""
        if self.steps is None or self.tokens is None:
            return self.product[size - 1 : size]
        among = np.arange(len(self.tokens)) if among is None else among
        rng = np.random.default_rng(SEED)
        picks = rng.choice(among, (BOOTSTRAPS, len(among)))
        tokens, steps = self.tokens[picks].sum(1), self.steps[size - 1][picks].sum(1)
        rates: NDArray[np.float64] = np.where(steps, tokens / np.maximum(steps, 1), 1.0)
        return rates

    def by_group(self, size: int, trace: RankTrace) -> dict[str, tuple[float, float | None]]:
        """Tokens per step on the conversations of each group, and its standard error (of one: None)."""
        if self.steps is None or self.tokens is None or trace.group is None:
            return {}
        group = trace.group[np.unique(trace.clusters, return_index=True)[1]]
        found: dict[str, tuple[float, float | None]] = {}
        for g, name in enumerate(trace.group_names):
            among = np.flatnonzero(group == g)
            if len(among):
                rate = tokens_per_step(self.tokens[among].sum(), self.steps[size - 1][among].sum())
                found[name] = (rate, float(self.bootstrap(size, among).std()) if len(among) > 1 else None)
        return found


def crossfit(trace: RankTrace, *, objective: str, **limits: Any) -> HeldOut:
    """Grow on K-1 folds of sequences and replay on the rest, for every size up to the budget.

    ``limits`` are those of `growth`: budget, max_depth, max_rank, gap_free.
    """
    family = grow(trace, objective=objective, **limits)
    n_sizes = len(family)
    steps = np.zeros((n_sizes, trace.num_sequences), dtype=np.int64)
    product, joint, n_states = np.zeros(n_sizes), np.zeros(n_sizes), 0
    for train, test in folds(trace):
        held_out = trace.select(test)
        paths = grow(trace.select(train), objective=objective, **limits).paths[:n_sizes]
        sizes = np.minimum(np.arange(1, n_sizes + 1), len(paths))
        steps[:, test] = replay_sizes(held_out, paths, sizes)
        states = held_out.has_step
        n = int(states.sum())
        nodes = np.bincount(growth_index(held_out, paths)[states].ravel(), minlength=len(paths))
        joint += (n + np.cumsum(nodes[: len(paths)]))[sizes - 1]
        hits, trials = count_hits(held_out.ranks[states], trace.top_k)
        accept = hits / np.maximum(trials, 1)[:, None]
        product += n * np.cumsum(product_values(accept, paths))[sizes - 1]
        n_states += n
    clusters, tokens = trace.clusters, trace.lengths - 1
    pooled = np.stack([np.bincount(clusters, row) for row in steps]).astype(np.int64)
    return HeldOut(family, pooled, np.bincount(clusters, tokens).astype(np.int64), product / n_states,
                   joint / n_states)  # fmt: skip


def folds(trace: RankTrace) -> Iterator[tuple[IntArray, IntArray]]:
    """Sequences to grow on and sequences to replay on, for every fold of conversations.

    Raises OutOfRange for a trace with a single conversation, which has nothing to hold out.
    """
    clusters = trace.clusters
    n = int(clusters.max()) + 1
    if n < 2:
        raise OutOfRange(
            "Held-out figures need at least 2 sequences, but the trace has 1. "
            "Calibrate on more: treeopt calibrate --num-prompts 64"
        )
    fold = (np.random.default_rng(SEED).permutation(n) % FOLDS)[clusters]
    for f in np.unique(fold):
        yield np.flatnonzero(fold != f), np.flatnonzero(fold == f)


def crossfit_accepted(trace: RankTrace, *, objective: str, budget: int, **limits: Any) -> IntArray:
    """Held-out steps that emit 0, 1, ... guesses with trees of ``budget`` rows."""
    counts = np.zeros(limits.get("max_depth", trace.num_heads) + 1, dtype=np.int64)
    for train, test in folds(trace):
        family = grow(trace.select(train), objective=objective, budget=budget, **limits)
        found = accepted_counts(trace.select(test), family.tree(len(family)))
        counts[: len(found)] += found
    return counts


def from_calibration(calibration: Calibration, **limits: Any) -> HeldOut:
    """The same from marginals alone (a published table): objective `independent`, nothing held out."""
    family = grow_independent(calibration.accept, **limits)
    return HeldOut(family, None, None, np.cumsum(family.gains), None)


@dataclass(frozen=True)
class Candidate:
    """A tree of one size and depth limit, with its held-out figure and its latency."""

    size: int
    held_out: HeldOut
    tokens_per_step: float
    latency: Latency | None
    plain: Latency | None
    batch_size: int

    @property
    def tokens_per_s(self) -> float | None:
        return 1e3 * self.batch_size * self.tokens_per_step / self.latency.ms if self.latency else None

    @property
    def relative_noise(self) -> float:
        return self.latency.stderr_ms / self.latency.ms if self.latency else 0.0

    @property
    def tree(self) -> Tree:
        return self.held_out.family.tree(self.size)


def plan_trees(
    source: RankTrace | Calibration,
    profile: LatencyProfile | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    budget: int = 64,
    max_rank: int = MAX_RANK,
    max_depth: int | None = None,
    objective: str = "replay",
    inputs: dict[str, str] | None = None,
) -> Plan:
    """The best tree within ``budget`` rows (root included) for each batch size.

    With a profile: highest predicted throughput over all sizes and depths; ties inside the latency's
    noise go to the smaller tree. Without: the whole budget. From a calibration the objective is
    always `independent`. Siblings have ranks without gaps, so that every engine can take the tree.

    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> plan_trees(calibration, budget=3).entries[0].medusa_choices
    [[0], [0, 0]]
    """
    for name, value, least in (("--budget", budget, 1), ("--max-rank", max_rank, 0),
                               ("--max-depth", max_depth, 1)):  # fmt: skip
        if value is not None and value < least:
            raise InvalidInput(f"{name} must be at least {least}, but got {value}.")
    check_objective(objective)
    depth_limit = min(source.num_heads, max_depth or source.num_heads)
    limits: dict[str, Any] = {"budget": budget, "max_rank": max_rank, "gap_free": True}
    if isinstance(source, RankTrace):
        families = [
            crossfit(source, objective=objective, max_depth=d, **limits) for d in range(1, depth_limit + 1)
        ]
    else:
        objective = "independent"
        families = [from_calibration(source, max_depth=d, **limits) for d in range(1, depth_limit + 1)]
    trace = source if isinstance(source, RankTrace) else None
    meta = source.meta if isinstance(source, RankTrace) else source.info
    entries = [
        _entry(families, trace, profile, batch_size, budget) for batch_size in sorted(set(batch_sizes))
    ]
    return Plan(
        entries=tuple(entries),
        objective=objective,
        drafter={**(meta.get("drafter") or {}), "num_heads": source.num_heads},
        acceptance=meta.get("acceptance"),
        constraint={**limits, "max_depth": depth_limit},
        runtime=profile.runtime if profile else None,
        inputs=inputs or {},
    )


def _entry(
    families: list[HeldOut],
    trace: RankTrace | None,
    profile: LatencyProfile | None,
    batch_size: int,
    budget: int,
) -> PlanEntry:
    context = profile.context(batch_size) if profile else None
    candidates = _candidates(families, profile, batch_size, context)
    warnings = []
    if profile is None or context is None:
        curve = [c for c in candidates if c.held_out is families[-1]]
        best, tied = curve[-1], [curve[-1].size]
        warnings.append("No profile was used: this is the largest tree of the budget, whatever a step costs.")
    else:
        fastest = max(candidates, key=lambda c: c.tokens_per_s or 0.0)
        ties = [c for c in candidates if _tied(c, fastest)]
        best = min(ties, key=lambda c: (c.size, -(c.tokens_per_s or 0.0)))
        tied = sorted({c.size for c in ties})
        curve = [max((c for c in candidates if c.size == size), key=lambda c: c.tokens_per_s or 0.0)
                 for size in sorted({c.size for c in candidates})]  # fmt: skip
        most, largest = max(len(f.family) for f in families), profile.largest(batch_size)
        if largest < most:
            warnings.append(
                f"The profile covers sizes up to {largest}, so larger trees (to {most}) were left out."
            )
        if profile.deepest(batch_size) < len(families):
            warnings.append(
                f"The profile covers depths up to {profile.deepest(batch_size)}, so deeper trees "
                f"(to {len(families)}) were left out."
            )
    if trace is None:
        warnings.append("Predicted from marginal accuracies alone: independent heads, nothing held out.")
    held_out, index = best.held_out, best.size - 1
    samples = held_out.bootstrap(best.size)
    tokens_error = float(samples.std())
    latency_error = best.relative_noise
    plain_error = best.plain.stderr_ms / best.plain.ms if best.plain else 0.0
    rate_error = float(np.hypot(tokens_error / best.tokens_per_step, latency_error))
    speedup = _speedup(best)
    low, high = np.quantile(samples, [0.025, 0.975]).tolist()
    joint, steps, tokens = held_out.joint, held_out.steps, held_out.tokens
    growth = zip(held_out.family.paths[1:], held_out.family.gains[1:], strict=True)
    return PlanEntry(
        batch_size=batch_size,
        context_tokens=context,
        size=best.size,
        depth=best.tree.depth,
        medusa_choices=best.tree.choices,
        tokens_per_step=best.tokens_per_step,
        tokens_per_step_stderr=tokens_error if steps is not None else None,
        step_ms=best.latency.ms if best.latency else None,
        step_ms_stderr=best.latency.stderr_ms if best.latency else None,
        tokens_per_s=best.tokens_per_s,
        tokens_per_s_stderr=best.tokens_per_s * rate_error if best.tokens_per_s else None,
        speedup=speedup,
        speedup_stderr=speedup * float(np.hypot(rate_error, plain_error)) if speedup else None,
        growth_order=[[list(path), float(gain)] for path, gain in growth],
        predicted={
            "product": float(held_out.product[index]),
            "joint": None if joint is None else float(joint[index]),
            "replayed": None if steps is None else best.tokens_per_step,
            "sequences": None if trace is None else trace.num_sequences,
            "conversations": None if tokens is None else len(tokens),
            "steps": None if steps is None else int(steps[index].sum()),
        },
        interval95={"tokens_per_step": [low, high]} if steps is not None else None,
        tied_sizes=tied,
        verified=None,
        best_chain=_best_chain(trace, families, profile, batch_size, context, budget),
        warnings=warnings,
        groups=_groups(best, trace),
        curve=[
            {"size": c.size, "depth": c.tree.depth, "tokens_per_step": c.tokens_per_step,
             "step_ms": c.latency.ms if c.latency else None, "tokens_per_s": c.tokens_per_s}
            for c in curve
        ],
    )  # fmt: skip


def _groups(best: Candidate, trace: RankTrace | None) -> dict[str, dict[str, float | None]]:
    """What the chosen tree is expected to reach on each group."""
    rates = best.held_out.by_group(best.size, trace) if trace else {}
    faster = (_speedup(best) or 0.0) / best.tokens_per_step
    return {
        name: {"tokens_per_step": rate, "tokens_per_step_stderr": error, "speedup": rate * faster or None}
        for name, (rate, error) in rates.items()
    }


def _candidates(
    families: list[HeldOut], profile: LatencyProfile | None, batch_size: int, context: int | None
) -> list[Candidate]:
    """Every size of every depth limit that the profile covers, once per distinct depth."""
    found = []
    for limit, held_out in enumerate(families, 1):
        rates, depths = held_out.tokens_per_step.tolist(), held_out.family.depths().tolist()
        for size, (rate, depth) in enumerate(zip(rates, depths, strict=True), 1):
            if profile is None or context is None:
                found.append(Candidate(size, held_out, rate, None, None, batch_size))
            elif max(depth, 1) == limit:  # a shallower tree was seen under its own limit
                latency = profile.step(batch_size, context, size, depth)
                plain = profile.plain(batch_size, context)
                if latency is not None:
                    found.append(Candidate(size, held_out, rate, latency, plain, batch_size))
    return found


def _tied(candidate: Candidate, fastest: Candidate) -> bool:
    noise = float(np.hypot(candidate.relative_noise, fastest.relative_noise))
    return (candidate.tokens_per_s or 0.0) >= (fastest.tokens_per_s or 0.0) * (1 - noise)


def _speedup(candidate: Candidate) -> float | None:
    if candidate.latency is None or candidate.plain is None:
        return None
    return candidate.tokens_per_step * candidate.plain.ms / candidate.latency.ms


def _best_chain(
    trace: RankTrace | None,
    families: list[HeldOut],
    profile: LatencyProfile | None,
    batch_size: int,
    context: int | None,
    budget: int,
) -> dict[str, Any] | None:
    """The fastest chain of top-1 guesses: a fixed tree, so its replay is not in-sample."""
    chains: list[dict[str, Any]] = []
    for depth in range(1, min(len(families), budget - 1) + 1):
        if trace is not None:
            rate = replay(trace, Tree.chain(depth)).tokens_per_step
        else:
            rate = 1.0 + sum(_gain(families[depth - 1], (0,) * d) for d in range(1, depth + 1))
        latency = None
        if profile is not None and context is not None:
            latency = profile.step(batch_size, context, depth + 1, depth)
            if latency is None:
                continue
        tokens_per_s = 1e3 * batch_size * rate / latency.ms if latency else None
        chains.append({"size": depth + 1, "depth": depth, "tokens_per_step": rate,
                       "step_ms": latency.ms if latency else None, "tokens_per_s": tokens_per_s})  # fmt: skip
    return max(chains, key=lambda c: c["tokens_per_s"] or c["tokens_per_step"], default=None)


def _gain(held_out: HeldOut, path: Choice) -> float:
    """The gain of a node by its family; 0 for one that the budget has no room for."""
    index = {known: i for i, known in enumerate(held_out.family.paths)}.get(path)
    return 0.0 if index is None else float(held_out.family.gains[index])
