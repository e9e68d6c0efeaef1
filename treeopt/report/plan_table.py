"""What a search chose, for the terminal and the report: the tables of drafts, how sure the choice is, and a tree."""

from math import nan

from rich.console import RenderableType

from treeopt.records.estimate import Estimate
from treeopt.records.figure import Figure
from treeopt.records.plan import EXACT, BatchRange, Plan, PlanEntry
from treeopt.report.copied_table import settings_table
from treeopt.report.plan_verdict import best_speculation, recommendations
from treeopt.report.table import Column, Table, texts
from treeopt.report.terminal import together
from treeopt.report.verdict import BY_DEFAULT
from treeopt.report.wording import count, percent, pm, ranges, timed
from treeopt.trees.draft import ANEW, Draft
from treeopt.trees.tree import Tree

EXPLAINED = {
    "dynamic": (
        "A dynamic tree is drafted anew at every step: the topk likeliest nodes of each level are expanded, and the best rows of "
        "all are verified. With topk 1 it is a chain. Its setting is levels/topk/rows."
    ),
    "ddtree": "A ddtree takes the likeliest paths as if depths were independent; its setting is depth/ranks/rows.",
}


def plan_table(plan: Plan, following: str = "") -> RenderableType:
    """What to use at each batch size in a sentence; a row for each; the other kinds; then how sure the choice is.

    following : what to run next, for a search
    """
    parts = (mixture, schedule)
    captions = [*map(certainty, plan.entries), *(part(plan) for part in parts if not plan.copies)]
    trees = trees_table(plan, "\n".join(filter(None, captions)))
    sentences = "\n".join(filter(None, [*recommendations(plan), following]))
    return together(trees, kinds_table(plan), headline=[sentences])


def trees_table(plan: Plan, caption: str = "") -> Table:
    """The draft of every entry, beside a choice not to speculate the best one, and a row for the mix over all."""
    if plan.copies:
        return settings_table(plan, caption)
    rows = list[tuple[str, ...]]()
    for entry in plan.entries:
        label = str(entry.batch_size)
        if plan.mix:
            label += f" ({plan.mix[entry.batch_size] / sum(plan.mix.values()):.0%})"
        rows.append((label, *_cells(plan, entry)))
        if not entry.speculates and (best := best_speculation(entry)):
            rows.append((f"{label}, best tree", *_cells(plan, best)))
    if (total := plan.mix_tokens_per_s) is not None:
        _, size, _, *draft = rows[0]
        rates = ["–"] if plan.part else ["–", pm(total, 0)]
        rows.append(("mix", size, pm(plan.mix_speedup), *draft[: -len(rates)], *rates))
    headers = ["batch", "rows", "tokens/step", "depth", "widths"]
    if plan.entries[0].step_ms:
        # Of a part of a step a ratio alone means something.
        rates = ["step over\nplain"] if plan.part else ["step ms", "tokens/s"]
        headers = ["batch", "rows", "speedup", "depth", "widths", "tokens/step", *rates]
    title = "One tree for the mix of loads" if plan.mix else "The best tree for each batch size"
    return Table(title, texts(*headers, wraps=("batch", "widths")), rows, caption=caption)


def _cells(plan: Plan, figure: Figure) -> tuple[str, ...]:
    """The cells of a draft behind its batch size."""
    shape, tokens = (str(figure.depth), _setting(figure.draft)), pm(figure.tokens_per_step)
    if figure.step_ms is None:
        return (str(figure.size), tokens, *shape)
    rates = [pm(figure.overhead)] if plan.part else [timed(figure.step_ms), timed(figure.tokens_per_s, 0)]
    return (str(figure.size), timed(figure.speedup), *shape, tokens, *rates)


def _setting(draft: Draft) -> str:
    """Nodes of each depth of a fixed tree, the setting of another draft."""
    if len(draft) == 1:
        return draft.words
    return " ".join(map(str, draft.widths())) if isinstance(draft, Tree) else draft.name


