"""What the columns of a table say, by their headers, their cells, and each other."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from treeopt.arms import lexicon
from treeopt.arms.columns import Words, drafter_name, words_of
from treeopt.arms.grids import Grid
from treeopt.errors import quoted

BOUND = re.compile(r"\b(?:min|max|minimum|maximum|best|worst)\b", re.IGNORECASE)
LENGTHS_OF_ARMS = ("k", "block")
TREE_AXES = {"option": "topk", "block": "rows"}


def columns_of(
    grid: Grid, context: Mapping[str, str], told: Callable[[Words], str | None], notes: list[str]
) -> list[Words]:
    """What each column of a table says: figures at ``axes``, or an axis of its rows (its first name).

    A figure whose header names none has that of the corner, or of the heading.

    context : axes that the headings above set
    told    : what the user says that a column means
    """
    headers = [words_of(name) for name in grid.header]
    corner = headers[0]
    measure = context.get("measure", "tokens_per_s")
    if corner.measures and not corner.axes and not _is_numeric(grid.column(0)):
        measure, headers[0] = corner.measures[0], replace(corner, measures=(), names=("label",))
    named = {*context, *(name for header in headers for name in (*header.names, *header.axes))}
    table = _Table(grid, headers, measure, named, "measure" in context)
    columns: list[Words] = []
    for header in headers:
        meaning = told(header)
        if meaning is None:
            column = table.column(header, columns)
        elif meaning in lexicon.CANONICAL or meaning == "prompts":
            column = _figures(header, meaning)
        else:
            column = _axis(header, meaning)
        if column.axis == "summary":
            notes.append(f"Column {quoted(column.text)} sums up others: left out.")
        if column.axis == "block":
            notes.append(
                f"Column {quoted(column.text)} was taken as rows with the last verified token, so guesses are one less; "
                f'if not: --column "{column.text}=k".'
            )
        columns.append(column)
    return _distinct(_with_plain(columns, grid), notes)


def _figures(header: Words, measure: str) -> Words:
    """The header of a column of figures."""
    return replace(header, measures=(measure,), names=())


def _axis(header: Words, axis: str) -> Words:
    """The header of a column that says an axis of its rows."""
    return replace(header, measures=(), names=(axis,), axes={})


@dataclass(frozen=True)
class _Table:
    """What the headers of a table say together.

    measure : of figures whose header names none
    named   : axes that the headers or the headings above name
    is_said : whether the headings above say what is measured
    """

    grid: Grid
    headers: Sequence[Words]
    measure: str
    named: set[str]
    is_said: bool

    @property
    def is_explicit(self) -> bool:
        """Whether a header says what it measures; a gain says it of no other column where the heading does."""
        derived = lexicon.DERIVED if self.is_said else ()
        return any({*header.measures}.difference(derived) for header in self.headers)

    @property
    def is_by_arm(self) -> bool:
        return bool(self.named & {"k", "label", "drafter"})

    @property
    def across(self) -> str:
        """The axis of headers that are plain numbers."""
        if len(self.headers[0].names) == 2:
            return self.headers[0].names[1]
        return "concurrency" if self.is_by_arm and "concurrency" not in self.named else "k"

    def column(self, header: Words, before: Sequence[Words]) -> Words:
        """The column after those ``before``."""
        cells = self.grid.column(len(before))
        is_switch = bool(cells) and all(map(lexicon.SWITCH.fullmatch, cells))
        if header.measures:
            return header
        if header.text == "AR" and self.is_explicit:
            return replace(_figures(header, "acceptance"), axes={})
        if header.names:
            return self._named(header, cells, before, is_switch)
        if "position" in header.axes:
            return replace(_figures(header, "positions"), axes={})
        if header.axes and is_switch:
            return _axis(header, "switch")
        if self.measure == "tokens_per_s" and lexicon.NO_SPEED.search(header.text):
            return _axis(header, f"?{header.text}")
        is_gain = self.measure == "tokens_per_s" and cells and all(re.match(r"[+−-]?[\d.]+ ?%", cell) for cell in cells)
        figures = _figures(header, "gain" if is_gain else self.measure)
        if header.axes:
            return figures
        if header.text.isdecimal():
            return replace(figures, axes={self.across: header.text})
        if lexicon.SUMMARY.fullmatch(header.text):
            return _axis(header, "summary")
        if not _is_numeric(cells):
            says_arm = any("k" in words_of(cell).axes or lexicon.DRAFTED.match(cell) for cell in cells)
            says_arm &= not self.named & {"k", "drafter"}
            return _axis(header, "label" if says_arm or not before else f"?{header.text}")
        if self.is_explicit:
            return _axis(header, f"?{header.text}")
        if not before:
            return _axis(header, self.across)
        axis = "dataset" if self.is_by_arm or lexicon.DATASET.search(header.text) else "drafter"
        return replace(figures, axes={"model" if lexicon.MODEL.search(header.text) else axis: header.text})

    def _named(self, header: Words, cells: Sequence[str], before: Sequence[Words], is_switch: bool) -> Words:
        """A column whose header names an axis, or seems to."""
        axis = header.axis
        if axis in ("k", "label", "drafter") and is_switch:
            return _axis(header, "switch")
        if axis == "dataset" and header.text.casefold() == "prompts" and _is_numeric(cells):
            return _figures(header, "prompts")
        if axis == "label" and _is_numeric(cells):
            return _axis(header, "ignore" if self.is_explicit else self.across)
        is_labelled = bool(before) and before[0].axis == "label"
        is_labelled = is_labelled and all("k" in words_of(cell).axes for cell in self.grid.column(0))
        is_second = axis in LENGTHS_OF_ARMS and (is_labelled or any(one.axis in LENGTHS_OF_ARMS for one in before))
        is_figure = axis in lexicon.CANONICAL and axis != "ignore"
        if {"k", "option", "block"} <= self.named and axis in TREE_AXES:  # SGLang's flags
            return _axis(header, TREE_AXES[axis])
        if is_second or axis == "option" or (is_figure and self.is_explicit):
            return _axis(header, f"?{header.text}")
        if is_figure:
            return _figures(header, axis)
        return _axis(header, header.text if axis == "setting" else axis)


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(re.match(r"\W{0,3}\d", cell) and not lexicon.TREE.fullmatch(cell) for cell in cells)


def _with_plain(columns: Sequence[Words], grid: Grid) -> list[Words]:
    """Beside a column without speculation another one of such figures is that of an arm, which its header names."""
    plain = next((column for column in columns if column.measures and dict(column.axes) == {"k": "0"}), None)
    if plain is None:
        return list(columns)
    is_named = any(column.axis in ("label", "drafter") for column in columns)
    found = []
    for i, column in enumerate(columns):
        cells = grid.column(i) if column.axis in ("k", "ignore", "label", f"?{column.text}") else []
        is_numeric = _is_numeric(cells) and any("." in cell for cell in cells)
        is_numeric &= not lexicon.NO_SPEED.search(column.text)
        if not column.axes and (is_numeric or column.measures == plain.measures):
            drafter = drafter_name(column.rest) if lexicon.DRAFTED.search(column.text) else lexicon.UNNAMED
            axes = {"?column": column.text} if is_named else {"drafter": drafter}
            column = replace(column, measures=plain.measures, axes=axes)
        found.append(column)
    return found


def _distinct(columns: Sequence[Words], notes: list[str]) -> list[Words]:
    """Columns of the same figures at the same axes differ in their other words; without those the first is taken.

    Bounds beside a mean are left out.
    """
    groups = defaultdict(list)
    for column in columns:
        if column.measures and column.measures[0] not in ("ignore", "positions"):
            groups[column.measures, tuple(sorted(column.axes.items()))].append(column)
    changed = {}
    for group in groups.values():
        means = [column for column in group if not BOUND.search(column.text)]
        if len(group) > 1 and len(means) != 1 and len({column.rest for column in group}) == len(group):
            for column in group:
                rest = drafter_name(column.rest) or column.text
                changed[column.text] = replace(column, axes={**column.axes, "?column": rest})
            continue
        first = (means or group)[0]
        for column in group:
            if column is not first:
                notes.append(f"Column {quoted(column.text)} was left out: {quoted(first.text)} is taken.")
                changed[column.text] = _axis(column, "ignore")
    return [changed.get(column.text, column) for column in columns]
