"""Counters by position in Prometheus expositions: what an engine counted between two scrapes.

Counters run since the start of the server, so one scrape holds its warm-up too. Series are told apart by
their labels, subtracted one by one and then summed: data-parallel engines have a series each, and the
restart of one would hide in the sum. The `_created` series are times, not counts; they tell a restart.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from treeopt.engines.measured.files import File
from treeopt.engines.measured.survival import MOST_DRAFTS
from treeopt.errors import InvalidInput

Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels
MOST_SERIES, MOST_LINE_CHARS = 10_000, 4096  # of one scrape: an engine has some hundreds
SINCE_START = (
    "One scrape counts from the start of the server, warm-up included. To measure a stretch of time, "
    "pass two scrapes: one before it and one after."
)


@dataclass(frozen=True)
class Counters:
    """Whole numbers that counters rose by, by name without prefix and `_total`; and by how much each may be off."""

    rises: dict[Series, tuple[int, float]]
    path: Path
    notes: tuple[str, ...] = ()

    def of(self, name: str) -> dict[Series, tuple[int, float]]:
        return {series: rise for series, rise in self.rises.items() if series[0] == name}

    def sum(self, name: str) -> int | None:
        """Over all engines; None where there is no such counter."""
        found = self.of(name).values()
        return sum(count for count, _ in found) if found else None

    def slack(self, name: str) -> float:
        """By how much the sum may be off."""
        return sum(slack for _, slack in self.of(name).values())

    def by_position(self, name: str, label: str) -> list[int]:
        """(K,) sums over all engines, position after position."""
        found: dict[int, int] = {}
        for (_, labels), (count, _) in self.of(name).items():
            place = dict(labels).get(label, "")
            if not re.fullmatch(r"\d{1,4}", place, re.ASCII):
                raise InvalidInput(
                    f"{self.path} must number positions 0, 1, ... under {label!r}, but has {place!r:.40}."
                )
            found[int(place)] = found.get(int(place), 0) + count
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
    files: Sequence[File], prefix: str, names: Collection[str], rounding: Callable[[float], float] = lambda value: 0.0
) -> Counters | None:
    """Counters of these ``names`` of one scrape, or between two of them; None where no file is an exposition.

    prefix   : a regular expression
    rounding : by how much a printed total may be off; the counters by position are whole
    """
    scrapes = [_scrape(content, path, prefix) for content, path in files if is_exposition(content, prefix)]
    if not scrapes:
        return None
    if len(scrapes) < len(files):
        raise InvalidInput("Files of one import must be of one form, but some are expositions and some are not.")
    if len(files) > 2:
        raise InvalidInput(
            f"An exposition is read alone, or as two scrapes, before and after, but got {len(files)} files."
        )
    (_, start), (_, path) = files[0], files[-1]
    labels = {label for one in scrapes for series in one for label in series[1]}
    models = {value for name, value in labels if name in ("model_name", "model")}
    if len(models) > 1:
        raise InvalidInput(f"{path} must be of one model, but has counters of {', '.join(sorted(models))}.")
    before, after = scrapes[0] if len(scrapes) > 1 else {}, scrapes[-1]
    rises = {}
    for series in {**before, **after}:
        name, old, new = series[0], before.get(series, 0.0), after.get(series, 0.0)
        if name.removesuffix("_created") not in names:
            continue
        if name.endswith("_created"):
            if series in before and series in after and old != new:
                raise InvalidInput(
                    f"{path} must be scraped without a restart since {start}: {name} began to count anew."
                )
            continue
        if not (0 <= old <= MOST_DRAFTS and 0 <= new <= MOST_DRAFTS):
            raise InvalidInput(f"{path} must have counts from 0 to {MOST_DRAFTS}, but {name} is {new:g}.")
        if new < old:
            raise InvalidInput(
                f"{path} must be scraped after {start} and without a restart between, but "
                f"{name}{dict(series[1]) or ''} fell from {old:g} to {new:g}."
            )
        count = round(new - old)
        printed = 0.0 if name.endswith("per_pos") else rounding(old) + rounding(new)
        rises[series] = count, abs(new - old - count) + printed
    found = Counters(rises, path)
    return Counters(rises, path, (*[SINCE_START] * (len(files) == 1), *_rounded(found)))


def _rounded(counters: Counters) -> list[str]:
    slacks = {name: [s for _, s in counters.of(name).values() if s] for name, _ in counters.rises}
    notes = []
    if parts := [name for name, found in slacks.items() if any(slack % 1 for slack in found)]:
        notes.append(f"Counters that are not whole were rounded: {', '.join(parts)}.")
    if said := [f"{name} to within {off:,}" for name, found in slacks.items() if (off := sum(map(int, found)))]:
        notes.append(f"Totals above a million are printed with six digits: {', '.join(said)}.")
    return notes


def _scrape(text: str, path: Path, prefix: str) -> dict[Series, float]:
    """The counters under ``prefix`` with their times of creation; gauges are of the last moment."""
    found = series_of(text, path, prefix).items()
    return {
        (name.removesuffix("_total"), labels): value
        for (name, labels), value in found
        if name.endswith(("_total", "_created"))
    }


def series_of(text: str, source: object, prefix: str) -> dict[Series, float]:
    """All values under ``prefix``, a regular expression, by their names without it and their labels."""
    from prometheus_client.parser import text_string_to_metric_families

    wanted = re.compile(prefix)
    lines = [line.strip() for line in text.splitlines() if wanted.match(line.strip())]
    if len(lines) > MOST_SERIES or len(max(lines, key=len, default="")) > MOST_LINE_CHARS:
        raise InvalidInput(
            f"{source} may have {MOST_SERIES:,} counters of drafts in lines of {MOST_LINE_CHARS:,} characters, but has more."
        )
    try:
        families = text_string_to_metric_families("\n".join(lines) + "\n")
        samples = [(wanted.sub("", sample.name), sample) for family in families for sample in family.samples]
        found = [((name, tuple(sorted(sample.labels.items()))), float(sample.value)) for name, sample in samples]
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise InvalidInput(f"{source} must be a Prometheus exposition, but is not: {error}.") from None
    counted = [series for series, _ in found if series[0].endswith(("_total", "_created"))]
    if len(set(counted)) < len(counted):
        raise InvalidInput(
            f"{source} must be one scrape, but has counters twice: save each scrape in a file of its own."
        )
    if not all(isfinite(value) for _, value in found):
        raise InvalidInput(f"{source} must have finite counts, but has others.")
    return dict(found)
