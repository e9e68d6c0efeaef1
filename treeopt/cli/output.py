"""What commands print: results as a table or as JSON on stdout, notes on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.errors import spoken

if TYPE_CHECKING:
    from treeopt.planning.compared import Compared, DraftersCompared, GroupsCompared


def show_result(document: Any, table: Any, as_json: bool) -> None:
    """Print the JSON document or the table; a text as it is."""
    from treeopt.files.storage import to_json
    from treeopt.report.terminal import out

    if as_json or isinstance(table, str):
        click.echo(to_json(document) if as_json else table)
    else:
        out(table)


def show_files(paths: Sequence[Path], notes: Sequence[str], as_json: bool, *, command: str | None = None) -> None:
    """Print what was written and the command that uses it, and the notes to stderr."""
    from treeopt.report.terminal import note

    names, notes = [str(path) for path in paths], [spoken(text) for text in notes]
    for text in notes:
        note(text)
    document = {"files": names, "notes": notes} | ({"command": command} if command else {})
    show_result(document, "\n".join([*names, *([command] if command else [])]), as_json)


def show_comparison(found: Compared | GroupsCompared | DraftersCompared, as_json: bool) -> None:
    """Print a comparison with its verdict, and its notes to stderr."""
    from treeopt.files.storage import schema
    from treeopt.report.compared_table import compared_table, verdict
    from treeopt.report.terminal import note

    for text in getattr(found, "notes", ()):
        note(text)
    document = {"schema": schema("comparison"), "verdict": verdict(found), **found.document()}
    show_result(document, compared_table(found), as_json)
