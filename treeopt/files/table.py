"""Rows of one table: commas, semicolons, tabs, or Markdown."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from treeopt.errors import InvalidInput, quoted

MOST_COLUMNS = 1000
RULE = re.compile(r"[\s|:-]+")  # below the header of a Markdown table


def table_rows(text: str, file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The number of each line below the header, and its cells by column in small letters; empty cells are left out."""
    lines = [line.strip() for line in text.splitlines()]
    is_markdown = any(line.startswith("|") and RULE.fullmatch(line) for line in lines)
    if is_markdown:  # what stands around the table is no row
        lines = [re.sub(r"[*`]", "", line) if line.startswith("|") else "" for line in lines]
    lines = ["" if RULE.fullmatch(line) else line.removeprefix("|").removesuffix("|") for line in lines]
    first = next(filter(None, lines), "")
    reader = csv.reader(lines, delimiter=max("|,;\t", key=first.count), strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            values = [cell.strip() for cell in cells]
            if not any(values):
                continue
            if not header:
                header = [name.lower() for name in values]
                if len(set(header)) < len(header) or len(header) > MOST_COLUMNS:
                    raise InvalidInput(
                        f"{file} must name up to {MOST_COLUMNS:,} columns, each once, but has {quoted(header)}."
                    )
            elif len(values) != len(header):
                raise InvalidInput(
                    f"{file} line {reader.line_num} must have {len(header)} cells, but it has {len(values)}."
                )
            else:
                yield reader.line_num, {name: value for name, value in zip(header, values, strict=True) if value}
    except csv.Error as error:
        raise InvalidInput(f"{file} line {reader.line_num} is not a row of a table: {error}.") from None
