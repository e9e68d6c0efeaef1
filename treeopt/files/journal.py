"""The finished blocks of a measurement that is still running, so that a killed one goes on.

A journal is a folder ``NAME.partial`` of numbered files, and a key that says what is being measured. The same command
continues behind its last block; the journal of anything else is thrown away. A block appears under its name only when it is
whole (`treeopt.files.writing`), so a block that is there is finished.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from treeopt.errors import InvalidInput
from treeopt.files import storage, writing

Make = Callable[[Sequence[int]], Iterable[tuple[int, bytes]]]  # blocks by their numbers, in any order
Say = Callable[[str], None]
Advance = Callable[[float], None]


class Journal:
    """Numbered blocks of one measurement, kept under ``folder`` until `discard` is called.

    key      all that the blocks depend on, as plain JSON
    suffix   of the block files, ".npz" or ".json"
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], suffix: str = ".json") -> None:
        self.folder, self.suffix = folder, suffix
        text = storage.to_json(key)
        try:
            is_same = storage.load_json(folder / "key.json") == json.loads(text)
        except InvalidInput:
            is_same = False
        if not is_same:
            writing.discard(folder)
            writing.write_text(folder / "key.json", text)

    def block(self, number: int) -> Path:
        """The file of a block."""
        return self.folder / f"{number:06d}{self.suffix}"

    def is_finished(self, number: int) -> bool:
        return self.block(number).is_file()

    def finished(self) -> int:
        """How many blocks are finished, counted from the first to the first gap."""
        return next(number for number in count() if not self.is_finished(number))

    def write(self, number: int, content: bytes) -> None:
        with writing.atomic_writer(self.block(number)) as stream:
            stream.write(content)

    def fill(self, sizes: Mapping[int, int], make: Make, advance: Advance, say: Say, *, in_parts: bool = False) -> None:
        """Make and write the blocks that are not finished.

        sizes    : size of every block; ``advance`` is called with it when the block is there
        make     : makes the blocks of some numbers, in any order
        in_parts : whether ``make`` calls ``advance`` itself while it makes a block
        """
        missing = [number for number in sizes if not self.is_finished(number)]
        if len(missing) < len(sizes):
            say(f"Continuing after {len(sizes) - len(missing)} of {len(sizes)} blocks.")
            advance(sum(sizes.values()) - sum(sizes[number] for number in missing))
        for number, content in make(missing) if missing else ():
            self.write(number, content)
            advance(0 if in_parts else sizes[number])

    def append(self, document: Mapping[str, Any]) -> None:
        """Write the next block of a journal of JSON."""
        self.write(self.finished(), storage.to_json(document).encode())

    def documents(self) -> list[Any]:
        """The finished blocks of a journal of JSON."""
        return [storage.load_json(self.block(number)) for number in range(self.finished())]
