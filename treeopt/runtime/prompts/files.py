"""Read the rows of files and datasets of prompts: .jsonl, .json, .csv, .parquet, .txt, the hub.

Rows come one by one, so that a file of a million lines is never held. A row that cannot be read is named and left out;
a file that cannot be read is one InvalidInput. Nothing that a file may hold, cut off or with flipped bits, is a
traceback.
"""

import csv
import gzip
import hashlib
import io
import json
import zlib
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
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
# A row's number, counted from 1, and its record, or the reason why it has none.
Found = tuple[int, Mapping[str, Any] | str]


@dataclass(frozen=True)
class Skipped:
    """A row that gives no prompt, and why."""

    row: int
    reason: str


@dataclass
class Rows:
    """The rows of a file or data set, which can be read once, and what was found in those that were read.

    records     : each row's number (the line in .jsonl and .txt), counted from 1, and its record, or why it has none;
                  InvalidInput may come among them
    fingerprint : sha256 of the file's bytes, or of a dataset's rows; asked for when all rows were read
    columns     : of all rows; a dict for its order
    skipped     : the first `MOST_SKIPPED` rows that gave nothing; n_skipped of all, n_read of all rows
    """

    name: str
    records: Iterator[Found]
    fingerprint: Callable[[], str]
    columns: dict[str, None] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    n_skipped: int = 0
    n_read: int = 0

    def each(self, read: Callable[[Mapping[str, Any]], T]) -> Iterator[tuple[int, T]]:
        """The number of every row, and what is read of it; where that raises ValueError the row is skipped."""
        for number, record in self.records:
            self.n_read += 1
            try:
                if isinstance(record, str):
                    raise ValueError(record)
                self.columns.update(dict.fromkeys(record))
                found = read(record)
            except ValueError as error:
                self.skip(number, str(error))
            else:
                yield number, found

    def skip(self, number: int, reason: str) -> None:
        self.n_skipped += 1
        insort(self.skipped, Skipped(number, reason), key=attrgetter("row"))
        del self.skipped[MOST_SKIPPED:]

    def reasons(self, noun: str) -> str:
        """Why nothing is left, for a message."""
        shown = [f"{noun} {skipped.row}: {skipped.reason}" for skipped in self.skipped[:MOST_REASONS]]
        return "; ".join([*shown, *(["..."] if self.n_skipped > MOST_REASONS else [])]) or "it is empty"

    def check_columns(self, options: Mapping[str, str | None]) -> None:
        """InvalidInput where an option names a column that no row has."""
        for option, name in options.items():
            if self.columns and name not in (None, *self.columns):
                raise InvalidInput(
                    f"{option} must be a column of {self.name}: {listed(self.columns)}, but got {name}."
                    f"{meant(name, self.columns)}"
                )


def read_rows(source: str, *, split: str | None = None, option: str = "prompts") -> Rows:
    """The rows of a file, of a folder with a dataset in it, or of a dataset id of the Hugging Face hub.

    split  : of a dataset; None takes "train", or the only one
    option : the parameter that says the file, for errors

    Raises InvalidInput where the source cannot be read or holds nothing.
    """
    path = find_local(source, MUST)
    reader = READERS.get(Path(source.lower().removesuffix(".gz")).suffix)
    if (path is None and reader is None) or (path is not None and path.is_dir()):
        return _dataset(source, path, split)
    if path is None:
        raise InvalidInput(f"{MUST}, but {Path(source).absolute()} does not exist.")
    if split is not None:
        raise InvalidInput(f"`split` is for a dataset, but `prompts` is {source}. Leave it out.")
    if reader is None:
        raise InvalidInput(f"`{option}` must end in {', '.join(READERS)}, or in .gz behind it, but got {source}.")
    return Rows(path.name, _read(path, reader, option), partial(sha256_of, path))


def _read(path: Path, reader: Callable[[IO[bytes]], Iterable[Found]], option: str) -> Iterator[Found]:
    try:
        with open_regular(path) as stored:
            stream = io.BytesIO(_unpacked(stored)) if path.suffix.lower() == ".gz" else stored
            mark = stream.read(3)
            if mark[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise ValueError("it is in UTF-16; save it as UTF-8")
            stream.seek(3 if mark == b"\xef\xbb\xbf" else 0)
            yield from limit_rows(reader(stream), "it", MOST_ROWS)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"`{option}` must be a readable file, but {path}: {first_line(error)}.") from None


