"""Looks every fact up in a release, and says by name what is gone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.engines_live.archives import AWAY, NotThereError, Release, newest_archive, release_of
from tests.engines_live.places import NOT_THERE, PLACES, Place
from tests.engines_live.readings import READINGS, Reading, words_read
from tests.engines_live.written import Word, words_of_engine
from treeopt.engines.registry import ENGINES

HEADS = ("engine", "release", "checked against", "facts", "gone")


@dataclass(frozen=True)
class Fact:
    """Something of an engine's that treeopt writes or reads, and what is wrong with it in a release: None for nothing."""

    what: str
    user: str
    where: str
    words: tuple[str, ...]  # each of which it needs
    problem: Callable[[Release], str | None]

    def gone(self, release: Release) -> str | None:
        """The sentence that says so; None where it is there."""
        problem = self.problem(release)
        return problem and f"{self.what} {problem} ({self.user}; looked for in {self.where})"


@dataclass(frozen=True)
class Report:
    """What was found of an engine: its release, the facts looked up, and those gone."""

    engine: str
    release: str
    checked: str
    facts: int = 0
    gone: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return [f"{self.engine} {self.release}: {line}" for line in self.gone]


def place_of(engine: str, word: Word) -> Place | None:
    places = PLACES.get(engine, {})
    return places.get(f"{word.kind} of {word.of}") or places.get(word.kind)


def found_in(release: Release, place: Place) -> frozenset[str]:
    found = (finder(text) for patterns, finder in place.items() for text in release.matching(patterns).values())
    return frozenset().union(*found)


def fact_of(engine: str, word: Word, user: str) -> Fact:
    """That a word stands where the engine defines such words; what is read in a log may be part of a text."""
    place = place_of(engine, word)

    def problem(release: Release) -> str | None:
        if place is None:
            return "has no place to be looked up in"
        try:
            names = found_in(release, place)
        except SyntaxError as error:
            return f"cannot be looked up, since this Python does not read {error.text!r:.60}"
        if word.text in names or (word.kind == "read text" and any(word.text in name for name in names)):
            return None
        is_there = any(map(release.matching, place))
        return "is gone" if is_there else "cannot be looked up, since its file is gone"

    return Fact(str(word), user, " ".join(place or ["places.py"]), (word.text,), problem)


def fact_of_reading(reading: Reading) -> Fact:
    def problem(release: Release) -> str | None:
        said = reading.problem(release.matching(reading.where))
        return said and f"is not read any more: {said}"

    return Fact(reading.what, f"read by {reading.kind}", reading.where, reading.words, problem)


def facts_of(engine: str) -> list[Fact]:
    """All that is written for an engine, and all that is read of it; what is written in two places once."""
    written: dict[tuple[str, str, int], Fact] = {}
    for word, methods in sorted(words_of_engine(engine).items()):
        user = f"written by {engine} {', '.join(sorted(methods))}"
        written.setdefault((word.kind, word.text, id(place_of(engine, word))), fact_of(engine, word, user))
    read = [
        fact_of(engine, word, f"read by {', '.join(sorted(kinds))}")
        for word, kinds in sorted(words_read(engine).items())
    ]
    return [*written.values(), *read, *map(fact_of_reading, READINGS.get(engine, ()))]


def report_of(engine: str, release: Release) -> Report:
    facts = facts_of(engine)
    gone = tuple(line for fact in facts if (line := fact.gone(release)))
    return Report(engine, release.version, checked_of(engine), len(facts), gone)


def checked_of(engine: str) -> str:
    """The releases that the table's living methods were checked against."""
    return ", ".join(dict.fromkeys(m.checked for m in ENGINES[engine].methods if m.status == "live"))


def look(engine: str, version: str | None = None) -> Report:
    """An engine's newest release, or the one asked for, looked through; without facts where there is none to be had."""
    package, checked = ENGINES[engine].package, checked_of(engine)
    assert package is not None
    try:
        if engine in NOT_THERE:
            return Report(engine, f"{newest_archive(package, version)[0]}, but {NOT_THERE[engine]}", checked)
        return report_of(engine, release_of(package, version))
    except AWAY as error:
        said = str(error) if isinstance(error, NotThereError) else f"the index was not reached: {error}"
        return Report(engine, said, checked)


def table(reports: Iterable[Report]) -> str:
    """The reports as a table; a release that is not the one checked is marked."""
    rows = [HEADS]
    for one in reports:
        same = re.search(rf"(?<![\d.]){re.escape(one.release)}(?![\d.])", one.checked)
        checked = one.checked if same or not one.facts else f"{one.checked} (differs)"
        counts = (str(one.facts), str(len(one.gone))) if one.facts else ("–", "–")
        rows.append((one.engine, one.release, checked, *counts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
