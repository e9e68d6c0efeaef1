"""What a plan says of the draft that was chosen for a batch size: its figures, their errors, and what to beware of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.growth.heldout import HeldOut, rates_by_group
from treeopt.growth.replay import accepted_lengths, length_counts
from treeopt.growth.source import Source
from treeopt.latency.estimate import StepCosts
from treeopt.planning.candidates import Candidates, Floats
from treeopt.planning.request import PlanRequest
from treeopt.planning.select import Selection, prompts_to_separate, select, throughput, throughput_draws
from treeopt.records.bootstrap import BOOTSTRAPS, interval95, stderr
from treeopt.records.figure import Errors, Figure, Intervals
from treeopt.records.plan import Basis, MixErrors, PlanEntry
from treeopt.trees.draft import TreeSize, draft_tree
from treeopt.trees.tree import Choice, Tree

KINDS = {
    "tree": ("grown", "chain"),
    "chain": ("chain",),
    "dynamic": ("dynamic",),
}  # kind of draft to groups of candidates


def figure_of(c: Candidates, i: int, *, chosen: int | None = None, whole: bool = True) -> Figure:
    """What a candidate reaches, with its errors.

    chosen : the candidate that it is compared with
    whole  : whether the draft itself is kept, and not its size alone
    """
    one, rate = c.all[i], float(c.rates[i])
    n, draws = one.conversations or BOOTSTRAPS, c.throughput_draws[i]
    is_replayed, is_noisy = one.steps is not None, _is_noisy(c, i)
    speedups = _speedups(c, i) if is_noisy else None
    over = None if chosen is None or not is_noisy else _ends(draws / c.throughput_draws[chosen], n)
    return Figure(
        draft=one.draft if whole else TreeSize(one.size, one.depth),
        batch_size=c.batch_size,
        tokens_per_step=rate,
        step_ms=None if c.ms is None else float(c.ms[i]),
        plain_ms=None if c.plain_ms is None else float(c.plain_ms[0]),
        stderr=Errors(
            tokens_per_step=stderr(c.rate_draws[i], n) if is_replayed else None,
            step_ms=float(c.ms_stderr[i]) if c.ms_stderr is not None and c.ms_stderr.any() else None,
            tokens_per_s=stderr(draws, n) if c.ms is not None and is_noisy else None,
            speedup=None if speedups is None else stderr(speedups, n),
        ),
        interval95=Intervals(
            tokens_per_step=_ends(c.rate_draws[i], n) if is_replayed else None,
            tokens_per_s=_ends(draws, n) if c.ms is not None and is_noisy else None,
            speedup=None if speedups is None else _ends(speedups, n),
            over_chosen=over,
        ),
    )


def _ends(draws: Floats, n: int) -> tuple[float, float]:
    low, high = interval95(draws, n)
    return low, high


def _is_noisy(c: Candidates, i: int) -> bool:
    """Whether anything is known of how uncertain a candidate's throughput is."""
    return c.all[i].steps is not None or (c.ms_stderr is not None and bool(c.ms_stderr.max() > 0))


def _speedups(c: Candidates, i: int) -> Floats | None:
    """(B,) speedup of a candidate over plain decoding; None without latencies."""
    if c.plain_ms is None or c.ms_draws is None:
        return None
    found: Floats = c.rate_draws[i] * c.plain_ms[1:] / c.ms_draws[i]
    return found


@dataclass(frozen=True)
class EntryMaker:
    """What all entries of a plan are made from; ``families`` are of the depth limits 1, 2, ..."""

    source: Source
    families: list[HeldOut]
    costs: dict[int, StepCosts]
    request: PlanRequest

    def entry(self, options: Sequence[Candidates], selections: Sequence[Selection], b: int) -> PlanEntry:
        """The chosen candidate and its rivals at the b-th batch size; for a mix, ties are those of the mix."""
        c, selection = options[b], selections[b]
        i, alone = selection.chosen, self.request.mix is None
        one, chosen = c.all[i], figure_of(c, i)
        best = i if one.held_out else c.best_of("grown")
        grown = None if best is None else c.all[best].held_out
        tree = draft_tree(Tree.chain(0) if best is None else c.all[best].draft)
        rates = one.held_out.rates(one.size) if one.held_out else None
        answers = self.source.answers
        return PlanEntry(
            batch_size=c.batch_size,
            context_tokens=c.context,
            chosen=chosen,
            others=_others(c, chosen, i),
            growth_order=_growth_order(grown, len(tree)),
            basis=Basis(
                product=rates.product if rates else None,
                joint=rates.joint if rates else None,
                sequences=None if answers is None else answers.num_sequences,
                conversations=one.conversations or None,
                steps=None if one.steps is None else int(one.steps.sum()),
            ),
            sizes95=selection.sizes95 if alone and c.ms is not None and _is_noisy(c, i) else None,
            tied_sizes=tied_sizes(c, selection) if alone else [],
            runner_up=_runner_up(c, selection) if alone else None,
            prompts_to_separate=prompts_to_separate([c], [1.0], selection) if alone else None,
            accepted=self._accepted(c, i),
            warnings=[
                *_profile_warnings(c, self.families, self.costs.get(c.batch_size), self.request),
                *self.source.caveats(
                    tree, budget=self.request.limits.budget, most=len(grown.family) if grown else len(tree)
                ),
            ],
            elsewhere=_elsewhere(options, one.key, c.batch_size),
            groups=self._groups(c, i, chosen),
            curve=_curve(c),
        )

    def _accepted(self, c: Candidates, i: int) -> list[float]:
        """Share of the steps that emit 0, 1, ... guesses with a candidate."""
        one, trace = c.all[i], self.source.pooled
        if one.held_out:
            return [float(share) for share in self.source.held_out_shares(one.held_out, one.size)]
        if one.group == "chain" or trace is None:
            return [float(share) for share in self.source.guess_shares(Tree.chain(one.depth))]
        counts = length_counts(trace, accepted_lengths(trace, one.draft), one.depth)
        return [float(share) for share in counts / max(counts.sum(), 1)]

    def _groups(self, c: Candidates, i: int, chosen: Figure) -> dict[str, Figure]:
        """What the chosen draft is expected to reach on each group."""
        one, answers = c.all[i], self.source.answers
        if one.steps is None or one.tokens is None or answers is None:
            return {}
        return {
            name: Figure(
                draft=TreeSize(one.size, one.depth),
                batch_size=c.batch_size,
                tokens_per_step=rate,
                step_ms=chosen.step_ms,
                plain_ms=chosen.plain_ms,
                stderr=Errors(tokens_per_step=error),
            )
            for name, (rate, error) in rates_by_group(one.steps, one.tokens, answers).items()
        }


