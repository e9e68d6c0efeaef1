"""Choose the draft with the best throughput for each batch size, or one for a mix of them: trees, or copied text.

throughput = batch_size x tokens per step / step latency, of every tree, or of every setting that was tried. Both factors
are measured, so both have noise; `treeopt.planning.select` says what it cannot tell apart.

A schedule says which batch sizes get which draft, in ranges, merged where the data cannot tell the difference.
A range has one draft for all its batch sizes. It may be another than the best of some of them as long as it
is tied with it there, and not slower than plain decoding; what it costs by the estimates is the range's loss.

Between two batch sizes that were searched, step latencies are interpolated on a straight line. A range ends there
where the next one's draft becomes faster by that estimate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from math import prod

from treeopt.engines.copied import KIND
from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.source import Source, source_of
from treeopt.latency.costs import StepCosts
from treeopt.planning.candidates import text_tables, tree_tables
from treeopt.planning.entries import figure_of, text_entry, tree_entry
from treeopt.planning.request import REQUEST, PlanRequest
from treeopt.planning.select import Selection, select, select_all
from treeopt.planning.table import Candidate, Table, common, mixed
from treeopt.records.figure import Figure
from treeopt.records.inputs import Accuracies
from treeopt.records.origins import DrafterRecord
from treeopt.records.plan import BatchRange, Constraint, Plan
from treeopt.records.profile import LatencyProfile
from treeopt.records.requestlog import RequestLog
from treeopt.trees.shapes import Limits

ONE_FOR_ALL = BatchRange(first=1, last=None, entry=0)  # the schedule of a single draft, whatever it costs anywhere
MOST_UNTIMED = 1024  # rows of a tree where nothing was timed
LEAST_GROWN = 8  # rows, so that a profile without trees can be told which to time


def plan_trees(record: Accuracies, profile: LatencyProfile | None = None, request: PlanRequest = REQUEST) -> Plan:
    """The best tree within the limits for each batch size, and a schedule of them.

    With a profile it takes the tree with the highest predicted throughput, and of those that the noise
    does not tell apart a fixed one, and the smallest. Without a profile it takes the largest tree that the budget allows.

    >>> import numpy as np
    >>> from treeopt.records.calibration import Calibration
    >>> calibration = Calibration(np.array([[60, 20], [40, 10]]), np.array([100, 100]))
    >>> plan_trees(calibration, request=PlanRequest(Limits(3))).entries[0].tree.medusa_choices
    [[0], [0, 0]]
    """
    source, mix = source_of(record), request.mix
    profile = profile and profile.as_deep_as(source.num_heads)
    costs = costs_of(profile, request, source.usual_context)
    limits = _useful(request.limits, source, costs)
    reach = max((cost.reach[0] for cost in costs.values()), default=limits.budget)
    within = asdict(replace(limits, budget=min(limits.budget, reach)))
    tables = tree_tables(source, limits, request, costs)
    if mix is None:
        selections = select_all(tables)
        schedule = schedule_of(list(zip(tables, selections, strict=True)))
    else:
        tables = common(tables)
        best = select(mixed(tables, [mix[table.batch_size] / sum(mix.values()) for table in tables]))
        selections = [replace(best, runner_up=None)] * len(tables)
        schedule = [ONE_FOR_ALL]
    entries = [
        tree_entry(source, table, selection, request.limits.budget)
        for table, selection in zip(tables, selections, strict=True)
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


def plan_text(
    settings: Mapping[str, Sequence[Candidate]],
    usual: Mapping[str, Candidate],
    log: RequestLog,
    costs: Mapping[int, StepCosts],
    request: PlanRequest,
) -> Plan:
    """The best setting for each batch size of a drafter that copies text: of the one that is the fastest at all of them together.

    settings : by drafter, what was tried on the held-out conversations
    usual    : by drafter, which of them is the engine's usual setting, where it is among them
    log      : the held-out conversations
    costs    : as of `costs_of`

    Raises OutOfRange where the latency of no setting is known.
    """
    choices, figures, unpriced = dict[str, list[tuple[Table, Selection]]](), dict[str, list[Figure]](), list[str]()
    for drafter, tried in settings.items():
        tables = text_tables(tried, request, costs)
        if bare := [table.batch_size for table in tables if len(table.candidates) == 1]:
            most = costs[bare[-1]].reach[0]
            unpriced.append(
                f"At batch size {bare[-1]} every setting of {drafter} verifies more than the {most} rows that were timed."
            )
            continue
        choices[drafter] = list(zip(tables, select_all(tables), strict=True))
        figures[drafter] = [figure_of(table, selection.chosen) for table, selection in choices[drafter]]
    if not figures:
        raise OutOfRange(f"{' '.join(unpriced)} Time larger sizes.")
    best = max(figures, key=lambda drafter: prod(figure.rate for figure in figures[drafter]))
    entries = []
    for i, (table, selection) in enumerate(choices[best]):
        speculates = table.sizes[selection.chosen] > 1
        others = {
            drafter: _best_setting(*pairs[i], drafter)
            for drafter, pairs in choices.items()
            if drafter != best or not speculates
        }
        entry = text_entry(table, selection, log, usual=usual.get(best), others=others)
        left_out = [f"{sentence} It is left out." for sentence in unpriced]
        entries.append(replace(entry, warnings=[*entry.warnings, *left_out]))
    profile = next((cost.profile for cost in costs.values()), None)
    return Plan(
        entries=tuple(entries),
        schedule=schedule_of(choices[best]),
        objective="replay",
        drafter={"kind": KIND, "id": best},
        constraint=Constraint(budget=request.limits.budget, engine=request.engine),
        runtime=(profile.runtime or None) if profile else None,
        part=profile.part if profile else None,
    )


def _best_setting(table: Table, selection: Selection, drafter: str) -> Figure:
    """The setting that was selected for a drafter; where that is not to speculate, the fastest one that does."""
    best = table.best_of(drafter)
    return figure_of(table, selection.chosen if table.sizes[selection.chosen] > 1 or best is None else best)


def costs_of(profile: LatencyProfile | None, request: PlanRequest, usual_context: float | None) -> dict[int, StepCosts]:
    """What steps cost at each batch size; empty without a profile.

    usual_context : tokens that a sequence has where the request does not say
    """
    context = usual_context if request.context is None else request.context
    return {b: StepCosts(profile, b, context) for b in request.sizes if profile}


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


def schedule_of(choices: Sequence[tuple[Table, Selection]]) -> list[BatchRange]:
    """The fewest ranges of batch sizes, where entry i is what was selected of the i-th table.

    The draft of the largest batch size that was searched serves all larger ones too, that of the smallest all smaller ones.
    Without latencies the sizes between two belong to the smaller one.
    """
    chosen = [table.candidates[selection.chosen] for table, selection in choices]
    ranges = _fewest([_losses(table, selection, chosen) for table, selection in choices])
    begins = [1]
    for (_, before), (first, after) in pairwise(ranges):
        begins.append(_change(choices[first - 1][0], choices[first][0], chosen[before], chosen[after]))
    ends = [*(begin - 1 for begin in begins[1:]), None]
    return [
        BatchRange(first=begin, last=end, entry=entry)
        for (_, entry), begin, end in zip(ranges, begins, ends, strict=True)
    ]


def _fewest(losses: list[dict[int, float]]) -> list[tuple[int, int]]:
    """The first table and the entry of each range, by the losses of the entries that can serve each table's batch size."""
    ranges: list[tuple[int, int]] = []
    first = 0
    while first < len(losses):
        last, best = first, losses[first]
        while last + 1 < len(losses) and (both := best.keys() & losses[last + 1].keys()):
            last, best = last + 1, {i: max(best[i], losses[last + 1][i]) for i in both}
        # the least loss; of equals that which belongs to the range
        entry = min(best, key=lambda i: (round(best[i], 6), not first <= i <= last, i))
        ranges.append((first, entry))
        first = last + 1
    return ranges


