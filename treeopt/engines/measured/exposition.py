"""Counters in Prometheus expositions: what an engine counted between two scrapes.

Counters run since the start of the server, so one scrape holds its warm-up too. Series are told apart by
their labels, subtracted one by one and then summed: data-parallel engines have a series each, and the
restart of one would hide in the sum.
A counter with a label may be missing until something is counted under it: it is zero.

C++ prints totals with six digits; counters by position are printed in full.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path

from treeopt.engines.measured.files import File
from treeopt.engines.measured.survival import MOST_DRAFTS, MOST_LENGTH, NONE, CountedDrafts, Drafts
from treeopt.errors import InvalidInput

Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels
MOST_SERIES, MOST_LINE_CHARS = 10_000, 4096  # of one scrape: an engine has some hundreds
MOST_ROUNDED = 0.01  # of the drafts, by which a rounded count may be off
COUNTERS = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
)  # vLLM's, llama.cpp's
EMITTED = ("generation_tokens", "time_to_first_token_seconds_count")  # the second are emitted without a step
SINCE_START = (
    "One scrape counts from the start of the server, warm-up included. To measure a stretch of time, "
    "pass two scrapes, one before it and one after, or what Prometheus' increase() gives for it."
)


@dataclass(frozen=True)
class Counters:
    """By how much counters rose, in whole numbers, by name without prefix and `_total`.

    totals    : sums over all engines
    positions : sums over all engines of counters by position, position after position
    off       : by how much rounding may have moved each total
    model     : as the server names it
    """

    totals: Mapping[str, int]
    positions: Mapping[str, list[int]]
    off: Mapping[str, float]
    path: Path
    notes: tuple[str, ...] = ()
    model: str | None = None

    def drafts(self, remedy: str) -> CountedDrafts:
        """The drafts that `COUNTERS` count; ``remedy`` says how else to measure, as `CountedDrafts` says it."""
        path = self.path
        drafts, drafted, accepted = (self.totals.get(name) for name in COUNTERS[:3])
        off, off_drafted, off_accepted = (self.off.get(name, 0.0) for name in COUNTERS[:3])
        reached = self.positions.get(COUNTERS[3], [])
        if drafts == 0 and not any(reached):
            raise InvalidInput(NONE.format(path))
        if drafts is None or not reached:
            raise InvalidInput(
                f"{path} must have counters of drafts and of the tokens accepted at every position ({COUNTERS[3]}), but has not."
            )
        if off > max(1, MOST_ROUNDED * drafts):
            raise InvalidInput(
                f"{path} must have totals that tell its drafts, but {drafts:,} are known to within {off:,.0f} only, since "
                "totals are rounded: restart the server before the measurement, or measure for longer."
            )
        if accepted is not None and abs(sum(reached) - accepted) > off_accepted + len(reached) / 2:
            raise InvalidInput(
                f"{path} must have counts by position that sum to the accepted tokens, but they sum to {sum(reached)}, "
                f"and {accepted} were accepted."
            )
        if 0 < reached[0] - drafts <= off:
            drafts = reached[0]
        if drafted and drafts:  # positions at which nothing was accepted may be left out
            length = min(ceil((drafted - off_drafted) / (drafts + off)), MOST_LENGTH + 1)
            reached = [*reached, *[0] * (length - len(reached))]
        if drafted is not None and abs(drafted - drafts * len(reached)) <= off_drafted + off * len(reached) + 1:
            drafted = drafts * len(reached)
        emitted, firsts = (self.totals.get(name) for name in EMITTED)
        tokens = None if emitted is None or firsts is None else emitted - firsts
        group = Drafts.of(drafts, reached, drafted, path, off=off)
        return CountedDrafts([group], path, self.notes, remedy=remedy, tokens=tokens, requests=firsts, model=self.model)


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
    files: Sequence[File], prefix: str, names: Sequence[str] = (*COUNTERS, *EMITTED), label: str = "position"
) -> Counters | None:
    """Counters of one scrape, or between two of them; None where no file is an exposition.

    prefix : a regular expression · names : of counters that are read · label : that numbers positions
    """
    scrapes = [_scrape(content, path, prefix, names) for content, path in files if is_exposition(content, prefix)]
    if not scrapes:
        return None
    if len(scrapes) < len(files):
        raise InvalidInput("Files of one import must be of one form, but some are expositions and some are not.")
    if len(files) > 2:
        raise InvalidInput(
            f"An exposition is read alone, or as two scrapes, before and after, but got {len(files)} files."
        )
    (_, start), (_, path) = files[0], files[-1]
    before, after = scrapes[0] if len(scrapes) > 1 else {}, scrapes[-1]
    models = {value for _, labels in after for name, value in labels if name in ("model_name", "model")}
    if len(models) > 1:
        raise InvalidInput(f"{path} must be of one model, but has counters of {', '.join(sorted(models))}.")
    totals, off, positions = Counter[str](), defaultdict[str, float](float), defaultdict[str, Counter[int]](Counter)
    for series in {**before, **after}:
        name, labels = series
        begin, end = before.get(series, 0.0), after.get(series, 0.0)
        if end < begin:
            raise InvalidInput(
                f"{path} must be scraped after {start} and without a restart between, but "
                f"{name}{dict(labels) or ''} fell from {begin:g} to {end:g}."
            )
        if (position := dict(labels).get(label)) is None:
            totals[name] += round(end - begin)
            off[name] += six_digits(begin) + six_digits(end)
        else:
            number = int(position) if re.fullmatch(r"\d{1,4}", position, re.ASCII) else -1
            positions[name][number] += round(end - begin)
    by_position = dict[str, list[int]]()
    for name, counts in positions.items():
        by_position[name] = [counts[place] for place in sorted(counts)]
        if sorted(counts) != list(range(len(counts))):
            raise InvalidInput(f"{path} must have every position from 0 on, but has {sorted(counts)}: was it cut off?")
    notes = (SINCE_START,) if len(files) == 1 else ()
    return Counters(totals, by_position, off, path, notes, next(iter(models), None))


def _scrape(text: str, path: Path, prefix: str, names: Sequence[str]) -> dict[Series, float]:
    """The counters that are read, without their times of creation."""
    counts = {}
    for (name, labels), value in series_of(text, path, rf"{prefix}(?=(?:{'|'.join(names)})(?:_total|[ {{]|$))").items():
        if not 0 <= value <= MOST_DRAFTS:
            raise InvalidInput(f"{path} must have counts from 0 to {MOST_DRAFTS}, but {name} is {value:g}.")
        counts[name.removesuffix("_total"), labels] = value
    return counts


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
                if series in values and series[0].endswith("_total"):
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
