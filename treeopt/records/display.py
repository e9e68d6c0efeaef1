"""Results show themselves where they are printed and in a notebook, and draw pictures of themselves.

Records lie below the rooms that make tables, pictures and an engine's files, and import none of them. `treeopt` registers
a viewer, the module that has them. It is imported when something is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import quoted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Exported:
    """The files of an export, notes on them, and the command that uses them."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]
    command: str | None


_viewers: list[Callable[[], Any]] = []


def register(load: Callable[[], Any]) -> None:
    """Register the viewer.

    load : imports it
    """
    _viewers[:] = [load]


def viewer() -> Any:
    return _viewers[0]()


def one_line(record: Any) -> str:
    """A record in one line: its numbers and short texts, and the sizes of its other fields.

    >>> from treeopt.trees.draft import DynamicTree
    >>> one_line(DynamicTree(3, 2, 8))
    'DynamicTree(levels=3, topk=2, rows=8)'
    """
    words = []
    for field in fields(record):
        value = getattr(record, field.name)
        shape = getattr(value, "shape", None)
        if isinstance(value, int | float | str):
            words.append(f"{field.name}={quoted(value, 40)}")
        elif isinstance(shape, tuple):
            words.append(f"{field.name}: {'×'.join(map(str, shape))}")
        elif value not in (None, {}, [], ()):
            words.append(f"{field.name}: {len(value) if isinstance(value, Sized) else type(value).__name__}")
    return f"{type(record).__name__}({', '.join(words)})"


class Displayed:
    """A result that shows itself as the table of its command: `print` as text, a notebook as HTML."""

    __repr__ = one_line

    def __str__(self) -> str:
        text: str = viewer().text(self)
        return text

    def _repr_html_(self) -> str:
        html: str = viewer().html(self)
        return html


class Drawn(Displayed):
    """A result that has pictures."""

    def plot(self, name: str, *others: Drawn, batch_size: int | None = None) -> Figure:
        """A picture by its name (``treeopt list figures``), as a matplotlib figure.

        others     : results that the picture needs too: ``plan.plot("tree", trace)``
        batch_size : of the tree, where a plan has several; by default its first

        Raises InvalidInput for an unknown name, OutOfRange where a result is missing.
        """
        figure: Figure = viewer().figure((self, *others), name, batch_size)
        return figure
