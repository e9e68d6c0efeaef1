"""Counters in Prometheus expositions: what an engine counted between two scrapes.

Counters run since the start of the server, so one scrape holds its warm-up too. Series are told apart by
their labels, subtracted one by one and then summed: data-parallel engines have a series each, and the
restart of one would hide in the sum. The `_created` series are times, not counts; they tell a restart.

C++ prints totals with six digits; counters by position are printed in full.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path

from treeopt.engines.measured.files import File
from treeopt.engines.measured.survival import MOST_DRAFTS, NONE, CountedDrafts, group_of
from treeopt.errors import InvalidInput

Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels
MOST_SERIES, MOST_LINE_CHARS = 10_000, 4096  # of one scrape: an engine has some hundreds
SUMS = 1e-6  # by which sums of what was rounded may be off
MOST_ROUNDED = 0.01  # of the drafts, by which a rounded count may be off
COUNTERS = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
)  # vLLM's, llama.cpp's
SINCE_START = (
    "One scrape counts from the start of the server, warm-up included. To measure a stretch of time, "
    "pass two scrapes: one before it and one after."
)


@dataclass(frozen=True)
class Counters:
    """By how much counters rose, as whole numbers, and by how much each of these may be off.

    Names are without prefix and `_total`.
    """

    rises: dict[Series, tuple[int, float]]
    path: Path
    notes: tuple[str, ...] = ()

    def of(self, name: str) -> dict[Series, tuple[int, float]]:
        return {series: rise for series, rise in self.rises.items() if series[0] == name}

    def sum(self, name: str) -> int | None:
        """The sum over all engines; None where there is no such counter."""
        rises = self.of(name).values()
        return sum(count for count, _ in rises) if rises else None

    def slack(self, name: str) -> float:
        """By how much the sum may be off."""
        return sum(slack for _, slack in self.of(name).values())

    def by_position(self, name: str, label: str) -> list[int]:
        """(K,) sums over all engines, position after position."""
        sums: dict[int, int] = {}
        for (_, labels), (count, _) in self.of(name).items():
            position = dict(labels).get(label, "")
            if not re.fullmatch(r"\d{1,4}", position, re.ASCII):
                raise InvalidInput(
                    f"{self.path} must number positions 0, 1, ... under {label!r}, but has {position!r:.40}."
                )
            sums[int(position)] = sums.get(int(position), 0) + count
        if sorted(sums) != list(range(len(sums))):
            raise InvalidInput(
                f"{self.path} must have every position from 0 on, but has {sorted(sums)}: was it cut off?"
            )
        return [sums[position] for position in sorted(sums)]

    def drafts(self, needed: str, remedy: str) -> CountedDrafts:
        """The drafts that `COUNTERS` count.

        needed : what the file must have, for an error · remedy : how else to measure, as `CountedDrafts` says it
        """
        path = self.path
        drafts, drafted, accepted = (self.sum(name) for name in COUNTERS[:3])
        reached = self.by_position(COUNTERS[3], "position")
        if drafts == 0 and not any(reached):
            raise InvalidInput(NONE.format(path))
        if drafts is None or not reached:
            raise InvalidInput(f"{path} must have num_drafts and {needed}, but has not.")
        off, slack = (self.slack(name) for name in COUNTERS[:2])
        if off > max(1, MOST_ROUNDED * drafts):
            raise InvalidInput(
                f"{path} must have totals that tell its drafts, but {drafts:,} are known to within {off:,.0f} only, since "
                "totals are rounded: restart the server before the measurement, or measure for longer."
            )
        if 0 < reached[0] - drafts <= off + SUMS:
            drafts = reached[0]
        if accepted is not None and abs(sum(reached) - accepted) <= sum(map(self.slack, COUNTERS[2:])) + SUMS:
            accepted = None
        full = drafts * len(reached)
        if drafted is not None and abs(drafted - full) <= slack + len(reached) * off + SUMS:
            drafted = full
        group = group_of(drafts, reached, drafted, path, accepted, off=ceil(off), slack=ceil(slack))
        return CountedDrafts([group], path, self.notes, remedy=remedy, off=off / max(drafts, 1))


def is_exposition(content: object, prefix: str) -> bool:
    """Whether a file is a text with lines under ``prefix``, a regular expression."""
    return isinstance(content, str) and re.search(f"^{prefix}", content, re.MULTILINE) is not None


def six_digits(value: float) -> float:
    """By how much a number may be off that C++ printed with its usual six digits.

    >>> six_digits(999999), six_digits(1234570), six_digits(1234567)
    (0.0, 5.0, 0.0)
    """
    return 0.5 * 10.0 ** (len(str(int(value))) - 6) if value >= 1e6 and float(f"{value:.6g}") == value else 0.0


def counters_among(files: Sequence[File], prefix: str, names: Collection[str] = COUNTERS) -> Counters | None:
    """Counters of one scrape, or between two of them; None where no file is an exposition.

    prefix : a regular expression · names : of counters that are read
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
    labels = {label for scrape in scrapes for _, labels in scrape for label in labels}
    models = {value for name, value in labels if name in ("model_name", "model")}
    if len(models) > 1:
        raise InvalidInput(f"{path} must be of one model, but has counters of {', '.join(sorted(models))}.")
    before, after = scrapes[0] if len(scrapes) > 1 else {}, scrapes[-1]
    rises = {}
    for series in {**before, **after}:
        name = series[0]
        if name.removesuffix("_created") not in names:
            continue
        if not name.endswith("_created"):
            rises[series] = _rise(series, before.get(series, 0.0), after.get(series, 0.0), start, path)
        elif series in before and series in after and before[series] != after[series]:
            raise InvalidInput(f"{path} must be scraped without a restart since {start}: {name} began to count anew.")
    return Counters(rises, path, (SINCE_START,) if len(files) == 1 else ())


