"""Measurements that other tools wrote, as calibrations and traces.

A file's content tells its kind. A file with the ranks of every state becomes a `RankTrace`, which can be replayed. Another
becomes a `Calibration` of marginal counts, or of the counts of a chain.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from treeopt.engines.base import Kind
from treeopt.engines.measured import rates, traces
from treeopt.engines.measured.files import Measurement, load_file
from treeopt.engines.measured.survival import CountedDrafts
from treeopt.engines.registry import ENGINES
from treeopt.errors import InvalidInput, meant
from treeopt.records.drafters import COUNTED

FORMATS = {  # kinds of files that are of no engine
    "medusa-pt": Kind("one table of hits a head, as Medusa's heads_accuracy.py saves it", traces.is_hits, traces.read_hits),
    "csv": Kind("CSV with a column 'head' in its first line", rates.is_table, rates.read_table, ("trials",)),
    "ranks": Kind('{"ranks": [[...], ...]} in every line', traces.is_ranks, traces.read_ranks),
}  # fmt: skip
_OF_ENGINES = {name: kind for engine in ENGINES.values() for name, kind in engine.imports.items()}
# By --from's names; the first that a file matches is taken.
KINDS: dict[str, Kind] = FORMATS | dict(sorted(_OF_ENGINES.items(), key=lambda item: item[1].takes_others))


def kind_of(content: object) -> str | None:
    """The first kind that a file's content matches; None where it matches none."""
    return next((name for name, candidate in KINDS.items() if candidate.matches(content)), None)


def kind_of_file(path: Path) -> str | None:
    """The kind of a file; None for a folder, and for a file that is of no kind."""
    return None if path.is_dir() else kind_of(load_file(path))


def read_measurement(
    paths: Path | Sequence[Path], kind: str | None = None, *, drafter: str | None = None, **options: int | str | None
) -> tuple[str, Measurement]:
    """The kind of the files, and the measurement that they hold.

    kind    : by default the first kind of `KINDS` that the first file matches
    drafter : the kind in `COUNTED` that made the drafts; by default the one that the files name, if they do
    options : the kind's reader gets those that are not None; an option that it does not take is refused
    """
    for parameter, value, names in (("kind", kind, KINDS), ("drafter", drafter, COUNTED)):
        if value is not None and value not in names:
            raise InvalidInput(
                f"`{parameter}` must be one of {', '.join(names)}, but got {value!r}.{meant(value, names)}"
            )
    paths = [paths] if isinstance(paths, Path) else list(paths)
    files = [(load_file(path), path) for path in paths]
    if kind is None:
        kind = kind_of(files[0][0])
    if kind is None:
        raise InvalidInput(
            f"{paths[0]} must be of a kind that treeopt import knows ({', '.join(KINDS)}), but looks like none: "
            "say which with `kind`."
        )
    reader = KINDS[kind]
    of_reader = {name: value for name, value in options.items() if value is not None}
    for name in of_reader.keys() - set(reader.options):
        raise InvalidInput(f"`{name}` does not go with a file of the kind {kind}: leave it out.")
    for content, path in files:
        if not reader.matches(content):
            raise InvalidInput(f"{path} must hold {reader.needed}, but holds none.")
    if kind in FORMATS and len(paths) > 1:
        raise InvalidInput(f"A file of the kind {kind} is imported alone, but got {len(paths)} files.")
    measurement = reader.read(*files[0], **of_reader) if kind in FORMATS else reader.read(files)
    if isinstance(measurement, CountedDrafts):
        return kind, measurement.calibration(drafter)
    return kind, replace(measurement, drafter=drafter)
