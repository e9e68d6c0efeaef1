"""From rows of figures with their axes to arms: what a figure counts is decided by all figures of its column."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import log, sqrt
from pathlib import Path
from statistics import median, mode

from pydantic import ValidationError

from treeopt.arms.arm import OFF, Arm, Arms, Unit
from treeopt.arms.columns import Number
from treeopt.arms.groups import crossed
from treeopt.arms.lexicon import PER_REQUEST, UNNAMED
from treeopt.errors import InvalidInput, quoted
from treeopt.files.fields import adapter, first_error

SPEEDS = ("tokens_per_s", "tokens_per_s_per_request", "speedup", "gain")
TIMES = ("tpot_ms", "tpot_p99_ms")
TIMED = (*SPEEDS, "tpot_ms")
OTHER_UNITS = {  # of a column: what it measures, and how much one of its units is
    "tpot_s": ("tpot_ms", 1000.0), "tpot_us": ("tpot_ms", 0.001), "tpot_p99_s": ("tpot_p99_ms", 1000.0),
    "tpot_p99_us": ("tpot_p99_ms", 0.001), "tokens_per_min": ("tokens_per_s", 1 / 60), "ktokens_per_s": ("tokens_per_s", 1000.0),
}  # fmt: skip
UNITS = (  # of a cell, before that of its column
    (TIMES, "ms", 1.0), (TIMES, r"s(ec|$|/)", 1000.0), (TIMES, "[uµμ]s", 0.001), (SPEEDS, ".*/min", 1 / 60), (SPEEDS, "k(tok|tps|t/)", 1000.0),
)  # fmt: skip
LENGTHS = ("length", "acceptance", "acceptance_rate", "accepted_per_step", "tokens_per_step")
RATE = "share of the drafted tokens that was accepted"
ACCEPTED, EMITTED = "accepted tokens per step, without the bonus token", "tokens per step, with the bonus token"
CELL = ("model", "dataset", "drafter", "k", "concurrency")
MOST_RATIO = 1.5  # between repeats of one setting
UNHEEDED = ("measure", "note", "run", "tree")  # axes that set nothing apart
RATIO = re.compile(r"\brelative\b|\bnormali[sz]ed\b", re.IGNORECASE)
REQUEST = re.compile(PER_REQUEST, re.IGNORECASE)
ALL = re.compile(r"\ball requests\b|\baggregate\b|\btotal\b|\bsystem\b", re.IGNORECASE)
SPREAD = re.compile(r"\bsd of (\d+) repeats (\d*\.?\d+)( ?%)?", re.ASCII)
SAID: Mapping[Unit, str] = {
    "all": "all requests together",
    "request": "one request",
    "ratio": "a ratio to decoding without speculation",
}


@dataclass
class Row:
    """Figures of one setting, each with the name of its column.

    axes            : "model", "dataset", "drafter", "k", "concurrency" and others, as they are written
    note            : what the headings and the row say of it
    table           : number of the table; 0 for lines outside of tables
    tokens_per_step : with the bonus token, by all figures of the column
    """

    axes: dict[str, str]
    note: str
    where: str
    table: int
    figures: dict[str, tuple[str, tuple[Number, ...]]] = field(default_factory=dict)
    tokens_per_step: float | None = None

    def has(self, *measures: str) -> bool:
        return any(measure in self.figures for measure in measures)

    def take(self, name: str, measures: Sequence[str], numbers: tuple[Number, ...]) -> None:
        """Add the figures of a cell, in the order of what its column measures; a figure that is there stays."""
        if measures == ("positions",) and numbers:
            numbers = (*self.figures.get("positions", ("", ()))[1], *numbers)
            self.figures["positions"] = (name, numbers)
            return
        for measure, number in zip(measures, numbers, strict=False):
            if measure in SPEEDS and len(measures) == 1 and number.unit == "x":
                measure = "speedup"
            measure, factor = OTHER_UNITS.get(measure, (measure, 1.0))
            sizes = (size for kinds, unit, size in UNITS if measure in kinds and re.match(unit, number.unit))
            factor = next(sizes, factor)
            spread = None if number.spread is None else number.spread * factor
            self.figures.setdefault(measure, (name, (Number(number.value * factor, number.unit, spread),)))

    def value(self, *measures: str) -> float | None:
        return next((self.figures[measure][1][0].value for measure in measures if measure in self.figures), None)

    @property
    def positions(self) -> tuple[float, ...]:
        shares = [number.value for number in self.figures.get("positions", ("", ()))[1]]
        return tuple(share / 100 for share in shares) if max(shares, default=0) > 2 else tuple(shares)

    @property
    def k(self) -> int | None:
        return int(self.axes["k"]) if self.axes.get("k", "").isdigit() else None

    @property
    def concurrency(self) -> int:
        return int(self.axes.get("concurrency", "1"))

    @property
    def drafter(self) -> str:
        if self.k == 0:
            return OFF
        policy = self.axes.get("k", "") if self.k is None else ""
        return " ".join(filter(None, (self.axes.get("drafter") or UNNAMED, policy, self.axes.get("tree"))))

    @property
    def cell(self) -> tuple[str, str]:
        return self.axes.get("model", ""), self.axes.get("dataset", "")


def arms_of(rows: Sequence[Row], notes: Sequence[str], path: Path) -> Arms:
    """The arms of a text. Raises InvalidInput where no row has a throughput or a time per token."""
    for row in rows:
        if row.axes.get("drafter", "").casefold() == OFF or ("drafter" not in row.axes and "k" not in row.axes):
            row.axes.setdefault("k", "" if row.axes.get("?label") else "0")
    measured = {measure for row in rows for measure in row.figures}
    if not measured & {*TIMED}:
        found = ", ".join(sorted(measured)) or "none"
        raise InvalidInput(
            f"{path} must give tokens per second or time per token of settings that were run, but its figures are: {found}. "
            "If a column holds them: --column NAME=tokens_per_s, or NAME=tpot_ms."
        )
    notes = list(dict.fromkeys(notes))
    meanings: dict[str, str] = {}
    _set_tokens_per_step(rows, meanings)
    rows = _gathered(rows)
    about = _about(rows, notes)
    if len({"concurrency" in row.axes for row in rows}) == 2:
        notes.append("Rows that do not say their concurrency were taken as 1.")
    units = _units(rows, meanings)
    arms = [_arm(row, unit, other) for row, unit, other in zip(rows, units, about, strict=True)]
    _check_repeats(rows, arms, notes)
    return Arms(arms=tuple(arms), meanings=meanings, notes=tuple(notes))


def _check_repeats(rows: Sequence[Row], arms: Sequence[Arm], notes: Sequence[str]) -> None:
    """Raises InvalidInput where repeats of one setting differ too much to be repeats: what tells them apart was not read.

    A column that is not known may tell settings apart, but not where none speculates.
    """
    first: dict[object, Arm] = {}
    is_plain = all(row.k == 0 for row in rows)
    for row, arm in zip(rows, arms, strict=True):
        about = [item for item in arm.about.items() if not (is_plain and f"?{item[0]}" in row.axes)]
        other = first.setdefault((arm.cell, arm.setting, arm.unit, tuple(about)), arm)
        if not (arm.tokens_per_s and other.tokens_per_s) or row.has("repeats") or "run" in row.axes:
            continue
        if not 1 / MOST_RATIO < arm.tokens_per_s / other.tokens_per_s < MOST_RATIO:
            raise InvalidInput(
                f"{arm.source}: {arm.name} at {arm.concurrency} at once has {arm.tokens_per_s:g}, but at {other.source} "
                f"{other.tokens_per_s:g}: what tells them apart was not read. {' '.join(notes)} "
                "If a column does: --column NAME=k, or NAME=drafter, concurrency, dataset, context."
            )


def _arm(row: Row, unit: Unit, about: Mapping[str, str]) -> Arm:
    if unit == "ratio":
        speed = row.value("speedup", "tokens_per_s")
        if speed is None and (gain := row.value("gain")) is not None:
            speed = 1 + gain / 100
    else:
        speed, tpot = row.value("tokens_per_s", "tokens_per_s_per_request"), row.value("tpot_ms")
        if speed is None and tpot:
            speed = 1000 / tpot * (row.concurrency if unit == "all" else 1)
    repeats = 1 if (given := row.value("repeats")) is None else given
    spread = row.value("spread")
    if spread is None:
        spread = next((row.figures[measure][1][0].spread for measure in SPEEDS if row.has(measure)), None)
    if match := SPREAD.search(row.note):
        repeats, spread = max(repeats, int(match[1])), float(match[2]) * ((speed or 0) / 100 if match[3] else 1)
    stderr = row.value("stderr")
    if stderr is None and spread is not None and repeats > 0:
        stderr = spread / sqrt(repeats)
    record = {
        "model": row.cell[0],
        "dataset": row.cell[1],
        "drafter": row.drafter,
        "k": row.k,
        "concurrency": row.concurrency,
        "about": about,
        "tokens_per_s": speed,
        "unit": unit,
        "tokens_per_step": 1.0 if row.k == 0 else row.tokens_per_step,
        "positions": row.positions,
        "repeats": repeats,
        "stderr": stderr / speed if stderr and speed else None,
        "source": row.where,
        **{measure: row.value(measure) for measure in ("tpot_ms", "tpot_p99_ms", "prompts", "seconds")},
    }
    try:
        arm: Arm = adapter(Arm).validate_python(record)
    except ValidationError as error:
        raise InvalidInput("{}: {} {}.".format(row.where, *first_error(error))) from None
    return arm


def _set_tokens_per_step(rows: Sequence[Row], meanings: dict[str, str]) -> None:
    """Set the rows' tokens per step by the columns that tell them, and add what these were taken as to ``meanings``."""
    columns = defaultdict(list)
    for row in rows:
        for measure in LENGTHS:
            if row.has(measure):
                columns[measure, row.table].append(row)
    for (measure, _), column in columns.items():
        name = column[0].figures[measure][0]
        speculative = [row for row in column if row.k != 0]
        numbers = [row.figures[measure][1][0] for row in speculative]
        values = [number.value for number in numbers]
        if not values:
            continue
        is_percent = any(number.unit == "%" for number in numbers)
        is_share = is_percent or max(values) <= 1 or max(values) > 20 or "%" in name
        scale = 100 if is_percent or max(values) > 1 else 1
        is_rate = measure in ("acceptance", "acceptance_rate") and is_share
        plain = [row.value(measure) for row in column if row.k == 0]
        has_no_bonus = measure == "accepted_per_step"
        has_no_bonus |= measure != "tokens_per_step" and not is_rate and _has_no_bonus(speculative, values, plain)
        kind = RATE if is_rate else ACCEPTED if has_no_bonus else EMITTED
        if measure not in ("accepted_per_step", "tokens_per_step"):
            other = "tokens_per_step" if is_rate or has_no_bonus else "accepted_per_step"
            kind += f'; if not: --column "{name}={other}"'
            if not is_rate and any(row.k and value > row.k + 1 for row, value in zip(speculative, values, strict=True)):
                meanings[name] = "left out: it is more than all guesses and the bonus token"
                continue
        meanings[name] = kind
        for row, value in zip(speculative, values, strict=True):
            if not is_rate:
                row.tokens_per_step = value + has_no_bonus
            elif value > scale:
                raise InvalidInput(
                    f"{row.where}: {quoted(name)} is {kind}: it must be at most 1, but is {value / scale:g}."
                )
            elif row.k is not None and row.tokens_per_step is None:
                row.tokens_per_step = 1 + row.k * value / scale


