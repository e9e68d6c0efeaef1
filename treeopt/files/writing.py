"""Files appear whole or not at all, and one process at a time writes to a folder.

temporary  a file or folder while it is written or deleted: .treeopt-OWNER-RANDOM.tmp, beside its place
owner      a hash of the folder whose lock the writer holds. The next holder of that lock deletes the temporary files that a
           killed writer left, and none of other owners
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
from functools import cache
from pathlib import Path
from typing import IO, Any

from treeopt.errors import InvalidInput
from treeopt.files.notes import note

LOCK = ".lock"
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # what file systems say that have none
_owner: ContextVar[str] = ContextVar("owner", default="0")  # 0: of files that are written without a lock


def temporary(path: Path) -> Path:
    """A new name beside ``path``."""
    return path.with_name(f".treeopt-{_owner.get()}-{secrets.token_hex(4)}.tmp")


@contextmanager
def _placing(path: Path) -> Iterator[Path]:
    """A temporary name. What is written there takes the place of ``path`` when the block ends without an error."""
    new = temporary(path)
    try:
        with _named(path, new):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield new
            os.replace(new, path)
    finally:
        with suppress(OSError):
            _delete(new)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name for a file, which takes the place of ``path`` when the block ends without an error.

    It gets the mode of the file that was there. Raises InvalidInput where it cannot be written: the disk is full, there is a
    folder in its place, or a file that is read-only.
    """
    path = Path(path)
    with _placing(path) as new:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "there is a folder of that name")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        yield new
        if path.exists():
            new.chmod(stat.S_IMODE(path.stat().st_mode))


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[IO[bytes]]:
    """A stream to a file that appears under ``path`` when everything is written. Raises InvalidInput as `replacing` does."""
    with replacing(path) as new:
        raw = _Watched(new, "xb")
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
    """A file that remembers the error of the system, for which a library that writes may raise another."""

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


def replace_together(writers: Mapping[Path, Callable[[Path], object]], gone: Iterable[Path] = ()) -> None:
    """Write all files whole, then put them in their places, the last one first.

    writers : path to a function that writes the file under a temporary name
    gone    : files to delete before that, so that no two files are of different origin whenever the process is killed
    """
    with ExitStack() as stack:
        for path, write in writers.items():
            new = stack.enter_context(replacing(path))
            try:
                write(new)
            except InvalidInput as error:
                raise InvalidInput(str(error).replace(str(new), str(path))) from None
        for path in gone:
            with _named(path, does="deleted"):
                path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete a folder. Whenever the process is killed, the folder is there whole or not at all."""
    if not folder.is_dir():
        return
    old = temporary(folder)
    with _named(folder, does="deleted"):
        os.replace(folder, old)
        _delete(old)


@contextmanager
def folder_made_once(folder: Path) -> Iterator[Path | None]:
    """A new folder to fill, which appears under its name when the block ends; None where it is there already.

    Other processes that want the same folder wait for it. The next process deletes what a killed one left.
    """
    lock = folder.with_name(f"{folder.name}{LOCK}")
    with _owning(folder), _named(folder, lock):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext() if folder.is_dir() else locked(lock) as is_sole:
            if folder.is_dir():
                yield None
                return
            if is_sole:
                _sweep([folder.parent])
            with _placing(folder) as new:
                new.mkdir()
                yield new


@contextmanager
def sole_writer(folder: Path, places: Iterable[Path], refusal: str) -> Iterator[None]:
    """Hold the lock of ``folder``. The operating system lifts it when the process ends, even if it is killed.

    places  : folders that the holder writes to; the temporary files of a killed holder are deleted there
    refusal : the message of InvalidInput where another process holds the lock

    Raises InvalidInput also where nothing can be written.
    """
    with _owning(folder), ExitStack() as stack:
        with _named(folder, folder / LOCK):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                is_sole = stack.enter_context(locked(folder / LOCK, waits=False))
            except BlockingIOError:
                raise InvalidInput(refusal) from None
            if is_sole:
                _sweep(places)
        try:
            yield
        finally:
            with suppress(OSError):  # there is something in the folder
                if [file.name for file in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                folder.rmdir()


@contextmanager
def locked(file: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, which is made where it is missing. False on a file system without locks, with a note.

    Raises BlockingIOError where another process holds it and ``waits`` is false.
    """
    import fcntl

    with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK), "rb", buffering=0) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            _note_no_locks(file.parent)
            yield False
            return
        if not os.fstat(stream.fileno()).st_nlink:
            raise BlockingIOError(f"{file} was just deleted by the process that held it")
        try:
            yield True
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)  # closing it would leave the lock to forked processes


@cache
def _note_no_locks(folder: Path) -> None:
    note(f"{folder} is on a file system without locks: let no other treeopt write there meanwhile.")


@contextmanager
def _owning(folder: Path) -> Iterator[None]:
    """Name temporary files as those of the folder's writer."""
    before = _owner.set(hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:12])
    try:
        yield
    finally:
        _owner.reset(before)


def _sweep(places: Iterable[Path]) -> None:
    """Delete the temporary files and folders that a killed writer of the same owner left."""
    for place in places:
        for file in place.glob(f".treeopt-{_owner.get()}-*.tmp"):
            with suppress(OSError):
                _delete(file)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _named(path: Path, new: Path | None = None, *, does: str = "written") -> Iterator[None]:
    """Turn an error of the system into a sentence that names ``path``. Errors that name another file stay.

    new : its temporary name
    """
    try:
        yield
    except OSError as error:
        files = {str(name) for name in (error.filename, error.filename2) if name is not None}
        about = {str(path), *map(str, path.parents), str(new)}
        if files and not files & about:
            raise
        raise InvalidInput(f"{path} cannot be {does}: {error.strerror or error}.") from None
