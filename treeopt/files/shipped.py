"""Calibrations and profiles that are shipped."""

from __future__ import annotations

from pathlib import Path

from treeopt.errors import InvalidInput, meant


def shipped(kind: str) -> dict[str, Path]:
    """Name to file of all that is shipped of a kind ("calibration", "profiles"), in the wheel or in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "shipped" / kind
    folder = installed if installed.is_dir() else package.parent / kind
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def find(kind: str, path_or_name: str) -> Path:
    """A file given by path, or a shipped one by its name; InvalidInput if there is neither."""
    path = Path(path_or_name)
    if path.exists():
        return path
    known = shipped(kind)
    if path_or_name not in known:
        names = ", ".join(known) or "none"
        raise InvalidInput(
            f"There is no file {path_or_name}, nor a shipped one of that name ({names}).{meant(path_or_name, known)}"
        )
    return known[path_or_name]