def _unpacked(stored: IO[bytes]) -> bytes:
    try:
        with gzip.GzipFile(fileobj=stored) as file:
            text = file.read(MOST_UNPACKED_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it is not a whole gzip file ({first_line(error)})") from None
    if len(text) > MOST_UNPACKED_BYTES:
        raise ValueError(f"unpacked it has more than {MOST_UNPACKED_BYTES // 2**20} MiB")
    if len(text) > max(SMALL_BYTES, MOST_RATIO * stored.tell()):
        raise ValueError(f"it unpacks to more than {MOST_RATIO} times its size")
    return text


# Readers of one file. They raise ValueError with the reason where the whole file is lost.


def _lines(stream: IO[bytes], record_of: Callable[[str], Mapping[str, Any] | str]) -> Iterator[Found]:
    """The record of every line that is not blank, by its number."""
    for number, line in enumerate(iter(partial(stream.readline, MOST_LINE_BYTES + 1), b""), 1):
        if len(line) > MOST_LINE_BYTES:
            raise ValueError(f"line {number} has more than {MOST_LINE_BYTES // 2**20} MiB")
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
            if text.strip():
                yield number, record_of(text)
        except UnicodeDecodeError:
            yield number, "it is not UTF-8"
        except ValueError as error:
            yield number, str(error)


def _jsonl(stream: IO[bytes]) -> Iterator[Found]:
    return _lines(stream, lambda line: _record(parse_json(line)))


def _json(stream: IO[bytes]) -> Iterable[Found]:
    data = stream.read(MOST_DOCUMENT_BYTES + 1)
    if len(data) > MOST_DOCUMENT_BYTES:
        raise ValueError(
            f"it has more than {MOST_DOCUMENT_BYTES // 2**20} MiB; as JSON lines (jq -c '.[]') it is read row by row"
        )
    try:
        document = parse_json(data.decode("utf-8")) if data.strip() else []
    except ValueError:
        lines = list(_jsonl(io.BytesIO(data)))  # many a .json file has JSON lines in it
        if len(lines) > 1 and isinstance(lines[0][1], dict):
            return lines
        raise
    return [(i, _record(value)) for i, value in enumerate(_values(document), 1)]


def _values(document: Any) -> list[Any]:
    """The rows of a JSON document: a list, a list under a key, columns, or a single row."""
    if isinstance(document, list):
        return document
    if not isinstance(document, dict):
        raise ValueError(f"it must be a list of objects or an object, but is {kind_of(document)}")
    for key in WRAPPERS:
        wrapped = document.get(key)
        if isinstance(wrapped, list) and (len(document) == 1 or any(isinstance(v, dict) for v in wrapped)):
            return wrapped
    columns = list(document.values())
    if columns and all(isinstance(c, dict) and c.keys() == columns[0].keys() for c in columns):
        columns = [list(c.values()) for c in columns]  # {"prompt": {"0": ..., "1": ...}}
    if not columns or not all(isinstance(c, list) for c in columns):
        return [document]
    if any(isinstance(value, dict) for column in columns for value in column):
        return [document]  # one conversation, its messages in a list
    if len({len(column) for column in columns}) > 1:
        raise ValueError("its columns have different lengths")
    return [dict(zip(document, values, strict=True)) for values in zip(*columns, strict=True)]


def _record(value: Any) -> Mapping[str, Any] | str:
    if isinstance(value, str):
        return {"prompt": value}
    return value if isinstance(value, dict) else f"it must be an object or a text, but is {kind_of(value)}"


def _csv(stream: IO[bytes], delimiter: str = ",") -> Iterator[Found]:
    text = io.TextIOWrapper(stream, "utf-8", newline="")
    most = csv.field_size_limit(MOST_LINE_BYTES)  # of the whole process; the rule is tokens, checked later
    try:
        parts = iter(partial(text.readline, MOST_LINE_BYTES), "")  # a longer line is a field too long, or none
        lines = (line for line in csv.reader(parts, delimiter=delimiter, strict=True) if line)
        header = next(lines, [])
        if len(set(header)) < len(header):
            raise ValueError("its first line must name every column once")
        for row, line in enumerate(lines, 1):
            if len(line) == len(header):
                yield row, dict(zip(header, line, strict=True))
            else:
                yield row, f"it has {len(line)} fields, but the header {len(header)}"
    except csv.Error as error:
        raise ValueError(f"it is not CSV ({error})") from None
    finally:
        csv.field_size_limit(most)
        text.detach()  # whoever opened the stream closes it


def _parquet(stream: IO[bytes]) -> Iterator[Found]:
    try:
        from pyarrow import parquet

        file, most = parquet.ParquetFile(stream), max(SMALL_BYTES, MOST_RATIO * stream.seek(0, io.SEEK_END))
        unpacked = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        if file.metadata.num_rows > MOST_ROWS:
            raise ValueError(f"it may have {MOST_ROWS:,} rows, but says that it has {file.metadata.num_rows:,}")
        numbers, read = count(1), 0
        plain = [field.name for field in file.schema_arrow if not _has_bytes(field.type)]
        for batch in file.iter_batches(BATCH_ROWS, columns=plain):
            read += batch.nbytes
            if max(unpacked, read) > most:  # a value that is stored once may stand in every row
                raise ValueError(f"it unpacks to more than {MOST_RATIO} times its size")
            batch.validate(full=True)  # before anything reads through its offsets
            for record in batch.to_pylist():
                yield next(numbers), record
    except ImportError:
        raise ValueError("a .parquet file needs pyarrow: pip install pyarrow") from None
    except Exception as error:  # of any library that pyarrow uses
        raise ValueError(f"it is not a whole .parquet file ({first_line(error)})") from None


def _has_bytes(kind: Any) -> bool:
    """Whether an Arrow type holds raw bytes, as pictures and sounds do: such columns are not even decoded."""
    name = str(getattr(kind, "value_type", kind))
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return any(map(_has_bytes, inner)) if inner else "binary" in name


READERS: dict[str, Callable[[IO[bytes]], Iterable[Found]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
    ".txt": partial(_lines, record_of=lambda line: {"prompt": line}),
    ".ndjson": _jsonl,
}


# Datasets.


def _dataset(source: str, folder: Path | None, split: str | None) -> Rows:
    """The rows of a data set in a folder, or of the hub: an id, with ":" and a configuration behind it or not."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is raised
    with loadable(MUST, source):
        if folder is None:
            name, (id_, _, config) = source, source.partition(":")
            dataset = datasets.load_dataset(id_, config or None, split=split)
        elif any((folder / file).exists() for file in ("state.json", "dataset_dict.json")):
            name, dataset = folder.resolve().name, datasets.load_from_disk(str(folder))
            if not isinstance(dataset, dict):
                dataset = {str(dataset.split or "train"): dataset}
        else:
            name, dataset = folder.resolve().name, datasets.load_dataset(str(folder), split=split)
        if isinstance(dataset, dict):
            chosen = split or ("train" if "train" in dataset else next(iter(dataset)) if len(dataset) == 1 else None)
            if chosen not in dataset:
                raise InvalidInput(f"`split` must be one of those of {source}: {listed(dataset)}, but got {split}.")
            split, dataset = chosen, dataset[chosen]
        plain = [field.name for field in dataset.features.arrow_schema if not _has_bytes(field.type)]
        dataset.data.validate(full=True)
        dataset = dataset.select_columns(plain)
    digest = hashlib.sha256()

    def found() -> Iterator[Found]:
        with loadable(MUST, source):
            for number, record in enumerate(dataset, 1):
                digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
                yield number, record

    return Rows(f"{name} ({split})" if split else name, found(), digest.hexdigest)


# Small services, also for those who read the records.


def parse_json(text: str) -> Any:
    """Any JSON; raises ValueError with the reason, however the text is broken."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise ValueError("it has a number that is too long") from None


def kind_of(value: Any) -> str:
    """The type of a value in the words of JSON.

    >>> kind_of([1]), kind_of(None), kind_of(1.5)
    ('a list', 'null', 'a number')
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else "a boolean"
    kinds = {str: "a text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"of type {type(value).__name__}")


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names for a message: quoted where they would be misread, and not too many."""
    names = list(names)
    shown = [name[:40] if name.isprintable() and name.strip() else repr(name[:40]) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
