"""How much of a file is read: bounds of texts, JSON, YAML and archives.

docs/formats.md lists the bounds. Those of prompts are in `treeopt.runtime.prompts.rows`, those of trees in
`treeopt.trees.tree`.
"""

import ast
import errno
import json
import math
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from treeopt.errors import InvalidInput

T = TypeVar("T")

MOST_BYTES = 2**27  # of a text file
MOST_VALUES = 2**23  # values and lines of a text, counted by their separators
MOST_NESTED = 100  # lists and objects in one another in YAML
MOST_YAML_CHARS = 2**17
MOST_ROWS = 2**17  # lines of a table, responses of an engine
MOST_ARRAY_BYTES = 2**31  # of all arrays that are read of an archive, unpacked
SEPARATORS = ",[{\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # commas, openings, and where str.splitlines ends a line


def loads(text: str, *, big_numbers: bool = False) -> Any:
    """A document of JSON. Raises ValueError beyond the bounds; its message ends the sentence "it cannot be read: ...".

    big_numbers : whether whole numbers may have more than 64 bits, as in configs of tokenizers
    """
    from pydantic_core import from_json

    with suppress(RecursionError):
        document = json.loads(
            text, parse_constant=_finite, parse_float=_finite, parse_int=int if big_numbers else _whole
        )
    from_json(text)  # which raises ValueError for nesting beyond 200, and for half a character (a lone surrogate)
    return document


def parse_yaml(text: str) -> Any:
    """A document of YAML. Raises ValueError for another text, for aliases, and beyond the bounds."""
    import yaml

    if len(text) > MOST_YAML_CHARS:
        raise ValueError(f"YAML may have {MOST_YAML_CHARS:,} characters, but this has {len(text):,}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    nested = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            nested += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or nested > MOST_NESTED:
                raise ValueError(f"YAML may be {MOST_NESTED} deep and must have no aliases")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def parse_python(text: str) -> ast.Module:
    """The syntax tree of a Python text; nothing is run. Raises ValueError for another text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's remarks on somebody else's file
            return ast.parse(text)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


def parse_literal(text: str) -> Any:
    """The value of a Python literal. Raises ValueError for another text."""
    try:
        (statement,) = parse_python(text.strip()).body
        return ast.literal_eval(statement.value if isinstance(statement, ast.Expr) else text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


def limit_rows(items: Iterable[T], source: object, most: int = MOST_ROWS) -> Iterator[T]:
    """The items. Raises InvalidInput when there are more than ``most``."""
    for number, item in enumerate(items):
        if number == most:
            raise InvalidInput(f"{source} may have {most:,} rows, but has more: keep the part that is needed.")
        yield item


def open_regular(path: str | Path) -> IO[bytes]:
    """A stream of a file. Raises OSError for a pipe or a device, which may never end."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.open("rb")


def check_stored(path: Path) -> None:
    """Raise ValueError where an archive of torch unpacks to more than the file: torch never compresses.

    An older file is a pickle, whose tensors are read from the file itself.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from None
    if size > path.stat().st_size:
        raise ValueError("it unpacks to more than it has")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"numbers must be finite, but it has {text:.20}")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError(f"whole numbers must fit into 64 bits, but it has {text:.20}...")
    return int(text)
