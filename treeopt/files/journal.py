"""The finished blocks of a measurement that is still running, so that a killed one goes on.

A journal is a folder ``NAME.partial`` of numbered files, and a key that says what is being measured. The same command
continues behind its last block; the journal of anything else is thrown away. A block is finished when its hash, together
with the key's, stands beside it: what was damaged since, or comes from another journal, is measured again.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
        self.key = wanted = json.loads(storage.to_json(key))
        try:
            known = storage.load_json(folder / "key.json")
        except InvalidInput:
            known = None
        if known != wanted:
            writing.discard(folder)
            writing.write_text(folder / "key.json", storage.to_json(wanted))
        self._whole: set[int] = set()
        self._key_hash = hashlib.sha256(storage.to_json(wanted).encode()).hexdigest()

    def block(self, number: int) -> Path:
        return self.folder / f"{number:06d}{self.suffix}"

    def finished(self) -> int:
        """How many blocks, from the first on, are there as they were finished."""
        return next(number for number in count() if not self.is_finished(number))

    def is_finished(self, number: int) -> bool:
        with suppress(OSError, ValueError):
            if number not in self._whole and storage.read_text(self._hash_file(number)) == self._hash(number):
                self._whole.add(number)
        return number in self._whole

    def finish(self, number: int) -> None:
        """Say that the file of a block is whole."""
        writing.write_text(self._hash_file(number), self._hash(number))
        self._whole.add(number)

    def write(self, number: int, content: bytes) -> None:
        """Write a block, which is finished then."""
        with writing.atomic_writer(self.block(number)) as stream:
            stream.write(content)
        self.finish(number)

    def fill(self, sizes: Mapping[int, int], make: Make, advance: Advance, say: Say, *, in_parts: bool = False) -> None:
        """Have these blocks made and written that are not finished; a journal does not tell who made them, or in which order.

        sizes    : of every block, by which ``advance`` is called when it is there
        in_parts : whether ``make`` calls that itself, while it makes a block
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
        return [storage.load_json(self.block(number)) for number in range(self.finished())]

    def _hash_file(self, number: int) -> Path:
        return self.folder / f"{self.block(number).name}.sha256"

    def _hash(self, number: int) -> str:
        return hashlib.sha256(f"{self._key_hash} {storage.sha256_of(self.block(number))}".encode()).hexdigest()
