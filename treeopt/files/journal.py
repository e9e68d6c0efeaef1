"""The finished blocks of a measurement that is still running, so that a killed one goes on.

A journal is a folder ``NAME.partial`` of numbered files, each written whole or not at all, and a key
that says what is being measured. The same command finds the journal and continues behind its last
block; the journal of anything else is thrown away. It is gone when the result is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.files import storage
from treeopt.files.writing import discard


class Journal:
    """Numbered blocks of one measurement, kept under ``folder`` until `discard` is called.

    key      all that the blocks depend on, as plain JSON
    suffix   of the block files, ".npz" or ".json"
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], suffix: str = ".json") -> None:
        self.folder, self.suffix = folder, suffix
        wanted = json.loads(storage.to_json(key))
        try:
            known = storage.load_json(folder / "key.json")
        except InvalidInput:
            known = None
        if known != wanted:
            discard(folder)
            storage.write_text(folder / "key.json", storage.to_json(wanted))

    def block(self, number: int) -> Path:
        """The file of a block."""
        return self.folder / f"{number:06d}{self.suffix}"

    def finished(self) -> int:
        """How many blocks, from the first on, are there."""
        number = 0
        while self.block(number).exists():
            number += 1
        return number

    def append(self, document: Mapping[str, Any]) -> None:
        """Write the next block of a journal of JSON."""
        storage.write_text(self.block(self.finished()), storage.to_json(document))

    def documents(self) -> list[dict[str, Any]]:
        """All blocks of a journal of JSON."""
        return [storage.load_json(self.block(number)) for number in range(self.finished())]
