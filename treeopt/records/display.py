"""How results show themselves in a notebook, and how they are drawn.

Records lie below the rooms that make tables, pictures and an engine's files, and import none of them. The package's
front, `treeopt`, registers where they are; they are imported when something is shown.
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
    """Files that were written for an engine, notes on them, and the command that uses them."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]
    command: str | None


_viewers: list[Callable[[], Any]] = []


def register(load: Callable[[], Any]) -> None:
    """Say where the viewer is, a module with the functions that are called below; ``load`` imports it."""
    _viewers[:] = [load]


def viewer() -> Any:
    return _viewers[0]()


def one_line(record: Any) -> str:
    """A record by what is known of it: numbers and short texts as they are, of the rest how much there is.

    >>> from treeopt.trees.draft import DynamicTree
    >>> one_line(DynamicTree(3, 2, 8))
    'DynamicTree(levels=3, topk=2, rows=8)'
    """
    said = []
    for name in (field.name for field in fields(record)):
        value, shape = getattr(record, name), getattr(getattr(record, name), "shape", None)
        if isinstance(value, int | float | str):
            said.append(f"{name}={quoted(value, 40)}")
        elif isinstance(shape, tuple):
            said.append(f"{name}: {'×'.join(map(str, shape))}")
        elif value not in (None, {}, [], ()):
            said.append(f"{name}: {len(value) if isinstance(value, Sized) else type(value).__name__}")
    return f"{type(record).__name__}({', '.join(said)})"


class Displayed:
    """A result that shows itself in a notebook."""

    __repr__ = one_line

    def _repr_html_(self) -> str:
        found: str = viewer().html(self)
        return found


class Drawn(Displayed):
    """A result that there are pictures of."""

    def plot(self, name: str, *others: Drawn, batch_size: int | None = None) -> Figure:
        """The picture of that name (``treeopt list figures``) as a matplotlib figure.

        others     : results that the picture needs too: ``plan.plot("tree", trace)``
        batch_size : which one of a plan's trees; by default its first

        Raises InvalidInput for a name that there is not, OutOfRange where a result is missing.
        """
        figure: Figure = viewer().figure((self, *others), name, batch_size)
        return figure
