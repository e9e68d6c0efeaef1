"""treeopt status: what the run directory holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from treeopt.cli.options import command, run_directory, show_result

if TYPE_CHECKING:
    from treeopt.records.rundir import RunDirectory


@command()
@run_directory(writes=False)
def status(run: RunDirectory, as_json: bool) -> None:
    """Say what the run directory holds, and what to do next.

    A file is stale if what it was made from has changed since. A file that cannot be read is named.

    \b
    Example:
        treeopt status
        treeopt status --run other-run
    """
    from treeopt.report.status import status
    from treeopt.report.status_table import status_table

    found = status(run)
    show_result(asdict(found), status_table(found), as_json)
