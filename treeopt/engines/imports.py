"""Measurements that other tools wrote, as calibrations and traces.

A kind is recognised by what the file holds. Where ranks are known state by state a `RankTrace` comes
out, so that trees can be replayed; else a `Calibration` of marginal counts, or of those that a chain needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from treeopt.engines.base import Kind
from treeopt.engines.measured import rates, traces
from treeopt.engines.measured.files import Found, load_file
from treeopt.engines.measured.survival import CountedDrafts
from treeopt.engines.registry import ENGINES
from treeopt.errors import InvalidInput, meant
from treeopt.records.drafters import COUNTED

FORMATS = {  # of no engine
    "medusa-pt": Kind("one table of hits a head, as Medusa's heads_accuracy.py saves it", traces.is_hits, traces.read_hits),
    "recall": Kind('{"recall": ...} or heads with "recall@1"', rates.is_recall, rates.read_recall, ("trials",)),
    "csv": Kind("CSV with a column 'head' in its first line", rates.is_table, rates.read_table, ("trials",)),
    "ranks": Kind('{"ranks": [[...], ...]} in every line', traces.is_ranks, traces.read_ranks),
}  # fmt: skip
_OF_ENGINES = {name: kind for engine in ENGINES.values() for name, kind in engine.imports.items()}
# By --from's names; the first that a file matches is taken.
KINDS: dict[str, Kind] = FORMATS | dict(sorted(_OF_ENGINES.items(), key=lambda item: item[1].takes_others))


def read_measurement(
    paths: Path | Sequence[Path], kind: str | None = None, *, drafter: str | None = None, **options: int | str | None
) -> tuple[str, Found]:
    """The kind of the files and the measurement that they hold; by default the first kind of `KINDS` that the first file matches.

    ``drafter`` is the kind in `COUNTED` that made the drafts; where it is None, the one that the files name, if they do.
    ``options`` that are not None go to the kind's reader; one that it does not take is refused.
    """
    for name, asked, names in (("kind", kind, KINDS), ("drafter", drafter, COUNTED)):
        if asked is not None and asked not in names:
            raise InvalidInput(f"`{name}` must be one of {', '.join(names)}, but got {asked!r}.{meant(asked, names)}")
    paths = [paths] if isinstance(paths, Path) else list(paths)
    files = [(load_file(path), path) for path in paths]
    if kind is None:
        kind = next((name for name, known in KINDS.items() if known.matches(files[0][0])), None)
    if kind is None:
        raise InvalidInput(
            f"{paths[0]} must be of a kind that treeopt import knows ({', '.join(KINDS)}), but looks like none: "
            "say which with `kind`."
        )
    known = KINDS[kind]
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() - set(known.options):
        raise InvalidInput(f"`{name}` does not go with a file of the kind {kind}: leave it out.")
    for content, path in files:
        if not known.matches(content):
            raise InvalidInput(f"{path} must hold {known.needed}, but holds none.")
    if kind in FORMATS and len(paths) > 1:
        raise InvalidInput(f"A file of the kind {kind} is imported alone, but got {len(paths)} files.")
    found = known.read(*files[0], **given) if kind in FORMATS else known.read(files)
    return kind, found.calibration(drafter) if isinstance(found, CountedDrafts) else replace(found, drafter=drafter)
