"""The state of a run directory, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.report.status import OK, RunStatus
from treeopt.report.terminal import grid, together

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS, ORIGINS = ("file", "made [UTC]", "state", "holds"), ("files", "made by", "of")


def status_table(status: RunStatus) -> RenderableType:
    """A row for every file, where they come from, and the command to give next."""
    table = grid(f"Files of {status.run}", COLUMNS, left=len(COLUMNS))
    origins: dict[tuple[str, str], list[str]] = {}
    for row in status.files:
        state = row.state if not row.why else f"{row.state}: {row.why}"
        made = (row.made or "").replace("T", " ")[:16]
        table.add_row(row.name, made, state, row.holds, style=None if row.state == OK else "bold")
        if row.command or row.of:
            origins.setdefault((row.command or "", row.of), []).append(row.name)
    rows = [(", ".join(names), *origin) for origin, names in origins.items()]
    parts = [table] if status.files else []
    parts += [grid("Where they come from", ORIGINS, rows, left=len(ORIGINS))] if rows else []
    return together(*parts, f"{status.why} Next:" if status.next else status.why, *filter(None, [status.next]))