def _has_no_bonus(rows: Sequence[Row], values: Sequence[float], plain: Sequence[float | None]) -> bool:
    """Whether mean lengths count the accepted tokens alone: by plain, by rates beside them, or since one is below 1."""
    if 0 in plain or min(values) < 1:
        return True
    for row, value in zip(rows, values, strict=True):
        accepted = sum(row.positions)
        rate = row.value("acceptance_rate")
        if rate is not None and row.k:
            accepted = row.k * (rate / 100 if rate > 1 else rate)
        if accepted:
            return abs(value - accepted) < abs(value - accepted - 1)
    return False


def _units(rows: Sequence[Row], meanings: dict[str, str]) -> list[Unit]:
    """The unit of tokens_per_s of each row: as its note says, else as those of its table; what columns say is added to ``meanings``."""
    tables = defaultdict(list)
    for row in rows:
        tables[row.table].append(row)
    usual: dict[int, Unit] = {}
    for table, group in tables.items():
        names = {measure: name for row in group for measure, (name, _) in row.figures.items()}
        speed = next((measure for measure in SPEEDS if measure in names), "tpot_ms")
        if speed in ("speedup", "gain") and "tpot_ms" in names:
            speed = "tpot_ms"
        notes = [row.note for row in group if speed in row.figures and _noted(row.note)]
        said = _noted(names.get(speed, ""))
        if speed in ("speedup", "gain") or {row.value(speed) for row in group if row.k == 0} == {1.0}:
            usual[table] = "ratio"
        elif speed == "tokens_per_s_per_request" or (not notes and _is_per_request(group)):
            usual[table] = "request"
        else:
            usual[table] = said or _noted(mode(notes or [""])) or "all"
        for measure, name in names.items():
            if measure in SPEEDS:
                meanings[name] = SAID[usual[table]] if measure == speed else f"left out: {names[speed]} says it"
            elif measure == "tpot_ms":
                meanings.setdefault(name, "time per token of one request")
    return [usual[row.table] if usual[row.table] == "ratio" else _noted(row.note) or usual[row.table] for row in rows]


