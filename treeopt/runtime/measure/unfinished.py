"""A block of a calibration that is not finished, kept as it stands: every half minute, where blocks take so long.

To the last bit, what follows depends on the cached keys and on which rows are decoded together. All of that is kept, so a
run that goes on ends in the same bytes as one that was never stopped, whenever it was kept last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from treeopt.errors import InvalidInput
from treeopt.files.journal import Journal
from treeopt.files.writing import atomic_writer, discard

EVERY_S = 30.0  # of work that a killed run loses at most
SHARE = 0.05  # of the time, that keeping takes at most
MOST_BYTES = 2**30  # of cached keys and values; a larger state is not kept


class Unfinished:
    """The last state of one block, in a folder of its own; that of any other block is thrown away.

    key  : all that the state depends on, as plain JSON
    tell : takes the sentence that says why nothing is kept any more
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], tell: Callable[[str], None] = lambda said: None) -> None:
        self._journal = Journal(folder, key, ".pt")
        self._last, self._cost, self._tell, self._failed = time.monotonic(), 0.0, tell, False

    def is_due(self) -> bool:
        """Whether to keep the state now."""
        return not self._failed and time.monotonic() - self._last >= max(EVERY_S, self._cost / SHARE)

    def keep(self, state: Mapping[str, Any]) -> None:
        """Write a state of plain values and tensors; the one before goes when it is whole.

        Where it cannot be written, that is told, and nothing is kept any more: the block itself goes on.
        """
        began, numbers = time.monotonic(), self._numbers()
        number = 1 + max(numbers, default=-1)
        try:
            with atomic_writer(self._journal.block(number)) as stream:
                torch.save(dict(state), stream)
            self._journal.finish(number)
            for old in numbers:
                self._journal.block(old).unlink(missing_ok=True)
        except InvalidInput as error:
            self._failed = True
            self._tell(f"{error} The block goes on; if it is stopped, it begins anew.")
            with suppress(InvalidInput):
                discard(self._journal.folder)
        self._last = time.monotonic()
        self._cost = self._last - began

    def read(self) -> dict[str, Any] | None:
        """The last state that is whole; None where there is none."""
        for number in sorted(self._numbers(), reverse=True):
            if self._journal.is_finished(number):
                return dict(torch.load(self._journal.block(number), map_location="cpu", weights_only=True))
        return None

    def _numbers(self) -> list[int]:
        return [int(file.stem) for file in self._journal.folder.glob("*.pt") if file.stem.isdecimal()]
