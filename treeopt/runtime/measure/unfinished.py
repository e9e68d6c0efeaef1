"""A block of a calibration that is not finished, kept as it stands: every half minute, where blocks take so long.

To the last bit, what follows depends on the cached keys and on which rows are decoded together. All of that is kept, so a
run that goes on ends in the same bytes as one that was never stopped, whenever it was kept last.
"""

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


class LastState:
    """The last state of a long work, plain values and tensors, in a folder of its own; that of other work is thrown away.

    key : all that the state depends on, as plain JSON
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self._journal = Journal(folder, key, ".pt")

    def write(self, number: int, state: Mapping[str, Any]) -> None:
        """Keep a state under a number above that of the one before, which goes when this one is whole."""
        with atomic_writer(self._journal.block(number)) as stream:
            torch.save(dict(state), stream)
        self._journal.finish(number)
        for file in self._journal.folder.glob("*.pt*"):
            if not file.name.startswith(self._journal.block(number).name):
                file.unlink(missing_ok=True)

    def last(self) -> int | None:
        """The number of the last state that is whole; None where there is none."""
        return max(filter(self._journal.is_finished, self._numbers()), default=None)

    def read(self) -> Mapping[str, Any] | None:
        number = self.last()
        if number is None:
            return None
        return dict(torch.load(self._journal.block(number), map_location="cpu", weights_only=True))

    def _numbers(self) -> list[int]:
        return [int(file.stem) for file in self._journal.folder.glob("*.pt") if file.stem.isdecimal()]


class Unfinished(LastState):
    """The last state of one block, kept from time to time.

    tell : takes the sentence that says why nothing is kept any more
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], tell: Callable[[str], None] = lambda said: None) -> None:
        super().__init__(folder, key)
        self._last, self._cost, self._tell, self._failed = time.monotonic(), 0.0, tell, False

    def is_due(self) -> bool:
        return not self._failed and time.monotonic() - self._last >= max(EVERY_S, self._cost / SHARE)

    def keep(self, state: Mapping[str, Any]) -> None:
        """Write a state. Where that cannot be done, it is told, and nothing is kept any more: the block itself goes on."""
        began = time.monotonic()
        try:
            self.write(1 + max(self._numbers(), default=-1), state)
        except InvalidInput as error:
            self._failed = True
            self._tell(f"{error} The block goes on; if it is stopped, it begins anew.")
            with suppress(InvalidInput):
                discard(self._journal.folder)
        self._last = time.monotonic()
        self._cost = self._last - began
