"""Arms from tables of any shape, as people paste them.

Every figure has axes: the union of what its row, its column, and the headings above say ("MTP", "K=2", "c=8"). Hence one
reader for long tables (a row for each arm), wide ones (a column for each K or concurrency), transposed ones, bullets and lines
of names and values. Figures of the same axes are an arm (`treeopt.arms.figures`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treeopt.arms.arm import Arms
from treeopt.arms.columns import (
    CANNOT,
    CANONICAL,
    DATASET,
    MISSING,
    MODEL,
    PLAIN,
    SUMMARY,
    Number,
    Words,
    bare,
    drafter_name,
    has_figure,
    numbers_of,
    words_of,
)
from treeopt.arms.figures import Row, arms_of
from treeopt.arms.grids import BOX, RULE, Cells, Grid, grid_at
from treeopt.errors import InvalidInput, meant, quoted
from treeopt.files.bounds import limit_rows

PLACES = ("model", "dataset", "drafter", "k", "concurrency")
POSITIVE = ("tokens_per_s", "tokens_per_s_per_request", "speedup", "tpot_ms", "tpot_p99_ms", "repeats", "prompts")
MOST_WORDS = 14  # of a heading


@dataclass(frozen=True)
class Column:
    """What a column says: figures of ``measures``, at ``axes``; or an axis of its rows."""

    name: str
    measures: tuple[str, ...] = ()
    axes: Mapping[str, str] = field(default_factory=dict)
    axis: str = ""


def read_tables(text: str, path: Path, columns: Mapping[str, str]) -> Arms:
    """The arms of all tables, bullets and lines of figures in a text; several of one setting are its repeats.

    columns : what columns mean, by name, where the text does not say it: {"accept len": "accepted_per_step"}

    Raises InvalidInput where nothing says a throughput or a time per token, and for a cell that cannot be read.
    """
    reader = _Reader(path, {bare(name).casefold(): meaning for name, meaning in columns.items()})
    reader.read(list(limit_rows(text.translate(BOX).split("\n"), path)))
    for name in columns:
        if bare(name).casefold() not in reader.heeded:
            known = ", ".join(quoted(other) for other in reader.names)
            raise InvalidInput(f"{path} has no column {quoted(name)}, only {known}.{meant(name, reader.names)}")
    return arms_of(reader.rows, reader.notes, path)


class _Reader:
    """Goes through a text once.

    levels : axes that the headings above set, by the level of the heading
    open   : whether the figures of the next line may belong to the last row
    """

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self.path, self.columns = path, columns
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.names: dict[str, None] = {}
        self.heeded: set[str] = set()
        self.levels: dict[int, dict[str, str]] = {}
        self.tables = 0
        self.open = False

    def read(self, lines: list[str]) -> None:
        i = 0
        while i < len(lines):
            if not lines[i].strip() or RULE.match(lines[i]):
                i, self.open = i + 1, self.open and bool(lines[i].strip())
            elif (grid := grid_at(lines, i, self.path, self.is_known)) and grid.rows:
                self.open = False
                self.table(grid)
                i = grid.rows[-1][0]
            else:
                self.line(i + 1, lines[i])
                i += 1

    @property
    def context(self) -> dict[str, str]:
        axes: dict[str, str] = {}
        for level in sorted(self.levels):
            axes = _joined(axes, self.levels[level])
        return axes

    def error(self, line: int, column: str, rule: str, cell: str) -> InvalidInput:
        return InvalidInput(
            f"{self.path} line {line}, column {quoted(column)}: a cell must be {rule}, but it is {quoted(cell)}. If the "
            f'column is something else: --column "{bare(column)[:60]}=ignore", or what it is.'
        )

    def is_known(self, cell: str) -> bool:
        words = words_of(cell)
        is_named = any(name != "label" for name in words.names)
        return bool(words.measures or is_named or words.axes or DATASET.search(cell) or self.told(cell, words))

    def told(self, name: str, words: Words) -> str | None:
        """What the user says that a column means, by its name, or its name without axes."""
        self.names[bare(name)] = None
        keys = [key for key in (bare(name).casefold(), words.said.casefold()) if key in self.columns]
        self.heeded.update(keys)
        return self.columns[keys[0]] if keys else None

    def table(self, grid: Grid) -> None:
        """Add the rows of a table, if it has figures."""
        labels = [words_of(cells[0]) for _, cells in grid.rows]
        heads = [words_of(name) for name in grid.header[1:]]
        measured = [bool(words.measures or {*words.names} - {"label", "dataset", "model"}) for words in labels]
        if all(measured) and any(words.measures for words in labels) and not any(words.measures for words in heads):
            grid = grid.transposed()
        self.tables += 1
        columns = self.columns_of(grid)
        if not any(column.measures for column in columns):
            return
        for number, cells in grid.rows:
            self.add(grid, columns, number, cells)

    def columns_of(self, grid: Grid) -> list[Column]:
        """What each column says. A figure whose header names none has that of the corner, or of the heading."""
        words = [words_of(name) for name in grid.header]
        corner = words[0]
        across = corner.names[1] if len(corner.names) == 2 else ""
        named = {name for word in words for name in (*word.names, *word.axes)} | set(self.context)
        across = across or ("concurrency" if named & {"k", "label", "drafter"} and "concurrency" not in named else "k")
        measure = self.context.get("measure", "tokens_per_s")
        numeric = [all(re.match(r"\W{0,3}\d", cell) for cell in grid.column(i)) for i in range(len(words))]
        if corner.measures and not corner.axes and not numeric[0]:
            measure, words[0] = corner.measures[0], Words(names=("label",))
        explicit = any(word.measures for word in words)
        columns = []
        for i, (name, word) in enumerate(zip(grid.header, words, strict=True)):
            if meaning := self.told(name, word):
                word = _as_told(meaning, word)
            if word.measures:
                columns.append(Column(bare(name), word.measures, word.axes))
            elif word.names:
                axis = word.names[0]
                if axis == "dataset" and bare(name).casefold() == "prompts" and numeric[i]:
                    columns.append(Column(bare(name), ("prompts",)))
                elif axis == "label" and numeric[i]:
                    columns.append(Column(bare(name), axis="ignore" if explicit else across))
                else:
                    columns.append(Column(bare(name), axis=bare(name) if axis == "setting" else axis))
            elif "position" in word.axes:
                columns.append(Column(bare(name), ("positions",)))
            elif word.axes:
                columns.append(Column(bare(name), (measure,), word.axes))
            elif re.fullmatch(r"\d+", bare(name), re.ASCII):
                columns.append(Column(bare(name), (measure,), {across: bare(name)}))
            elif not numeric[i]:
                columns.append(Column(bare(name), axis="label" if not i else f"?{bare(name)}"))
            elif SUMMARY.fullmatch(bare(name)):
                self.notes.append(f"Column {quoted(name)} sums up others: left out.")
                columns.append(Column(bare(name), axis="ignore"))
            elif explicit:
                columns.append(Column(bare(name), axis=f"?{bare(name)}"))
            else:
                axis = "dataset" if named & {"k", "label", "drafter"} or DATASET.search(name) else "drafter"
                columns.append(Column(bare(name), (measure,), {axis: bare(name)}))
        return columns

    def add(self, grid: Grid, columns: Sequence[Column], line: int, cells: Cells) -> None:
        """Add the rows of figures of one line: one for each set of axes that its columns have."""
        axes, note = self.row_axes(columns, line, cells)
        if axes is None:
            return
        rows: dict[tuple[tuple[str, str], ...], Row] = {}
        shared = []
        is_wide = any(column.axes for column in columns if column.measures and "position" not in column.axes)
        for column, cell in zip(columns, cells, strict=True):
            if not column.measures or column.measures == ("ignore",):
                continue
            cell = bare(cell)
            numbers = self.numbers(column, cell, line, grid.comma)
            if is_wide and not column.axes:
                shared.append((column, numbers))
                continue
            key = tuple(sorted(column.axes.items()))
            if CANNOT.match(cell):
                self.notes.append(
                    f"Line {line}, column {quoted(column.name)} says {quoted(cell)}: left out as not runnable."
                )
                continue
            if key not in rows:
                where = f"{self.path} line {line}"
                rows[key] = Row(_joined(_joined(self.context, axes), column.axes), note, where, self.tables)
            rows[key].take(column.name, column.measures, numbers)
        for row in rows.values():
            for column, numbers in shared:
                row.take(column.name, column.measures, numbers)
        self.rows += rows.values()

    def row_axes(self, columns: Sequence[Column], line: int, cells: Cells) -> tuple[dict[str, str] | None, str]:
        """What the cells of a row say of its axes, and its free text. No axes: it sums up other rows."""
        axes: dict[str, str] = {}
        note = self.context.get("note", "")
        for column, cell in zip(columns, cells, strict=True):
            cell = bare(cell)
            if not column.axis or column.axis == "ignore":
                continue
            if column.axis == "note":
                note += "; " + cell
            elif SUMMARY.fullmatch(cell) and column.axis not in ("k", "concurrency"):
                self.notes.append(f"Line {line} ({quoted(cell)}) sums up others: left out.")
                return None, note
            elif column.axis in ("label", "drafter"):
                label = words_of(cell)
                drafter = drafter_name(label.rest)
                if column.axis == "drafter" and "k" in {other.axis for other in columns}:
                    label, drafter = Words(axes={"k": "0"} if PLAIN.fullmatch(cell) else {}), cell
                named = {"drafter": drafter} if drafter and label.axes.get("k") != "0" else {}
                axes = {**label.axes, **named, **axes}
            elif column.axis in ("k", "block", "concurrency"):
                axes |= self.count(column, cell, line)
            elif not MISSING.fullmatch(cell):
                axes[column.axis] = cell
        return axes, note

    def count(self, column: Column, cell: str, line: int) -> dict[str, str]:
        """What a cell of K, blocks or concurrency says."""
        words = words_of(cell)
        if column.axis != "concurrency" and "k" in words.axes:
            return dict(words.axes)
        if "concurrency" in words.axes and column.axis == "concurrency":
            return {"concurrency": words.axes["concurrency"]}
        if MISSING.fullmatch(cell):
            return {}
        numbers = numbers_of(cell)
        if not numbers or numbers[0].value != int(numbers[0].value) or not 0 <= numbers[0].value < 2**31:
            raise self.error(line, column.name, "a whole number", cell)
        if column.axis == "block":
            return {"k": str(max(0, int(numbers[0].value) - 1))}
        return {column.axis: str(int(numbers[0].value))}

    def numbers(self, column: Column, cell: str, line: int, comma: bool) -> tuple[Number, ...]:
        """The figures of a cell. Raises InvalidInput where it has none and does not say so."""
        if MISSING.fullmatch(cell):
            return ()
        if column.measures == ("positions",):
            cell = re.sub(r"[\[\]();/,|]+(?= ?[\d.])", " ", cell) if not comma else cell
        numbers = numbers_of(cell, comma)
        if not numbers or any(not number.value < 1e300 for number in numbers):
            raise self.error(line, column.name, "a number", cell)
        first = numbers[0].value
        if column.measures != ("gain",) and (first < 0 or (first == 0 and column.measures[0] in POSITIVE)):
            raise self.error(line, column.name, "a number above 0", cell)
        return numbers

    def line(self, number: int, text: str) -> None:
        """Take the figures of a bullet or of a line of names and values; any other short line is a heading."""
        if len(text) > 400:
            return
        level = len(text) - len(text.lstrip("#")) if text.startswith("#") else 7
        content = bare(re.sub(r"^\s*(?:[-*+•#]+|\d+[.)])\s+", "", text))
        parts = re.split(r"[,;|](?!\d)|[()→]|\s[–—-]\s|\band\b|\bvs\.?\s", content)
        phrases = [words_of(part) for part in parts if part and part.strip()]
        if not any(map(has_figure, phrases)):
            if level < 7 or len(content.split()) <= MOST_WORDS:
                self.heading(level, content)
            return
        self.open &= not re.match(r"\s*(?:[-*+•]|\d+[.)])\s", text)
        axes: dict[str, str] = {}
        for words in phrases:
            drafter = drafter_name(re.sub(r"[:=].*|(?<!\w)[~\d.]+\S*", "", words.rest))
            closer = dict(words.axes)
            if drafter and ("drafter" in closer or (not (closer or has_figure(words)) and len(drafter.split()) <= 4)):
                closer["drafter"] = drafter
            axes = _joined(axes, closer)
            if has_figure(words):
                self.figure(words, _joined(self.context, axes), number, content)

    def figure(self, words: Words, axes: dict[str, str], number: int, text: str) -> None:
        """Add a figure to the last row, or to a new one where that has it already or is of another setting."""
        row = self.rows[-1] if self.open else None
        if not row or row.has(words.measures[:1]) or any(row.axes.get(name, axes[name]) != axes[name] for name in axes):
            row = Row({}, f"{self.context.get('note', '')} {text}", f"{self.path} line {number}", 0)
            self.rows.append(row)
            self.open = True
        row.axes = _joined(row.axes, axes)
        meaning = self.told(words.said, words)
        row.take(words.said, (meaning,) if meaning else words.measures[:1], numbers_of(words.rest.replace(":", " ")))

    def heading(self, level: int, text: str) -> None:
        """Axes that hold for the lines below."""
        self.open = False
        self.levels = {key: axes for key, axes in self.levels.items() if key < level or key == level == 7}
        words = words_of(text)
        axes = dict(words.axes)
        name, _, value = text.partition(":")
        if value.strip() and (axis := next(iter(words_of(name).names), "")) in PLACES:
            axes[axis] = value.strip()
        else:
            for axis, pattern in (("model", MODEL), ("dataset", DATASET)):
                if match := pattern.search(words.rest):
                    axes[axis] = match[0].strip(" .-/")
        if len(words.measures) == 1:
            axes["measure"] = words.measures[0]
        if words.rest or words.measures:
            axes["note"] = text
        self.levels[level] = _joined(self.levels.get(level, {}), axes)


def _as_told(meaning: str, words: Words) -> Words:
    """The words of a column whose meaning the user said."""
    if meaning in CANONICAL or meaning == "prompts":
        return Words(measures=(meaning,), axes=words.axes)
    return Words(names=(meaning if meaning in PLACES or meaning == "note" else "setting",))


def _joined(axes: Mapping[str, str], closer: Mapping[str, str]) -> dict[str, str]:
    """Axes with those that are said closer to the figure: another drafter has another K, off has no drafter."""
    axes = dict(axes)
    if "drafter" in closer and closer["drafter"] != axes.get("drafter"):
        axes.pop("k", None)
    if closer.get("k") == "0" or ("k" in closer and axes.get("k") == "0"):
        axes.pop("drafter", None)
    return {**axes, **closer}
