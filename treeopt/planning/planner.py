"""Choose the tree with the best throughput for each batch size, or one for a mix of them.

throughput = batch_size x tokens per step / step latency, over every size and depth. Both factors are
measured, so both have noise; `treeopt.planning.select` says what it cannot tell apart.

A schedule says which batch sizes get which tree, in ranges, merged where the data cannot tell the difference.
A range has one tree for all its batch sizes. It may be another than the best of some of them as long as it
is tied with it there; what it costs by the estimates is the range's loss.

Between two batch sizes that were searched, step latencies are interpolated on a straight line. A range ends there
where the next one's tree becomes faster by that estimate. Of very many between two it is asked of `MOST`.

n candidates of two batch sizes · G batch sizes between them
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.growth.source import Source, source_of
from treeopt.latency.costs import StepCosts, between_batch_sizes
from treeopt.planning.candidates import tables_of
from treeopt.planning.entries import entry_of, figure_of
from treeopt.planning.request import REQUEST, PlanRequest
from treeopt.planning.select import Selection, select, select_all
from treeopt.planning.table import Floats, Key, Table, common, mixed
from treeopt.records.figure import Figure
from treeopt.records.inputs import Accuracies
from treeopt.records.origins import DrafterRecord
from treeopt.records.plan import BatchRange, Constraint, Plan
from treeopt.records.profile import LatencyProfile
from treeopt.trees.shapes import Limits
from treeopt.trees.tree import IntArray

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
    source, mix = source_of(record), request.mix
    profile = profile and profile.as_deep_as(source.num_heads)
    context = request.context if request.context is not None else source.usual_context
    costs = {b: StepCosts(profile, b, context) for b in request.sizes if profile}
    limits = _useful(request.limits, source, costs)
    reach = max((cost.reach[0] for cost in costs.values()), default=limits.budget)
    within = asdict(replace(limits, budget=min(limits.budget, reach)))
    options = tables_of(source, limits, request, costs)
    alone: list[Figure | None] = [None] * len(options)
    if mix is None:
        selections = select_all(options)
        schedule = schedule_of(options, selections)
    else:
        own = map(select, options)
        alone = [figure_of(table, selection.chosen) for table, selection in zip(options, own, strict=True)]
        options = common(options)
        whole = mixed(options, [mix[table.batch_size] / sum(mix.values()) for table in options])
        selections = [select(whole)] * len(options)
        schedule = [ONE_FOR_ALL]
    entries = [
        entry_of(source, table, selection, budget=request.limits.budget, alone=own)
        for table, selection, own in zip(options, selections, alone, strict=True)
    ]
    drafter: DrafterRecord = source.meta.get("drafter") or DrafterRecord()
    return Plan(
        entries=tuple(entries),
        schedule=schedule,
        objective=source.grown_by,
        drafter={**drafter, "num_heads": source.num_heads},
        acceptance=source.meta.get("acceptance"),
        constraint=Constraint(**within, mix=mix, engine=request.engine),
        runtime=(profile.runtime or None) if profile else None,
        part=profile.part if profile else None,
    )


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
    most, heads = max((cost.reach[0] for cost in costs.values()), default=limits.budget) + 1, source.num_heads
    depth = min(limits.max_depth or heads, heads)
    return replace(limits, max_depth=depth, budget=min(limits.budget, max(most, LEAST_GROWN)))


def schedule_of(options: list[Table], selections: list[Selection]) -> list[BatchRange]:
    """The fewest ranges of batch sizes, where entry i is what was selected for options[i].

    Above the largest batch size that was searched its tree goes on, and below the smallest one that one's.
    Without latencies a batch size between two belongs with the smaller one.
    """
    chosen = [table.all[s.chosen].key for table, s in zip(options, selections, strict=True)]
    losses = [_losses(table, s, chosen) for table, s in zip(options, selections, strict=True)]
    has_drafter = any(cost.rows > 1 for _, cost in chosen)
    options = [
        table if table.idle is None else table.without(table.plain if has_drafter else table.idle) for table in options
    ]
    ranges = _fewest(losses)
    begins = [1]
    for (_, before), (first, after) in pairwise(ranges):
        low, high = options[first - 1], options[first]
        sizes = _some(low.batch_size + 1, high.batch_size - 1)
        there, unknown = _lost(low, high, sizes), np.full(len(sizes), np.inf)
        better = np.flatnonzero(there.get(chosen[after], unknown) < there.get(chosen[before], -unknown))
        begins.append(int(sizes[better[0]]) if len(better) else high.batch_size)
    ends = [*(begin - 1 for begin in begins[1:]), None]
    return [
        BatchRange(first=begin, last=end, entry=entry)
        for (_, entry), begin, end in zip(ranges, begins, ends, strict=True)
    ]


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


def _losses(table: Table, selection: Selection, chosen: list[Key]) -> dict[int, float]:
    """Loss at this batch size of every entry whose draft is tied for best there."""
    own = float(table.throughput[selection.chosen])
    tied = {table.all[i].key: float(table.throughput[i]) for i in (*selection.tied.tolist(), selection.chosen)}
    return {i: max(0.0, 1 - tied[key] / own) for i, key in enumerate(chosen) if key in tied}


def _some(first: int, last: int) -> IntArray:
    return np.asarray(np.linspace(first, last, min(max(last - first + 1, 0), MOST)).round().astype(np.int64))


def _lost(low: Table, high: Table, batch_sizes: IntArray) -> Losses:
    """Share of the throughput that candidates lose against the fastest, by interpolated latencies; none without latencies."""
    shared = [key for key in low.places if key in high.places] if low.context is not None else []
    here, there = ([table.places[key] for key in shared] for table in (low, high))
    ms = between_batch_sizes(low.ms[here], high.ms[there], batch_sizes, low.batch_size, high.batch_size)  # (n, G)
    rates = low.rates[here, None] / ms
    return dict(zip(shared, 1 - rates / rates.max(axis=0, initial=0.0), strict=True))
