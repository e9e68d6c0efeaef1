"""What a plan says of dynamic trees: the table of kinds, and the setting that an engine is told at each batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.records.expected import AdaptiveFigures
from treeopt.records.served import losses_of, setting_of
from treeopt.report.wording import lost, percentages, pm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from treeopt.records.plan import Plan, PlanEntry

KINDS = ("batch", "kind", "levels/\ntopk", "rows", "tokens/step", "step ms", "speedup", "over fixed")
KINDS_NOTE = (
    "A dynamic tree is drafted anew at every step: the topk likeliest nodes of each level are expanded, and the best rows of "
    "all are verified. With topk 1 it is a chain. An adaptive one also chooses how many, by what the drafter's scores promise."
)
WHAT = "setting"  # of a server: levels/topk/rows


def kind_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The chosen fixed tree of every entry beside the best of the other kinds; empty where nothing is known of these."""
    rows: list[tuple[str, ...]] = []
    for e in plan.entries:
        others = [(kind, figures) for kind, figures in (("dynamic", e.dynamic), ("adaptive", e.adaptive)) if figures]
        if others:
            fixed = ("fixed", "–", str(e.size), pm(e.tokens_per_step, e.tokens_per_step_stderr))
            rows.append((str(e.batch_size), *fixed, pm(e.step_ms, None), pm(e.speedup, e.speedup_stderr), "1"))
        for kind, f in others:
            taken = f"{f.mean_rows:.1f} of {f.size}" if isinstance(f, AdaptiveFigures) else str(f.size)
            rate = pm(f.tokens_per_step, f.tokens_per_step_stderr)
            low, high = f.over_fixed95 or (None, None)
            over = f"{f.over_fixed:.2f} [{low:.2f}, {high:.2f}]" if low and high else pm(f.over_fixed, None)
            speedup = pm(f.speedup, f.speedup_stderr)
            rows.append(
                (str(e.batch_size), kind, f"{f.depth}/{f.topk}", taken, rate, pm(f.step_ms, None), speedup, over)
            )
    return rows


def settings(plan: Plan) -> str:
    """What an engine of dynamic trees is told at each batch size, and what one setting for all costs.

    Empty for a plan of no such engine, or without dynamic trees.
    """
    from treeopt.export.write import planned_trees

    planned, way = plan.constraint.engine if plan.constraint else None, planned_trees(plan)
    if planned is None or way is None or not all(e.dynamic for e in plan.entries):
        return ""
    if plan.mix:
        return f"{planned.name} gets levels/topk/rows {setting_words(plan, plan.entries[0])}.{_losses(plan, plan.entries[0])}"
    each = "; ".join(f"{e.batch_size}: {setting_words(plan, e)}" for e in plan.entries)
    said = f"{planned.name} gets levels/topk/rows, by batch size {each}."
    shared = None if way.by_batch_size else one_for_all(plan)
    return f"{said} One server for all: that of {shared.batch_size}.{_losses(plan, shared)}" if shared else said


def settings_for(plan: Plan, sizes: Sequence[int | None]) -> list[str]:
    """For which load an export of dynamic trees is, and what it loses elsewhere; first what speaks against speculation.

    sizes : batch sizes whose settings are written; None alone for a schedule, or for the one that all have
    """
    first = plan.entries[0]
    if plan.mix:
        shares = zip(percentages([plan.mix[e.batch_size] for e in plan.entries]), plan.entries, strict=True)
        load = ", ".join(f"{share} of the time at {e.batch_size}" for share, e in shares)
        said = f"Written for the mix of batch sizes ({load}): {setting_words(plan, first)}.{_losses(plan, first)}"
        return [*against(plan, [first]), said]
    entries = list(plan.entries) if list(sizes) == [None] else [plan.entry(size) for size in sizes]
    each = ", ".join(f"{e.batch_size} ({setting_words(plan, e)})" for e in entries)
    if list(sizes) == [None] and len(entries) > 1:
        return [*against(plan, entries), f"Written for all batch sizes: {each}."]
    if len(entries) > 1:
        found = [*against(plan, entries), f"Written for each batch size, to start a server with: {each}."]
        if shared := one_for_all(plan):
            found.append(f"For one server take that of --batch-size {shared.batch_size}.{_losses(plan, shared)}")
        return found
    known = _losses(plan, entries[0]) or " What it loses at other batch sizes is not known." * (len(plan.entries) > 1)
    return [*against(plan, entries), f"Written for batch size {each}.{known}"]


def setting_words(plan: Plan, entry: PlanEntry) -> str:
    """The setting of an entry in a few words."""
    tree = setting_of(plan, entry)
    return tree.name if tree else "do not speculate"


def one_for_all(plan: Plan) -> PlanEntry | None:
    """The entry whose setting loses the least at any batch size; None for one batch size, and where that is not known."""
    known = [e for e in plan.entries if len(losses_of(plan, e)) == len(plan.entries) > 1]
    return min(known, key=lambda e: max(losses_of(plan, e).values()), default=None)


def _losses(plan: Plan, entry: PlanEntry) -> str:
    losses = losses_of(plan, entry)
    others = [(size, loss) for size, loss in sorted(losses.items()) if plan.mix or size != entry.batch_size]
    missing = [str(e.batch_size) for e in plan.entries if e.batch_size not in losses]
    said = lost(others, WHAT)
    return said + (f" At {', '.join(missing)} that is not known." if said and missing else "")


def against(plan: Plan, entries: Sequence[PlanEntry]) -> Iterator[str]:
    """Where speculation does not pay, or may not."""
    for e in entries[:1] if plan.mix else entries:
        if (f := e.dynamic) is None or f.speedup is None:
            continue
        speedup = pm(f.speedup, f.speedup_stderr)
        if plan.mix:
            if setting_of(plan, e) is None:
                yield "Do not speculate over the mix: no dynamic tree is predicted to be faster than plain decoding."
        elif setting_of(plan, e) is None:
            yield (
                f"Do not speculate at batch size {e.batch_size}: the best dynamic tree there, {f.tree.name}, is predicted to "
                f"be {speedup} times as fast as plain decoding."
            )
        elif setting_of(plan, e) == f.tree and f.speedup - 1.96 * (f.speedup_stderr or 0) <= 1:
            yield f"Speculation may not gain at batch size {e.batch_size}: its predicted speedup is {speedup}."