def kinds_table(plan: Plan) -> Table | None:
    """The chosen draft of every entry beside the best of the other kinds; None where nothing is known of dynamic ones."""
    columns = [
        Column("batch", lambda row: str(row[0].batch_size)),
        Column("kind", lambda row: row[1]),
        Column("speedup", lambda row: timed(row[2].speedup)),
        Column("rows or\nsetting", lambda row: row[2].draft.name if row[2].draft.kind in ANEW else str(row[2].size)),
        Column("tokens/step", lambda row: pm(row[2].tokens_per_step)),
        *([] if plan.part else [Column("step ms", lambda row: pm(row[2].step_ms and row[2].step_ms.value), spare=1)]),
        Column("over chosen", lambda row: "1" if _is_chosen(row) else str(row[2].over(row[0]))),
    ]
    entries = [e for e in plan.entries if any(map(e.best, ANEW))]
    rows = [(e, kind, best) for e in entries for kind, best in {e.draft.kind: e, **e.others}.items()]
    kinds = {kind for _, kind, _ in rows}
    caption = " ".join(explanation for kind, explanation in EXPLAINED.items() if kind in kinds)
    title = "Fixed and dynamic trees, predicted"
    return Table(title, columns, rows, caption=caption, bold=_is_chosen) if rows else None


def _is_chosen(row: tuple[PlanEntry, str, Figure]) -> bool:
    return row[2] is row[0]


def certainty(entry: PlanEntry) -> str:
    """What speedups are over, where an engine is told to be exact, and which sizes are as good as the chosen one.

    Empty where that is not known.
    """
    said = ""
    if exact := entry.others.get(EXACT):
        said = f"Speedups are over {BY_DEFAULT}; told to be exact it is {timed(exact.speedup)} times as fast, plain. "
    if entry.runner_up is None or entry.tokens_per_step.low is None:
        return said.strip()
    said += f"Batch size {entry.batch_size}: {_ties(entry, entry.runner_up)}"
    return said + "."


def _ties(entry: PlanEntry, runner: Figure) -> str:
    """Which sizes are tied with the chosen one, and how far the next best is behind."""
    others, over = any(size != entry.size for size in entry.tied_sizes), runner.over(entry)
    error = nan if over.log_stderr is None else over * over.log_stderr
    said = f"sizes {ranges(entry.tied_sizes)} are tied" if others else "no other size is tied"
    return f"{said}; the next best, {count(runner.size, 'row')}, is {percent(Estimate(over, error), 'behind', 'ahead', digits=1)}"


def mixture(plan: Plan) -> str:
    """What the rows of a mix of loads are; empty without a mix."""
    if not plan.mix:
        return ""
    return (
        "A percentage is the share of the time that the server decodes so many sequences at once; the row of the mix has the "
        "mean over the time."
    )


def schedule(plan: Plan) -> str:
    """Which batch sizes get which tree; empty for one batch size."""
    if len(plan.entries) < 2 or plan.mix:
        return ""
    parts = [f"{_range(part)}: {plan.entries[part.entry].draft.words}" for part in plan.schedule]
    searched = [entry.batch_size for entry in plan.entries]
    said = f"Schedule by batch size: {'; '.join(parts)}. Searched: {', '.join(map(str, searched))}."
    if searched[-1] - searched[0] >= len(searched):
        timed = plan.entries[0].step_ms is not None
        said += (
            " Between these step times are interpolated." if timed else " Between these the next smaller one's goes on."
        )
    if plan.break_even:
        said += f" From batch size {plan.break_even} on it does not speculate."
    said += _ties_of_ranges(plan) + slower_than_without(plan)
    return f"{said} Above {searched[-1]} nothing was searched{f', and below {searched[0]}' if searched[0] > 1 else ''}."


def _ties_of_ranges(plan: Plan) -> str:
    """Where a range has another draft than the best one of its batch size; empty where none has."""
    ties = list[str]()
    for entry in plan.entries:
        for part in plan.schedule:
            served = plan.entries[part.entry].draft
            if part.first <= entry.batch_size <= (part.last or entry.batch_size) and served != entry.draft:
                ties.append(f"{served.words} with {entry.draft.words} at batch size {entry.batch_size}")
    return f" Tied: {'; '.join(ties)}." if ties else ""


def slower_than_without(plan: Plan) -> str:
    """Where an engine without a drafter is faster than the schedule of one that has it, and by how much; empty if nowhere."""
    known = {e.batch_size: e.speedup for e in plan.entries}
    found = {size: speedup for size, speedup in known.items() if speedup is not None and speedup < 1}
    if not found:
        return ""
    is_tail = list(found) == list(known)[-len(found) :]
    where = f"From batch size {min(found)} on" if is_tail else f"At batch size {', '.join(map(str, found))}"
    each = ", ".join(f"{speedup} times as fast at {size}" for size, speedup in found.items())
    return f" {where} this is slower than an engine without the drafter: {each}."


def _range(part: BatchRange) -> str:
    return f"{part.first} on" if part.last is None else ranges(range(part.first, part.last + 1))
