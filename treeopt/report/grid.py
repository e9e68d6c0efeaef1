"""A table that fits its line, whatever the width: no word is broken and no figure is cut.

On a line that is too narrow the table gives up its frame, then the columns that can be spared, which are named below
it. If that is not enough, each row becomes a block of lines.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.box import HEAVY_HEAD
from rich.cells import cell_len
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult

GAP = 2  # characters between columns without a frame


class Grid:
    """A table of texts.

    columns : headers; all empty for a table without
    left    : so many columns are names; the others are figures, which are never wrapped
    wraps   : headers of other columns whose cells may be wrapped between words
    spare   : headers of columns that a narrow line does without, the first one first
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]] = (),
        *,
        left: int = 0,
        caption: str | None = None,
        wraps: Collection[str] = (),
        spare: Sequence[str] = (),
    ) -> None:
        self.title, self.columns, self.left, self.caption = title, tuple(columns), left, caption
        self.wraps, self.spare = wraps, spare
        self.rows: list[tuple[tuple[str, ...], str | None]] = [(tuple(row), None) for row in rows]
        self.sections: set[int] = set()  # rows below which a line is drawn

    def add_row(self, *cells: str, style: str | None = None) -> None:
        self.rows.append((cells, style))

    def add_section(self) -> None:
        """Draw a line below the last row."""
        self.sections.add(len(self.rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        body, gone = self._fitted(options.max_width)
        yield Text(self.title, "table.title")
        yield body
        if self.caption:
            yield Text(self.caption, "table.caption")
        if gone:
            yield Text(f"Left out on a line this narrow: {', '.join(gone)}. A wider terminal or --json shows them.")

    def _fitted(self, width: int) -> tuple[RenderableType, list[str]]:
        """The table in the best form for the width, and the columns that it does without."""
        every = range(len(self.columns))
        for framed, n in [(True, 0), *((False, n) for n in range(len(self.spare) + 1))]:
            kept = [i for i in every if self.columns[i] not in self.spare[:n]]
            frame = 3 * len(kept) + 1 if framed else GAP * (len(kept) - 1)
            if widths := self._widths(kept, width - frame):
                return self._table(kept, widths, framed), [_line(name) for name in self.spare[:n]]
        return Group(*(self._block(number, width) for number in range(len(self.rows)))), []

    def _widths(self, kept: list[int], room: int) -> list[int] | None:
        """Characters of every column; None where they cannot all have what their words and figures take."""
        least, natural = [], []
        for i in kept:
            cells = [row[i] for row, _ in self.rows]
            lines = [line for cell in cells for line in cell.split("\n")]
            words = [word for cell in cells for word in _words(cell)]
            free = i < self.left or self.columns[i] in self.wraps
            least.append(max(map(cell_len, [*self.columns[i].split(), *(words if free else lines)]), default=0))
            natural.append(max(map(cell_len, [*self.columns[i].split("\n"), *lines]), default=0))
        over = room - sum(least)
        if over < 0:
            return None
        wanted = sorted(range(len(kept)), key=lambda column: natural[column] - least[column])
        for left, column in zip(range(len(kept), 0, -1), wanted, strict=True):  # the modest ones first
            more = min(natural[column] - least[column], over // left)
            least[column] += more
            over -= more
        return least

    def _table(self, kept: list[int], widths: list[int], framed: bool) -> Table:
        table = Table(
            box=HEAVY_HEAD if framed else None,
            pad_edge=framed,
            padding=(0, 1 if framed else GAP, 0, int(framed)),
            show_header=any(self.columns),
        )
        for i, width in zip(kept, widths, strict=True):
            justify: JustifyMethod = "left" if i < self.left else "right"
            table.add_column(Text(self.columns[i]), width=width, justify=justify, overflow="fold")
        for number, (row, style) in enumerate(self.rows):
            table.add_row(*(Text(row[i]) for i in kept), style=style, end_section=number in self.sections)
        return table

    def _block(self, number: int, width: int) -> RenderableType:
        """A row as lines: its names, then each figure behind its header."""
        row, style = self.rows[number]
        names = self.left if 0 < self.left < len(row) else 1
        heading = [
            cell if self.left else f"{_line(name)} {cell}"
            for name, cell in zip(self.columns, row[:names], strict=False)
        ]
        labels = [_line(name) for name in self.columns[names:]]
        words = [word for cell in row[names:] for word in _words(cell)]
        beside = 2 * GAP + max(map(cell_len, labels), default=0) + max(map(cell_len, words), default=0) <= width
        block = Table.grid(padding=(0, GAP))
        for label, cell in zip(labels, row[names:], strict=True):
            text = Text(cell, overflow="fold")
            block.add_row(Text(label), text) if beside else block.add_row(Group(Text(label), text))
        head = Text("  ".join(filter(None, heading)), style or "bold")
        return Group(head, Padding(block, (0, 0, 0, GAP), expand=False))


def _words(cell: str) -> list[str]:
    """The words of a cell as rich wraps them: the first of a line has its indentation with it.

    >>> _words(" of these\\n2 lines")
    [' of', 'these', '2', 'lines']
    """
    return re.findall(r"^[^\S\n]+\S+|\S+", cell, re.MULTILINE)


def _line(header: str) -> str:
    """A header on one line."""
    return " ".join(header.split())
