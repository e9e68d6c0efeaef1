"""How much of a file is read: bounds of texts, JSON, YAML and archives, checked before anything is made of them.

The bounds are in docs/formats.md too; those of prompts stand in `treeopt.runtime.prompts.files`, those of trees in
`treeopt.trees.tree`.
"""

import ast
import errno
import json
import math
import re
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from treeopt.errors import InvalidInput

T = TypeVar("T")

MOST_BYTES = 2**27  # of a text file
MOST_VALUES = 2**23  # values and lines of a text, by what stands between them
MOST_NESTED = 100  # lists and objects in one another
MOST_YAML_CHARS = 2**17
MOST_ROWS = 2**17  # lines of a table, responses of an engine
MOST_ARRAY_BYTES = 2**31  # of all arrays that are read of an archive, unpacked
MOST_TENSOR_BYTES = 2**28  # of the tensors of an import
MOST_RATIO, SMALL_BYTES = 100, 2**22  # how many times its size an archive may unpack to, unless that is little
MOST_MEMBERS, MOST_DIRECTORY_BYTES = 1000, 2**17  # of an archive of arrays
MOST_TENSOR_DIRECTORY_BYTES = 2**24  # of torch's archives, which have a member for each tensor
SEPARATORS = ",[{\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # commas, openings, and where str.splitlines ends a line
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
END_OF_ZIP, ZIP64 = b"PK\x05\x06", b"PK\x06\x07"


def loads(text: str, *, big_numbers: bool = False) -> Any:
    """A document of JSON within the bounds. ValueError ends the sentence "it cannot be read: ...".

    big_numbers : whether whole numbers may have more than 64 bits, as in configs of tokenizers
    """
    try:
        whole = int if big_numbers else _whole
        document = json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=whole)
        too_deep = _is_nested_beyond(document, MOST_NESTED)
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"lists and objects may stand {MOST_NESTED} deep in one another, but these stand deeper")
    if SURROGATE.search(text):
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text in it has half a character (a lone surrogate)") from None
    return document


def _is_nested_beyond(document: Any, depth: int) -> bool:
    children = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return any(
        isinstance(child, dict | list) and (depth == 1 or _is_nested_beyond(child, depth - 1)) for child in children
    )


def parse_yaml(text: str) -> Any:
    """YAML within the bounds and without aliases; ValueError where it is none, or goes beyond them."""
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
    """The syntax tree of a Python text, of which nothing is run; ValueError where it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's remarks on somebody else's file
            return ast.parse(text)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


def parse_literal(text: str) -> Any:
    """A literal of Python; ValueError where it is none."""
    try:
        (statement,) = parse_python(text.strip()).body
        return ast.literal_eval(statement.value if isinstance(statement, ast.Expr) else text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


def limit_rows(items: Iterable[T], source: object, most: int = MOST_ROWS) -> Iterator[T]:
    """The items; InvalidInput when there are more than ``most``."""
    for number, item in enumerate(items):
        if number == most:
            raise InvalidInput(f"{source} may have {most:,} rows, but has more: keep the part that is needed.")
        yield item


def open_regular(path: str | Path) -> IO[bytes]:
    """A file to read; OSError for a pipe or a device, which may never end."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.open("rb")


def check_directory(stream: IO[bytes], most_bytes: int = MOST_DIRECTORY_BYTES) -> None:
    """ValueError where a zip archive's list of members is longer, or is none; readers take all of it into memory."""
    size = stream.seek(0, 2)
    stream.seek(max(0, size - 2**16 - 22))
    tail = stream.read()
    at = tail.rfind(END_OF_ZIP)
    if not 0 <= at <= len(tail) - 22:
        raise ValueError("it is no zip archive")
    (listed,) = struct.unpack_from("<L", tail, at + 12)
    if tail[max(0, at - 20) : at].startswith(ZIP64):
        stream.seek(struct.unpack_from("<Q", tail, at - 12)[0])
        (listed,) = struct.unpack_from("<Q", stream.read(56), 40)
    if listed > most_bytes:
        raise ValueError("its list of members is too long")
    stream.seek(0)


def check_stored(path: Path) -> None:
    """ValueError where the members of torch's zip archives would unpack to more than the file: torch never compresses."""
    with path.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            return  # a pickle, whose tensors are read from the file itself
        check_directory(stream, MOST_TENSOR_DIRECTORY_BYTES)
        with zipfile.ZipFile(stream) as archive:
            held = sum(member.file_size for member in archive.infolist())
    if held > path.stat().st_size:
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
