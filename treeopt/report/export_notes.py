"""Notes on an export: for which load it is, and what its drafts lose at batch sizes that have others."""

from collections.abc import Sequence

from treeopt.engines.base import Method
from treeopt.records.figure import Figure
from treeopt.records.plan import Plan, PlanEntry
from treeopt.report.plan_table import schedule
from treeopt.report.wording import percent

WITHOUT_COSTS = (
    "The plan was made without step costs: it is not known whether speculation pays, nor at which batch sizes. "
    "Costs come from treeopt profile, of another engine with --from-csv."
)


def load_notes(plan: Plan, sizes: Sequence[int | None], method: Method) -> list[str]:
    """The load that an export is for, and what its drafts lose under another that the engine can have.

    sizes : batch sizes whose drafts are written; None alone for a schedule, or for the one draft that all have
    """
    notes = [_written_for(plan, sizes)]
    if plan.speculates and plan.entries[0].chosen.step_ms is None:
        notes.append(WITHOUT_COSTS)
    elif not plan.mix:
        entries = [entry for entry in plan.entries if method.decodes(entry.batch_size)]
        notes += [_losses(entry, entries) for entry in entries if entry.batch_size in sizes and len(entries) > 1]
    if len(sizes) > 1:
        shares = ",".join(f"{entry.batch_size}:SHARE" for entry in plan.entries)
        notes.append(f"A server has one of these files. One draft for all: treeopt search --batch-size {shares}")
    return notes


def _written_for(plan: Plan, sizes: Sequence[int | None]) -> str:
    if plan.mix:
        total = sum(plan.mix.values())
        shares = [f"{amount / total:.0%} of the time at {size}" for size, amount in sorted(plan.mix.items())]
        load = f"the mix of batch sizes ({', '.join(shares)})"
        return f"Written for {load}: {plan.entries[0].draft.words}."
    if list(sizes) == [None] and len(plan.entries) > 1:
        if all(entry.draft == plan.entries[0].draft for entry in plan.entries):
            return f"Written for all batch sizes: {plan.entries[0].draft.words}."
        return f"Written for all batch sizes. {schedule(plan)}"
    entries = [plan.entry(size) for size in sizes]
    drafts = ", ".join(f"{entry.batch_size} ({entry.draft.words})" for entry in entries)
    left_out = [str(entry.batch_size) for entry in plan.entries if entry not in entries]
    if left_out:
        return f"Written for batch size {drafts}, not for {', '.join(left_out)}."
    return f"Written for batch size {drafts}."


def _losses(entry: PlanEntry, entries: Sequence[PlanEntry]) -> str:
    """How much slower an entry's draft is at the batch sizes of other entries than the drafts that are best there."""
    losses = []
    for other in entries:
        if other.batch_size == entry.batch_size:
            continue
        figure = _figure_at(other, entry.chosen)
        loss = (
            "not known" if figure is None else percent(figure.rate.value / other.chosen.rate.value, "slower", "faster")
        )
        losses.append(f"{loss} at {other.batch_size}")
    return f"The draft of batch size {entry.batch_size} beside the best of the others: {', '.join(losses)}."


def _figure_at(entry: PlanEntry, figure: Figure) -> Figure | None:
    """The figure of the same draft at an entry's batch size; None where the plan does not know it."""
    if figure.size == 1:
        return entry.plain
    for known in (entry.chosen, *entry.others.values(), *entry.curve):
        if (known.size, known.depth, known.tokens_per_step) == (figure.size, figure.depth, figure.tokens_per_step):
            return known
    return None
