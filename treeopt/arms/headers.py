"""What the columns of a table say, by their headers, their cells, and each other."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from treeopt.arms.columns import (
    CANONICAL,
    DATASET,
    DRAFTED,
    MODEL,
    SUMMARY,
    SWITCH,
    UNNAMED,
    Words,
    drafter_name,
    numbers_of,
    words_of,
)
from treeopt.arms.grids import Grid
from treeopt.errors import quoted

BOUND = re.compile(r"\b(?:min|max|minimum|maximum|best|worst)\b", re.IGNORECASE)
LENGTHS_OF_ARMS = ("k", "block")


@dataclass(frozen=True)
class Column:
    """What a column says: figures of ``measures``, at ``axes``; or an axis of its rows.

    axis : "?name" where it is not known whether the column is a setting
    rest : other words of the header
    """

    name: str
    measures: tuple[str, ...] = ()
    axes: Mapping[str, str] = field(default_factory=dict)
    axis: str = ""
    rest: str = ""

    @property
    def shown(self) -> str:
        """The name that columns of the same figures share, by which the user can say what they are."""
        return words_of(self.name).said or self.measures[0] if self.axes else self.name


def columns_of(
    grid: Grid, context: Mapping[str, str], told: Callable[[str, Words], str | None], notes: list[str]
) -> list[Column]:
    """What each column of a table says. A figure whose header names none has that of the corner, or of the heading.

    context : axes that the headings above set
    told    : what the user says that a column means
    """
    words = [words_of(name) for name in grid.header]
    corner = words[0]
    measure = context.get("measure", "tokens_per_s")
    if corner.measures and not corner.axes and not _is_numeric(grid.column(0)):
        measure, words[0] = corner.measures[0], Words(names=("label",))
    elif "measure" not in context and _are_lengths(grid, words):
        measure = "length"
    table = _Table(grid, words, measure, {*context, *(name for word in words for name in (*word.names, *word.axes))})
    columns: list[Column] = []
    for name, word in zip(grid.header, words, strict=True):
        meaning = told(name, word)
        if meaning is None:
            column = table.column(name, word, columns)
        elif meaning in CANONICAL or meaning == "prompts":
            column = Column(name, (meaning,), word.axes, rest=word.rest)
        else:
            column = Column(name, axis=meaning)
        columns.append(column)
    notes += [
        f"Column {quoted(column.name)} sums up others: left out." for column in columns if column.axis == "summary"
    ]
    plain = next((column for column in columns if column.measures and dict(column.axes) == {"k": "0"}), None)
    for i, column in enumerate(columns if plain else ()):
        cells = grid.column(i) if column.axis in ("k", "ignore", "label", f"?{column.name}") else []
        is_numeric = _is_numeric(cells) and any("." in cell for cell in cells)
        if plain and not column.axes and (column.measures == plain.measures or is_numeric):
            drafter = drafter_name(column.rest) if DRAFTED.search(column.name) else UNNAMED
            is_named = any(other.axis in ("label", "drafter") for other in columns)
            axes = {"?column": column.name} if is_named else {"drafter": drafter}
            columns[i] = replace(column, measures=plain.measures, axes=axes)
    return _distinct(columns, notes)


@dataclass(frozen=True)
class _Table:
    """What the headers of a table say together.

    measure : of figures whose header names none
    named   : axes that the headers or the headings above name
    """

    grid: Grid
    words: Sequence[Words]
    measure: str
    named: set[str]

    @property
    def is_explicit(self) -> bool:
        return any(word.measures for word in self.words)

    @property
    def is_by_arm(self) -> bool:
        return bool(self.named & {"k", "label", "drafter"})

    @property
    def across(self) -> str:
        """The axis of headers that are plain numbers."""
        if len(self.words[0].names) == 2:
            return self.words[0].names[1]
        return "concurrency" if self.is_by_arm and "concurrency" not in self.named else "k"

    def column(self, name: str, word: Words, before: Sequence[Column]) -> Column:
        """The column after those ``before``."""
        if word.measures:
            return Column(name, word.measures, word.axes, rest=word.rest)
        if name == "AR" and self.is_explicit:
            return Column(name, ("acceptance",))
        cells = self.grid.column(len(before))
        is_gain = (
            self.measure == "tokens_per_s" and bool(cells) and all(re.match(r"[+−-]?[\d.]+ ?%", cell) for cell in cells)
        )
        measure = "gain" if is_gain else self.measure
        if word.names:
            return self._axis(name, word.names[0], cells, before)
        if "position" in word.axes:
            return Column(name, ("positions",))
        if word.axes:
            is_switch = bool(cells) and all(map(SWITCH.fullmatch, cells))
            return Column(name, axis="switch") if is_switch else Column(name, (measure,), word.axes, rest=word.rest)
        if name.isdecimal():
            return Column(name, (measure,), {self.across: name})
        if SUMMARY.fullmatch(name):
            return Column(name, axis="summary")
        if not _is_numeric(cells):
            says_arm = any(words_of(cell).axes.get("k") == "0" or DRAFTED.match(cell) for cell in cells)
            says_arm &= not self.named & {"k", "drafter"}
            return Column(name, axis="label" if says_arm or not before else f"?{name}")
        if self.is_explicit or not before:
            return Column(name, axis=f"?{name}" if self.is_explicit else self.across)
        axis = "dataset" if self.is_by_arm or DATASET.search(name) else "drafter"
        return Column(name, (measure,), {"model" if MODEL.search(name) else axis: name})

    def _axis(self, name: str, axis: str, cells: Sequence[str], before: Sequence[Column]) -> Column:
        """A column whose header names an axis, or seems to."""
        if axis in ("k", "label", "drafter") and cells and all(map(SWITCH.fullmatch, cells)):
            return Column(name, axis="switch")
        if axis == "dataset" and name.casefold() == "prompts" and _is_numeric(cells):
            return Column(name, ("prompts",))
        if axis == "label" and _is_numeric(cells):
            return Column(name, axis="ignore" if self.is_explicit else self.across)
        labelled = (
            bool(before)
            and before[0].axis == "label"
            and all("k" in words_of(cell).axes for cell in self.grid.column(0))
        )
        is_second = axis in LENGTHS_OF_ARMS and (labelled or any(column.axis in LENGTHS_OF_ARMS for column in before))
        is_figure = axis in CANONICAL and axis != "ignore"
        if is_second or axis == "option" or (is_figure and self.is_explicit):
            return Column(name, axis=f"?{name}")
        if is_figure:
            return Column(name, (axis,))
        return Column(name, axis=name if axis == "setting" else axis)


def _are_lengths(grid: Grid, words: Sequence[Words]) -> bool:
    """Whether figures for each K, of which nothing says what they are, can be tokens per step, with no run without speculation."""
    lengths = {
        i: int(word.axes["k"])
        for i, word in enumerate(words)
        if word.axes.get("k", "").isdecimal() and not word.measures
    }
    figures = [(k, figure) for i, k in lengths.items() for cell in grid.column(i) for figure in numbers_of(cell)[:1]]
    return bool(figures) and all(k and 1 <= figure.value <= k + 1 and not figure.unit for k, figure in figures)


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(re.match(r"\W{0,3}\d", cell) for cell in cells)


def _distinct(columns: Sequence[Column], notes: list[str]) -> list[Column]:
    """Columns of the same figures at the same axes differ in their other words; without those the first is taken.

    Bounds beside a mean are left out.
    """
    groups = defaultdict(list)
    for column in columns:
        groups[column.measures, tuple(sorted(column.axes.items()))].append(column)
    changed = {}
    for (measures, _), group in groups.items():
        if not measures or measures[0] in ("ignore", "positions") or len(group) == 1:
            continue
        means = [column for column in group if not BOUND.search(column.name)]
        group = [*means, *(column for column in group if column not in means)]
        if len(means) != 1 and len({column.rest for column in group}) == len(group):
            for column in group:
                rest = drafter_name(column.rest) or column.name
                changed[column.name] = replace(column, axes={**column.axes, "?column": rest})
            continue
        for column in group[1:]:
            notes.append(f"Column {quoted(column.name)} was left out: {quoted(group[0].name)} is taken.")
            changed[column.name] = Column(column.name, axis="ignore")
    return [changed.get(column.name, column) for column in columns]
