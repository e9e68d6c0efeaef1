"""Finished blocks of a journal at an fsspec URL, for workers that share no disk with the command that asked them.

A worker sends a block and its hash as `treeopt.files.journal` writes them; the command fetches both into its own journal,
which tells what is damaged. Blocks lie in a folder named by the journal's key, so that no other measurement meets them.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from treeopt.errors import InvalidInput, Unsupported, first_line
from treeopt.files import storage
from treeopt.files.journal import Journal
from treeopt.files.writing import atomic_writer

CLAIM, HASH = "driver", ".sha256"
OF_ONE_PROCESS = ("memory",)  # protocols whose files no other process sees


class Mirror:
    """The blocks at a URL of the journal with this key. Raises InvalidInput where the place cannot be used.

    Two commands with one key would do the same work twice: the later one takes the place, and the earlier one stops
    when it notices. So a command that was killed leaves nothing behind that its successor had to wait for.
    """

    def __init__(self, url: str, key: Mapping[str, Any]) -> None:
        self.url, self._token = shown(url), ""
        self._files, root = opened(url)
        self.folder = f"{root.rstrip('/')}/treeopt-{hashlib.sha256(storage.to_json(key).encode()).hexdigest()[:12]}"

    def take(self) -> None:
        """Become the command whose journal this is."""
        now = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
        self._token = f"{socket.gethostname()}, process {os.getpid()}, since {now} ({secrets.token_hex(4)})"
        with self._told("written"):
            self._files.makedirs(self.folder, exist_ok=True)
            self._files.pipe_file(f"{self.folder}/{CLAIM}", self._token.encode())

    def check(self) -> None:
        """Raise InvalidInput where another command has taken the journal since."""
        with self._told("read"):
            self._files.invalidate_cache()
            there = f"{self.folder}/{CLAIM}"
            found = self._files.cat_file(there).decode() if self._files.exists(there) else "it has ended since"
        if found != self._token:
            raise InvalidInput(
                f"A journal has one command at a time, but another one took {self.url} for the same measurement "
                f"({found}): this one stops. What it finished is kept."
            )

    def finished(self) -> set[int]:
        """The numbers of the blocks that were sent whole; what became of them since, `fetch` finds out."""
        with self._told("read"):
            self._files.invalidate_cache()
            names = [PurePosixPath(path).name for path in self._files.ls(self.folder, detail=False)]
        return {int(name.split(".")[0]) for name in names if re.fullmatch(rf"\d{{6,}}\.\w+{HASH}", name, re.ASCII)}

    def send(self, journal: Journal, number: int) -> None:
        """Copy a finished block here, its hash last."""
        with self._told("written"):
            for file in (journal.block(number), journal.hash_of(number)):
                self._files.pipe_file(f"{self.folder}/{file.name}", file.read_bytes())

    def fetch(self, journal: Journal, number: int) -> bool:
        """Copy a block into the journal; whether it is there as it was finished."""
        for file in (journal.block(number), journal.hash_of(number)):
            with self._told("read"):
                content = self._files.cat_file(f"{self.folder}/{file.name}")
            with atomic_writer(file) as stream:
                stream.write(content)
        return journal.is_finished(number)

    def remove(self) -> None:
        """Delete the blocks: all of them were fetched."""
        with self._told("deleted"):
            self._files.rm(self.folder, recursive=True)

    @contextmanager
    def _told(self, does: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system has errors of its own
            raise InvalidInput(f"--journal {self.url} cannot be {does}: {first_line(error)}.") from None


def opened(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path there; InvalidInput or Unsupported, in words, where there is none."""
    import fsspec

    protocol = url.split("://")[0] if "://" in url else "file"
    if protocol in OF_ONE_PROCESS:
        raise InvalidInput(
            f"--journal must be a place that all workers see, but {protocol}:// is the memory of one process: pass a "
            "folder that all hosts share, or the URL of a store, s3://BUCKET/FOLDER for example."
        )
    try:
        files, path = fsspec.url_to_fs(url)
    except ImportError as error:
        raise Unsupported(
            f"--journal {shown(url)} needs a package that is not installed: {first_line(error)}."
        ) from None
    except Exception as error:
        raise InvalidInput(
            f"--journal must be a folder or an fsspec URL, but {shown(url)}: {first_line(error)}."
        ) from None
    return files, str(path)


def shown(url: str) -> str:
    """A URL without the name and the password that may stand in it.

    >>> shown("ftp://me:secret@host/folder")
    'ftp://host/folder'
    """
    return re.sub(r"//[^/@]*@", "//", url)
