"""Where a text has tables, and their cells: CSV, Markdown, frames of a console, aligned columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from treeopt.arms.columns import bare, has_figure, numbers_of, words_of
from treeopt.arms.lexicon import MISSING
from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import limit_rows

MOST_COLUMNS = 200
MOST_CELL = 2000  # characters
MOST_LINES = 2**13
MOST_CELLS = 2**16  # of a table
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200b-\u200f\u202a-\u202e\u2060-\u2069]")
MARKS = ("|", "\t", ";", ",", "  ", " ")  # between cells
RULE = re.compile(r"[\s|:+=_.~-]{3,}$")
BOX = str.maketrans("│┃║┆─━═┄┌┏╔└┗╚├┣╠┤┫╣┬┳╦┴┻╩┼╋╬╇╈┡┩╒╕╘╛╞╡╪╤╧┐┓╗┘┛╝", "||||" + "-" * 44, "\ufeff") | str.maketrans(
    "，：；（）＝／", ",:;()=/"
)
Cells = Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table: its header, its rows with their line, and the mark between its cells."""

    header: Cells
    rows: Sequence[tuple[int, Cells]]
    mark: str
    line: int

    @cached_property
    def has_comma(self) -> bool:
        """Whether a comma is always that of a decimal."""
        return self.mark == ";" or any(re.search(r"\d\.\d{3},\d", cell) for _, cells in self.rows for cell in cells)

    def column(self, i: int) -> list[str]:
        """The cells that hold something."""
        return [cells[i] for _, cells in self.rows if not MISSING.fullmatch(cells[i])]

    def with_one_header(self) -> Grid:
        """The header joined with a first row that names figures or settings: "c=8" over "tok/s"."""
        (_, first), *others = self.rows
        said = [words_of(cell) for cell in first[1:]]
        if (
            not others
            or len(set(self.header)) == len(self.header)
            or not all(words.measures or words.axes for words in said)
        ):
            return self
        names: list[str] = []
        for name in self.header:
            names.append(name or (names[-1] if names else ""))
        return Grid([" ".join(pair).strip() for pair in zip(names, first, strict=True)], others, self.mark, self.line)

    def transposed(self, is_left_out: Sequence[bool]) -> Grid:
        """Columns but those that are left out, and the first, become rows; they keep the line of the header."""
        names = [self.header[0], *(cells[0] for _, cells in self.rows)]
        columns = [i for i, is_out in enumerate(is_left_out, 1) if not is_out]
        rows = [(self.line, [self.header[i], *(cells[i] for _, cells in self.rows)]) for i in columns]
        return Grid(names, rows, self.mark, self.line)


def lines_of(text: str, path: Path) -> list[str]:
    """The lines of a text, frames and HTML as Markdown, without colours. Raises InvalidInput for other control characters."""
    if "<table" in text.lower():
        text = re.sub(r">\s+<", "><", text)
        text = re.sub(r"(?i)<tr[^<>]*>|</t[dh]>", "|", re.sub(r"(?i)</(?:tr|table)>", r"\n\g<0>", text))
    lines = re.sub(r"\x1b\[[0-9;]*m|^(?: ?> ?)+|^ *(?:```|~~~).*", "", text.translate(BOX), flags=re.MULTILINE).split(
        "\n"
    )
    for number, line in enumerate(limit_rows(lines, path, MOST_LINES), 1):
        if not (line.isprintable() or HIDDEN.search(line) is None):
            raise InvalidInput(f"{path} line {number} has a control character: {quoted(line)}.")
    return lines