def _noted(note: str) -> Unit | None:
    """The unit that a note says."""
    if RATIO.search(note):
        return "ratio"
    return "request" if REQUEST.search(note) else "all" if ALL.search(note) else None


def _is_per_request(rows: Iterable[Row]) -> bool:
    """Whether tokens per second times time per token are about 1 and not the concurrency."""
    shares = [
        log(row.value("tokens_per_s") * row.value("tpot_ms") / 1000) / log(row.concurrency)  # type: ignore[operator]
        for row in rows
        if row.concurrency > 1 and row.has("tokens_per_s") and row.has("tpot_ms")
    ]
    return bool(shares) and median(shares) < 0.3


def _gathered(rows: Sequence[Row]) -> list[Row]:
    """The rows; what is said of acceptance alone goes to the rows with the axes that it has."""
    timed = [row for row in rows if row.has(*TIMED) or not row.figures]
    places = defaultdict(list)
    for row in timed:
        for place in product(*({row.axes.get(axis), None} for axis in CELL)):
            places[place].append(row)
    others = []
    for row in rows:
        if not row.has(*TIMED) and row.figures:
            alike = [
                other
                for other in places.get(tuple(row.axes.get(axis) for axis in CELL), ())
                if all(other.axes.get(axis, row.axes[axis]) == row.axes[axis] for axis in row.axes if _is_setting(axis))
            ]
            others += [] if alike else [row]
            for other in alike:
                other.figures = {**row.figures, **other.figures}
                other.tokens_per_step = other.tokens_per_step or row.tokens_per_step
    return timed + others


