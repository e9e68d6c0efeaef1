"""Reading and writing of JSON and texts.

Every document begins {"schema": "treeopt.<kind>/1", ...}. Readers ignore keys that they do not know.
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

VERSIONS = {
    "calibration": 2,
    "plan": 3,
    "bench": 3,
    "profile": 2,
    "score": 2,
    "comparison": 2,
}  # of kinds whose form has changed
T = TypeVar("T")
LONG = (str, list, tuple, Mapping, np.ndarray)  # values that have a line of their own in a list


def schema(kind: str) -> str:
    """The schema name of a kind of document.

    >>> schema("profile")
    'treeopt.profile/2'
    """
    return f"treeopt.{kind}/{VERSIONS.get(kind, 1)}"


def write_json(path: str | Path, kind: str, document: Mapping[str, Any]) -> None:
    """Write a document of a kind, with its schema name first. Raises ValueError for NaN and infinities."""
    write_text(path, to_json({"schema": schema(kind), **document}) + "\n")


def to_json(document: Any, indent: str = "\n") -> str:
    """Indented JSON, in which a list or an object of plain numbers is one line.

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
    if isinstance(document, Mapping) and not all(isinstance(value, int | float) for value in document.values()):
        lines = []
        for key, value in document.items():
            name = key if isinstance(key, str) else json.dumps(key)
            lines.append(f"{json.dumps(name)}: {to_json(value, deeper)}")
        return "{" + deeper + f",{deeper}".join(lines) + indent + "}"
    if isinstance(document, list | tuple) and any(isinstance(value, LONG) for value in document):
        return "[" + deeper + f",{deeper}".join(to_json(value, deeper) for value in document) + indent + "]"
    return json.dumps(document, allow_nan=False, default=lambda number: number.tolist())  # of numpy


def document(record: Any) -> Any:
    """A record as values of JSON.

    A dataclass becomes an object of its fields, after its ``first_keys``, which may name properties. What may be left out is
    left out where it is empty, or None by default. The keys of a draft stand among those of what has it. Other types have their form in ``record``.
    """
    if hasattr(record, "record"):
        return record.record
    if is_dataclass(record):
        needed = {field.name for field in fields(record) if field.default is MISSING is field.default_factory}
        has_default = {field.name for field in fields(record) if field.default not in (None, MISSING)}
        values: dict[str, Any] = {}
        for name in keys_of(type(record)):
            value = document(getattr(record, name))
            if name == "draft":
                values |= value
            elif name in needed or value not in (None, {}, []) or (value is None and name in has_default):
                values[name] = value
        return values
    if isinstance(record, Mapping):
        return {key: document(value) for key, value in record.items()}
    return [document(value) for value in record] if isinstance(record, list | tuple) else record


def keys_of(kind: Any) -> list[str]:
    """The keys that files have of a dataclass, in their order."""
    return list(dict.fromkeys([*getattr(kind, "first_keys", ()), *(field.name for field in fields(kind))]))


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    """The document of a kind in a file. Raises InvalidInput for a file that is missing, damaged, or of another kind."""
    document: dict[str, Any] = load_json(path)
    name = document.get("schema") if isinstance(document, dict) else type(document).__name__
    if name != schema(kind):
        raise InvalidInput(f'{path} must have "schema": "{schema(kind)}", but it has {quoted(name)}.')
    return document


def read_text(path: str | Path) -> str:
    """The text of a file, read as UTF-8. Raises InvalidInput for a file that is missing, no text, or beyond the bounds."""
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
    """The JSON in a file. Raises InvalidInput for a file that is missing, damaged, or beyond the bounds (`loads`)."""
    text = read_text(path)
    try:
        return loads(text, big_numbers=big_numbers)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not valid JSON (line {error.lineno}: {error.msg}); was it cut off?") from None
    except ValueError as error:
        raise InvalidInput(f"{path} cannot be read: {error}.") from None


def typed(kind: type[T], record: Any, source: str | Path) -> T:
    """A record of a JSON file as an instance of a dataclass or another type.

    source : the file, for messages

    Raises InvalidInput, which names the place, for a value outside its annotation (`treeopt.files.fields`). Keys that are no
    fields are ignored.
    """
    from pydantic import ValidationError

    from treeopt.files.fields import adapter, first_error

    try:
        instance: T = adapter(cast(Hashable, kind)).validate_json(json.dumps(record), strict=True)
        return instance
    except ValidationError as error:
        place, reason = first_error(error)
        where = f" at {place}" if place else ""
        raise InvalidInput(f"{source} is not as it should be{where}: {reason}.") from None


def sha256_of(file: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with open_regular(file) as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()
