"""Rows of prompts and logs: a file or a data set is opened, and its rows come one by one, each with its number.

    bytes ─ a reader, by the file's ending ─► (number, row) ─ a parser ─► (number, record)

A row that cannot be read is named and left out; a file that cannot be read is one InvalidInput. Nothing that a file may hold,
cut off or with flipped bits, is a traceback. A file of a million lines is never held.
"""

import csv
import gzip
import hashlib
import io
import json
import zlib
from bisect import insort
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, TypeVar

from treeopt.errors import InvalidInput, first_line, meant
from treeopt.files.bounds import limit_rows, open_regular
from treeopt.files.places import find_local
from treeopt.files.storage import sha256_of
from treeopt.runtime.folder import loadable

MOST_ROWS = 10**6
MOST_UNPACKED_BYTES = 2**28  # of a .gz file
MOST_DOCUMENT_BYTES, MOST_LINE_BYTES = 2**27, 2**24  # of a .json file, which is read whole; of a line of the others
MOST_RATIO, SMALL_BYTES = 100, 2**24  # of what unpacks: how many times its size, unless that is little
BATCH_ROWS = 64  # of a table, read at once
MOST_SKIPPED = 1000  # listed of the rows that give nothing
MOST_REASONS = 3  # shown where no row is left
MUST = "`prompts` must be a file, a folder or a hub dataset"
WRAPPERS = ("data", "prompts", "rows", "examples", "instances", "train", "test")  # keys around a list of rows

T = TypeVar("T")
Record = Mapping[str, Any]
Reader = Callable[[IO[bytes]], Iterable[tuple[int, Any]]]


@dataclass(frozen=True)
class Skipped:
    """A row that gives nothing, and why."""

    row: int
    reason: str


@dataclass
class Rows:
    """The rows of a file or data set, which can be read once, and what was found in those that were read.

    raw         : each row's number (the line in .jsonl and .txt), counted from 1, and the row; InvalidInput may come among them
    parse       : makes a row's record; ValueError is why it has none
    fingerprint : sha256 of the file's bytes, or of a dataset's rows; asked for when all rows were read
    columns     : of all rows; a dict for its order
    skipped     : the first `MOST_SKIPPED` rows that gave nothing; n_skipped of all, n_read of all rows
    """

    name: str
    raw: Iterator[tuple[int, Any]]
    parse: Callable[[Any], Record]
    fingerprint: Callable[[], str]
    columns: dict[str, None] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    n_skipped: int = 0
    n_read: int = 0

    def each(self, read: Callable[[Record], T]) -> Iterator[tuple[int, T]]:
        """The number of every row, and what is read of its record; where that raises ValueError the row is skipped."""
        for number, row in self.raw:
            self.n_read += 1
            try:
                record = self.parse(row)
                self.columns.update(dict.fromkeys(record))
                result = read(record)
            except ValueError as error:
                self.skip(number, str(error))
            else:
                yield number, result

    def skip(self, number: int, reason: str) -> None:
        self.n_skipped += 1
        insort(self.skipped, Skipped(number, reason), key=attrgetter("row"))
        del self.skipped[MOST_SKIPPED:]

    def reasons(self, noun: str) -> str:
        """Why nothing is left, for a message."""
        shown = [f"{noun} {skipped.row}: {skipped.reason}" for skipped in self.skipped[:MOST_REASONS]]
        return "; ".join(shown) or "it is empty"

    def check_columns(self, options: Mapping[str, str | None]) -> None:
        """InvalidInput where an option names a column that no row has."""
        for option, name in options.items():
            if self.columns and name not in (None, *self.columns):
                raise InvalidInput(
                    f"{option} must be a column of {self.name}: {listed(self.columns)}, but got {name}."
                    f"{meant(name, self.columns)}"
                )


