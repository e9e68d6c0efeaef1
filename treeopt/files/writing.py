"""Files that are there whole or not at all, and folders that one process writes to at a time.

temporary  a file or folder while it is made or deleted, .treeopt-OWNER-RANDOM.tmp beside what it is to be or was
owner      the folder whose lock the writer holds, by a hash of its path. Who holds that lock next deletes what a
           killed writer left there, and nothing of other owners
"""

import errno
import hashlib
import io
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from treeopt.errors import InvalidInput

LOCK = ".lock"
WRITTEN: set[Path] = set()  # files that this process has put in place; the command line says what an interrupt left
_inputs: ContextVar[frozenset[str]] = ContextVar(
    "inputs", default=frozenset()
)  # files that a command was given to read
_owner: ContextVar[str] = ContextVar("owner", default="0")  # 0: of files that are written without a lock


def temporary(path: Path) -> Path:
    """A new name beside ``path``, for what is to take its place."""
    return path.with_name(f".treeopt-{_owner.get()}-{secrets.token_hex(4)}.tmp")


@contextmanager
def keeping(inputs: Iterable[object]) -> Iterator[None]:
    """Refuse to write the files among ``inputs``, which a command was given to read."""
    files = {os.path.realpath(given) for given in inputs if isinstance(given, str | Path) and os.path.isfile(given)}
    before = _inputs.set(_inputs.get() | files)
    try:
        yield
    finally:
        _inputs.reset(before)


def check_no_input(path: Path) -> None:
    """Raise InvalidInput where ``path`` is an input of the command that wants to write it, or to delete it."""
    if os.path.realpath(path) in _inputs.get():
        raise InvalidInput(
            f"{path} is an input of this command, which would replace it: move the file to another folder first."
        )


@contextmanager
def _placing(path: Path) -> Iterator[Path]:
    """A temporary name; what is made under it takes the place of ``path`` when the block is done without an error."""
    made = temporary(path)
    try:
        with _named(path, made):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield made
            os.replace(made, path)
    finally:
        with suppress(OSError):
            _delete(made)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """The name of a file to write, which appears under ``path`` when the block is done without an error, with the mode of the
    file that was there.

    Raises InvalidInput where it cannot be written: a full disk, a folder in its place, a file that is read-only.
    """
    path = Path(path)
    check_no_input(path)
    with _placing(path) as made:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "there is a folder of that name")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        yield made
        if path.exists():
            made.chmod(stat.S_IMODE(path.stat().st_mode))
    WRITTEN.add(path)


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[IO[bytes]]:
    """A stream whose file appears under ``path`` only when everything was written. Raises InvalidInput as `replacing`."""
    with replacing(path) as made:
        raw = _Watched(made, "xb")
        try:
            with io.BufferedWriter(raw) as stream:
                yield stream
                stream.flush()
                os.fsync(raw.fileno())
        except Exception:
            if raw.failure is None:
                raise
        if raw.failure is not None:
            raise raw.failure


class _Watched(io.FileIO):
    """A file that remembers why writing failed, whatever the library that writes makes of it."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def write_text(path: str | Path, text: str) -> None:
    with atomic_writer(path) as stream:
        stream.write(text.encode())


def append_line(path: Path, line: str) -> None:
    """Add a line to a text that grows; InvalidInput where it cannot be written."""
    with _named(path), path.open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
    WRITTEN.add(path)


def replace_together(writers: Mapping[Path, Callable[[Path], object]], gone: Iterable[Path] = ()) -> None:
    """Put new files in the place of old ones, all written whole before the first is moved, the last one first.

    gone : files to delete before that, so that whenever the process is killed, no two files are of different origin
    """
    gone = list(gone)
    for path in gone:
        check_no_input(path)
    with ExitStack() as stack:
        for path, write in writers.items():
            made = stack.enter_context(replacing(path))
            try:
                write(made)
            except InvalidInput as error:
                raise InvalidInput(str(error).replace(str(made), str(path))) from None
        for path in gone:
            with _named(path, does="deleted"):
                path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete a folder and all in it: whenever the process is killed, it is there whole or not at all."""
    if not folder.is_dir():
        return
    rest = temporary(folder)
    with _named(folder, does="deleted"):
        os.replace(folder, rest)
        _delete(rest)


@contextmanager
def folder_made_once(folder: Path) -> Iterator[Path | None]:
    """A new folder to fill, which appears under that name when the block is done; None where it is there already.

    Others who want the same folder wait until it is made. What a killed process left is deleted by the next.
    """
    from filelock import FileLock

    lock = folder.with_name(f"{folder.name}{LOCK}")
    with _owning(folder), _named(folder, lock):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext() if folder.is_dir() else FileLock(lock):
            if folder.is_dir():
                yield None
                return
            _sweep([folder.parent])
            with _placing(folder) as made:
                made.mkdir()
                yield made


def is_of_journal(file: Path) -> bool:
    """Whether a file is kept for the same command to continue with.

    >>> is_of_journal(Path("run/profile.partial/batch-size-1/000000.json")), is_of_journal(Path("run/profile.json"))
    (True, False)
    """
    return any(part.endswith(".partial") or part.startswith("answers-") for part in file.parts[:-1])


@contextmanager
def sole_writer(folder: Path, places: Iterable[Path], refusal: str, *, lock: bool = True) -> Iterator[None]:
    """Hold the lock of ``folder``; the operating system lifts it when the process ends, however it does.

    places : folders that the holder writes to, in which the temporary files of a killed one are deleted
    lock   : False for the other processes of a command of several, whose first one holds it

    Raises InvalidInput where another process holds it, with the sentence ``refusal``, or nothing can be written.
    """
    from filelock import FileLock, Timeout

    held = FileLock(folder / LOCK, timeout=0)
    with _owning(folder):
        with _named(folder, folder / LOCK):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                if lock:
                    held.acquire()
                    _sweep(places)
            except Timeout:
                raise InvalidInput(refusal) from None
            except NotImplementedError:  # a file system without locks
                pass
        try:
            yield
        finally:
            with suppress(OSError):  # there is something in the folder
                if [file.name for file in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                folder.rmdir()
            held.release()


@contextmanager
def _owning(folder: Path) -> Iterator[None]:
    """Have temporary files named as those of the folder's writer."""
    before = _owner.set(hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:12])
    try:
        yield
    finally:
        _owner.reset(before)


def _sweep(places: Iterable[Path]) -> None:
    """Delete the temporary files and folders that a killed writer of the same owner left."""
    for place in places:
        for left in place.glob(f".treeopt-{_owner.get()}-*.tmp"):
            with suppress(OSError):
                _delete(left)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _named(path: Path, made: Path | None = None, *, does: str = "written") -> Iterator[None]:
    """Turn the system's refusal into a sentence that names ``path``; errors that name another file stay."""
    try:
        yield
    except OSError as error:
        files = {str(name) for name in (error.filename, error.filename2) if name is not None}
        about = {str(path), *map(str, path.parents), str(made)}
        if files and not files & about:
            raise
        raise InvalidInput(f"{path} cannot be {does}: {error.strerror or error}.") from None