def _is_setting(axis: str) -> bool:
    return axis not in ("measure", "note") and not axis.startswith("?")


def _about(rows: Sequence[Row], notes: list[str]) -> list[dict[str, str]]:
    """What else differs between rows of a model and data set, for each row.

    A setting that is known as one counts where it differs; another column only where one setting was run at several of its
    values, and others at the same ones: it is a measurement otherwise.
    """
    cells = defaultdict(list)
    for row in rows:
        cells[row.cell].append(row)
    heeded = set()
    for cell, group in cells.items():
        heeded.add((cell, "engine"))  # by which its launch line is written
        for axis in dict.fromkeys(axis for row in group for axis in row.axes):
            if axis in CELL or axis in UNHEEDED:
                continue
            values, is_crossed = crossed(
                ((row.drafter, row.k, row.concurrency), row.axes[axis]) for row in group if axis in row.axes
            )
            if len(values) < 2:
                continue
            if not axis.startswith("?") or (is_crossed and len(values) <= max(2, len(group) / 2)):
                heeded.add((cell, axis))
            elif axis not in ("?label", "?heading"):
                notes.append(
                    f'Column {quoted(axis[1:])} was not used. If arms may differ in it: --column "{axis[1:]}=context".'
                )
    notes[:] = dict.fromkeys(notes)
    return [{axis.lstrip("?"): row.axes[axis] for axis in row.axes if (row.cell, axis) in heeded} for row in rows]
