"""Arms from tables of any shape, as people paste them.

Every figure has axes: the union of what its row, its column, and the headings above say ("MTP", "K=2", "c=8"). Hence one
reader for long tables (a row for each arm), wide ones (a column for each K or concurrency), transposed ones, bullets and lines
of names and values. Figures of the same axes are an arm (`treeopt.arms.figures`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from treeopt.arms import lexicon
from treeopt.arms.arm import Arms
from treeopt.arms.columns import (
    Number,
    Words,
    axes_of,
    bare,
    drafter_name,
    figures_of,
    has_figure,
    numbers_of,
    tree_axes,
    words_of,
)
from treeopt.arms.figures import Row, arms_of
from treeopt.arms.grids import RULE, Grid, grid_at, lines_of
from treeopt.arms.headers import columns_of
from treeopt.errors import InvalidInput, meant, quoted

Figure = tuple[Words, tuple[Number, ...] | None]  # of a column; None where its cell says that it cannot run
GROUPS = ("model", "dataset", "concurrency")  # axes whose cells may stand once for several rows
PLACES = ("model", "dataset", "drafter")  # axes that are words
ASIDE = ("prompts", "repeats", "seconds")  # figures that make no arm alone
BARE = re.compile(r"[\s:.=~>-]*[\d.,]+[\s.]*")  # a figure without a word
COUNTS = re.compile(r"(?<![.\d])\d{2,}(?![.\d]| ?%)")  # of tokens, not a share or a length
MTP_BENCH = re.compile(r"(\w+) +pred= *\d+ +draft= *\d+ +acc= *\d+ +rate=")  # a line of llama.cpp's mtp-bench
MOST_WORDS = 14  # of a heading


def read_tables(text: str, path: Path, columns: Mapping[str, str]) -> Arms:
    """The arms of all tables, bullets and lines of figures in a text; several of one setting are its repeats.

    columns : what columns mean, by name, where the text does not say it: {"accept len": "accepted_per_step"}

    Raises InvalidInput where nothing says a throughput or a time per token, and for a cell that cannot be read.
    """
    reader = _Reader(path, {bare(name).casefold(): meaning for name, meaning in columns.items()})
    reader.read(lines_of(text, path))
    settings = Counter(row.where for row in reader.rows)
    rows = []
    for row in reader.rows:
        if row.table or not reader.tables or (settings[row.where] == 1 and {"k", "drafter"} & row.axes.keys()):
            rows.append(row)
        else:
            reader.notes.append(f"{row.where} was left out: beside a table a sentence must name one setting.")
    for name in columns:
        if bare(name).casefold() not in reader.heeded:
            known = ", ".join(quoted(other) for other in reader.names)
            raise InvalidInput(f"{path} has no column {quoted(name)}, only {known}.{meant(name, reader.names)}")
    return arms_of(rows, reader.notes, path)


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
            elif grid := grid_at(lines, i, self.path, self.is_known):
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

    def is_known(self, cell: str) -> bool:
        words = words_of(cell)
        is_named = any(name != "label" for name in words.names)
        return bool(
            words.measures or is_named or words.axes or lexicon.DATASET.search(cell) or cell.casefold() in self.columns
        )

    def told(self, words: Words) -> str | None:
        """What the user says that a column means, by its name, or its name without axes."""
        self.names[words.text] = None
        keys = [key for key in (words.text.casefold(), words.said.casefold()) if key in self.columns]
        self.heeded.update(keys)
        return self.columns[keys[0]] if keys else None

    def table(self, grid: Grid) -> None:
        """Add the rows of a table, if it has figures."""
        labels = [words_of(cells[0]) for _, cells in grid.rows]
        heads = [words_of(name) for name in grid.header[1:]]
        measured = [bool(words.measures or {*words.names} - {"label", "dataset", "model"}) for words in labels]
        gains = [bool({*words.measures} & {*lexicon.DERIVED}) for words in heads]
        is_named = sum(measured) > len(measured) / 2 and any(words.measures for words in labels)
        if is_named and not any(words.measures and not gain for words, gain in zip(heads, gains, strict=True)):
            grid = grid.transposed(gains)
        named = [name for name in grid.header if name and not {*words_of(name).measures} & {*lexicon.DERIVED}]
        if twice := next((name for name in named if named.count(name) > 1), None):
            raise InvalidInput(
                f"{self.path} line {grid.line} must name every column once, but has {quoted(twice)} twice."
            )
        self.tables += 1
        columns = columns_of(grid, self.context, self.told, self.notes)
        if any(column.measures for column in columns):
            groups = [i for i, column in enumerate(columns) if column.axis in GROUPS and grid.mark == "|"]
            above = grid.rows[0][1]
            for number, cells in grid.rows:
                above = [above[i] if i in groups and not cell else cell for i, cell in enumerate(cells)]
                self.add(columns, number, above, grid.has_comma)

    def add(self, columns: Sequence[Words], line: int, cells: Sequence[str], comma: bool) -> None:
        """Add the rows of figures of one line: one for each set of axes that its columns have."""
        context = self.context
        axes: dict[str, str] = {}
        note = context.get("note", "")
        figures: list[Figure] = []
        for column, cell in zip(columns, cells, strict=True):
            try:
                if column.measures and column.measures != ("ignore",) and lexicon.CANNOT.match(cell):
                    self.notes.append(
                        f"Line {line}, column {quoted(column.text)} says {quoted(cell)}: left out as not runnable."
                    )
                    figures.append((column, None))
                elif column.measures and column.measures != ("ignore",):
                    figures.append((column, figures_of(column.measures, cell, comma)))
                elif column.axis == "note":
                    note += f"; {cell}"
                elif lexicon.SUMMARY.fullmatch(cell) and column.axis not in ("k", "concurrency", "ignore", "summary"):
                    self.notes.append(f"Line {line} ({quoted(cell)}) sums up others: left out.")
                    return
                elif column.axis[:1] in ("?", "l") and words_of(cell).measures == ("ignore",) and "tg" not in cell:
                    return  # of reading the prompt
                else:
                    axes |= axes_of(
                        column.axis, cell, column.text, "k" in {other.axis for other in columns} | axes.keys()
                    )
            except ValueError as error:
                raise InvalidInput(
                    f"{self.path} line {line}, column {quoted(column.text)}: a cell must be {error}, but it is {quoted(cell)}. "
                    f'If the column is something else: --column "{column.text[:60]}=ignore", or what it is.'
                ) from None
        tree = [axes.get("k", ""), axes.pop("topk", ""), axes.pop("rows", "")]
        if all(map(str.isdecimal, tree)):
            axes |= tree_axes(*map(int, tree))
        sets: dict[tuple[tuple[str, str], ...], list[Figure]] = {}
        for figure in figures:
            sets.setdefault(tuple(sorted(figure[0].axes.items())), []).append(figure)
        shared = sets.pop((), []) if len(sets) > 1 else []
        for set_axes, own in sets.items():
            row = Row(_joined(_joined(context, axes), dict(set_axes)), note, f"{self.path} line {line}", self.tables)
            for column, numbers in [*own, *shared]:
                row.take(_shared_name(column), column.measures, numbers or ())
            if all(numbers is not None for _, numbers in own):
                self.rows.append(row)

    def line(self, number: int, text: str) -> None:
        """Take the figures of a bullet or of a line of names and values; any other short line is a heading."""
        if len(text) > 400:
            return
        level = len(text) - len(text.lstrip("#")) if text.startswith("#") else 7 * any(0 < at < 7 for at in self.levels)
        content = bare(re.sub(r"^\s*(?:[-*+•#]+|\d+[.)])\s+", "", text))
        content = re.sub(
            r"(?<=\d)[,;] (?=\.?\d+(?:\.\d+)?%?(?:[,;\s)]|$))", " ", content
        )  # lists of rates stay one phrase
        content = MTP_BENCH.sub(r"dataset: \1, acceptance_rate=", content)
        parts = re.split(r"[,;|](?!\d)|\.\s|[()→]|\s[–—-]\s|\band\b|\bvs\.?\s|\s(?=[a-z_/]+=)", content)
        phrases = [_pair(part) or words_of(part) for part in parts if part and part.strip()]
        phrases = [
            phrase for phrase in phrases if not (phrase.measures == ("acceptance",) and COUNTS.search(phrase.rest))
        ]
        axes: dict[str, str] = {}
        measure = self.context.get("measure") or next((phrase.measures[0] for phrase in phrases if phrase.measures), "")
        if measure and any(phrase.axes for phrase in phrases):
            phrases = [
                replace(phrase, measures=(measure,)) if BARE.fullmatch(phrase.rest) and not phrase.measures else phrase
                for phrase in phrases
            ]
        if not any(has_figure(phrase) and phrase.measures[0] not in ASIDE for phrase in phrases):
            if 0 < level < 7 or len(content.split()) <= MOST_WORDS:
                self.heading(level, content, phrases)
            return
        self.open &= not re.match(r"\s*(?:[-*+•]|\d+[.)])\s", text)
        for words in phrases:
            drafter = drafter_name(re.sub(r"[:=].*|(?<![\w-])[~\d.]+\S*", "", words.rest.lstrip(" :=")))
            closer = dict(words.axes)
            if (
                words.rest
                and axes.get("k") != "0"
                and not re.search(r"= *\d", words.rest)
                and 0 < len(drafter.split()) <= 4
                and not lexicon.MISSING.fullmatch(drafter)
                and ("drafter" in closer or not (closer or has_figure(words)))
            ):
                closer["drafter"] = drafter
            elif not closer and lexicon.SPECULATES.search(words.rest):
                closer["drafter"] = lexicon.UNNAMED
            axes = _joined(axes, closer)
            if has_figure(words):
                self.figure(words, _joined(self.context, axes), number, content)

    def figure(self, words: Words, axes: dict[str, str], number: int, text: str) -> None:
        """Add a figure to the last row, or to a new one where that has it already or is of another setting."""
        row = self.rows[-1] if self.open else None
        if (
            not row
            or row.has(*words.measures[:1])
            or any(row.axes.get(name, axes[name]) != axes[name] for name in axes)
        ):
            row = Row({}, f"{self.context.get('note', '')} {text}", f"{self.path} line {number}", 0)
            self.rows.append(row)
            self.open = True
        row.axes = _joined(row.axes, axes)
        meaning = self.told(words)
        row.take(
            words.said or words.measures[0],
            (meaning,) if meaning else words.measures[:1],
            numbers_of(words.rest.replace(":", " ")),
        )

    def heading(self, level: int, text: str, phrases: Sequence[Words]) -> None:
        """Axes that hold for the lines below."""
        self.open = False
        self.levels = {key: axes for key, axes in self.levels.items() if key < level or key == level in (0, 7)}
        words = words_of(text)
        axes = dict(words.axes)
        for axis, pattern in (
            ("model", lexicon.MODEL),
            ("dataset", lexicon.DATASET),
            ("quantization", lexicon.QUANTIZATION),
        ):
            if (match := pattern.search(words.rest)) and not lexicon.DRAFTED.search(match[0]):
                axes[axis] = match[0].strip(" .-/")
        for phrase in reversed(phrases):
            axes |= {axis: phrase.axes[axis] for axis in PLACES if axis in phrase.axes}
        for axis in ("model", "dataset"):
            if "drafter" in axes and axis in axes:
                axes["drafter"] = drafter_name(axes["drafter"].replace(axes[axis], ""))
        measures = [measure for measure in words.measures if measure not in lexicon.DERIVED] or words.measures
        if len(measures) == 1:
            axes["measure"] = measures[0]
        if words.rest or words.measures:
            axes["note"] = text
        if words.rest and not re.fullmatch(r"(?i)run|repeat|trial|pass", words.rest):
            axes["?heading"] = words.rest
        self.levels[level] = _joined(self.levels.get(level, {}), axes)


def _shared_name(column: Words) -> str:
    """The name that columns of the same figures share, by which the user can say what they are."""
    return column.said or column.measures[0] if column.axes else column.text


def _pair(text: str) -> Words | None:
    """What a name and its value say: "model: Qwen3-8B"."""
    name, _, value = text.replace("=", ":", 1).partition(":")
    axis = next(iter(words_of(name).names), "")
    return Words(text, axes=axes_of(axis, value.strip(), name, False)) if axis in PLACES and value.strip() else None


def _joined(axes: Mapping[str, str], closer: Mapping[str, str]) -> dict[str, str]:
    """Axes with those that are said closer to the figure: another drafter has another K, off has no drafter."""
    axes = dict(axes)
    if "drafter" in closer and (axes.get("drafter", closer["drafter"]) != closer["drafter"] or axes.get("k") == "0"):
        axes.pop("k", None)
    if closer.get("k") == "0" or ("k" in closer and axes.get("k") == "0"):
        axes.pop("drafter", None)
    return {**axes, **closer}
