"""Arms from tables of any shape, as people paste them.

Every figure has axes: the union of what its row, its column, and the headings above say ("MTP", "K=2", "c=8"). Hence one
reader for long tables (a row for each arm), wide ones (a column for each K or concurrency), transposed ones, bullets and lines
of names and values. Figures of the same axes are an arm (`treeopt.arms.figures`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from treeopt.arms.grids import RULE, Cells, Grid, grid_at, lines_of
from treeopt.errors import InvalidInput, meant, quoted

PLACES = ("model", "dataset", "drafter", "k", "concurrency")
MOST_COUNT = 2**16
ASIDE = ("prompts", "repeats", "seconds")  # figures that make no arm alone
BARE = re.compile(r"[\s:.=~>-]*[\d.,]+[\s.]*")  # a figure without a word
MOST_WORDS = 14  # of a heading


@dataclass(frozen=True)
class Column:
    """What a column says: figures of ``measures``, at ``axes``; or an axis of its rows."""

    name: str
    measures: tuple[str, ...] = ()
    axes: Mapping[str, str] = field(default_factory=dict)
    axis: str = ""
    rest: str = ""


def read_tables(text: str, path: Path, columns: Mapping[str, str]) -> Arms:
    """The arms of all tables, bullets and lines of figures in a text; several of one setting are its repeats.

    columns : what columns mean, by name, where the text does not say it: {"accept len": "accepted_per_step"}

    Raises InvalidInput where nothing says a throughput or a time per token, and for a cell that cannot be read.
    """
    reader = _Reader(path, {bare(name).casefold(): meaning for name, meaning in columns.items()})
    reader.read(lines_of(text, path))
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
        return bool(
            words.measures or is_named or words.axes or DATASET.search(cell) or bare(cell).casefold() in self.columns
        )

    def told(self, name: str, words: Words) -> str | None:
        """What the user says that a column means, by its name, or its name without axes."""
        self.names[bare(name)] = None
        keys = [key for key in (bare(name).casefold(), words.said.casefold()) if key in self.columns]
        self.heeded.update(keys)
        return self.columns[keys[0]] if keys else None

    def table(self, grid: Grid) -> None:
        """Add the rows of a table, if it has figures."""
        grid = grid.with_one_header()
        labels = [words_of(cells[0]) for _, cells in grid.rows]
        heads = [words_of(name) for name in grid.header[1:]]
        measured = [bool(words.measures or {*words.names} - {"label", "dataset", "model"}) for words in labels]
        if all(measured) and any(words.measures for words in labels) and not any(words.measures for words in heads):
            grid = grid.transposed()
        self.tables += 1
        columns = self.columns_of(grid)
        if any(column.measures for column in columns):
            context = self.context
            for number, cells in grid.rows:
                self.add(context, columns, number, cells, grid.comma)

    def columns_of(self, grid: Grid) -> list[Column]:
        """What each column says. A figure whose header names none has that of the corner, or of the heading."""
        names = [bare(name) for name in grid.header]
        if twice := next((name for name in names if name and names.count(name) > 1), None):
            raise InvalidInput(
                f"{self.path} line {grid.line} must name every column once, but has {quoted(twice)} twice."
            )
        words = [words_of(name) for name in names]
        numeric = [all(re.match(r"\W{0,3}\d", cell) for cell in grid.column(i)) for i in range(len(words))]
        measure = self.context.get("measure", "tokens_per_s")
        corner = words[0]
        if corner.measures and not corner.axes and not numeric[0]:
            measure, words[0] = corner.measures[0], Words(names=("label",))
        explicit = any(word.measures for word in words)
        named = {name for word in words for name in (*word.names, *word.axes)} | set(self.context)
        is_by_arm = bool(named & {"k", "label", "drafter"})
        across = (
            corner.names[1]
            if len(corner.names) == 2
            else "concurrency"
            if is_by_arm and "concurrency" not in named
            else "k"
        )
        columns: list[Column] = []
        for name, word, is_numeric in zip(names, words, numeric, strict=True):
            axis = word.names[0] if word.names else ""
            if meaning := self.told(name, word):
                column = _as_told(meaning, name, word)
            elif word.measures:
                column = Column(name, word.measures, word.axes, rest=word.rest)
            elif explicit and name == "AR":
                column = Column(name, ("acceptance",))
            elif axis == "dataset" and is_numeric and name.casefold() == "prompts":
                column = Column(name, ("prompts",))
            elif axis == "label" and is_numeric:
                column = Column(name, axis="ignore" if explicit else across)
            elif axis:
                is_second = axis in ("k", "block") and any(other.axis in ("k", "block") for other in columns)
                column = Column(
                    name, axis=f"?{name}" if is_second or axis == "option" else name if axis == "setting" else axis
                )
            elif "position" in word.axes:
                column = Column(name, ("positions",))
            elif word.axes:
                column = Column(name, (measure,), word.axes, rest=word.rest)
            elif name.isdecimal():
                column = Column(name, (measure,), {across: name})
            elif SUMMARY.fullmatch(name):
                self.notes.append(f"Column {quoted(name)} sums up others: left out.")
                column = Column(name, axis="ignore")
            elif explicit or not is_numeric:
                column = Column(name, axis=f"?{name}" if columns or is_numeric else "label")
            else:
                column = Column(name, (measure,), {"dataset" if is_by_arm or DATASET.search(name) else "drafter": name})
            columns.append(column)
        return self.distinct(columns)

    def distinct(self, columns: Sequence[Column]) -> list[Column]:
        """Columns of the same figures at the same axes differ in their other words; without those the first is taken."""
        groups: dict[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], list[Column]] = {}
        for column in columns:
            groups.setdefault((column.measures, tuple(sorted(column.axes.items()))), []).append(column)
        changed = {}
        for (measures, _), group in groups.items():
            if not measures or measures[0] in ("ignore", "positions") or len(group) == 1:
                continue
            for column in group:
                if len({other.rest for other in group}) == len(group):
                    changed[column.name] = replace(
                        column, axes={**column.axes, "?column": drafter_name(column.rest) or column.name}
                    )
                elif column is not group[0]:
                    self.notes.append(
                        f"Column {quoted(column.name)} was left out: {quoted(group[0].name)} says the same."
                    )
                    changed[column.name] = Column(column.name, axis="ignore")
        return [changed.get(column.name, column) for column in columns]

    def add(self, context: dict[str, str], columns: Sequence[Column], line: int, cells: Cells, comma: bool) -> None:
        """Add the rows of figures of one line: one for each set of axes that its columns have."""
        axes, note = self.row_axes(columns, line, cells)
        if axes is None:
            return
        rows: dict[tuple[tuple[str, str], ...], Row] = {}
        shared = []
        broken = []
        is_wide = any(column.axes for column in columns if column.measures and "position" not in column.axes)
        for column, cell in zip(columns, cells, strict=True):
            if not column.measures or column.measures == ("ignore",):
                continue
            cell = bare(cell)
            numbers = self.numbers(column, cell, line, comma)
            if is_wide and not column.axes:
                shared.append((column, numbers))
                continue
            key = tuple(sorted(column.axes.items()))
            if CANNOT.match(cell):
                self.notes.append(
                    f"Line {line}, column {quoted(column.name)} says {quoted(cell)}: left out as not runnable."
                )
                broken.append(key)
            if key not in rows:
                where = f"{self.path} line {line}"
                rows[key] = Row(
                    _joined(_joined(context, axes), column.axes), context.get("note", "") + note, where, self.tables
                )
            rows[key].take(column.name, column.measures, numbers)
        for row in rows.values():
            for column, numbers in shared:
                row.take(column.name, column.measures, numbers)
        self.rows += [row for key, row in rows.items() if key not in broken]

    def row_axes(self, columns: Sequence[Column], line: int, cells: Cells) -> tuple[dict[str, str] | None, str]:
        """What the cells of a row say of its axes, and its free text. No axes: it sums up other rows."""
        axes: dict[str, str] = {}
        note = ""
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
                if not MISSING.fullmatch(cell):
                    axes["?label"] = label.rest
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
        if column.axis == "k" and not numbers_of(cell) and re.fullmatch(r"[a-z][\w .+-]*", cell, re.IGNORECASE):
            return {"?label": cell, **({"drafter": drafter} if (drafter := drafter_name(cell)) else {})}
        number = self.numbers(column, cell, line)[0].value
        least = int(column.axis == "concurrency")
        if not least <= number <= MOST_COUNT or number % 1:
            raise self.error(line, column.name, f"a whole number from {least} to {MOST_COUNT:,}", cell)
        if column.axis == "block":
            return {"k": str(max(0, int(number) - 1))}
        return {column.axis: str(int(number))}

    def numbers(self, column: Column, cell: str, line: int, comma: bool = False) -> tuple[Number, ...]:
        """The figures of a cell: one, or those that its column has. Raises InvalidInput for another cell that is not empty."""
        if MISSING.fullmatch(cell):
            return ()
        if column.measures == ("positions",):
            cell = re.sub(r"[\[\]();/|]+" if comma else r"[\[\]();/|,]+", " ; ", cell)
        numbers = numbers_of(cell, comma)
        if len(column.measures) <= 1 and column.measures != ("positions",):
            outside = numbers_of(re.sub(r"\([^()]*\)| of [\d.]+", "", cell), comma)
            speeds = [number for number in numbers if number.unit.startswith("t")]
            plain = [number for number in outside if number.unit not in ("%", "x")]
            numbers = tuple(speeds[:1] or plain or outside[:1])
        if not numbers or (len(numbers) > 1 and len(column.measures) <= 1 and column.measures != ("positions",)):
            raise self.error(line, column.name, "a number", cell)
        return numbers

    def line(self, number: int, text: str) -> None:
        """Take the figures of a bullet or of a line of names and values; any other short line is a heading."""
        if len(text) > 400:
            return
        level = len(text) - len(text.lstrip("#")) if text.startswith("#") else 7
        content = bare(re.sub(r"^\s*(?:[-*+•#]+|\d+[.)])\s+", "", text))
        content = re.sub(
            r"(?<=\d)[,;] (?=\.?\d+(?:\.\d+)?%?(?:[,;\s)]|$))", " ", content
        )  # lists of rates stay one phrase
        parts = re.split(r"[,;|](?!\d)|[()→]|\s[–—-]\s|\band\b|\bvs\.?\s", content)
        phrases = [words_of(part) for part in parts if part and part.strip()]
        measures = {phrase.measures[0] for phrase in phrases if phrase.measures} or {self.context.get("measure", "")}
        axes: dict[str, str] = {}
        if len(measures) == 1 and measures != {""} and any(phrase.axes for phrase in phrases):
            phrases = [
                replace(phrase, measures=tuple(measures)) if BARE.fullmatch(phrase.rest) else phrase
                for phrase in phrases
            ]
        if not any(has_figure(phrase) and phrase.measures[0] not in ASIDE for phrase in phrases):
            if level < 7 or len(content.split()) <= MOST_WORDS:
                self.heading(level, content)
            return
        self.open &= not re.match(r"\s*(?:[-*+•]|\d+[.)])\s", text)
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
        row.take(
            words.said or words.measures[0],
            (meaning,) if meaning else words.measures[:1],
            numbers_of(words.rest.replace(":", " ")),
        )

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
        if words.rest and not re.fullmatch(r"(?i)run|repeat|trial|pass", words.rest):
            axes["?heading"] = text
        self.levels[level] = _joined(self.levels.get(level, {}), axes)


def _as_told(meaning: str, name: str, words: Words) -> Column:
    """A column whose meaning the user said."""
    if meaning in CANONICAL or meaning == "prompts":
        return Column(name, (meaning,), words.axes, rest=words.rest)
    return Column(name, axis=meaning)


def _joined(axes: Mapping[str, str], closer: Mapping[str, str]) -> dict[str, str]:
    """Axes with those that are said closer to the figure: another drafter has another K, off has no drafter."""
    axes = dict(axes)
    if "drafter" in closer and (axes.get("drafter", closer["drafter"]) != closer["drafter"] or axes.get("k") == "0"):
        axes.pop("k", None)
    if closer.get("k") == "0" or ("k" in closer and axes.get("k") == "0"):
        axes.pop("drafter", None)
    return {**axes, **closer}
