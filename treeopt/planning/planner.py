"""Choose the tree with the best throughput for each batch size, or one for a mix of them.

throughput = batch_size x tokens per step / step latency, over every size and depth. Both factors are
measured, so both have noise; `treeopt.planning.select` says what it cannot tell apart.

A schedule says which batch sizes get which tree, in ranges, merged where the data cannot tell the difference.
A range has one tree for all its batch sizes. It may be another than the best of some of them as long as it
is tied with it there; what it costs by the estimates is the range's loss.

Between two batch sizes that were searched, step latencies are interpolated on a straight line. A range ends there
where the next one's tree becomes faster by that estimate. What the trees lose there is an estimate too: `errors_between`
says how far such estimates were off at batch sizes that were searched. Of very many between two it is asked of `MOST`.

n candidates of two batch sizes · G batch sizes between them
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from math import prod

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.growth.source import Source, objective_for, source_of
from treeopt.latency.estimate import StepCosts
from treeopt.latency.interpolation import between_batch_sizes
from treeopt.planning.candidates import Candidates, Floats, Key, common, mixed, tables_of
from treeopt.planning.entries import entry_of, mix_errors
from treeopt.planning.request import PlanRequest
from treeopt.planning.select import Selection, judged, select, select_all
from treeopt.records.inputs import Accuracies, of_block
from treeopt.records.origins import DrafterRecord
from treeopt.records.plan import BatchRange, Constraint, Plan
from treeopt.records.profile import LatencyProfile
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import BoolArray, IntArray

REQUEST = PlanRequest()
ONE_FOR_ALL = BatchRange(first=1, last=None, entry=0)  # the schedule of a single draft, whatever it costs anywhere
MOST_UNTIMED = 1024  # rows of a tree where nothing was timed
LEAST_GROWN = 8  # rows, so that a profile without trees can be told which to time
MOST = 1000  # batch sizes between two that a loss is computed for
Losses = dict[Key, Floats]  # (G,) of each candidate whose latency is known on both sides


def plan_trees(record: Accuracies, profile: LatencyProfile | None = None, request: PlanRequest = REQUEST) -> Plan:
    """The best draft within the limits for each batch size, and a schedule of them.

    With a profile it takes the draft with the highest predicted throughput, and of those that the noise
    does not tell apart a fixed tree, and the smallest. Without a profile it takes the largest tree that the budget allows.

    >>> import numpy as np
    >>> from treeopt.records.calibration import Calibration
    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> plan_trees(calibration, request=PlanRequest(Limits(3))).entries[0].tree.medusa_choices
    [[0], [0, 0]]
    """
    if widths := getattr(record, "widths", ()):
        return fastest_block(record, widths, profile, request)
    _, profile = of_block(record.num_heads, record, profile)
    source, mix = source_of(record), request.mix
    context = request.context if request.context is not None else source.usual_context
    costs = {b: StepCosts(profile, b, context, redrafts=request.redrafts) for b in request.sizes if profile}
    limits = _useful(request.limits, source, costs)
    wide = limits if mix else _useful(request.unconstrained(), source, costs)
    reach = max((c.reach[0] for c in costs.values()), default=limits.budget)
    within = asdict(replace(limits, budget=min(limits.budget, reach)))
    options, tables = tables_of(source, limits, request, costs), []
    if wide != limits:
        tables = tables_of(source, wide, replace(request, dynamic=None, whole_blocks=False), costs)
    if mix is None:
        selections = select_all(options)
    else:
        tables, options = options, common(options)
        whole = mixed(options, [mix[c.batch_size] / sum(mix.values()) for c in options])
        selections = [select(whole)] * len(options)
    alone = [select(c) for c in tables] if mix else select_all(tables)
    free = [(judged(c, best), best.chosen) for c, best in zip(tables, alone, strict=True)]
    schedule, tests = ([ONE_FOR_ALL], []) if mix else schedule_of(options, selections)
    options = [judged(c, s) for c, s in zip(options, selections, strict=True)]
    budget, found = request.limits.budget, [(s, b, free[b] if free else None) for b, s in enumerate(selections)]
    entries = [entry_of(source, options, *each, budget=budget, own=mix is None) for each in found]
    errors = mix_errors(judged(whole, selections[0]), options[0], selections[0]) if mix else None
    drafter: DrafterRecord = source.meta.get("drafter") or DrafterRecord()
    return Plan(
        entries=tuple(entries),
        schedule=schedule,
        objective=objective_for(source, request.objective),
        drafter={**drafter, "num_heads": source.num_heads},
        acceptance=source.meta.get("acceptance"),
        constraint=Constraint(**within, mix=mix, engine=request.engine),
        runtime=(profile.runtime or None) if profile else None,
        part=profile.part if profile else None,
        mix_errors=errors,
        error_between=max(tests, default=None),
        tests_between=len(tests) or None,
    )


def fastest_block(
    record: Accuracies, recorded: Sequence[int], profile: LatencyProfile | None, request: PlanRequest
) -> Plan:
    """The plan of the width whose drafts are the fastest at all batch sizes together; of equal ones that of the narrowest.

    They are compared over plain steps, timed beside each: those are the same at every width, but for the machine's drift.
    A width of those ``recorded`` that was not timed is left out, and a warning says so.
    """
    untimed = profile.untimed(recorded[:-1], request.sizes) if profile else []
    widths = [width for width in recorded if width not in untimed]
    plans = {n: plan_trees(*of_block(n, record, profile), request) for n in widths}
    speed = {
        n: plan.mix_speedup or prod(e.chosen.speedup or e.chosen.rate for e in plan.entries)
        for n, plan in plans.items()
    }
    best, said = plans[max(widths, key=speed.__getitem__)], []
    if profile and untimed:
        which, sizes = (", ".join(map(str, some)) for some in (untimed, profile.batch_sizes))
        said = [
            f"The profile has no steps at batch size {sizes} with a block of {which} guesses, so that width was left out. To "
            f"time it: treeopt profile --batch-size {sizes.replace(' ', '')} --overwrite"
        ]
    entries = tuple(replace(e, warnings=[*e.warnings, *said]) for e in best.entries)
    return replace(best, entries=entries, widths={n: [e.chosen for e in plan.entries] for n, plan in plans.items()})


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


def schedule_of(options: list[Candidates], selections: list[Selection]) -> tuple[list[BatchRange], list[float]]:
    """The fewest ranges of batch sizes, where entry i is what was selected for options[i]; and `errors_between` of them.

    Above the largest batch size that was searched its tree goes on, and below the smallest one that one's.
    Without latencies a batch size between two belongs with the smaller one.
    """
    chosen = [c.all[s.chosen].key for c, s in zip(options, selections, strict=True)]
    losses = [_losses(c, s, chosen) for c, s in zip(options, selections, strict=True)]
    has_drafter = any(size > 1 for _, size, *_ in chosen)
    options = [c if c.idle is None else c.without(c.plain if has_drafter else c.idle) for c in options]
    gaps = [(low, high, _some(low.batch_size + 1, high.batch_size - 1)) for low, high in pairwise(options)]
    across = [(options[i - 1], options[i + 1], np.array([options[i].batch_size])) for i in range(1, len(options) - 1)]
    lost = [_lost(*gap) for gap in (*gaps, *across)]
    ranges = _fewest(losses)
    begins = [1]
    for (_, before), (first, after) in pairwise(ranges):
        sizes, there = gaps[first - 1][2], lost[first - 1]
        unknown = np.full(len(sizes), np.inf)
        better = np.flatnonzero(there.get(chosen[after], unknown) < there.get(chosen[before], -unknown))
        begins.append(int(sizes[better[0]]) if len(better) else options[first].batch_size)
    found = []
    for (_, entry), begin, end in zip(ranges, begins, [*(begin - 1 for begin in begins[1:]), None], strict=True):
        between = [np.zeros(0)]
        for (_, _, sizes), there in zip(gaps, lost, strict=False):
            inside = (sizes >= begin) & (sizes <= (end or sizes.max(initial=0)))
            between.append(there.get(chosen[entry], np.full(len(sizes), np.nan))[inside])
        most = float(np.concatenate(between).max(initial=-1.0))  # NaN where one is not known
        found.append(BatchRange(first=begin, last=end, entry=entry, between=most if most >= 0 else None))
    for i, (one, two) in enumerate(pairwise(found), 1):
        found[i] = replace(two, first95=first95(options, chosen[one.entry], chosen[two.entry]))
    return found, errors_between(options, chosen, lost[len(gaps) :])


def first95(options: Sequence[Candidates], before: Key, after: Key) -> tuple[int, int | None] | None:
    """95 % interval of the batch size from which on one draft is faster than another, of those searched and those between.

    In each draw of conversations and rounds that is as many batch sizes later as the other is faster at. The end is None where
    it lies beyond the largest searched; the whole is None where fewer than two have both.
    """
    known = [c for c in options if c.context is not None and {before, after} <= c.places.keys()]
    sizes, ahead = list[int](), list[BoolArray]()
    for low, high in pairwise(known):
        here = _some(low.batch_size, high.batch_size - (high is not known[-1]))
        ends = low.batch_size, high.batch_size
        rates = [  # (B, G)
            low.rate_draws[i][:, None] / between_batch_sizes(low.ms_draws[i], high.ms_draws[j], here, *ends)
            for i, j in ((low.places[key], high.places[key]) for key in (before, after))
        ]
        sizes += here.tolist()
        ahead.append(rates[0] >= rates[1])
    if not sizes or not known[0].is_noisy:
        return None
    later = np.hstack(ahead).sum(axis=1)
    first, last = ([*sizes, None][n] for n in np.percentile(later, (2.5, 97.5), method="nearest").astype(int))
    return first or sizes[-1], last


def errors_between(options: list[Candidates], chosen: list[Key], lost: list[Losses]) -> list[float]:
    """How far interpolated losses are off: the errors at batch sizes that were searched, each left out in turn.

    Of the trees chosen on either side the one with the smaller interpolated loss is taken; where the two are one, nothing
    is tested. Shares of the throughput; empty where there are no three batch sizes, or no profile.

    lost : (1,) interpolated losses at each batch size but the first and the last
    """
    found = []
    for before, c, after, losses in zip(chosen, options[1:], chosen[2:], lost, strict=False):
        known = [(float(losses[key][0]), key) for key in (before, after) if key in losses and before != after]
        if known and (best := min(known, key=lambda one: one[0]))[1] in c.places:
            found.append(abs(best[0] - 1 + float(c.throughput[c.places[best[1]]] / c.throughput.max())))
    return found


def _fewest(losses: list[dict[int, float]]) -> list[tuple[int, int]]:
    """The first option and the entry of each range, by the losses of the entries that can serve each option."""
    found: list[tuple[int, int]] = []
    first = 0
    while first < len(losses):
        last, best = first, losses[first]
        while last + 1 < len(losses) and (both := best.keys() & losses[last + 1].keys()):
            last, best = last + 1, {i: max(best[i], losses[last + 1][i]) for i in both}
        # the least loss; of equals that which belongs to the range
        entry = min(best, key=lambda i: (round(best[i], 6), not first <= i <= last, i))
        found.append((first, entry))
        first = last + 1
    return found


def _losses(c: Candidates, selection: Selection, chosen: list[Key]) -> dict[int, float]:
    """Loss at this batch size of every entry whose draft is tied for best there."""
    own = float(c.throughput[selection.chosen])
    tied = {c.all[i].key: float(c.throughput[i]) for i in (*selection.tied.tolist(), selection.chosen)}
    return {i: max(0.0, 1 - tied[key] / own) for i, key in enumerate(chosen) if key in tied}


def _some(first: int, last: int) -> IntArray:
    """Batch sizes from the first to the last, at most `MOST` of them."""
    return np.asarray(np.linspace(first, last, min(max(last - first + 1, 0), MOST)).round().astype(np.int64))


def _lost(low: Candidates, high: Candidates, batch_sizes: IntArray) -> Losses:
    """Share of the throughput that candidates lose against the fastest, by interpolated latencies; none without latencies."""
    shared = [key for key in low.places if key in high.places] if low.context is not None else []
    here, there = ([c.places[key] for key in shared] for c in (low, high))
    ms = between_batch_sizes(low.ms[here], high.ms[there], batch_sizes, low.batch_size, high.batch_size)  # (n, G)
    rates = low.rates[here, None] / ms
    return dict(zip(shared, 1 - rates / rates.max(axis=0, initial=0.0), strict=True))
