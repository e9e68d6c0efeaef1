"""Files: JSON and NPZ with a schema name, written whole or not at all, read with checks.

Every document begins {"schema": "treeopt.<type>/1", ...}; readers ignore keys that they do not know.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput

VERSION = 1
T = TypeVar("T")
UNREADABLE_NPZ = Exception  # zipfile, zlib and numpy raise anything at a damaged archive or an absurd size
UNFINISHED = ".tmp"  # ends the name of a file while it is written


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[IO[bytes]]:
    """A file that appears under ``path`` only when everything was written."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}.") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    with atomic_writer(path) as stream:
        stream.write(text.encode())


def schema(kind: str) -> str:
    """The name that a JSON document of a kind begins with.

    >>> schema("plan")
    'treeopt.plan/1'
    """
    return f"treeopt.{kind}/{VERSION}"


def write_json(path: str | Path, kind: str, document: Mapping[str, Any]) -> None:
    """Write ``document`` with its schema name first; NaN and infinities are refused."""
    write_text(path, to_json({"schema": schema(kind), **document}) + "\n")


def to_json(document: Any) -> str:
    """JSON, indented, with short lists of plain values on one line each."""
    return _compact(json.dumps(document, indent=2, allow_nan=False, default=_plain))


def read_json(path: str | Path, kind: str, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The document at ``path`` after checking its schema name and that the keys exist.

    Raises InvalidInput for a file that is missing, truncated, of another type, or not finite.
    """
    document = load_json(path)
    expected = schema(kind)
    if not isinstance(document, dict) or document.get("schema") != expected:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise InvalidInput(f'{path} must have "schema": "{expected}", but it has {found!r}.')
    missing = [key for key in required if key not in document]
    if missing:
        raise InvalidInput(f"{path} must have the key {missing[0]!r}, but it is missing.")
    return document


def read_text(path: str | Path) -> str:
    """The text at ``path``, UTF-8; InvalidInput where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from None


def load_json(path: str | Path) -> Any:
    """Any JSON at ``path``, NaN and infinities refused."""
    text = read_text(path)
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not valid JSON (line {error.lineno}: {error.msg}); was it cut off?") from None
    except ValueError as error:
        raise InvalidInput(f"{path} must hold finite numbers, but it has {error}.") from None


def typed(kind: type[T], record: Any, source: str | Path) -> T:
    """``record``, read from the JSON file ``source``, as an instance of a dataclass.

    Every field is checked against its annotation; keys that are no fields are ignored. Raises InvalidInput
    that names the place.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(json.dumps(record), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ")
        raise InvalidInput(f"{source} is not as it should be{' at ' * bool(place)}{place}: {reason}") from None


def write_npz(path: str | Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Compressed, without pickles."""
    with atomic_writer(path) as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)


def read_npz(path: str | Path, required: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Every array of the file; raises InvalidInput where it is missing, truncated or incomplete."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist.") from None
    except UNREADABLE_NPZ:
        raise InvalidInput(f"{path} is not a readable .npz file without pickles; was it cut off?") from None
    missing = [name for name in required if name not in arrays]
    if missing:
        raise InvalidInput(f"{path} must hold the array {missing[0]!r}, but it is missing.")
    return arrays


def sha256_of(file: Path) -> str:
    """Hex digest of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} does not belong in a JSON file")


def refuse_constant(name: str) -> None:
    """For NaN and infinities, which JSON has not."""
    raise ValueError(name)


def _compact(text: str) -> str:
    """Join the lines of innermost lists, so that a path or a row of a table is one line."""
    import re

    return re.sub(
        r"\[\s*([^\[\]{}]*?)\s*\]",
        lambda match: "[" + re.sub(r"\s*\n\s*", " ", match[1]) + "]" if '"' not in match[1] else match[0],
        text,
    )
