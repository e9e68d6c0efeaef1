"""The table of a plan of drafters that copy text: each setting beside the engine's usual one and those of its other drafters."""

from __future__ import annotations

from treeopt.planning.entries import USUAL
from treeopt.records.figure import Figure
from treeopt.records.plan import Plan, PlanEntry
from treeopt.report.table import Column, Table
from treeopt.report.wording import pm, timed

Row = tuple[PlanEntry, str, Figure]
USUAL_IS = "Usual is what the engine takes by default, or what its documentation shows."


def settings_table(plan: Plan, caption: str = "") -> Table:
    """One row per batch size for the chosen setting, below it the usual one and the best of the engine's other drafters."""
    rows = [(e, name, f) for e in plan.entries for name, f in {"chosen": e.chosen, **e.others}.items()]
    is_timed = any(e.step_ms for e in plan.entries)
    columns = [
        Column("batch", lambda row: str(row[0].batch_size)),
        Column("drafter", _drafter, names=True),
        Column("tokens/step", lambda row: pm(row[2].tokens_per_step), spare=1 if is_timed else 0),
        Column("setting", lambda row: _setting(row[2]), wraps=True),
        Column("rows/step", lambda row: pm(row[2].rows_per_step), spare=3),
    ]
    if is_timed:
        columns.insert(2, Column("speedup", lambda row: timed(row[2].speedup)))
        columns.append(Column("step ms", lambda row: timed(row[2].step_ms), spare=4))
    columns.append(Column("row may cost\n[plain steps]", lambda row: pm(row[2].break_even), spare=2))
    usual = USUAL_IS if any(USUAL in entry.others for entry in plan.entries) else ""
    return Table(
        "The best setting for each batch size" if is_timed else "The setting that emits the most tokens per step",
        columns,
        rows,
        caption="\n".join(filter(None, [usual, caption])),
        bold=lambda row: row[1] == "chosen",
        section=lambda row: row[0].batch_size,
    )


def _drafter(row: Row) -> str:
    drafter = row[2].draft.drafter or "none"
    return drafter if row[1] in ("chosen", drafter) else f"{drafter}, {row[1]}"


def _setting(figure: Figure) -> str:
    if not figure.draft.drafter:
        return "do not speculate"
    return "\n".join(f"{option}={value}" for option, value in figure.draft.options.items()) or "the defaults"
