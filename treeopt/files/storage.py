"""Files: JSON with a schema name and texts, written whole or not at all, read with checks.

Every document begins {"schema": "treeopt.<type>/1", ...}; readers ignore keys that they do not know.
"""

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import MOST_BYTES, MOST_VALUES, SEPARATORS, loads, open_regular
from treeopt.files.writing import write_text

VERSIONS = {"plan": 2, "bench": 2, "profile": 2}  # of kinds whose form has changed
T = TypeVar("T")
LONG = (str, list, tuple, Mapping, np.ndarray)  # what has a line of its own in a list


def schema(kind: str) -> str:
    """The name that a JSON document of a kind begins with.

    >>> schema("profile")
    'treeopt.profile/2'
    """
    return f"treeopt.{kind}/{VERSIONS.get(kind, 1)}"


def write_json(path: str | Path, kind: str, document: Mapping[str, Any]) -> None:
    """Write ``document`` with its schema name first; NaN and infinities are refused."""
    write_text(path, to_json({"schema": schema(kind), **document}) + "\n")


def to_json(document: Any, indent: str = "\n") -> str:
    """JSON, indented, with lists of plain numbers on one line each.

    >>> print(to_json({"paths": [[0], [0, 1]]}))
    {
      "paths": [
        [0],
        [0, 1]
      ]
    }
    """
    if isinstance(document, np.ndarray):
        document = document.tolist()
    deeper = indent + "  "
    if isinstance(document, Mapping) and document:
        named = ((key if isinstance(key, str) else json.dumps(key), value) for key, value in document.items())
        lines = [f"{json.dumps(key)}: {to_json(value, deeper)}" for key, value in named]
        return "{" + deeper + f",{deeper}".join(lines) + indent + "}"
    if isinstance(document, list | tuple) and any(isinstance(value, LONG) for value in document):
        return "[" + deeper + f",{deeper}".join(to_json(value, deeper) for value in document) + indent + "]"
    return json.dumps(document, allow_nan=False, default=lambda number: number.tolist())  # of numpy


def document(record: Any) -> Any:
    """A record as JSON has it: a dataclass as its fields, of those with a default only what is known and not empty, and what follows under "shown".

    A class says what follows from its fields by a property ``shown``; a draft has a form of its own, ``record``.
    """
    if hasattr(record, "record"):
        return record.record
    if is_dataclass(record):
        found = {f.name: document(value) for f in fields(record) if (value := getattr(record, f.name)) is not None}
        follows = document(getattr(record, "shown", {}))
        needed = {f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING}
        found = {key: value for key, value in found.items() if key in needed or value not in ({}, [])}
        return {**found, "shown": follows} if follows else found
    if isinstance(record, Mapping):
        return {key: document(value) for key, value in record.items()}
    return [document(value) for value in record] if isinstance(record, list | tuple) else record


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    """The document at ``path``. Raises InvalidInput for a file that is missing, cut off, of another type, or not finite."""
    document = load_json(path)
    found = document.get("schema") if isinstance(document, dict) else type(document).__name__
    if found != schema(kind):
        raise InvalidInput(f'{path} must have "schema": "{schema(kind)}", but it has {quoted(found)}.')
    known: dict[str, Any] = document
    return known


def read_text(path: str | Path) -> str:
    """The text at ``path``, UTF-8; InvalidInput where there is none, or more of it than is read."""
    try:
        with open_regular(path) as stream:
            data = stream.read(MOST_BYTES + 1)
        text = None if len(data) > MOST_BYTES else data.decode("utf-8")
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from None
    if text is None or (len(text) > MOST_VALUES and sum(map(text.count, SEPARATORS)) > MOST_VALUES):
        raise InvalidInput(
            f"{path} may have {MOST_BYTES // 2**20} MiB and {MOST_VALUES:,} values and lines, but has more: keep the "
            "part that is needed."
        )
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def load_json(path: str | Path, *, big_numbers: bool = False) -> Any:
    """Any JSON at ``path`` within the bounds (`loads`); NaN and infinities are refused."""
    text = read_text(path)
    try:
        return loads(text, big_numbers=big_numbers)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not valid JSON (line {error.lineno}: {error.msg}); was it cut off?") from None
    except ValueError as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from None


def typed(kind: type[T], record: Any, source: str | Path) -> T:
    """``record``, read from the JSON file ``source``, as an instance of a dataclass or another type.

    Every field is checked against its annotation, range included (`treeopt.files.fields`); keys that are no fields are
    ignored. Raises InvalidInput that names the place.
    """
    from pydantic import ValidationError

    from treeopt.files.fields import adapter, first_error

    try:
        found: T = adapter(cast(Hashable, kind)).validate_json(json.dumps(record), strict=True)
        return found
    except ValidationError as error:
        place, reason = first_error(error)
        raise InvalidInput(f"{source} is not as it should be{' at ' * bool(place)}{place}: {reason}.") from None


def sha256_of(file: Path) -> str:
    """Hex digest of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with open_regular(file) as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()