def grid_at(lines: Sequence[str], start: int, path: Path, is_known: Callable[[str], bool]) -> Grid | None:
    """The table whose header is a line; None where none is.

    is_known : whether a cell of the header names something; a line of prose has none or few
    """
    second = next((i for i in range(start + 1, min(start + 3, len(lines))) if not RULE.match(lines[i])), None)
    if second is None or not lines[second].strip() or lines[second] == lines[start]:
        return None
    for mark in MARKS:
        header = _split(lines[start], mark, start, path)
        size = len(header)
        if size < 2 or (mark in "  " and header[0].endswith(":")):
            continue
        following = len(_split(lines[second], mark, second, path))
        lacks_cells = mark == "  " and 1 < following < size  # aligned columns, of which some are empty
        if mark != "|" and following != size and not lacks_cells:
            continue
        needed = size if lacks_cells else {"|": second == start + 1, "\t": 1, " ": size}.get(mark, 2)
        words = [words_of(cell) for cell in header[:MOST_COLUMNS]]
        is_line = (mark != "|" or second == start + 1) and any(map(has_figure, words))
        numbered = [bool(numbers_of(word.rest.replace(":", " "))) for word in words]
        is_line |= (mark == " " and any(numbered)) or (mark == "," and all(numbered))
        if sum(map(is_known, header[:MOST_COLUMNS])) >= needed and not is_line:
            rows = _rows(lines, second, header, mark, path)
            bared = [(number, [bare(cell) for cell in cells]) for number, cells in rows]
            return Grid([bare(name) for name in header], bared, mark, start + 1).with_one_header() if rows else None
    return None


def _rows(lines: Sequence[str], start: int, header: list[str], mark: str, path: Path) -> list[tuple[int, list[str]]]:
    """The rows of a table with their lines, until an empty line."""
    size = len(header)
    rows = []
    for i in range(start, len(lines)):
        if lines[i].strip() and RULE.match(lines[i]):
            continue
        if not lines[i].strip() or (mark == "|" and "|" not in lines[i]):
            break
        cells = _split(lines[i], mark, i, path)
        if (
            mark == "|"
            and i + 1 == len(lines)
            and lines[start - 1].rstrip().endswith("|") > lines[i].rstrip().endswith("|")
        ):
            raise InvalidInput(f"{path} line {i + 1} must end in | as the other lines do; was it cut off?")
        if mark == "|":
            cells += [""] * (size - len(cells))
        if not any(cells[size:]):
            cells = cells[:size]
        if len(cells) < size and mark == "  ":
            cells = _placed(lines[start - 1], lines[i], header)
        if len(cells) != size and mark in "  ":
            break
        if len(cells) != size:
            raise InvalidInput(
                f"{path} line {i + 1} must have {size} cells, as its header has, but it has {len(cells)}."
            )
        if cells != header:
            rows.append((i + 1, cells))
    for number, row in [(start, header), *rows]:
        if size > MOST_COLUMNS or any(len(cell) > MOST_CELL for cell in row):
            raise InvalidInput(
                f"{path} line {number} may have {MOST_COLUMNS} columns of {MOST_CELL:,} characters, but has more."
            )
    if size * len(rows) > MOST_CELLS:
        raise InvalidInput(f"{path} line {start} begins a table that may have {MOST_CELLS:,} cells, but has more.")
    return rows


def _placed(head: str, line: str, header: list[str]) -> list[str]:
    """The cells of a line of aligned columns, some of which are empty: each below the name that is nearest. Else no cells."""
    ends = [match.span() for match in re.finditer(r"\S+(?: \S+)*", head)]
    cells = [""] * len(header)
    for match in re.finditer(r"\S+(?: \S+)*", line):
        gaps = [max(start - match.end(), match.start() - end) for start, end in ends]
        place = gaps.index(min(gaps))
        if cells[place]:
            return []
        cells[place] = match[0]
    return cells


def _split(line: str, mark: str, number: int, path: Path) -> list[str]:
    """The cells of a line."""
    if mark == "|":
        line = line.strip().replace("\\|", "¦")
        return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] if "|" in line else []
    if mark in "  ":
        return re.split(r"\s{2,}" if mark == "  " else r"\s+", line.strip())
    if mark not in line:
        return []
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=mark, strict=True))]
    except csv.Error as error:
        raise InvalidInput(f"{path} line {number + 1} is no row of a table: {error}.") from None