def _losses(table: Table, selection: Selection, chosen: Sequence[Candidate]) -> dict[int, float]:
    """Loss at this batch size of every entry that can serve it: its draft is tied for best there, and no slower than plain."""
    best, least = float(table.throughput[selection.chosen]), float(table.throughput[selection.plain])
    tied = {table.candidates[i]: float(table.throughput[i]) for i in (*selection.tied.tolist(), selection.chosen)}
    able = {candidate: rate for candidate, rate in tied.items() if candidate.size == 1 or rate >= least}
    return {i: max(0.0, 1 - able[candidate] / best) for i, candidate in enumerate(chosen) if candidate in able}


def _change(low: Table, high: Table, before: Candidate, after: Candidate) -> int:
    """The first batch size between two, or else the larger one, at which a draft is faster than the one that is served before.

    Latencies between the two are on a straight line.
    """
    if low.context is None or after not in low.places or before not in high.places:
        return high.batch_size
    leads = []  # above 0 where `after` is faster
    for table in (low, high):
        i, j = table.places[before], table.places[after]
        leads.append(float(table.rates[j] * table.ms[i] - table.rates[i] * table.ms[j]))
    if max(leads) <= 0:
        return high.batch_size
    share = 0.0 if leads[0] > 0 else leads[0] / (leads[0] - leads[1])
    return min(low.batch_size + 1 + int(share * (high.batch_size - low.batch_size)), high.batch_size)
