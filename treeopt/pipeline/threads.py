"""The threads of a run: chosen once by timing plain steps, and the same in all that is measured after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from treeopt.errors import TreeoptError
from treeopt.files import storage
from treeopt.files.provenance import machine
from treeopt.records.rundir import RunDirectory
from treeopt.report.terminal import note, progress

if TYPE_CHECKING:
    from treeopt.runtime.session import Session

_chosen: int | None = None  # the number that torch was given here; any other is the user's


def settle_threads(run: RunDirectory, session: Session) -> None:
    """Compute with the run's number of threads, or choose it; a number that the user said stays.

    Sums are rounded otherwise with other threads, so a calibration that was killed goes on with the number that its
    journal has.
    """
    if session.target.device.type != "cpu":
        return
    import torch

    from treeopt.runtime.measure import threads

    global _chosen
    now, known = torch.get_num_threads(), next(recorded_threads(run), None)
    if "threads" in session.source or (now != _chosen and threads.are_said()):
        if known is not None and known != now:
            note(
                f"This computes with {now} thread{'s' * (now > 1)}, but the run was measured with {known}: pass `threads={known}` for the same."
            )
        return
    if known is None and now != _chosen:
        with progress("Choosing threads", None):
            known = threads.choose_threads(session.setup(1), [c.first for c in session.prompts.conversations[:4]])
    _chosen = min(known or now, threads.cores())
    torch.set_num_threads(_chosen)


def recorded_threads(run: RunDirectory) -> Iterator[int]:
    """The numbers of threads that the run was measured with on this machine: timings first, then what is unfinished."""
    records: list[Mapping[str, Any]] = []
    try:
        records += [run.read_profile().info.get("provenance") or {}] if run.profile.exists() else []
        records += [run.read_trace().meta.get("provenance") or {}] if run.trace.exists() else []
    except TreeoptError:
        pass  # whoever needs the file says what is wrong with it
    for file in sorted(run.path.glob("*.partial/**/key.json")):
        try:
            key = storage.load_json(file)
        except TreeoptError:
            continue
        records += [part for part in (key.get("provenance"), key) if isinstance(part, dict)] if key else []
    for record in records:
        n = record.get("threads")
        if isinstance(n, int) and n >= 1 and record.get("machine") == machine():
            yield n
