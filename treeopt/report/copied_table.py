"""What a search over settings of drafters that copy text chose, for the terminal and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.records.figure import Figure
from treeopt.records.plan import Plan, PlanEntry
from treeopt.report.plan_table import certainty
from treeopt.report.table import Column, Table
from treeopt.report.terminal import together
from treeopt.report.verdict import doubts
from treeopt.report.wording import pm, told
from treeopt.trees.draft import CopiedText

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = tuple[PlanEntry, str, Figure]
CAPTION = (
    "Usual is what the engine takes by default, or what its documentation shows. Break-even is what a row more may cost, as a share "
    "of a plain step, before decoding plainly is faster."
)


def copied_table(plan: Plan) -> RenderableType:
    """One row per batch size for the chosen setting, below it the usual one and the best of the engine's other drafters."""
    rows = [(e, name, f) for e in plan.entries for name, f in {"chosen": e.chosen, **e.others}.items()]
    is_timed = any(e.chosen.step_ms for e in plan.entries)
    columns = [
        Column("batch", lambda row: str(row[0].batch_size)),
        Column("drafter", lambda row: _drafter(row), names=True),
        Column("setting", lambda row: _setting(row[2]), wraps=True),
        Column("rows/step", lambda row: pm(row[2].rows_per_step, None)),
        Column("tokens/step", lambda row: told(row[2], "tokens_per_step")),
    ]
    if is_timed:
        columns += [
            Column("step ms", lambda row: told(row[2], "step_ms"), spare=1),
            Column("speedup", lambda row: told(row[2], "speedup")),
        ]
    else:
        columns.append(Column("break-even", lambda row: pm(row[2].break_even, None)))
    said = [certainty(e, hint=False) for e in plan.entries]
    caption = "\n".join([CAPTION, *filter(None, said)])
    title = "The best setting for each batch size" if is_timed else "The setting that emits the most tokens per step"
    table = Table(
        title,
        columns,
        rows,
        caption=caption,
        bold=lambda row: row[1] == "chosen",
        section=lambda row: row[0].batch_size,
    )
    return together(table, headline=doubts(plan))


def _drafter(row: Row) -> str:
    draft = row[2].draft
    own = draft.drafter if isinstance(draft, CopiedText) else "none"
    return own if row[1] in ("chosen", own) else f"{own}, {row[1]}"


def _setting(figure: Figure) -> str:
    """The options, one below the other; without what all the engine's options begin with."""
    draft = figure.draft
    if not isinstance(draft, CopiedText):
        return "do not speculate"
    return "\n".join(f"{option}={value}" for option, value in draft.settings) or "the defaults"
