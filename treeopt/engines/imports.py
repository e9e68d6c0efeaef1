"""Measurements that other tools wrote, as calibrations and traces.

A kind is recognised by what the file holds. Where ranks are known state by state a `RankTrace` comes
out, so that trees can be replayed; else a `Calibration` of marginal counts, or of those that a chain needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treeopt.engines.measured.files import Found, load_file
from treeopt.engines.measured.survival import CountedDrafts
from treeopt.engines.registry import KINDS
from treeopt.errors import InvalidInput
from treeopt.records.drafters import COUNTED


def read_measurement(
    paths: Path | Sequence[Path], kind: str | None = None, *, drafter: str | None = None, **options: int | str | None
) -> tuple[str, Found]:
    """The measurement in files, and their kind: the one of `KINDS` that is asked for, or that the first file tells.

    ``drafter`` is the kind in `COUNTED` that made the drafts.
    ``options`` that are not None go to the kind's reader; one that it does not take is refused.
    """
    if kind is not None and kind not in KINDS:
        raise InvalidInput(f"`kind` must be one of {', '.join(KINDS)}, but got {kind!r}.")
    if drafter is not None and drafter not in COUNTED:
        raise InvalidInput(f"`drafter` must be one of {', '.join(COUNTED)}, but got {drafter!r}.")
    paths = [paths] if isinstance(paths, Path) else list(paths)
    contents = [load_file(path) for path in paths]
    if kind is None:
        kind = next((name for name, known in KINDS.items() if known.matches(contents[0])), None)
    if kind is None:
        raise InvalidInput(
            f"{paths[0]} must be of a kind that treeopt import knows ({', '.join(KINDS)}), but looks like none: "
            "say which with `kind`."
        )
    known = KINDS[kind]
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in known.options:
            raise InvalidInput(f"`{name}` does not go with a file of the kind {kind}: leave it out.")
    for content, path in zip(contents, paths, strict=True):
        if not known.matches(content):
            raise InvalidInput(f"{path} must hold {known.needed}, but holds none.")
    if not known.takes_several and len(paths) > 1:
        raise InvalidInput(f"A file of the kind {kind} is imported alone, but got {len(paths)} files.")
    where = (list(zip(contents, paths, strict=True)),) if known.takes_several else (contents[0], paths[0])
    found = known.read(*where, **given)
    return kind, found.calibration(drafter) if isinstance(found, CountedDrafts) else found