def _rise(series: Series, before: float, after: float, start: Path, path: Path) -> tuple[int, float]:
    """The whole number that a counter rose by, and by how much it may be off."""
    name, labels = series
    if not (0 <= before <= MOST_DRAFTS and 0 <= after <= MOST_DRAFTS):
        raise InvalidInput(f"{path} must have counts from 0 to {MOST_DRAFTS}, but {name} is {after:g}.")
    if after < before:
        raise InvalidInput(
            f"{path} must be scraped after {start} and without a restart between, but "
            f"{name}{dict(labels) or ''} fell from {before:g} to {after:g}."
        )
    count = round(after - before)
    printed = 0.0 if name.endswith("per_pos") else six_digits(before) + six_digits(after)
    return count, abs(after - before - count) + printed


def _scrape(text: str, path: Path, prefix: str) -> dict[Series, float]:
    """The counters under ``prefix`` with their times of creation; gauges are of the last moment."""
    return {
        (name.removesuffix("_total"), labels): value
        for (name, labels), value in series_of(text, path, prefix).items()
        if name.endswith(("_total", "_created"))
    }


def series_of(text: str, source: object, prefix: str) -> dict[Series, float]:
    """All values under ``prefix``, a regular expression, by their names without it and their labels."""
    from prometheus_client.parser import text_string_to_metric_families

    begins = re.compile(prefix)
    lines = [line.strip() for line in text.splitlines() if begins.match(line.strip())]
    if len(lines) > MOST_SERIES or len(max(lines, key=len, default="")) > MOST_LINE_CHARS:
        raise InvalidInput(
            f"{source} may have {MOST_SERIES:,} counters of drafts in lines of {MOST_LINE_CHARS:,} characters, but has more."
        )
    values: dict[Series, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                series = begins.sub("", sample.name), tuple(sorted(sample.labels.items()))
                if series in values and series[0].endswith(("_total", "_created")):
                    raise InvalidInput(
                        f"{source} must be one scrape, but has counters twice: save each scrape in a file of its own."
                    )
                values[series] = float(sample.value)
    except InvalidInput:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise InvalidInput(f"{source} must be a Prometheus exposition, but is not: {error}.") from None
    if not all(map(isfinite, values.values())):
        raise InvalidInput(f"{source} must have finite counts, but has others.")
    return values