def read_rows(source: str, *, split: str | None = None) -> Rows:
    """The rows of a file, of a folder with a dataset in it, or of a dataset id of the Hugging Face hub.

    Raises InvalidInput where the source cannot be read.

    split : of a dataset; None takes "train", or the only one
    """
    path = find_local(source, MUST)
    reader, parse = READERS.get(Path(source.lower().removesuffix(".gz")).suffix, (None, record_of))
    if path.is_dir() if path else reader is None:
        return _dataset(source, path, split)
    if path is None:
        raise InvalidInput(f"{MUST}, but {Path(source).absolute()} does not exist.")
    if split is not None:
        raise InvalidInput(f"`split` is for a dataset, but `prompts` is {source}. Leave it out.")
    if reader is None:
        raise InvalidInput(
            f"The name of a file with rows must end in {', '.join(READERS)}, or in .gz behind it, but got {source}."
        )
    return Rows(path.name, _read(path, reader), parse, partial(sha256_of, path))


def _read(path: Path, reader: Reader) -> Iterator[tuple[int, Any]]:
    try:
        with open_regular(path) as stored:
            stream = io.BytesIO(_unpacked(stored)) if path.suffix.lower() == ".gz" else stored
            stream.seek(len(BOM_UTF8) if stream.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
            yield from limit_rows(reader(stream), "it", MOST_ROWS)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {first_line(error)}.") from None


def _unpacked(stored: IO[bytes]) -> bytes:
    most = min(MOST_UNPACKED_BYTES, max(SMALL_BYTES, int(MOST_RATIO * stored.seek(0, io.SEEK_END))))
    stored.seek(0)
    try:
        with gzip.GzipFile(fileobj=stored) as file:
            text = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it is not a whole gzip file ({first_line(error)})") from None
    if len(text) > most:
        raise ValueError(f"unpacked it has more than {most:,} bytes")
    return text


# Readers of one file. They raise ValueError with the reason where the whole file is lost.


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, by its number."""
    for number, line in enumerate(iter(partial(stream.readline, MOST_LINE_BYTES + 1), b""), 1):
        if len(line) > MOST_LINE_BYTES:
            raise ValueError(f"line {number} has more than {MOST_LINE_BYTES // 2**20} MiB")
        if line.strip():
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _json(stream: IO[bytes]) -> Iterable[tuple[int, Any]]:
    """The values of a list, which may be in an object; a table by columns; a single object; or JSON lines."""
    data = stream.read(MOST_DOCUMENT_BYTES + 1)
    if len(data) > MOST_DOCUMENT_BYTES:
        raise ValueError(
            f"it has more than {MOST_DOCUMENT_BYTES // 2**20} MiB; as JSON lines (jq -c '.[]') it is read row by row"
        )
    try:
        document = parse_json(_text_of(data)) if data.strip() else []
    except ValueError:
        lines = list(_lines(io.BytesIO(data)))  # many a .json file has JSON lines in it
        if len(lines) > 1 and lines[0][1].strip().endswith(b"}"):
            return lines
        raise
    if isinstance(document, dict):
        lists = (document.get(name) for name in WRAPPERS)
        document = next((rows for rows in lists if isinstance(rows, list)), None) or _table(document)
    if not isinstance(document, list):
        raise ValueError(f"it must be a list of objects or an object, but is {kind_of(document)}")
    return enumerate(document, 1)


def _table(columns: Mapping[str, Any]) -> list[Any]:
    """The rows of a table by columns; a single row where these are none, as of a conversation with its messages."""
    values = columns.values()
    if not values or not all(
        isinstance(column, list) and not any(isinstance(v, dict) for v in column) for column in values
    ):
        return [columns]
    if len({len(column) for column in values}) > 1:
        raise ValueError("its columns have different lengths")
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _csv(stream: IO[bytes], delimiter: str = ",") -> Iterator[tuple[int, dict[str | None, Any]]]:
    csv.field_size_limit(MOST_LINE_BYTES)  # of the whole process; the rule is tokens, checked later
    text = io.TextIOWrapper(stream, "utf-8", newline="")
    parts = iter(partial(text.readline, MOST_LINE_BYTES), "")  # a longer line is a field too long, or none
    rows = csv.DictReader(parts, delimiter=delimiter, strict=True)
    try:
        header = rows.fieldnames or []
        if len(set(header)) < len(header):
            raise ValueError("its first line must name every column once")
        yield from enumerate(rows, 1)
    except csv.Error as error:
        raise ValueError(f"it is not CSV ({error})") from None


def _parquet(stream: IO[bytes]) -> Iterator[tuple[int, Record]]:
    try:
        from pyarrow import parquet

        file, most = parquet.ParquetFile(stream), max(SMALL_BYTES, MOST_RATIO * stream.seek(0, io.SEEK_END))
        unpacked = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        if file.metadata.num_rows > MOST_ROWS:
            raise ValueError(f"it may have {MOST_ROWS:,} rows, but says that it has {file.metadata.num_rows:,}")
        number = read = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=_plain_columns(file.schema_arrow)):
            read += batch.nbytes
            if max(unpacked, read) > most:  # a value that is stored once may stand in every row
                raise ValueError(f"it unpacks to more than {MOST_RATIO} times its size")
            batch.validate(full=True)  # before anything reads through its offsets
            for record in batch.to_pylist():
                yield (number := number + 1), record
    except ImportError:
        raise ValueError("a .parquet file needs pyarrow: pip install pyarrow") from None
    except Exception as error:  # of any library that pyarrow uses
        raise ValueError(f"it is not a whole .parquet file ({first_line(error)})") from None


def _plain_columns(schema: Any) -> list[str]:
    """Columns without raw bytes, as pictures and sounds have: those are not even decoded."""
    return [column.name for column in schema if not _has_bytes(column.type)]


def _has_bytes(kind: Any) -> bool:
    name = str(getattr(kind, "value_type", kind))
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return any(map(_has_bytes, inner)) if inner else "binary" in name


# Parsers of one row. They raise ValueError with the reason where it is lost.


def record_of(row: Any) -> Record:
    """The record of a line of JSON, or of a value: an object, or a text, which is a prompt."""
    value = parse_json(_text_of(row)) if isinstance(row, bytes) else row
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"it must be an object or a text, but is {kind_of(value)}")
    return value


def _cells_of(row: dict[str | None, Any]) -> Record:
    if None in row or None in row.values():
        raise ValueError("it has more or fewer fields than the header")
    return row  # type: ignore[return-value]


READERS: dict[str, tuple[Reader, Callable[[Any], Record]]] = {
    ".jsonl": (_lines, record_of),
    ".json": (_json, record_of),
    ".csv": (_csv, _cells_of),
    ".tsv": (partial(_csv, delimiter="\t"), _cells_of),
    ".parquet": (_parquet, record_of),
    ".txt": (_lines, lambda line: {"prompt": _text_of(line)}),
    ".ndjson": (_lines, record_of),
}


def _dataset(source: str, folder: Path | None, split: str | None) -> Rows:
    """The rows of a data set in a folder, or of the hub: an id, with ":" and a configuration behind it or not."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is raised
    name = folder.resolve().name if folder else source
    with loadable(MUST, source):
        if folder and any((folder / file).exists() for file in ("state.json", "dataset_dict.json")):
            data = datasets.load_from_disk(str(folder))
            splits = data if isinstance(data, dict) else {str(data.split or "train"): data}
        else:
            id_, _, config = (str(folder), "", "") if folder else source.partition(":")
            data = datasets.load_dataset(id_, config or None, split=split)
            splits = data if isinstance(data, dict) else {split: data}
        usual = "train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else None
        if (split := split or usual) not in splits:
            raise InvalidInput(f"`split` must be one of those of {source}: {listed(splits)}, but got {split}.")
        dataset, digest = splits[split], hashlib.sha256()
        dataset.data.validate(full=True)
        dataset = dataset.select_columns(_plain_columns(dataset.features.arrow_schema))

    def rows() -> Iterator[tuple[int, Record]]:
        with loadable(MUST, source):
            for number, record in enumerate(dataset, 1):
                digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
                yield number, record

    return Rows(f"{name} ({split})", rows(), record_of, digest.hexdigest)


# Small services, also for those who read the records.


def parse_json(text: str) -> Any:
    """Any JSON; raises ValueError with the reason, however the text is broken."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({first_line(error)})") from None


def _text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None


def kind_of(value: Any) -> str:
    """The type of a value in the words of JSON.

    >>> kind_of([1]), kind_of(None), kind_of(1.5)
    ('a list', 'null', 'a number')
    """
    kinds = {
        type(None): "null",
        bool: "a boolean",
        str: "a text",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), f"of type {type(value).__name__}")


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names for a message: quoted where they would be misread, and not too many."""
    names = list(names)
    shown = [name[:40] if name.isprintable() and name.strip() else repr(name[:40]) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
