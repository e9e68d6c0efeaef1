"""A table is a title and columns; the terminal, a notebook and the report's page show the same ones.

On a line of the terminal no word is broken and no figure is cut. Where the line is too narrow the table gives up its
frame, then the columns that can be spared, which are named below it; then each row becomes a block of lines.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import Any

from rich.box import HEAVY_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

GAP = 2  # characters between columns without a frame


@dataclass(frozen=True)
class Column:
    """The header of a column, and how a record's cell reads.

    header : may have several lines
    names  : whether it says what a row is of: such cells stand at the left and are wrapped between words
    wraps  : whether another one's cells may be wrapped, too; figures are not
    spare  : above 0 where a narrow line can do without, the largest first
    """

    header: str
    cell: Callable[[Any], str]
    names: bool = False
    wraps: bool = False
    spare: int = 0


def texts(*headers: str, names: int = 0, wraps: Sequence[str] = (), spare: Sequence[str] = ()) -> list[Column]:
    """Columns of rows of texts; the first ``names`` say what a row is of, ``spare`` are left out in this order."""
    order = {header: len(spare) - i for i, header in enumerate(spare)}
    return [Column(h, itemgetter(i), i < names, h in wraps, order.get(h, 0)) for i, h in enumerate(headers)]


class Table:
    """Rows of texts below headers.

    bold    : whether a record's row is the one to look at
    section : records that differ in it are parted by a line
    """

    def __init__(
        self,
        title: str,
        columns: Sequence[Column],
        records: Iterable[Any],
        *,
        caption: str = "",
        bold: Callable[[Any], bool] = lambda record: False,
        section: Callable[[Any], object] = lambda record: None,
    ) -> None:
        self.title, self.columns, self.caption, records = title, list(columns), caption, list(records)
        self.rows = [tuple(column.cell(record) for column in columns) for record in records]
        self.bold = [bold(record) for record in records]
        groups = [section(record) for record in records]
        self.ends = [a != b for a, b in zip(groups, [*groups[1:], *groups[-1:]], strict=True)]  # a line below

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
        spare = sorted((i for i in every if self.columns[i].spare), key=lambda i: -self.columns[i].spare)
        for framed, n in [(True, 0), *((False, n) for n in range(len(spare) + 1))]:
            kept = [i for i in every if i not in spare[:n]]
            frame = 3 * len(kept) + 1 if framed else GAP * (len(kept) - 1)
            if widths := self._widths(kept, width - frame):
                return self._framed(kept, widths, framed), [_line(self.columns[i].header) for i in spare[:n]]
        return Group(*(self._block(row, width) for row in self.rows)), []

    def _widths(self, kept: list[int], room: int) -> list[int] | None:
        """Characters of every column; None where they cannot all have what their words and figures take."""
        widths, wishes = [], []
        for i in kept:
            column, lines = self.columns[i], [line for row in self.rows for line in row[i].split("\n")]
            words = [word for line in lines for word in _words(line)] if column.names or column.wraps else lines
            widths.append(_longest([*column.header.split(), *words]))
            wishes.append(_longest([*column.header.split("\n"), *lines]) - widths[-1])
        if (over := room - sum(widths)) < 0:
            return None
        for done, i in enumerate(sorted(range(len(kept)), key=wishes.__getitem__)):  # the modest ones first
            more = min(wishes[i], over // (len(kept) - done))
            widths[i] += more
            over -= more
        return widths

    def _framed(self, kept: list[int], widths: list[int], framed: bool) -> RichTable:
        table = RichTable(
            box=HEAVY_HEAD if framed else None,
            pad_edge=framed,
            padding=(0, 1 if framed else GAP, 0, int(framed)),
            show_header=any(column.header for column in self.columns),
        )
        for i, width in zip(kept, widths, strict=True):
            justify: JustifyMethod = "left" if self.columns[i].names else "right"
            table.add_column(Text(self.columns[i].header), width=width, overflow="fold", justify=justify)
        for row, bold, ends in zip(self.rows, self.bold, self.ends, strict=True):
            table.add_row(*(Text(row[i]) for i in kept), style="bold" if bold else None, end_section=ends)
        return table

    def _block(self, row: tuple[str, ...], width: int) -> RenderableType:
        """A row as lines: its names, then each figure behind its header."""
        labels = [_line(column.header) for column in self.columns]
        named = len([*takewhile(lambda column: column.names, self.columns)])
        names = named if 0 < named < len(row) else 1
        heading = "  ".join(filter(None, row[:names])) if named else f"{labels[0]} {row[0]}"
        words = [word for cell in row[names:] for word in _words(cell)]
        beside = 2 * GAP + _longest(labels[names:]) + _longest(words) <= width
        block = RichTable.grid(padding=(0, GAP))
        for label, cell in zip(labels[names:], row[names:], strict=True):
            text = Text(cell, overflow="fold")
            block.add_row(Text(label), text) if beside else block.add_row(Group(Text(label), text))
        return Group(Text(heading, "bold"), Padding(block, (0, 0, 0, GAP), expand=False))


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _words(cell: str) -> list[str]:
    """The words of a cell as rich wraps them: the first of a line has its indentation with it.

    >>> _words(" of these\\n2 lines")
    [' of', 'these', '2', 'lines']
    """
    return re.findall(r"^[^\S\n]+\S+|\S+", cell, re.MULTILINE)


def _line(header: str) -> str:
    return " ".join(header.split())
