"""Measurements that other tools wrote, as calibrations.

A file's content tells its kind. An engine gives counted drafts (counters, or histograms of requests) or printed rates, which
become the `Calibration` of a chain; tables become one of heads.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeopt.engines.base import Kind
from treeopt.engines.measured import rates as printed_rates
from treeopt.engines.measured import tables
from treeopt.engines.measured.files import Measurement, load_file
from treeopt.engines.measured.rates import MEANINGS, Meaning
from treeopt.engines.registry import ENGINES, engine_named
from treeopt.errors import InvalidInput, Unsupported, meant
from treeopt.records.drafters import COUNTED

ARMS, SHARDS, TREE = "arms", "shards", "tree"  # what treeopt import reads besides measurements
FORMATS = {  # kinds of files that are of no engine
    "csv": Kind("CSV with a column 'head' in its first line", tables.is_table, tables.read_table, ("trials", "rates")),
    "rates": Kind("the rates by position of a training log of EAGLE", printed_rates.is_rates, printed_rates.read_rates),
}  # fmt: skip
_OF_ENGINES = {name: kind for engine in ENGINES.values() for name, kind in engine.imports.items()}
# By --from's names; the first that a file matches is taken.
KINDS: dict[str, Kind] = FORMATS | dict(sorted(_OF_ENGINES.items(), key=lambda item: item[1].takes_others))


def kind_of_file(path: Path) -> str | None:
    """The first kind that a file's content matches; None for a folder, and for a file that is of no kind."""
    if path.is_dir():
        return None
    content = load_file(path)
    return next((name for name, kind in KINDS.items() if kind.matches(content)), None)


def kinds_named(name: str) -> Mapping[str, Kind]:
    """The kinds that a name means: that kind, or those of an engine."""
    if name in KINDS:
        return {name: KINDS[name]}
    engines = [engine.name for engine in ENGINES.values() if engine.imports]
    with suppress(Unsupported):
        return ENGINES[engine_named(name, engines)].imports
    names = (*KINDS, ARMS, SHARDS, TREE)
    raise InvalidInput(f"`kind` must be one of {', '.join(names)}, but got {name!r}.{meant(name, names)}")


def read_measurement(
    paths: Path | Sequence[Path],
    kind: str | None = None,
    *,
    drafter: str | None = None,
    trials: int | None = None,
    rates: Meaning | None = None,
    tokens: int | None = None,
) -> tuple[str, Measurement]:
    """The kind of the files, and the measurement that they hold.

    kind    : by default the first kind of `KINDS` that a file matches
    drafter : the kind in `COUNTED` that made the drafts; by default the one that the files name, if they do
    trials  : of every head, or drafts, for rates without counts
    rates   : what such rates are
    tokens  : emitted by all steps of counted drafts, for steps without a draft
    """
    options: dict[str, Any] = {"trials": trials, "rates": rates, "tokens": tokens}
    known: list[tuple[str, str | None, Sequence[str]]]
    known = [("drafter", drafter, tuple(COUNTED)), ("rates", rates, tuple(MEANINGS))]
    for parameter, value, names in known:
        if value is not None and value not in names:
            raise InvalidInput(
                f"`{parameter}` must be one of {', '.join(names)}, but got {value!r}.{meant(value, names)}"
            )
    kinds = KINDS if kind is None else kinds_named(kind)
    paths = [paths] if isinstance(paths, Path) else list(paths)
    files = [(load_file(path), path) for path in paths]
    matching = [name for content, _ in files for name in kinds if KINDS[name].matches(content)]
    if kind is None and not matching:
        raise InvalidInput(
            f"{paths[0]} must be of a kind that treeopt import knows ({', '.join(KINDS)}), but looks like none: "
            "say which with `kind`."
        )
    kind = [*matching, *kinds][0]
    reader = KINDS[kind]
    for content, path in files:
        if not reader.matches(content):
            raise InvalidInput(f"{path} must hold {reader.needed}, but holds none.")
    if kind in FORMATS and len(paths) > 1:
        raise InvalidInput(f"A file of the kind {kind} is imported alone, but got {len(paths)} files.")
    of_reader = {name: options[name] for name in reader.options}
    found = reader.read(*files[0], **of_reader) if kind in FORMATS else reader.read(files)
    heeded = reader.options if isinstance(found, Measurement) else found.options
    for name, value in options.items():
        if value is not None and name not in heeded:
            raise InvalidInput(f"`{name}` does not go with what {paths[-1]} holds: leave it out.")
    if isinstance(found, Measurement):
        return kind, replace(found, drafter=drafter)
    return kind, found.measurement(drafter, **{name: options[name] for name in heeded})