def _others(c: Candidates, chosen: Figure, i: int) -> dict[str, Figure]:
    """The best of each other kind of draft than the chosen one's."""
    best = {kind: c.best_of(*groups) for kind, groups in KINDS.items() if kind != chosen.draft.kind}
    found = {kind: figure_of(c, j, chosen=i) for kind, j in best.items() if j is not None}
    return {kind: figure for kind, figure in found.items() if kind == figure.draft.kind}


def _elsewhere(options: Sequence[Candidates], key: tuple[str, int, int, int], batch_size: int) -> list[Figure]:
    """What a draft reaches at the other batch sizes, where its latency is known."""
    others = [c for c in options if c.batch_size != batch_size and c.ms is not None and key in c.places]
    return [figure_of(c, c.places[key], whole=False) for c in others]


def _growth_order(best: HeldOut | None, size: int) -> list[tuple[Choice, float]]:
    """The paths of the best fixed tree with their gains, and on to the whole budget where trees are nested."""
    if best is None:
        return []
    whole = len(best.family) if best.family.members is None else size
    nodes = zip(best.family.nodes(whole)[1:], best.family.gains_of(whole)[1:], strict=True)
    return [(path, float(gain)) for path, gain in nodes]


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
    timed: set[int] = set()
    for family in (held_out.family for held_out in families):
        timed |= set(family.sizes[~np.isnan(costs.ms(family.sizes, family.depths()))].tolist())
    gaps = sorted(size for size in known - timed if size <= largest)
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


def _curve(c: Candidates) -> list[Figure]:
    """The best grown tree of every size."""
    grown, points = c.groups == "grown", []
    for size in np.unique(c.sizes[grown]).tolist():
        here = np.flatnonzero(grown & (c.sizes == size))
        i = int(here[c.throughput[here].argmax()])
        one = c.all[i]
        points.append(
            Figure(
                draft=TreeSize(one.size, one.depth),
                batch_size=c.batch_size,
                tokens_per_step=float(c.rates[i]),
                step_ms=None if c.ms is None else float(c.ms[i]),
                stderr=Errors(tokens_per_s=None if c.ms is None else float(c.throughput_draws[i].std())),
            )
        )
    return points


def tied_sizes(c: Candidates, selection: Selection) -> list[int]:
    """Sizes that the data cannot tell from the fastest."""
    return sorted({int(size) for size in c.sizes[selection.tied]})


def _runner_up(c: Candidates, selection: Selection) -> Figure | None:
    """The fastest draft of another size; None where no latency is known."""
    j = selection.runner_up
    return None if j is None or c.ms is None else figure_of(c, j, chosen=selection.chosen)


def best_alone(c: Candidates) -> Figure:
    """What the best draft for one batch size alone reaches."""
    return figure_of(c, select([c], [1.0]).chosen)


def mix_errors(options: list[Candidates], shares: Sequence[float], selection: Selection) -> MixErrors | None:
    """How sure the figures of one draft for a mix are; None without latencies."""
    i, plain = selection.chosen, []
    for share, c in zip(shares, options, strict=True):
        if c.plain_ms is None:
            return None
        plain.append(share * 1e3 * c.batch_size / c.plain_ms[1:])  # (B,) tokens per second
    if not any(_is_noisy(c, i) for c in options):
        return MixErrors(tied_sizes=tied_sizes(options[0], selection))
    draws, total = throughput_draws(options, shares), throughput(options, shares)
    n, j = options[0].all[i].conversations or BOOTSTRAPS, selection.runner_up
    runner = None
    if j is not None:  # its share of the chosen one's throughput is that over the mix
        own, ends = figure_of(options[0], j), _ends(draws[j] / draws[i], n)
        assert own.step_ms is not None
        base = options[0].throughput[i]
        step_ms = 1e3 * own.batch_size * own.tokens_per_step / float(base * total[j] / total[i])
        runner = Figure(
            draft=own.draft,
            batch_size=own.batch_size,
            tokens_per_step=own.tokens_per_step,
            step_ms=step_ms,
            interval95=Intervals(over_chosen=ends),
        )
    return MixErrors(
        tokens_per_s=stderr(draws[i], n),
        speedup=stderr(draws[i] / np.sum(plain, axis=0), n),
        tied_sizes=tied_sizes(options[0], selection),
        runner_up=runner,
        prompts_to_separate=prompts_to_separate(options, shares, selection),
    )
