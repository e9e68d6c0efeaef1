"""The content of other tools' files.

JSON           the document; of JSON lines and of a saved event stream a list with one document a line
anything else  its text
"""

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, quoted
from treeopt.files.bounds import limit_rows, loads
from treeopt.files.storage import read_text
from treeopt.records.calibration import Calibration
from treeopt.trees.tree import MOST_DEPTH

File = tuple[Any, Path]  # what a file holds, and its path
# In logs whose lines may begin as JSON does.
LOGS = ("Decode batch", "SpecDecoding metrics: ", "draft acceptance", "/0_acc'")
TAGGED = re.compile(r"\[[^][{\"\n]*\] *[^\s\[]")  # a line of a log
EVENT = re.compile(r"^data:(?!\s*\[DONE\])", re.MULTILINE)


@dataclass(frozen=True)
class Measurement:
    """A calibration that was read, and notes on it.

    drafter : its kind in `COUNTED`; None if neither the file nor the user names it
    """

    calibration: Calibration
    notes: tuple[str, ...] = ()
    drafter: str | None = None


def load_file(path: Path) -> Any:
    """A JSON document, a list of JSON lines, or a text; InvalidInput where it is none of them."""
    text = read_text(path).removeprefix("\ufeff").strip()
    text = text.replace('"request_rate": Infinity', '"request_rate": "inf"')  # as SGLang's bench_serving writes it
    if not text:
        raise InvalidInput(f"{path} must hold a measurement, but it is empty.")
    if EVENT.search(text):
        events = [line.removeprefix("data:").strip() for line in text.splitlines() if EVENT.match(line)]
        return _documents(path, "\n".join(events))
    return _documents(path, text) if text[0] in "{[" and not TAGGED.match(text) else text


def counted(hits: NDArray[np.int64], trials: Sequence[int], path: Path) -> Calibration:
    """The calibration of these counts; InvalidInput names the file."""
    try:
        return Calibration(hits, np.array(trials))
    except InvalidInput as error:
        raise InvalidInput(f"{path} cannot be a calibration: {error}") from None


def head_order(names: Collection[str], path: Path) -> list[str]:
    """Names of heads in their order; the names end in numbers that count up from 0 or from 1.

    >>> head_order(["head_2", "head_1"], Path("x.json"))
    ['head_1', 'head_2']
    """
    if len(names) > MOST_DEPTH:
        raise InvalidInput(f"{path} may have {MOST_DEPTH} heads, but has {len(names):,}.")
    digits = {name: re.search(r"(\d{1,4})\Z", name, re.ASCII) for name in names}
    numbers = {name: int(match[1]) for name, match in digits.items() if match}
    counted = [number - min(numbers.values()) for number in sorted(numbers.values())]
    if not names or counted != list(range(len(names))) or min(numbers.values()) > 1:
        raise InvalidInput(f"{path} must number its heads 0, 1, ... or 1, 2, ..., but has {quoted(list(names))}.")
    return sorted(numbers, key=numbers.__getitem__)


def _documents(path: Path, text: str) -> Any:
    try:
        return loads(text)
    except ValueError as error:
        problem = error
    with suppress(ValueError):
        return [loads(line) for line in limit_rows((line for line in text.splitlines() if line.strip()), path)]
    if any(mark in text for mark in LOGS):
        return text
    raise InvalidInput(f"{path} must be valid JSON, or one document a line, but it is not: {problem}.")
