"""Counters by position in Prometheus expositions: what an engine counted between two scrapes.

Counters run since the start of the server, so one scrape holds its warm-up too. Series are told apart by
their labels, subtracted one by one and then summed: data-parallel engines have a series each, and the
restart of one would hide in the sum. The `_created` series are times, not counts; they tell a restart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treeopt.engines.measured.files import File
from treeopt.engines.measured.survival import MOST_DRAFTS
from treeopt.errors import InvalidInput

Labels = tuple[tuple[str, str], ...]
Scrape = dict[tuple[str, Labels], float]
MOST_SERIES, MOST_LINE_CHARS = 10_000, 4096  # of one scrape: an engine has some hundreds
SINCE_START = (
    "One scrape counts from the start of the server, warm-up included. To measure a stretch of time, "
    "pass two scrapes: one before it and one after."
)


@dataclass(frozen=True)
class Rise:
    """The whole number that a counter rose by, and by how much it may be off."""

    count: int
    slack: float = 0.0


@dataclass(frozen=True)
class Counters:
    """Rises of counters, by name and labels; names without prefix and `_total`."""

    series: dict[tuple[str, Labels], Rise]
    path: Path
    notes: tuple[str, ...] = ()

    def sum(self, name: str) -> int | None:
        """Over all engines; None where there is no such counter."""
        found = [rise.count for (series, _), rise in self.series.items() if series == name]
        return sum(found) if found else None

    def slack(self, name: str) -> float:
        """By how much the sum may be off."""
        return sum(rise.slack for (series, _), rise in self.series.items() if series == name)

    def by_position(self, name: str, label: str) -> list[int]:
        """(K,) sums over all engines, position after position."""
        found: dict[int, int] = {}
        for (series, labels), rise in self.series.items():
            if series == name:
                place = dict(labels).get(label, "")
                if not re.fullmatch(r"\d{1,4}", place, re.ASCII):
                    raise InvalidInput(
                        f"{self.path} must number positions 0, 1, ... under {label!r}, but has {place!r:.40}."
                    )
                found[int(place)] = found.get(int(place), 0) + rise.count
        if sorted(found) != list(range(len(found))):
            raise InvalidInput(
                f"{self.path} must have every position from 0 on, but has {sorted(found)}: was it cut off?"
            )
        return [found[place] for place in sorted(found)]


def is_exposition(content: object, prefix: str) -> bool:
    """Whether a file is a text with lines under ``prefix``, a regular expression."""
    return isinstance(content, str) and re.search(f"^{prefix}", content, re.MULTILINE) is not None


def six_digits(value: float) -> float:
    """By how much a number may be off that C++ printed with its usual six digits.

    >>> six_digits(999999), six_digits(1234570), six_digits(1234567)
    (0.0, 5.0, 0.0)
    """
    return 0.5 * 10.0 ** (len(str(int(value))) - 6) if value >= 1e6 and float(f"{value:.6g}") == value else 0.0


def counters_among(
    files: Sequence[File], prefix: str, names: Collection[str], rounding: Callable[[float], float] | None = None
) -> Counters | None:
    """Counters of these ``names`` of one scrape, or between two of them; None where no file is an exposition.

    prefix   : a regular expression
    rounding : by how much a printed total may be off; the counters by position are whole
    """
    scrapes = [scrape(content, path, prefix) for content, path in files if is_exposition(content, prefix)]
    if not scrapes:
        return None
    if len(scrapes) < len(files):
        raise InvalidInput("Files of one import must be of one form, but some are expositions and some are not.")
    if len(files) > 2:
        raise InvalidInput(
            f"An exposition is read alone, or as two scrapes, before and after, but got {len(files)} files."
        )
    path = files[-1][1]
    named = [dict(labels) for one in scrapes for _, labels in one]
    models = {labels[name] for labels in named for name in ("model_name", "model") if name in labels}
    if len(models) > 1:
        raise InvalidInput(f"{path} must be of one model, but has counters of {', '.join(sorted(models))}.")
    before, after = scrapes[0] if len(scrapes) > 1 else {}, scrapes[-1]
    series = {}
    for key in {**before, **after}:
        name, labels = key
        if name.removesuffix("_created") not in names:
            continue
        old, new = before.get(key, 0.0), after.get(key, 0.0)
        if name.endswith("_created"):
            if key in before and key in after and old != new:
                raise InvalidInput(
                    f"{path} must be scraped without a restart since {files[0][1]}, but {name} has changed: the server "
                    "began to count anew."
                )
            continue
        if not 0 <= old <= MOST_DRAFTS or not 0 <= new <= MOST_DRAFTS:
            raise InvalidInput(f"{path} must have counts from 0 to {MOST_DRAFTS}, but {name} is {new:g}.")
        if new < old:
            raise InvalidInput(
                f"{path} must be scraped after {files[0][1]} and without a restart between, but "
                f"{name}{dict(labels) or ''} fell from {old:g} to {new:g}."
            )
        count = round(new - old)
        printed = rounding(old) + rounding(new) if rounding and not name.endswith("per_pos") else 0.0
        series[key] = Rise(count, abs(new - old - count) + printed)
    notes = () if len(files) > 1 else (SINCE_START,)
    return Counters(series, path, (*notes, *_rounded(series)))


def _rounded(series: Mapping[tuple[str, Labels], Rise]) -> list[str]:
    """Notes on what was rounded, and by how much."""
    notes = []
    names = dict.fromkeys(name for (name, _), rise in series.items() if rise.slack)
    if parts := [name for name in names if any(s == name and rise.slack % 1 for (s, _), rise in series.items())]:
        notes.append(f"Counters that are not whole were rounded: {', '.join(parts)}.")
    off = {name: sum(int(rise.slack) for (s, _), rise in series.items() if s == name) for name in names}
    if said := [f"{name} to within {slack:,}" for name, slack in off.items() if slack]:
        notes.append(f"Totals above a million are printed with six digits: {', '.join(said)}.")
    return notes


def scrape(text: str, path: Path, prefix: str) -> Scrape:
    """The samples under ``prefix``, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    wanted = re.compile(prefix)
    lines = [line.strip() for line in text.splitlines() if wanted.match(line.strip())]
    if len(lines) > MOST_SERIES or len(max(lines, key=len, default="")) > MOST_LINE_CHARS:
        raise InvalidInput(
            f"{path} may have {MOST_SERIES:,} counters of drafts in lines of {MOST_LINE_CHARS:,} characters, but has more."
        )
    found: Scrape = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                name = wanted.sub("", sample.name)
                if name.endswith(("_total", "_created")):  # gauges are of the last moment
                    labels = tuple(sorted(sample.labels.items()))
                    key = name.removesuffix("_total"), labels
                    if key in found:
                        raise InvalidInput(
                            f"{path} must be one scrape, but has {name} twice: save each scrape in a file of its own."
                        )
                    found[key] = float(sample.value)
    except InvalidInput:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise InvalidInput(f"{path} must be a Prometheus exposition, but is not: {error}.") from None
    if not all(abs(value) < float("inf") for value in found.values()):  # NaN is refused as well
        raise InvalidInput(f"{path} must have finite counts, but has others.")
    return found
